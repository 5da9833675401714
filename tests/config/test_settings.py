"""The settings loader: files, overrides, the error for each mistake, and the help text."""

import math
import re
from dataclasses import FrozenInstanceError, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from selfplay.config import Config as RunConfig
from selfplay.config import load_config
from selfplay.config.load import load, override_words
from selfplay.config.play import GameConfig
from selfplay.config.schema import RULES, describe, described
from selfplay.config.text import changed, difference, dump
from selfplay.errors import SettingsError
from selfplay.methods.options import JudgeOptions
from selfplay.preflight.command_line import Parser
from selfplay.rollout.options import BranchConfig
from selfplay.warm_start.options import WarmStartConfig


@dataclass(frozen=True, slots=True, config=RULES)
class Shape:
    """A fresh model of this shape."""

    width: int = Field(default=64, ge=8)
    family: Literal["qwen2", "llama"] = "qwen2"


@dataclass(frozen=True, slots=True, config=RULES)
class Rollout:
    """How games are played."""

    group_size: int = Field(default=8, ge=1)
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    seats: tuple[int, ...] = (0, 1)
    scripted: str | None = None
    talk: Literal["loud", "low"] = "loud"

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.temperature == 0 and self.group_size > 1:
            raise ValueError("rollout.temperature 0 needs rollout.group_size 1, got more")
        return self


@dataclass(frozen=True, slots=True, config=RULES)
class Model:
    """Which model."""

    path: str | None = None
    scratch: Shape | None = None


@dataclass(frozen=True, slots=True, config=RULES)
class Config:
    """All settings."""

    seed: int = 0
    """Seed of every draw."""
    wandb: bool = False
    words: tuple[str, ...] = ()
    chat: dict[str, object] = Field(default_factory=dict)
    rollout: Rollout = Field(default_factory=Rollout)
    model: Model = Field(default_factory=Model)


def write(tmp_path: Path, text: str, name: str = "run.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def refused(path: Path | None, *overrides: str) -> str:
    with pytest.raises(SettingsError) as error:
        load(Config, path, overrides)
    return str(error.value)


def test_no_file_gives_every_default() -> None:
    assert load(Config, None, []) == Config()


def test_file_and_overrides_set_every_type(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
seed: 3
words: [a, b]
chat: {enable_thinking: false, deep: {n: [1, 2.5, null]}}
rollout:
  seats: [1]
  talk: low
model:
  scratch: {width: 32}
""",
    )
    overrides = ["seed=4", "wandb=true", "rollout.temperature=1e-5", "rollout.scripted=plain"]
    config = load(Config, path, [*overrides, "chat.deep.n=7"])
    assert config == Config(
        seed=4,
        wandb=True,
        words=("a", "b"),
        chat={"enable_thinking": False, "deep": {"n": 7}},
        rollout=Rollout(seats=(1,), talk="low", temperature=1e-5, scripted="plain"),
        model=Model(scratch=Shape(width=32)),
    )
    assert type(load(Config, None, ["rollout.temperature=2"]).rollout.temperature) is float


def test_a_path_may_begin_with_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "a.yaml"
    path.write_text("model: {path: ~/models/b}\n")
    config = load_config(path, ["out=~/runs/a"])
    assert config.out == f"{tmp_path}/runs/a" and config.model.path == f"{tmp_path}/models/b"


def test_null_removes_a_section_and_an_empty_one_has_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "model:\n  scratch: {width: 32}\nrollout: {}\n")
    assert load(Config, path, ["model.scratch=null"]) == Config()
    assert load(Config, None, ["model.scratch.width=16"]).model.scratch == Shape(width=16)


EMPTIED: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"chat": {}}),
    ("rollout", {"rollout": Rollout()}),
    ("model.scratch", {"model": Model(path="p", scratch=Shape())}),
    ("model", {"model": Model()}),
]


@pytest.mark.parametrize(("name", "emptied"), EMPTIED)
def test_an_empty_mapping_replaces_the_one_below_it_and_a_key_none_beside_it(
    name: str, emptied: dict[str, Any], tmp_path: Path
) -> None:
    """In a file over its base, as an override and from Python; the other sections stay."""
    base = {"chat": {"deep": {"n": 1}}, "rollout": {"group_size": 3, "talk": "low"}}
    path = write(tmp_path, yaml.safe_dump(base | {"model": {"path": "p", "scratch": {"width": 9}}}))
    nested: Any = {}
    for part in reversed(name.split(".")):
        nested = {part: nested}
    over = write(tmp_path, yaml.safe_dump({"base": "run.yaml", **nested}), "over.yaml")
    wanted = replace(load(Config, path), **emptied)
    assert load(Config, path) != wanted
    assert load(Config, over) == load(Config, path, [f"{name}={{}}"]) == wanted
    assert load(Config, path, override_words({name: {}})) == wanted
    assert load(Config, path, ["chat.deep.m=2"]).chat == {"deep": {"n": 1, "m": 2}}


def test_an_empty_mapping_of_a_run_is_no_method_no_policy_and_options_at_their_defaults() -> None:
    branches = {"play": "branches", "options": {"siblings": 3}}
    given = {"base": "tiny_roles", "methods": {"best_games": {"weight": 0.7}}, "rollout": branches}
    read = partial(load_config, given)
    assert read(["methods={}"]).methods == read(["policies={}", "methods={}"]).methods == {}
    assert read(["methods.best_games={}"]).methods["best_games"].weight == 0.2
    assert read(["policies={}"]).policy_names == ("",)
    assert (read().play_options.siblings, read(["rollout.options={}"]).play_options.siblings) == (
        3,
        4,
    )
    assert read(["game={name: planning, options: {}}"]).game == GameConfig("planning")


def test_off_switches_the_warm_start_of_a_base_file_off(tmp_path: Path) -> None:
    """In a file that extends it, on the command line and from Python; later keys count again."""
    base = tmp_path / "base.yaml"
    base.write_text("warm_start: {num_games: 8, recorded: people.jsonl}\n")
    over = tmp_path / "over.yaml"
    over.write_text("base: base.yaml\nwarm_start: off\n")
    assert load(RunConfig, base).warm_start.imitates
    from_python: dict[str, Any] = {"base": str(base), "warm_start": "off"}
    ways = load(RunConfig, over), load(RunConfig, base, ["warm_start=off"])
    for config in (*ways, load(RunConfig, from_python)):
        assert config.warm_start == WarmStartConfig() and not config.warm_start.imitates
    config = load(RunConfig, over, ["warm_start.chats=mine.jsonl"])
    assert config.warm_start == WarmStartConfig(chats="mine.jsonl") and config.warm_start.imitates
    with pytest.raises(SettingsError, match=r"override 'warm_start=on': warm_start must be "):
        load(RunConfig, base, ["warm_start=on"])


def test_a_section_is_frozen_and_checked_whenever_it_is_made() -> None:
    rollout = Rollout(group_size=4)
    with pytest.raises(FrozenInstanceError):
        rollout.group_size = 2  # type: ignore[misc]
    assert replace(rollout, talk="low") == Rollout(group_size=4, talk="low")
    for changes in ({"group_size": 0}, {"group_size": "4"}, {"talk": "lo"}, {"temperature": 0.0}):
        with pytest.raises(ValueError):
            replace(rollout, **changes)


def test_a_file_starts_from_its_base(tmp_path: Path) -> None:
    write(tmp_path, "seed: 1\nrollout: {group_size: 4, temperature: 0.5}\n", "base.yaml")
    path = write(tmp_path, "base: base.yaml\nrollout: {group_size: 2}\n")
    config = load(Config, path, [])
    assert config == Config(seed=1, rollout=Rollout(group_size=2, temperature=0.5))
    path = write(tmp_path, "base: base.yaml\n\nrollout:\n")
    assert refused(path).startswith(f"{path}:3: rollout must be a section")


def test_circular_bases_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "base: run.yaml\n", "base.yaml")
    path = write(tmp_path, "seed: 1\nbase: base.yaml\n")
    assert refused(path) == f"{tmp_path / 'base.yaml'}:1: base run.yaml leads back to itself"


def test_a_mistake_in_a_base_names_the_base(tmp_path: Path) -> None:
    base = write(tmp_path, "seed: 1\nwandb: maybe\n", "base.yaml")
    path = write(tmp_path, "base: base.yaml\n")
    assert refused(path) == f"{base}:2: wandb must be a valid boolean, got maybe"


# A file, the line of its mistake, and what the message names: the key, the value, the choices.
MISTAKES: list[tuple[str, int, tuple[str, ...]]] = [
    ("rollout:\n  group_sise: 4\n", 2, ("rollout.group_sise", "nearest is rollout.group_size")),
    ("group_size: 4\n", 1, ("nearest is rollout.group_size",)),
    ("zzz: 4\n", 1, ("zzz", "seed, wandb, words, chat, rollout, model")),
    ("rollout: {foo: 1}\n", 1, ("rollout.foo; valid here are group_size, temperature",)),
    ("seed: 1\nseed: 2\n", 2, ("seed is given twice",)),
    ("seed: 1:30\n", 1, ("seed must be a valid integer, got '1:30'",)),
    ("chat: {deep: {n: 1e400}}\n", 1, ("a number must be finite, got 1e400",)),
    ("chat: {n: -.inf}\n", 1, ("a number must be finite, got -.inf",)),
    ("model: {path: no}\n", 1, ("got false; quote text that YAML would read as another type",)),
    ("seed: true\n", 1, ("seed must be a valid integer", "got true")),
    ("seed: null\n", 1, ("seed must be a valid integer", "got null")),
    ("rollout:\n  temperature: 3\n", 2, ("rollout.temperature must be at most 2, got 3",)),
    ("rollout:\n  temperature: .nan\n", 2, ("finite", ".nan")),
    ("rollout:\n  seats:\n  - 0\n  - b\n", 4, ("rollout.seats.1 must be a valid integer",)),
    ("rollout: 3\n", 1, ("rollout must be a section, as rollout: {KEY: VALUE}", "got 3")),
    ("words: a\n", 1, ("words must be a list, as [A, B]", "got a")),
    ("model:\n  scratch: {family: lama}\n", 2, ("'qwen2' or 'llama', got lama; nearest is llama",)),
    ("seed: [1\n", 2, ("YAML",)),
]


@pytest.mark.parametrize(("text", "line", "named"), MISTAKES)
def test_a_mistake_names_file_line_rule_value_and_nearest(
    tmp_path: Path, text: str, line: int, named: tuple[str, ...]
) -> None:
    path = write(tmp_path, text)
    message = refused(path)
    assert message.startswith(f"{path}:{line}: ") and "\n" not in message
    assert all(part in message for part in named), message


def test_numbers_and_dates_are_read_as_they_look(tmp_path: Path) -> None:
    path = write(tmp_path, "seed: 1_010\nmodel: {path: 2026-11-29}\nwords: ['010', 1:30]\n")
    chat = "chat={a: 1e-4, b: .5e1, c: 0x1F, d: 010, e: 0.5, f: 0, g: 12:30am, h: 1_0.5}"
    values = {"a": 1e-4, "b": 5.0, "c": 31, "d": 10, "e": 0.5, "f": 0, "g": "12:30am", "h": 10.5}
    assert load(Config, path, [chat]) == Config(
        seed=1010, model=Model(path="2026-11-29"), words=("010", "1:30"), chat=values
    )


@pytest.mark.parametrize(
    ("first", "second", "key"),
    [
        ("optim.lr=1", "optim={lr: 2}", "optim.lr"),
        ("optim={lr: 2, beta1: 0.5}", "optim.lr=1", "optim.lr"),
        ("model.scratch.width=64", "model.scratch=null", "model.scratch.width"),
        (
            "rollout={options: {turns: all}}",
            "rollout.options={turns: first}",
            "rollout.options.turns",
        ),
        ("eval.partners=[self]", "eval={partners: [self, pool]}", "eval.partners.0"),
    ],
)
def test_a_key_is_given_once(first: str, second: str, key: str) -> None:
    """On the command line and from Python; a section may be given in parts, and anew after null."""
    rule = f"override '{re.escape(second)}': {key} is given by override .* too; leave one out"
    with pytest.raises(SettingsError, match=rule):
        Parser("train.py", None).check_settings([first, second])
    python = dict(word.split("=", 1) for word in (first, second))
    with pytest.raises(SettingsError, match=rf"{key} is given by override .* too"):
        override_words({name: yaml.safe_load(value) for name, value in python.items()})
    for words in (
        ["optim.lr=1", "optim={beta1: 0.5}"],
        ["model.scratch=null", "model.scratch.width=8"],
    ):
        Parser("train.py", None).check_settings(words)


def test_values_from_python_are_finite() -> None:
    with pytest.raises(
        SettingsError, match=r"^algorithm\.options must be plain values, .*Out of range float"
    ):
        override_words({"algorithm.options": {"tau": math.nan}})


def test_a_mistake_on_the_command_line_names_the_override() -> None:
    message = refused(None, "seed=1", "rollout.group_size=few")
    assert message.startswith("override 'rollout.group_size=few': rollout.group_size must be")
    for override, named in (
        *(("seed", "key=value"), ("rolout.group_size=2", "nearest is rollout")),
        *(("seed.x=2", "seed must be a valid integer"), ("words=[a", "YAML")),
    ):
        message = refused(None, override)
        assert message.startswith(f"override '{override}': ") and named in message


def test_a_contradiction_names_where_its_keys_were_given(tmp_path: Path) -> None:
    path = write(tmp_path, "rollout:\n  group_size: 4\n")
    message = refused(path, "seed=1", "rollout.talk=low", "rollout.temperature=0")
    places = f"override 'rollout.temperature=0', {path}:2"
    assert message == f"{places}: rollout.temperature 0 needs rollout.group_size 1, got more"
    path = write(tmp_path, "base: run.yaml\nrollout: {temperature: 0}\n", "top.yaml")
    assert refused(path).startswith(f"{path}:2, {tmp_path / 'run.yaml'}:2: rollout.temperature 0")


# PyYAML writes U+0085 so that it reads a blank; ~/ is read as the home folder.
text = st.text(st.characters(codec="utf-8", exclude_characters="\x85"), max_size=12).filter(
    lambda drawn: not drawn.startswith("~/")
)
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
leaves = st.none() | st.booleans() | numbers | text
anything = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3)
)
configs = st.builds(
    Config,
    seed=st.integers(),
    wandb=st.booleans(),
    words=st.lists(text).map(tuple),
    chat=st.dictionaries(text, anything, max_size=3),
    rollout=st.builds(
        Rollout,
        group_size=st.integers(1, 99),
        temperature=st.floats(1e-12, 2),
        seats=st.lists(st.integers(0, 1)).map(tuple),
        scripted=st.none() | text,
        talk=st.sampled_from(["loud", "low"]),
    ),
    model=st.builds(
        Model, path=st.none() | text, scratch=st.none() | st.builds(Shape, width=st.integers(8))
    ),
)


@settings(max_examples=30)
@given(config=configs)
def test_dumped_settings_load_as_an_equal_object(
    config: Config, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "round.yaml"
    path.write_text(dump(config), encoding="utf-8")
    loaded = load(Config, path, [])
    assert loaded == config and difference(loaded, config) == []


def test_difference_names_each_key_with_both_values() -> None:
    a = Config()
    b = load(Config, None, ["seed=2", "rollout.talk=low", "model.scratch={}", "words=[x]"])
    assert difference(a, b) == [
        "seed: 0 -> 2",
        "words: [] -> [x]",
        "rollout.talk: loud -> low",
        "model.scratch: null -> {family: qwen2, width: 64}",
    ]


def test_changed_settings_are_compared_with_the_defaults_of_their_own_kind() -> None:
    """Another game's options have no defaults of matching, and an absent section may be given."""
    words = ["model.path=x", "game={name: planning, options: {slots: 1}}", "model.lora={}"]
    assert changed(load_config(None, words), RunConfig()) == [
        ("game.name", "matching", "planning"),
        ("game.options.slots", "3", "1"),
        ("model.path", "null", "x"),
        ("model.lora", "null", "{}"),
    ]


def test_a_run_from_before_its_keys_moved_is_read_as_it_was(tmp_path: Path) -> None:
    """Also with all settings of engines in the section of one."""
    path = tmp_path / "config.yaml"
    engine = "engine: {kind: hf, mem_fraction: 0.5, sessions: auto, fast: true, exact: false}"
    for kl, constant, turns, is_now in (
        ("true", "constant, constant_length: 64", "first", ("k3_ratio", 64, "branches")),
        ("false", "token_mean, constant_length: 0", "none", ("k3", "token_mean", "plain")),
    ):
        judge = "checkpoint:a, judge_weight: 2, rubric: b" if turns == "first" else "rubric"
        path.write_text(
            f"algorithm: {{kl: 0.1, kl_ratio: {kl}, aggregation: {constant}}}\n{engine}\n"
            f"rollout: {{branch: {{turns: {turns}, siblings: 3}}}}\nreward: {{judge: {judge}}}\n"
        )
        config = load(RunConfig, path)
        algorithm = config.algorithm
        found = (algorithm.kl_estimator, algorithm.aggregation, config.rollout.play)
        assert found == is_now and config.engine == RunConfig().engine
        branch = BranchConfig("first", siblings=3) if turns == "first" else None
        assert config.play_options == branch
        rated = {"judge": JudgeOptions("checkpoint:a", "b", 2.0)} if turns == "first" else {}
        assert config.methods == rated


def test_help_lists_every_key_with_type_default_rule_and_sentence() -> None:
    lines = describe(described(Config)).splitlines()
    assert lines[:2] == ["  seed  (int; default 0)", "      Seed of every draw."]
    assert "  rollout.temperature  (float; default 1.0; at least 0.0; at most 2.0)" in lines
    keys = {line.split()[0] for line in lines if line.startswith("  rollout.")}
    assert keys == {f"rollout.{each.name}" for each in fields(Rollout)}


def test_help_names_types_in_words() -> None:
    @dataclass(frozen=True)
    class Kinds:
        schedule: Literal["constant", "linear"] = "constant"
        names: tuple[Annotated[str, Field(min_length=1)], ...] = ()
        share: Annotated[float, Field(ge=0)] | Literal["auto"] | None = None
        body: dict[str, Any] = field(default_factory=dict)

    kinds = {each.name: (each.kind, each.rules) for each in described(Kinds)}
    assert kinds == {
        "schedule": ("constant or linear", ()),
        "names": ("list of str", ()),
        "share": ("float or auto or null", ("at least 0",)),
        "body": ("mapping", ()),
    }
