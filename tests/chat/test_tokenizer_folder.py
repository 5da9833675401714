"""A folder's tokenizer has the ids of its tokenizer.json, whatever class a loader would pick."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from selfplay.chat.rendering import make_rendering
from selfplay.chat.template import CHATML
from selfplay.chat.tokenizer import load_tokenizer

# Classes that released folders of byte-level BPE name: OLMo 2, R1-Distill-Llama and DeepSeek-Coder,
# Phi, Falcon, StarCoder2, Nemo; and one that does not exist here.
CLASSES = [
    *("GPT2Tokenizer", "LlamaTokenizerFast", "LlamaTokenizer", "CodeGenTokenizer"),
    *("PreTrainedTokenizerFast", "GPTNeoXTokenizerFast", "CohereTokenizerFast"),
    *("GemmaTokenizerFast", "BertTokenizer", "Qwen2Tokenizer", "NoSuchTokenizer", None),
]
FAMILIES = ["olmo2", "llama", "qwen2"]
TEXTS = [
    "It's 2023, and 650841823 is far.\n\n  def f(x):\n\t\treturn 12 ",
    "Grüße, 世界 🙂 1½ I'LL DON't",
    "<|im_start|>user\n a <|im_end|> <tag> b",
]


@cache
def _trained() -> PreTrainedTokenizerFast:
    """Byte-level BPE that splits text by a pattern of its own: numbers in threes."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}|[^\p{N}\s]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*TEXTS, "202 3 650 841 823 20 23 2023 1419"] * 4, trainer=trainer)
    backend.add_tokens([AddedToken("<tag>", normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=CHATML
    )


def _folder(folder: Path, **config: Any) -> Tokenizer:
    """A folder of that tokenizer with these settings in its tokenizer_config.json."""
    _trained().save_pretrained(folder)
    _edit(folder / "tokenizer_config.json", lambda settings: settings.update(config))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _edit(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    settings = json.loads(file.read_text())
    change(settings)
    file.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))


def _check(folder: Path, own: Tokenizer) -> None:
    tokenizer = load_tokenizer(folder)
    rendering = make_rendering(tokenizer)
    for text in TEXTS:
        ids = own.encode(text, add_special_tokens=False).ids
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids
        assert tokenizer.decode(ids) == own.decode(ids, skip_special_tokens=False)
    said = TEXTS[0].strip()
    assert rendering.action_ids(said)[:-1] == own.encode(said, add_special_tokens=False).ids
    assert rendering.decode(rendering.action_ids(said)) == said


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("named", CLASSES)
def test_the_class_that_a_folder_names_changes_no_id(
    tmp_path: Path, named: str | None, family: str
) -> None:
    own = _folder(tmp_path / "model", tokenizer_class=named)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": family}))
    _check(tmp_path / "model", own)
    load_tokenizer(tmp_path / "model").save_pretrained(tmp_path / "saved")
    _check(tmp_path / "saved", own)


BLANKS = {"lstrip": True, "rstrip": True, "normalized": True, "special": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "blanks beside a token": {"added_tokens_decoder": {"0": {"content": "<|im_start|>", **BLANKS}}},
    "a prefix space": {"add_prefix_space": True, "do_lower_case": True, "legacy": True},
    "clean-up": {"clean_up_tokenization_spaces": True},
    "a bos token": {"add_bos_token": True, "bos_token": "<|im_start|>"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings_beside_tokenizer_json_change_no_id(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    _check(tmp_path, _folder(tmp_path, **settings))


def test_a_token_that_only_the_settings_have_comes_after_the_last_one(tmp_path: Path) -> None:
    own = _folder(tmp_path)
    last = own.get_vocab_size()
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<new>": last}))
    assert load_tokenizer(tmp_path).convert_tokens_to_ids("<new>") == last
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<new>": last + 7}))
    with pytest.raises(ValueError, match=f"'<new>' must have the id {last + 7}, .* got {last} "):
        load_tokenizer(tmp_path)
    (tmp_path / "added_tokens.json").unlink()
    new = {"added_tokens_decoder": {"3": {"content": "<tag>", **BLANKS}}}
    _edit(tmp_path / "tokenizer_config.json", lambda settings: settings.update(new))
    with pytest.raises(ValueError, match="'<tag>' must have the id 3"):
        load_tokenizer(tmp_path)
