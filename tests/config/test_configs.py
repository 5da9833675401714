"""Every configuration that is shipped loads, and says only what differs from the defaults."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from selfplay.config import Config, load_config
from selfplay.config.settings import SettingsError, describe

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_loads_into_a_run_folder_of_its_own(path: Path) -> None:
    assert load_config(path).out == f"runs/{path.stem}"


def test_pretrained_models_play_the_full_game_with_all_that_a_seat_reads() -> None:
    """Their texts are the full rules; a seat's own share of a long human game fits its tokens: 53
    turns and 1,155 words and marks were the most that people used."""
    pretrained = [load_config(path) for path in CONFIGS if path.stem.startswith("qwen")]
    assert len(pretrained) == 4
    for config in pretrained:
        assert (config.game.size, config.game.brief, config.game.scale) == (8, False, True)
        assert config.model.path is not None and config.model.path.startswith("Qwen/Qwen")
        assert (config.engine.kind, config.model.dtype) == ("sglang", "bfloat16")
        # A prompt of 560 tokens, then for every turn what was said and the template around it.
        assert config.rollout.max_game_tokens >= 560 + 1155 * 1.5 + 53 * 16


def test_small_models_on_a_cpu_take_one_thread() -> None:
    """Two threads of one wait for each other, above all beside other work."""
    small = [load_config(path) for path in CONFIGS if path.stem.startswith("tiny")]
    assert len(small) >= 7
    assert [config.threads for config in small] == [1] * len(small)


def test_three_by_three_is_tiny_with_another_board() -> None:
    tiny, tiny3 = (load_config(p) for p in CONFIGS if p.stem in ("tiny", "tiny3"))
    assert (tiny.game.size, tiny3.game.size) == (2, 3)
    assert tiny3.optim == tiny.optim and tiny3.algorithm == tiny.algorithm


def test_a_method_may_stand_alone_and_keeps_its_section(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text("model: {path: x}\nalgorithm: {kl: 0.03}\n")
    path = tmp_path / "run.yaml"
    path.write_text("base: base.yaml\nalgorithm: rloo\n")
    algorithm = load_config(path).algorithm
    assert (algorithm.method, algorithm.kl) == ("rloo", 0.03)
    algorithm = load_config(path, ["algorithm.kl=0.1", "algorithm=ema"]).algorithm
    assert (algorithm.method, algorithm.kl) == ("ema", 0.1)
    assert load_config(path, ["algorithm="]).algorithm.method == "grpo", "empty: the defaults"


def test_a_wrong_method_is_answered_with_its_key_place_and_nearest(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: x}\nalgorithm: rlo\n")
    with pytest.raises(SettingsError, match=r"run\.yaml:2: algorithm\.method .*nearest is rloo"):
        load_config(path)
    with pytest.raises(SettingsError, match=r"override 'algorithm=7': algorithm\.method must be"):
        load_config(path, ["algorithm=7"])
    with pytest.raises(SettingsError, match="algorithm must be a section"):
        load_config(path, ["algorithm=[rloo]"])
    with pytest.raises(SettingsError, match="at least 2 for rloo, got 1"):
        load_config(path, ["algorithm=rloo", "rollout.group_size=1"])
    assert load_config(path, ["algorithm=ema", "rollout.group_size=1"]).rollout.group_size == 1


KEY = re.compile(r"(?<![\w./-])([a-z_]+(?:\.[a-z_]+)+)(?![\w(/])")
# Written with a dot in messages, and no settings: a tokenizer's and a model's own functions.
NOT_KEYS = {"eval.py", "model.resize_token_embeddings"}


def messages(tree: ast.AST) -> Iterator[str]:
    """Every literal text in what is raised."""
    for raised in ast.walk(tree):
        if isinstance(raised, ast.Raise):
            for part in ast.walk(raised):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def test_keys_that_errors_name_exist() -> None:
    """A remedy that names a key which is not there helps nobody."""
    shown = describe(Config)
    keys = {
        name.replace("[]", "") for name in re.findall(r"^ *([a-z_.\[\]]+)(?::|  \()", shown, re.M)
    }
    top = {name.partition(".")[0] for name in keys if "." in name}
    named: dict[str, set[str]] = {}
    for path in sorted((CONFIGS[0].parents[1] / "selfplay").rglob("*.py")):
        for text in messages(ast.parse(path.read_text(encoding="utf-8"))):
            for name in KEY.findall(text):
                if name.partition(".")[0] in top:
                    named.setdefault(name, set()).add(path.name)
    assert len(named) > 40
    assert {name: where for name, where in named.items() if name not in keys | NOT_KEYS} == {}
