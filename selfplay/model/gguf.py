"""Converts a `.gguf` file into an ordinary Hugging Face folder, once, in a cache.

transformers reads the file (`gguf_file=`, which needs the package gguf) and dequantizes its
weights; they are saved in bfloat16. Trains nothing and loads no folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import HF_HOME
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from dialop.shown import error_line
from selfplay.atomic import atomic_folder
from selfplay.chat.rendering import make_rendering
from selfplay.errors import SettingsError

CACHE = Path(HF_HOME) / "selfplay-gguf"
_CONVERSION = b"3"  # increase it when the conversion changes, so that old folders are not used
_MAGIC = b"GGUF"
# How byte-level BPE splits a text, by the name that a file gives it (tokenizer.ggml.pre). The
# patterns are those of llama.cpp (src/llama-vocab.cpp) and of the models' own tokenizer.json.
_DIGIT = r"\p{N}"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, str | None] = {
    **dict.fromkeys(("gpt-2", "gpt2"), None),
    **dict.fromkeys(("smollm", "starcoder", "command-r", "refact"), _DIGIT),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _WORDS % _DIGIT),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _WORDS % r"\p{N}{1,3}"),
}


def converted(file: Path, *, what: str, cache: Path = CACHE) -> Path:
    """The folder with the converted model and tokenizer of a `.gguf` file, created if missing.

    The cache names a file by its content, so a copy is not converted again.
    Raises SettingsError, which begins with `what`, for a file that transformers cannot convert and
    where gguf is not installed; OSError if the file system refuses the folder.
    """
    try:
        name = _name(file)
    except OSError as error:
        raise SettingsError(f"{what} must be a readable file, got {file}: {error}") from None
    if name is None:
        raise SettingsError(
            f"{what} must be a GGUF file, got {file}, which does not start with GGUF"
        )
    folder = cache / name
    if (folder / "config.json").exists():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise SettingsError(
            f"{what} {file} needs the package gguf: pip install -r requirements/gguf.txt"
        )
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ranks of one host wait for the one that converts
        if not (folder / "config.json").exists():
            print(f"converting {file}, once, into {folder}", file=sys.stderr, flush=True)
            with atomic_folder(folder) as new:
                try:
                    _convert(file, new)
                except Exception as error:
                    raise SettingsError(
                        f"{what} must be a GGUF file of a model that transformers can convert, got "
                        f"{file}: {error_line(error)}"
                    ) from error
    return folder


def _name(file: Path) -> str | None:
    """The file's name in the cache; None if it is no GGUF file."""
    with file.open("rb") as content:
        if content.read(len(_MAGIC)) != _MAGIC:
            return None
    digest = hashlib.sha256(_CONVERSION + file_digest(file))
    return f"{file.stem}-{digest.hexdigest()[:16]}"


def file_digest(file: Path) -> bytes:
    """The sha256 of a file, which is read again only if its size or time has changed."""
    stat = file.stat()
    return _digest(file, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=256)
def _digest(file: Path, size: int, mtime_ns: int) -> bytes:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").digest()


def _convert(file: Path, folder: Path) -> None:
    """Write the model and the tokenizer of `file` into a new folder.

    The file is read from a folder of its own, because transformers would also read the configs
    beside it, which may be another model's.
    """
    with tempfile.TemporaryDirectory() as alone:
        (Path(alone) / file.name).symlink_to(file.resolve())
        source = {"pretrained_model_name_or_path": alone, "gguf_file": file.name}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    if (name := _split_name(file)) is not None:
        split_as(tokenizer.backend_tokenizer, name)
    mend_tokenizer(tokenizer)
    model.config.eos_token_id = tokenizer.eos_token_id
    if model.generation_config is not None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _split_name(file: Path) -> str | None:
    """How the file's byte-level BPE splits a text; None for other tokenizers and if untold."""
    from gguf import GGUFReader

    kind, name = (
        None if field is None else str(field.contents())
        for field in map(GGUFReader(file).get_field, ("tokenizer.ggml.model", "tokenizer.ggml.pre"))
    )
    return name if kind == "gpt2" and name != "default" else None


def split_as(backend: Tokenizer, name: str) -> None:
    """Make byte-level BPE split a text as `name` tells, which transformers ignores. Raises
    ValueError for an unknown name."""
    if name not in _SPLITS:
        raise ValueError(
            f"its tokenizer splits text as {name}, which is none of {', '.join(_SPLITS)}; use the "
            "folder that the file was made from"
        )
    pattern = _SPLITS[name]
    # A pattern of digits alone leaves the rest to GPT-2's.
    whole = pattern is not None and pattern != _DIGIT
    splits: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not whole)]
    if pattern is not None:
        splits.insert(0, pre_tokenizers.Split(Regex(pattern), "isolated"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)


def mend_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Correct what transformers' conversion of a tokenizer gets wrong.

    - If prompts contain the eos token (SmolLM2's is `<|im_start|>`), the token that ends a turn in
      the chat template becomes eos. The run's own check refuses unreadable templates.
    - A byte-level tokenizer decodes each token separately. The conversion joins all tokens first;
      one character outside the byte alphabet then leaves the complete text undecoded.
    - Decoded text is not cleaned up, which would remove sampled blanks.
    """
    tokenizer.clean_up_tokenization_spaces = False
    if "ByteLevel" in repr(tokenizer.backend_tokenizer.pre_tokenizer):
        tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    if tokenizer.chat_template is None:
        return
    try:
        rendering = make_rendering(tokenizer)
    except SettingsError:
        return
    eos = tokenizer.eos_token_id
    if eos is None or (eos != rendering.end_id and eos in rendering.first(system="", user="Hi")):
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(rendering.end_id)
