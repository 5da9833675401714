"""Small stand-ins for chat models: a tokenizer trained here, templates that behave alike."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from selfplay.chat.rendering import Rendering, make_rendering
from selfplay.chat.tokenizer import train_tokenizer

TEMPLATES = Path(__file__).parent / "templates"
TEXTS = [
    "Hello, world 12. You are user assistant system model in out\n\n",
    "[INST] the paper goes to the reviewer [/INST] start of turn, header end",
    "<think>\n\n</think>\n\n the other one is better, I think.",
] * 3


@dataclass(frozen=True, slots=True)
class Family:
    """A template file with its model's special tokens; `word_marks`: sentencepiece-like spaces;
    `added`: tokens that are in the tokenizer without being flagged special; `spelt`: merges of the
    learnt vocabulary come to its special tokens, too."""

    template: str
    specials: tuple[str, ...]
    bos: str | None = None
    eos: str | None = None
    kwargs: Mapping[str, object] = field(default_factory=dict)
    word_marks: bool = False
    added: tuple[str, ...] = ()
    spelt: bool = False


_CHATML = ("<|im_start|>", "<|im_end|>")
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
_GEMMA4 = ("<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>")
_GRANITE = ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>")
_DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
_THINK = ("<think>", "</think>")
_GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|endoftext|>")

FAMILIES = {
    "qwen2.5": Family("qwen25", _CHATML),
    "qwen3 without thinking": Family("qwen3", _CHATML, kwargs={"enable_thinking": False}),
    "llama3": Family("llama3", _LLAMA, bos=_LLAMA[0], eos=_LLAMA[3]),
    "llama3.2 with a date": Family(
        "llama32", _LLAMA, bos=_LLAMA[0], eos=_LLAMA[3], kwargs={"date_string": "26 Jul 2024"}
    ),
    "mistral": Family("mistral", ("<s>", "</s>"), bos="<s>", eos="</s>"),
    "mistral, word marks": Family("mistral", ("<s>", "</s>"), "<s>", "</s>", word_marks=True),
    "mistral nemo": Family(
        "mistral_nemo", ("<s>", "</s>", "[INST]", "[/INST]"), bos="<s>", eos="</s>"
    ),
    "gemma": Family("gemma", _GEMMA, bos="<bos>", eos="<eos>"),
    "gemma, word marks": Family("gemma", _GEMMA, "<bos>", "<eos>", word_marks=True),
    "no template": Family("", _CHATML),
    "qwen3, tags unflagged": Family(
        "qwen3", _CHATML, kwargs={"enable_thinking": False}, added=(*_THINK, "<tool_call>")
    ),
    "deepseek v3.1": Family(
        "deepseek31", _DEEPSEEK, *_DEEPSEEK, added=("<｜User｜>", "<｜Assistant｜>", *_THINK)
    ),
    "gemma 4": Family("gemma4", _GEMMA4, bos="<bos>", eos="<turn|>"),
    "granite 3.3": Family("granite33", _GRANITE, eos=_GRANITE[2]),
    "llama3.2 today": Family("llama32", _LLAMA, bos=_LLAMA[0], eos=_LLAMA[3]),
    "zephyr": Family("zephyr", ("<s>", "</s>"), bos="<s>", eos="</s>"),
    "olmo 2": Family("olmo2", ("<|endoftext|>",), bos="<|endoftext|>", eos="<|endoftext|>"),
    "smollm3 without thinking": Family("smollm3", _CHATML, kwargs={"enable_thinking": False}),
    "smollm3 thinking": Family("smollm3", _CHATML, added=_THINK),
    "glm 4.5 without thinking": Family(
        "glm45", _GLM, eos="<|endoftext|>", kwargs={"enable_thinking": False}
    ),
    "mistral, word marks, merges spell its tokens": Family(
        "mistral", ("<s>", "</s>"), "<s>", "</s>", word_marks=True, spelt=True
    ),
}
# Their templates rewrite old turns, so each turn is rendered anew. With thinking off, if their
# template can turn it off, they are extended as the families above.
ANEW = {
    "qwen3 thinking": Family("qwen3", _CHATML),
    "qwen3 thinking, tags unflagged": Family("qwen3", _CHATML, added=_THINK),
    "qwen3 thinking 2507": Family("qwen3_2507", _CHATML, added=_THINK),
    "deepseek v3.1 thinking": Family(
        "deepseek31", _DEEPSEEK, *_DEEPSEEK, kwargs={"thinking": True}, added=_THINK
    ),
    "nemotron nano 2": Family("nemotron", _CHATML, added=_THINK),
    "glm 4.5 thinking": Family("glm45", _GLM, eos=_GLM[5], added=_THINK),
}
# Families that are refused, each with a word that its refusal must name.
REFUSED = {
    "gemma 4 thinking": (
        Family("gemma4", _GEMMA4, "<bos>", "<turn|>", kwargs={"enable_thinking": True}),
        "enable_thinking: false",
    ),
    "llama 2": (Family("llama2", ("<s>", "</s>"), "<s>", "</s>"), "'</s>'"),
    "gpt-oss": (
        Family("gpt_oss", ("<|start|>", "<|end|>", "<|message|>", "<|channel|>")),
        "<|channel|>",
    ),
}


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """The family's tokenizer, trained in a blink. Read it, do not change it."""
    return make_tokenizer((FAMILIES | ANEW)[name])


@cache
def rendering_of(name: str) -> Rendering:
    """How a run renders the family's chats. Read it, do not change it."""
    return make_rendering(tokenizer_of(name), template_kwargs=(FAMILIES | ANEW)[name].kwargs)


def make_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """A new tokenizer with the family's special tokens and template."""
    if family.word_marks:
        tokenizer = _word_marked(family.specials if family.spelt else ())
    else:
        tokenizer = train_tokenizer(TEXTS, vocab_size=420)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in family.added])
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.specials)})
    if family.bos:
        tokenizer.bos_token = family.bos
    if family.eos:
        tokenizer.eos_token = family.eos
    tokenizer.chat_template = (
        (TEMPLATES / f"{family.template}.jinja").read_text() if family.template else None
    )
    return tokenizer


def _word_marked(spelt: Sequence[str]) -> PreTrainedTokenizerFast:
    """Llama-2-like: spaces become word marks, one is put before a text's beginning, bytes fall
    back.

    Its special tokens stand in the vocabulary itself, and its post-processor puts one in front.
    Merges put each of `spelt` together from its characters, before all other merges.
    """
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=special + [f"<0x{byte:02X}>" for byte in range(256)],
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer=trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = state["added_tokens"][: len(special)]
    for token in spelt:
        for i in range(1, len(token)):
            state["model"]["merges"].insert(0, [token[:i], token[i]])
            state["model"]["vocab"].setdefault(token[: i + 1], len(state["model"]["vocab"]))
    backend = Tokenizer.from_str(json.dumps(state))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
