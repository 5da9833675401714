"""Converts a `.gguf` file into an ordinary Hugging Face folder, once, in a cache.

The packages gguf and transformers read the file. Each of its keys and tensors is used, is listed as
changing no number, or ends the conversion. Quantized weights are saved in bfloat16, others keep
their numbers. Trains nothing and loads no folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import math
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import HF_HOME
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers import modeling_gguf_pytorch_utils as reading
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dialop.shown import error_line
from selfplay.atomic import atomic_folder
from selfplay.chat.rendering import make_rendering
from selfplay.errors import SettingsError
from selfplay.model.hub import file_digest

CACHE = Path(HF_HOME) / "selfplay-gguf"
_CONVERSION = b"4"  # increment it when the conversion changes, so that old folders are not used
_MAGIC = b"GGUF"
# general.architecture, and transformers' name of the family. Files of other families lack numbers
# (the scale of Gemma's attention, the layers with a window) or the rule that splits text.
_FAMILIES = {
    **{name: name for name in ("llama", "qwen2", "qwen3")},
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
}
# The config attribute set by a key; the key is prefixed with the architecture.
_NUMBERS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_YARN = {
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_NOTHING = (  # keys that change no number here
    "GGUF.*",  # counts of the header, which gguf reads
    "general.*",  # names, authors, licences; architecture and type are read before
    "quantize.*",  # how the quantized numbers were chosen
    "*.vocab_size",  # the rows of the embedding decide
    "*.rope.scaling.finetuned",  # whether training saw the scaling
    "tokenizer.ggml.add_???_token",  # the chat template writes the tokens around a text
    "tokenizer.ggml.*_token_id",  # of tokens that no chat contains; the others are read earlier
    "tokenizer.chat_template?*",  # templates for other uses, and their names
    "tokenizer.huggingface.json",  # the same tokenizer again
)
_SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
_OTHER_ENDS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_CONTROL, _ADDED = 3, (3, 4)  # in tokenizer.ggml.token_type: control and user-defined
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
# How byte-level BPE splits a text, by its name in a file (tokenizer.ggml.pre). The patterns come
# from llama.cpp (src/llama-vocab.cpp) and the models' own tokenizer.json.
_DIGIT = r"\p{N}"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, str | None] = {
    **dict.fromkeys(("gpt-2", "gpt2"), None),
    **dict.fromkeys(("smollm", "starcoder", "command-r", "refact"), _DIGIT),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _WORDS % _DIGIT),
    **dict.fromkeys(_LLAMA3, _WORDS % r"\p{N}{1,3}"),
}


def converted(file: Path, *, what: str, cache: Path = CACHE) -> Path:
    """The folder with the converted model and tokenizer of a `.gguf` file, created if missing.

    The cache names a file by its content, so a copy is not converted again.
    Raises SettingsError, which starts with `what`, for a file that transformers cannot convert or
    if gguf is not installed; OSError if the file system refuses the folder.
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
                        f"{what} must be a GGUF file of a model that can be converted, got "
                        f"{file}: {error_line(error)}"
                    ) from error
    return folder


def _name(file: Path) -> str | None:
    """The file's name in the cache; None if it is not a GGUF file."""
    with file.open("rb") as content:
        if content.read(len(_MAGIC)) != _MAGIC:
            return None
    digest = hashlib.sha256(_CONVERSION + file_digest(file))
    return f"{file.stem}-{digest.hexdigest()[:16]}"


def _convert(file: Path, folder: Path) -> None:
    """Write the model and the tokenizer of `file` into a new folder.

    transformers reads only the weights: it would also read the configs next to the file, which may
    be another model's, and may keep the weights quantized. Raises ValueError for a key or a tensor
    that is neither read nor known to change nothing.
    """
    from gguf import GGUFReader

    reader = GGUFReader(file)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    keys: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    family = keys.pop("general.architecture", None)  # each key is taken out where it is read
    if family not in _FAMILIES:
        raise ValueError(
            f"its general.architecture must be one of {', '.join(_FAMILIES)}, got {family}"
        )
    config, tokenizer = _config(family, keys, tensors), _tokenizer(family, keys)
    ends = [keys.pop(key) for key in _OTHER_ENDS if key in keys]
    for key, value in keys.items():
        if not any(fnmatchcase(key, known) for known in _NOTHING):
            raise ValueError(f"its key {key} is not read, got {value!r:.40}")
    mend_tokenizer(tokenizer)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    quantized = {t.tensor_type.name for t in tensors.values()} - {"F32", "F16", "BF16"}
    dtype = torch.bfloat16 if quantized else torch.float32
    with torch.device("meta"):  # for the names of its weights
        model = AutoModelForCausalLM.from_config(config)
    weights = reading.load_gguf_checkpoint(
        str(file), return_tensors=True, model_to_load=model, torch_dtype=dtype
    )
    model, found = type(model).from_pretrained(
        None, config=config, state_dict=weights["tensors"], dtype=dtype, output_loading_info=True
    )
    processor = reading.TENSOR_PROCESSORS.get(family, reading.TensorProcessor)(config.to_dict())
    read = reading.get_gguf_hf_weights_map(model, processor)
    unread = {n for n in tensors if n not in read and n.removesuffix(".weight") not in read}
    if unread:
        raise ValueError(f"its tensor {min(unread)} is not read")
    if found["missing_keys"]:
        raise ValueError(f"it has no tensor for {min(found['missing_keys'])}")
    if all(torch.equal(p, p.bfloat16().to(p)) for p in model.parameters()):
        model.bfloat16()
    if model.generation_config is not None:
        model.generation_config.eos_token_id = [*dict.fromkeys([tokenizer.eos_token_id, *ends])]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _config(family: str, keys: dict[str, Any], tensors: dict[str, Any]) -> PretrainedConfig:
    """The model's config. Removes what it reads from both mappings. Raises ValueError for a key
    that is missing or that no config can express."""

    def take(key: str, default: Any = None) -> Any:
        value = keys.pop(f"{family}.{key}", default)
        if value is None or isinstance(value, list):
            raise ValueError(f"its key {family}.{key} must be one value, got {value}")
        return value

    values = {name: take(key) for key, name in _NUMBERS.items()}
    values |= {name: take(key) for key, name in _EXPERTS.items() if f"{family}.{key}" in keys}
    width = take("attention.key_length", values["hidden_size"] // values["num_attention_heads"])
    rope = {"rope_type": "default", "rope_theta": take("rope.freq_base", 10_000.0)}
    kind, factor = take("rope.scaling.type", "linear"), take("rope.scaling.factor", 1.0)
    yarn = {"original_max_position_embeddings": values["max_position_embeddings"]}
    yarn |= {name: take(key) for key, name in _YARN.items() if f"{family}.{key}" in keys}
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"its {family}.rope.scaling.type must be none, linear or yarn, got {kind}")
    if kind != "none" and factor not in (0.0, 1.0):
        rope |= {"rope_type": kind, "factor": factor, **(yarn if kind == "yarn" else {})}
    fixed = {
        "general.type": "model",
        "split.count": 1,
        f"{family}.attention.value_length": width,
        f"{family}.rope.dimension_count": width,
        f"{family}.attention.causal": True,
    }
    for key, right in fixed.items():
        if (got := keys.pop(key, right)) != right:
            raise ValueError(f"its {key} must be {right}, got {got}")
    config = AutoConfig.for_model(
        _FAMILIES[family],
        **values,
        head_dim=width,
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        norm_topk_prob=family == "qwen3moe",
        rope_parameters=rope,
    )
    if (factors := tensors.pop("rope_freqs.weight", None)) is not None:
        _scale(config, torch.tensor(factors.data, dtype=torch.float64))
    return config


def _scale(config: PretrainedConfig, factors_D: Tensor) -> None:
    """Set the config's Llama 3 rotary scaling, whose frequencies have these divisors.

    The divisor is f if a wave is longer than the original context L, 1 if L holds 4 waves, and
    1 / ((1 - s) / f + s) between them, with s = (L / wave - 1) / 3, as in transformers'
    `_compute_llama3_parameters`. Raises ValueError for other divisors.
    """
    if bool((factors_D == 1.0).all()):
        return
    rope, top = config.rope_parameters, float(factors_D.max())
    frequencies_D = rope["rope_theta"] ** (-torch.arange(len(factors_D)).double() / len(factors_D))
    s_D = (1 / factors_D - 1 / top) / (1 - 1 / top)
    # L between the two; elsewhere a wave that is longer than L, or 4 waves that are not.
    contexts_D = 2 * math.pi / frequencies_D * (1 + 3 * s_D)
    between_D = (s_D > 1e-4) & (s_D < 1 - 1e-4)
    shortest = torch.tensor([1.0, *contexts_D[s_D > 0.5]]).max()
    middle = (shortest * contexts_D[s_D <= 0.5].min()).sqrt()
    context = contexts_D[between_D].mean() if between_D.any() else middle
    config.rope_parameters = {
        "rope_type": "llama3",
        "rope_theta": rope["rope_theta"],
        "factor": top,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": round(float(context)),
    }
    scaled_D, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    right = torch.allclose(frequencies_D / factors_D, scaled_D.double(), rtol=1e-4, atol=0.0)
    if not right or rope["rope_type"] != "default":
        raise ValueError(
            "its tensor rope_freqs.weight must hold the divisors of Llama 3's rotary scaling, low "
            f"1 and high 4, without another scaling, got {float(factors_D.min()):.3g} to {top:.3g}"
        )


def _tokenizer(family: str, keys: dict[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer. Removes what it reads from `keys`. Raises ValueError for an unknown kind."""

    def take(key: str, default: Any = None) -> Any:
        return keys.pop(f"tokenizer.ggml.{key}", default)

    kind, tokens, kinds = take("model"), take("tokens"), take("token_type", ())
    split, scores, prefix = take("pre", "default"), take("scores"), take("add_space_prefix", True)
    merges = [tuple(merge.split(" ")) for merge in take("merges", ())]
    ids = {name: take(f"{key}_token_id") for key, name in _SPECIAL.items()}
    if kind == "gpt2":
        if split == "default":  # in a file older than this key
            split = "qwen2" if family.startswith("qwen") else "gpt-2"
        vocabulary = {token: number for number, token in enumerate(tokens)}
        backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split in _LLAMA3))
        split_as(backend, split)
        if split == "qwen2":
            backend.normalizer = normalizers.NFC()
    elif kind == "llama":
        unknown = None if ids["unk"] is None else tokens[ids["unk"]]
        backend = _word_marks(tokens, scores or (), unknown, prefix=prefix)
    else:
        raise ValueError(f"its tokenizer.ggml.model must be gpt2 or llama, got {kind}")
    added = [pair for pair in zip(tokens, kinds, strict=False) if pair[1] in _ADDED]
    backend.add_tokens([AddedToken(t, normalized=False, special=k == _CONTROL) for t, k in added])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=keys.pop("tokenizer.chat_template", None),
        **{f"{name}_token": tokens[i] for name, i in ids.items() if i is not None},
    )


def _word_marks(
    tokens: Sequence[str], scores: Sequence[float], unknown: str | None, *, prefix: bool
) -> Tokenizer:
    """Sentencepiece's BPE, in which "▁" is a space; `prefix` puts one before a text.

    It merges the two neighbours whose token has the best score, so the merges of a token are all
    its halves that are tokens, in the order of the scores. Raises ValueError for missing scores.
    """
    if len(scores) != len(tokens):
        raise ValueError(
            f"its tokenizer.ggml.scores must have a number for each of {len(tokens)} tokens, got "
            f"{len(scores)}"
        )
    score = dict(zip(tokens, scores, strict=True))
    merges: list[tuple[str, str]] = []
    for token in sorted(score, key=score.__getitem__, reverse=True):
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        halves = [pair for pair in halves if pair[0] in score and pair[1] in score]
        merges += sorted(halves, key=lambda pair: (score[pair[0]], score[pair[1]]), reverse=True)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    marked = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*marked, normalizers.Replace(" ", "▁")])
    steps = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1)] if prefix else [])])
    return backend


def split_as(backend: Tokenizer, name: str) -> None:
    """Make byte-level BPE split text by the rule `name`, which transformers ignores. Raises
    ValueError for an unknown name."""
    if name not in _SPLITS:
        raise ValueError(
            f"its tokenizer.ggml.pre must be one of {', '.join(_SPLITS)}, got {name}; use the "
            "folder that the file was made from"
        )
    pattern = _SPLITS[name]
    # The pattern of digits leaves the rest to GPT-2's pattern.
    whole = pattern is not None and pattern != _DIGIT
    splits: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not whole)]
    if pattern is not None:
        splits.insert(0, pre_tokenizers.Split(Regex(pattern), "isolated"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)


def mend_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Correct the errors of transformers' conversion of a tokenizer.

    - If prompts contain the eos token (SmolLM2's is `<|im_start|>`), the token that ends a turn in
      the chat template becomes eos. The run's own check refuses unreadable templates.
    - A byte-level tokenizer decodes each token separately. The conversion joins all tokens first,
      so a single character outside the byte alphabet leaves the complete text undecoded.
    - Decoded text is not cleaned up, which would remove sampled spaces.
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
