"""Every file in configs/ loads, and every key that an error message names exists."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dialop.kit import SWITCHES
from selfplay.config import Config, load_config
from selfplay.config.schema import names_of
from selfplay.errors import SettingsError

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_loads_and_has_its_own_run_folder(path: Path) -> None:
    assert load_config(path).out == f"runs/{path.stem}"


def test_pretrained_models_have_room_for_the_longest_human_game() -> None:
    """They play with the full rules. One seat of a human game used at most 53 turns and 1,155
    words and punctuation marks."""
    pretrained = [load_config(path) for path in CONFIGS if path.stem.startswith("qwen")]
    assert len(pretrained) == 6
    for config in pretrained:
        rules = config.game.options
        assert (rules.size, rules.brief, rules.scale) == (8, False, True)
        assert config.model.path is not None and config.model.path.startswith("Qwen/Qwen")
        assert (config.engine.kind, config.model.dtype) == ("sglang", "bfloat16")
        # A prompt of 560 tokens, then 1.5 tokens per word and 16 per turn for the template.
        assert config.rollout.max_game_tokens >= 560 + 1155 * 1.5 + 53 * 16


def test_small_models_on_a_cpu_take_one_thread() -> None:
    """Two threads are slower for so small a model, above all on a busy machine."""
    small = [load_config(path) for path in CONFIGS if path.stem.startswith("tiny")]
    assert len(small) >= 7
    assert [config.threads for config in small] == [1] * len(small)


def test_tiny3_is_tiny_long_with_a_larger_board() -> None:
    tiny3, tiny = (load_config(p) for p in CONFIGS if p.stem in ("tiny_long", "tiny3"))
    assert (tiny.game.options.size, tiny3.game.options.size) == (2, 3)
    assert tiny3.optim == tiny.optim and tiny3.algorithm == tiny.algorithm


def test_a_plain_method_keeps_the_rest_of_its_section(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text("model: {path: x}\nalgorithm: {kl: 0.03}\n")
    path = tmp_path / "run.yaml"
    path.write_text("base: base.yaml\nalgorithm: rloo\n")
    algorithm = load_config(path).algorithm
    assert (algorithm.method, algorithm.kl) == ("rloo", 0.03)
    algorithm = load_config(path, ["algorithm.kl=0.1", "algorithm=ema"]).algorithm
    assert (algorithm.method, algorithm.kl) == ("ema", 0.1)
    with pytest.raises(SettingsError, match="'algorithm=': algorithm must be an object"):
        load_config(path, ["algorithm="])


def test_an_invalid_method_names_its_key_place_and_nearest_choice(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: x}\nalgorithm: rlo\n")
    with pytest.raises(SettingsError, match=r"run\.yaml:2: algorithm\.method .*nearest is rloo"):
        load_config(path)
    with pytest.raises(SettingsError, match=r"override 'algorithm=7': algorithm\.method must be"):
        load_config(path, ["algorithm=7"])
    with pytest.raises(SettingsError, match="algorithm must be an object"):
        load_config(path, ["algorithm=[rloo]"])
    with pytest.raises(SettingsError, match="at least 2 for rloo, got 1"):
        load_config(path, ["algorithm=rloo", "rollout.group_size=1"])
    assert load_config(path, ["algorithm=ema", "rollout.group_size=1"]).rollout.group_size == 1


KEY = re.compile(r"(?<![\w./-])([a-z_]+(?:\.[a-z_]+)+)(?![\w(/])")
# Dotted names in messages that are not settings.
NOT_KEYS = {
    *("eval.py", "model.resize_token_embeddings"),
    *(f"game.options.{name}" for name in SWITCHES),
}


def messages(tree: ast.AST) -> Iterator[str]:
    """Every string literal in a raise statement."""
    for raised in ast.walk(tree):
        if isinstance(raised, ast.Raise):
            for part in ast.walk(raised):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def test_keys_named_in_errors_exist() -> None:
    keys = {name.replace("[]", "") for name in names_of(Config)}
    top = {name.partition(".")[0] for name in keys if "." in name}
    named: dict[str, set[str]] = {}
    for path in sorted((CONFIGS[0].parents[1] / "selfplay").rglob("*.py")):
        for text in messages(ast.parse(path.read_text(encoding="utf-8"))):
            for name in KEY.findall(text):
                if name.partition(".")[0] in top:
                    named.setdefault(name, set()).add(path.name)
    assert len(named) > 40
    assert {name: where for name, where in named.items() if name not in keys | NOT_KEYS} == {}
