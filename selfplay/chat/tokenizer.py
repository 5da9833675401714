"""Reads the tokenizer of a folder, or trains a byte-level BPE tokenizer for a scratch model.

Training is deterministic: the same texts in the same order give the same vocabulary. Text is split
by Qwen2's rules, which make every digit a separate piece (47 is read as 4, 7), so a model need not
learn each number separately. The tokenizer uses the Qwen2 class itself, because transformers
applies that class's rules to any folder with a Qwen2 model, whatever the saved tokenizer specifies.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from selfplay.chat.template import CHATML
from selfplay.errors import SettingsError

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_SPECIAL = [END_OF_TEXT, TURN_START, TURN_END]
_MIN_VOCAB_SIZE = 256 + len(_SPECIAL)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a folder, with the ids of its tokenizer.json.

    transformers rebuilds the tokenizer with the class named in tokenizer_config.json or used by the
    model's family, and so overrides how tokenizer.json splits text (OLMo 2 names GPT2Tokenizer,
    R1-Distill-Llama names LlamaTokenizerFast). Here only tokenizer.json decides, except that
    tokenizer_config.json and added_tokens.json may append tokens. A folder without tokenizer.json
    is read by transformers alone. Raises SettingsError for an added token whose id would differ
    from the folder's.
    """
    file = folder / "tokenizer.json"
    if not file.exists():
        return AutoTokenizer.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    own, loaded = Tokenizer.from_file(str(file)), tokenizer.backend_tokenizer
    loaded.normalizer, loaded.pre_tokenizer = own.normalizer, own.pre_tokenizer
    loaded.decoder = own.decoder
    # Adding a known token again restores which adjacent blanks belong to it.
    loaded.add_tokens([token for _, token in sorted(own.get_added_tokens_decoder().items())])
    for number, token in tokenizer.init_kwargs.get("added_tokens_decoder", {}).items():
        got = loaded.token_to_id(str(token))
        if got != int(number):
            raise SettingsError(
                f"{folder}: the token {str(token)!r} must have the id {number}, as in "
                f"tokenizer_config.json or added_tokens.json, got {got} from tokenizer.json"
            )
    return tokenizer


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int, phrases: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Train a tokenizer of at most `vocab_size` tokens on `texts`.

    It has the ChatML template, eos `<|im_end|>` and pad `<|endoftext|>`. Each of `phrases` is
    always a single token. Any text can be encoded and decodes to itself (in Unicode's composed
    form). Raises SettingsError for a vocabulary too small for all bytes and phrases.
    """
    smallest = _MIN_VOCAB_SIZE + len(phrases)
    if vocab_size < smallest:
        raise SettingsError(
            f"model.scratch.vocab_size must be at least {smallest} (256 bytes, {len(_SPECIAL)} "
            f"special tokens and {len(phrases)} phrases of the game), got {vocab_size}"
        )
    backend = Qwen2Tokenizer().backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(phrases),
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer=trainer)
    trained = json.loads(backend.to_str())["model"]
    merges: Any = [(left, right) for left, right in trained["merges"]]
    tokenizer = Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=merges,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    tokenizer.chat_template = CHATML
    return tokenizer
