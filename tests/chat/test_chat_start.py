"""train.py and eval.py check the chat template before they load a model or play a game."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

import train
from selfplay.chat.rendering import make_rendering
from selfplay.config import load_config
from selfplay.distributed import init_world
from selfplay.setup import warn_of_template
from tests.helpers.chat_families import FAMILIES, Family, make_tokenizer
from tests.helpers.tiny_run import TINY, tiny_model


def folder_with(family: Family, folder: Path) -> Path:
    """A model folder whose tokenizer and template are the family's."""
    tokenizer = make_tokenizer(family)
    tokenizer.save_pretrained(folder)
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(folder)
    return folder


def test_what_a_template_allows_and_does_not_read_is_reported_at_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Turns that can be typed, and arguments that have no effect."""
    (tmp_path / "tiny.yaml").write_text(TINY)

    def reported(family: str, *words: str) -> str:
        config = load_config(tmp_path / "tiny.yaml", [f"model.chat_template.{w}" for w in words])
        rendering = make_rendering(
            make_tokenizer(FAMILIES[family]), template_kwargs=config.model.chat_template
        )
        warn_of_template(rendering, "a model", init_world(device="cpu"))
        shown = capsys.readouterr()
        assert ("keep '<think>" in shown.out) == (family == "qwen3 without thinking")
        return shown.err

    assert reported("llama3") == ""
    line = reported("zephyr")
    assert line.count("\n") == 1 and "<|assistant|>" in line
    qwen = "qwen3 without thinking"
    assert reported(qwen, "enable_thinking=false") == ""
    line = reported(qwen, "enable_thinking=false", "enable_thinkin=false", "role=user")
    assert line.count("\n") == 1 and "model.chat_template" in line
    assert line.endswith("not read: enable_thinkin; nearest is enable_thinking, role\n")


@pytest.mark.slow
def test_a_run_writes_the_template_that_it_trained_with(tmp_path: Path) -> None:
    """With its date, which the family's own template would read from the clock of a server."""
    model = folder_with(FAMILIES["granite 3.3"], tmp_path / "model")
    (tmp_path / "tiny.yaml").write_text(TINY)
    words = [f"model.path={model}", "model.scratch=null", "warm_start.num_games=0", "steps=1"]
    assert train.main(["--config", f"{tmp_path}/tiny.yaml", f"out={tmp_path}/run", *words]) == 0
    exports = [path.parent for path in (tmp_path / "run").rglob("tokenizer_config.json")]
    assert {tmp_path / "run" / "final"} < set(exports)
    for folder in exports:
        text = AutoTokenizer.from_pretrained(folder).apply_chat_template(
            [{"role": "user", "content": "A"}], tokenize=False, add_generation_prompt=True
        )
        assert "Today's Date: July 26, 2024." in text
