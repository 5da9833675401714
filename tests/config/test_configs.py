"""Every file in configs/ loads, and every key that an error message names exists."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dialop.kit import SWITCHES
from selfplay.config import Config, load_config
from selfplay.config.features import all_described

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_loads_and_has_its_own_run_folder(path: Path) -> None:
    assert load_config(path).out == f"runs/{path.stem}"


def test_pretrained_models_have_room_for_the_longest_human_game() -> None:
    """They play with the full rules. One seat of a human game used at most 53 turns and 1,155
    words and punctuation marks. (The config from the rules alone plays on small boards.)"""
    names = [path for path in CONFIGS if path.stem.startswith("qwen")]
    pretrained = [load_config(path) for path in names if not path.stem.endswith("_rules")]
    assert len(pretrained) == 6
    for config in pretrained:
        rules = config.game.options
        assert (rules.size, rules.brief, rules.scale) == (8, False, True)
        assert config.model.path is not None and config.model.path.startswith("Qwen/Qwen")
        assert (config.engine.kind, config.model.dtype) == ("sglang", "bfloat16")
        # A prompt of 560 tokens, then 1.5 tokens per word and 16 per turn for the template.
        assert config.rollout.max_game_tokens >= 560 + 1155 * 1.5 + 53 * 16


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
    keys = {each.name for each in all_described(Config)}
    top = {name.partition(".")[0] for name in keys if "." in name}
    named: dict[str, set[str]] = {}
    for path in sorted((CONFIGS[0].parents[1] / "selfplay").rglob("*.py")):
        for text in messages(ast.parse(path.read_text(encoding="utf-8"))):
            for name in KEY.findall(text):
                if name.partition(".")[0] in top:
                    named.setdefault(name, set()).add(path.name)
    assert len(named) > 40
    assert {name: where for name, where in named.items() if name not in keys | NOT_KEYS} == {}
