"""The settings loader: files, overrides, the error for each mistake, and the help text."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfplay.config import Config as RunConfig
from selfplay.config import load_config
from selfplay.config.settings import describe, difference, dump, key, load, renamed_keys, section
from selfplay.config.tree import load_tree, rule_sources
from selfplay.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    width: int = key(64, "Width of the model.", within=(8, None))
    family: Literal["qwen2", "llama"] = key("qwen2", "Which shape.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    group_size: int = key(8, "Episodes of one instance.", within=(1, None))
    temperature: float = key(1.0, "Softmax temperature.", within=(0.0, 2.0))
    seats: tuple[int, ...] = key((0, 1), "Seats that train.", within=(0, 1))
    scripted: str | None = key(None, "Wording of the partner.")
    talk: Literal["on", "off"] = key("on", "Whether messages are allowed.")

    def check(self) -> None:
        if self.temperature == 0 and self.group_size > 1:
            raise ValueError("rollout.temperature 0 needs a group_size of 1, got more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Partner:
    kind: str = key("self", "Who sits there.", choices=("self", "honest", "solo"))
    share: float = key(1.0, "Share of the games.", within=(0, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    path: str | None = key(None, "Folder.")
    scratch: Shape | None = section(Shape, "A fresh model of this shape.", optional=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    seed: int = key(0, "Seed of every draw.")
    wandb: bool = key(False, "Log to wandb too.")
    words: tuple[str, ...] = key((), "Extra words.")
    chat: dict[str, object] = key({}, "Extra arguments of the chat template.")
    partners: tuple[Partner, ...] = key((), "The pool of partners.")
    rollout: Rollout = section(Rollout, "How games are played.")
    model: Model = section(Model, "Which model.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    rollout: Rollout = section(Rollout, "How games are played.")
    outer: Config = section(Config, "Sections below a section.")


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
partners: [{kind: honest, share: 0.5}, {}]
rollout:
  seats: [1]
  talk: off          # YAML 1.1 reads this as false
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
        partners=(Partner(kind="honest", share=0.5), Partner()),
        rollout=Rollout(seats=(1,), talk="off", temperature=1e-5, scripted="plain"),
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
    path = write(tmp_path, "model:\n  scratch: {width: 32}\nrollout:\n")
    assert load(Config, path, ["model.scratch=null"]) == Config()
    assert load(Config, None, ["model.scratch.width=16"]).model.scratch == Shape(width=16)


def test_a_file_starts_from_its_base(tmp_path: Path) -> None:
    write(tmp_path, "seed: 1\nrollout: {group_size: 4, temperature: 0.5}\n", "base.yaml")
    path = write(tmp_path, "base: base.yaml\nrollout: {group_size: 2}\n")
    config = load(Config, path, [])
    assert config == Config(seed=1, rollout=Rollout(group_size=2, temperature=0.5))


def test_an_empty_section_does_not_drop_that_of_its_base(tmp_path: Path) -> None:
    base = "rollout: {temperature: 0.5}\nouter: {rollout: {talk: off}, model: {scratch: {}}}\n"
    write(tmp_path, base, "base.yaml")
    path = write(tmp_path, "base: base.yaml\n\nrollout:\n")
    told = "rollout must be a section, got nothing; remove the key to keep what is set, or write"
    assert refused(path) == f"{path}:3: {told} rollout: {{}}"
    path = write(tmp_path, "base: base.yaml\nrollout: {}\nouter: {model: {scratch: null}}\n")
    config = load(Outer, path, [])
    assert (config.rollout.temperature, config.outer.model.scratch) == (0.5, None)
    with pytest.raises(SettingsError, match=r"'outer\.rollout=': .* must be a section"):
        load(Outer, path, ["outer.rollout="])


def test_circular_bases_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "base: run.yaml\n", "base.yaml")
    path = write(tmp_path, "seed: 1\nbase: base.yaml\n")
    assert refused(path) == f"{tmp_path / 'base.yaml'}:1: base run.yaml leads back to itself"


def test_a_mistake_in_a_base_names_the_base(tmp_path: Path) -> None:
    base = write(tmp_path, "seed: 1\nwandb: maybe\n", "base.yaml")
    path = write(tmp_path, "base: base.yaml\n")
    assert refused(path) == f"{base}:2: wandb must be true or false, got 'maybe'"


# A file, the line of its mistake, and what the message names: the key, the value, the choices.
MISTAKES: list[tuple[str, int, tuple[str, ...]]] = [
    ("rollout:\n  group_sise: 4\n", 2, ("rollout.group_sise", "nearest is rollout.group_size")),
    ("group_size: 4\n", 1, ("nearest is rollout.group_size",)),
    ("seed: 1\nrollout.group_size: 2\n", 2, ("section, as rollout: {group_size: 2}",)),
    ("model: {scratch.width: 9}\n", 1, ("model.scratch.width must", "as scratch: {width: 9}")),
    ("zzz: 4\n", 1, ("zzz", "seed, wandb, words, chat, partners, rollout, model")),
    ("partners:\n- {kind: self}\n- {kid: self}\n", 3, ("nearest is partners[1].kind",)),
    ("seed: 1\nseed: 2\n", 2, ("seed is given twice", "line 1")),
    ("chat: {a: 1, a: 2}\n", 1, ("a is given twice",)),
    ("seed: 1.5\n", 1, ("seed must be an integer", "'1.5'")),
    ("seed: true\n", 1, ("seed must be an integer", "'true'")),
    ("seed: 010\n", 1, ("seed must be an integer in plain decimal digits", "'010'")),
    ("seed: 1:30\n", 1, ("seed must be an integer in plain", "'1:30'")),
    ("seed: 0x10\n", 1, ("seed must be an integer in plain", "'0x10'")),
    ("rollout: {temperature: 01}\n", 1, ("rollout.temperature must be a finite number in plain",)),
    ("rollout: {temperature: 0:01.5}\n", 1, ("rollout.temperature", "'0:01.5'")),
    ("wandb: !!bool foo\n", 1, ("a value must be what its YAML tag says",)),
    ("seed: !!int ''\n", 1, ("a value must be what its YAML tag says",)),
    ("chat: {a: !!timestamp a}\n", 1, ("a value must be what its YAML tag says",)),
    ("seed: null\n", 1, ("seed must be an integer", "'null'")),
    ("wandb: 1\n", 1, ("wandb must be true or false", "'1'")),
    ("words: [a, 2]\n", 1, ("words[1] must be text", "'2'")),
    ("words: a\n", 1, ("words must be a list", "'a'")),
    ("chat: [1]\n", 1, ("chat must be a mapping", "[1]")),
    ("rollout: 3\n", 1, ("rollout must be a section with group_size, ", "'3'")),
    ("rollout:\n  group_size: 0\n", 2, ("rollout.group_size must be at least 1", "'0'")),
    ("rollout:\n  temperature: 3\n", 2, ("rollout.temperature", "at most 2.0", "'3'")),
    ("rollout:\n  temperature: .nan\n", 2, ("rollout.temperature", "finite", "'.nan'")),
    ("rollout:\n  seats: [0, 2]\n", 2, ("rollout.seats[1]", "at most 1", "'2'")),
    ("model:\n  scratch: {family: lama}\n", 2, ("qwen2, llama", "'lama'; nearest is llama")),
    ("partners: [{kind: Honest}]\n", 1, ("self, honest, solo", "nearest is honest")),
    ("- 1\n", 1, ("mapping",)),
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


def test_a_mistake_on_the_command_line_names_the_override() -> None:
    message = refused(None, "seed=1", "rollout.group_size=few")
    assert message.startswith("override 'rollout.group_size=few': rollout.group_size must be")
    for override, named in (
        *(("seed", "key=value"), ("rolout.group_size=2", "nearest is rollout")),
        *(("seed.x=2", "seed must be an integer"), ("words=[a", "YAML")),
    ):
        message = refused(None, override)
        assert message.startswith(f"override '{override}': ") and named in message


def test_a_contradiction_names_its_files_and_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, "rollout:\n  group_size: 4\n")
    message = refused(path, "seed=1", "rollout.talk=off", "rollout.temperature=0")
    assert message.startswith(f"{path}, override 'rollout.temperature=0': rollout.temperature 0")


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        ("a.b must be below a.c.d, got 1", ["FILE", "override 'a.c.d=3'"]),
        ("a.b needs c_e", ["FILE", "override 'a.c_e=4'"]),
        ("a.* needs a.c", ["FILE", "override 'a.c.d=3'", "override 'a.c_e=4'"]),
        ("f must be below the c of a", ["override 'f=5'"]),
        ("it must be below f and a", ["FILE"]),
    ],
)
def test_a_rule_lists_only_the_sources_of_the_keys_that_it_names(
    rule: str, named: list[str], tmp_path: Path
) -> None:
    path = write(tmp_path, "a: {b: 1}\n")
    tree = load_tree(path, ["a.c.d=3", "a.c_e=4", "f=5"], {})
    found = rule_sources(tree, "", rule)
    assert [source.replace(str(path), "FILE") for source in found] == named


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert refused(tmp_path / "no.yaml").startswith(f"{tmp_path / 'no.yaml'}: no such file")


text = st.text(st.characters(codec="utf-8"), max_size=12)
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text
anything = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3)
)
configs = st.builds(
    Config,
    seed=st.integers(),
    wandb=st.booleans(),
    words=st.lists(text).map(tuple),
    chat=st.dictionaries(text, anything, max_size=3),
    partners=st.lists(
        st.builds(Partner, kind=st.sampled_from(["self", "solo"]), share=st.floats(0, 1))
    ).map(tuple),
    rollout=st.builds(
        Rollout,
        group_size=st.integers(1, 99),
        temperature=st.floats(1e-12, 2),
        seats=st.lists(st.integers(0, 1)).map(tuple),
        scripted=st.none() | text,
        talk=st.sampled_from(["on", "off"]),
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
    assert load(Config, path, []) == config
    assert difference(load(Config, path, []), config) == []


def test_difference_names_each_key_with_both_values() -> None:
    a = Config()
    b = load(Config, None, ["seed=2", "rollout.talk=off", "model.scratch={}", "words=[x]"])
    assert difference(a, b) == [
        "seed: 0 -> 2",
        "words: [] -> [x]",
        "rollout.talk: 'on' -> 'off'",
        "model.scratch: null -> {family: qwen2, width: 64}",
    ]


def test_help_lists_every_key_with_type_default_rule_and_sentence() -> None:
    lines = describe(Config).splitlines()
    assert lines[0] == "  seed  (int; default 0)"
    assert lines[1] == "      Seed of every draw."
    assert "rollout: How games are played." in lines
    assert "  rollout.temperature  (float; default 1.0; at least 0.0; at most 2.0)" in lines
    assert "  rollout.talk  (on | off; default 'on')" in lines
    assert "model.scratch: A fresh model of this shape. (default null)" in lines
    assert "  model.scratch.width  (int; default 64; at least 8)" in lines
    assert "  partners  (list of section; default [])" in lines
    assert "  partners[].kind  (str; default self; one of self, honest, solo)" in lines


# --- renamed settings -----------------------------------------------------------------------------

CHANGES = Path(__file__).resolve().parents[2] / "docs" / "changes.md"
TABLE = CHANGES.read_text(encoding="utf-8").partition("## Settings")[2].partition("\n## ")[0]
ROW = re.compile(r"^\| (partner )?`([\w.]+)`(?: \(section\))? \| (?:partner )?`([\w.]+)` \|$", re.M)
ROWS = ROW.findall(TABLE)
RENAMED_KEYS = {old: new for partner, old, new in ROWS if not partner}
RENAMED_PARTNERS = [(old, new) for partner, old, new in ROWS if partner]


def test_the_document_lists_every_renamed_key() -> None:
    assert len(ROWS) == TABLE.count("\n| ") - 1, "every row but the head is understood"
    assert renamed_keys(RunConfig) == RENAMED_KEYS


@pytest.mark.parametrize("old", RENAMED_KEYS)
def test_an_old_key_is_refused_with_its_new_name(old: str, tmp_path: Path) -> None:
    new = RENAMED_KEYS[old]
    text = "model: {path: x}\n"
    for depth, part in enumerate(old.split(".")):
        text += f"{'  ' * depth}{part}:\n"
    path = write(tmp_path, text)
    with pytest.raises(SettingsError) as error:
        load_config(path)
    assert str(error.value) == f"{path}:{2 + old.count('.')}: {old} is now {new}"
    with pytest.raises(SettingsError, match=rf"{re.escape(old)} is now {re.escape(new)}$"):
        load_config(None, ["model.path=x", f"{old}=1"])


@pytest.mark.parametrize("old", [old for old in RENAMED_KEYS if old in ("past", "eval.guard")])
def test_a_key_below_an_old_section_is_refused_with_its_new_name(old: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_config(None, ["model.path=x", f"{old}.x=1"])
    assert str(error.value).endswith(f": {old}.x is now {RENAMED_KEYS[old]}.x")


@pytest.mark.parametrize(("old", "new"), RENAMED_PARTNERS)
def test_an_old_partner_is_refused_with_its_new_name(old: str, new: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"model: {{path: x}}\nrollout: {{partners: [self, {old}*0.5]}}\n")
    with pytest.raises(SettingsError) as error:
        load_config(path)
    assert str(error.value) == f"{path}: rollout.partners: partner {old} is now {new}"
