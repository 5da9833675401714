"""A vocabulary with holes: its largest id is above its number of tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from selfplay.chat.markers import Markers
from selfplay.chat.rendering import Rendering, make_rendering
from selfplay.chat.tokenizer import load_tokenizer
from selfplay.preflight.model import reachable_vocab_size
from tests.helpers.chat_families import tokenizer_of

THINKING = "qwen3 thinking, tags unflagged"
THOUGHT, SAID = "Is it 12?\n", "Hello, world 12. Grüße, 世界 🙂"
# From which id on all ids are larger, and by how much.
HOLES = {
    "before the words above the bytes": (300, 60),
    "before all but the markers": (3, 1),
    "before the tags of thoughts": (-3, 1000),
    "before the last tokens": (-2, 7),
}


def _shifted(folder: Path, start: int, size: int, family: str = THINKING) -> Rendering:
    """The family's tokenizer with a hole of `size` ids before the id `start`, saved and loaded."""
    tokenizer = tokenizer_of(family)
    start %= len(tokenizer)
    state = json.loads(tokenizer.backend_tokenizer.to_str())

    def moved(token: int) -> int:
        return token + size if token >= start else token

    added = {token["content"]: token["id"] for token in state["added_tokens"]}
    vocab = state["model"]["vocab"] | added
    state["model"]["vocab"] = {text: moved(token) for text, token in vocab.items()}
    for token in state["added_tokens"]:
        token["id"] = moved(token["id"])
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        eos_token=tokenizer.eos_token,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)
    loaded = load_tokenizer(folder)
    assert len(loaded) == len(tokenizer) == reachable_vocab_size(loaded) - size
    return make_rendering(loaded)


@pytest.mark.parametrize(("start", "size"), HOLES.values(), ids=HOLES)
def test_every_token_above_a_hole_is_read(tmp_path: Path, start: int, size: int) -> None:
    """Also the tag that ends a thought, which the game drops."""
    rendering = _shifted(tmp_path, start, size)
    opened, closed = load_tokenizer(tmp_path).convert_tokens_to_ids(["<think>", "</think>"])
    assert closed >= len(tokenizer_of(THINKING))
    thought = rendering.action_ids(THOUGHT)[:-1]
    ids = [opened, *thought, closed, *rendering.action_ids(SAID)]
    said = f"<think>{THOUGHT}</think>{SAID}"
    assert rendering.decode(ids) == said
    assert "".join(rendering.pieces(ids[:-1])) == said
    assert rendering.readable(ids).startswith(said)
    assert rendering.ends_turn(ids)


def test_an_id_without_a_token_is_unreadable(tmp_path: Path) -> None:
    """In a hole, above the vocabulary (a model has more rows), and below 0; the end of a turn,
    whatever its flags, does not stand in for it."""
    for name, family in (("hole", THINKING), ("plain", "qwen2.5"), ("words", "gemma")):
        rendering = _shifted(tmp_path / name, 300, 60, family)
        said = rendering.action_ids("Hello, world")
        for unknown in (300, 359, 10_000, -1):
            ids = [*said[:2], unknown, *said[2:]]
            text = rendering.decode(ids)
            assert text.count("\ufffd") == 1 and text.replace("\ufffd", "") == "Hello, world"
            assert rendering.pieces([unknown, unknown]) == ["\ufffd", "\ufffd"]
    words = Tokenizer(WordLevel({"Hello": 0}, "Hello"))
    assert Markers(words, {}, {}, re.compile("x^")).decode([0, 1]) == "Hello\ufffd"
