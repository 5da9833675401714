"""A scratch model's tokenizer: single digits, round trips, saved folders with the same ids."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaConfig, Qwen2Config

from selfplay.chat.rendering import make_rendering
from selfplay.chat.tokenizer import train_tokenizer

TEXTS = [
    "[propose] paper 12 -> Dana, 47.5\n",
    "[message] I'd say reviewer Dana (paper 12)!\n\n",
] * 4
TOKENIZER = train_tokenizer(TEXTS, vocab_size=320)
ODD = "user\n\n  (Paper 127): {'x': 47.5}\n\n\tRöv !!\nit's 世 🙂\r\n <|im_end|>"


def test_markers_and_template() -> None:
    markers = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert TOKENIZER.convert_tokens_to_ids(markers) == [0, 1, 2]
    assert (TOKENIZER.eos_token, TOKENIZER.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert len(TOKENIZER) <= 320
    text = TOKENIZER.apply_chat_template(
        [{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_every_digit_is_a_token_of_its_own() -> None:
    pieces = [TOKENIZER.decode([i]) for i in TOKENIZER.encode("paper 1247 at 47.5")]
    assert [p for p in pieces if any(c.isdigit() for c in p)] == list("1247475")
    multi = [t for t in TOKENIZER.get_vocab() if sum(c.isdigit() for c in t) and len(t) > 1]
    assert multi == []


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(max_codepoint=0x2FF)))
def test_any_text_decodes_to_itself(text: str) -> None:
    ids = TOKENIZER.encode(text, split_special_tokens=True)
    assert TOKENIZER.decode(ids) == text


@pytest.mark.parametrize("config", [None, Qwen2Config(), LlamaConfig()])
def test_a_saved_folder_loads_to_the_same_ids(
    tmp_path: Path, config: Qwen2Config | LlamaConfig | None
) -> None:
    """transformers picks the class by the model's config; ids must not depend on it."""
    TOKENIZER.save_pretrained(tmp_path)
    if config is not None:
        config.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == TOKENIZER.get_vocab()
    for text in [*TEXTS, ODD]:
        assert loaded.encode(text) == TOKENIZER.encode(text)
    assert (loaded.eos_token_id, loaded.pad_token_id) == (2, 0)
    ours, theirs = make_rendering(TOKENIZER), make_rendering(loaded)
    assert theirs.first(system=ODD, user=ODD) == ours.first(system=ODD, user=ODD)
    assert theirs.action_ids(ODD) == ours.action_ids(ODD)


def test_training_is_deterministic() -> None:
    again = train_tokenizer(iter(TEXTS), vocab_size=320)
    assert again.backend_tokenizer.to_str() == TOKENIZER.backend_tokenizer.to_str()


def test_a_vocabulary_too_small_for_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"vocab_size must be at least 259.*got 100"):
        train_tokenizer(TEXTS, vocab_size=100)
