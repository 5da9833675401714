"""Reads a chat template: renders it around sentinels, splits the rendering there, and finds out how
it rewrites history, such as dropping thoughts from old answers.

A slot is a place for content together with the template text before it. The tail is the text after
the last user text, including the generation prompt. Templates that read the date always get
`CLOCK`. Units: text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from jinja2 import Environment
from jinja2.exceptions import TemplateError, UndefinedError

from dialop.specs import nearest

if TYPE_CHECKING:  # it imports torch, which a program that draws a page does not need
    from transformers import PreTrainedTokenizerFast

CHATML = (
    "{%- for message in messages %}"
    "{%- if message.role != 'system' or message.content %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# The date that `strftime_now` gives templates, so that prompts do not change at midnight. It is the
# default date of Llama 3's template.
CLOCK = datetime(2024, 7, 26)

# The date directives that templates use, longer ones before those they contain.
_DIRECTIVES = ("%-d", "%-m", *(f"%{letter}" for letter in "aAwdbBmyYHIpMSj"))
# Puts the system text before the first user text, like `Rendering.first`.
_FOLDED = (
    "{%- if messages | length > 1 and messages[0].role == 'system' and messages[0].content is "
    "string and messages[1].content is string -%}{%- set messages = [{'role': messages[1].role, "
    "'content': messages[0].content + '\\n\\n' + messages[1].content}] + messages[2:] -%}"
    "{%- endif -%}"
)

_NUM_TURNS = 4
# Rendered instead of contents.
SLOT = "slotpx{}xqtext"
# Added around contents to detect what a template trims; no template writes these blanks itself.
_PAD_LEFT, _PAD_RIGHT = "\n\t ", " \t\n"
OPEN, CLOSE = "<think>\n", "</think>\n\n"  # around a thought, in the form that templates use

# Template arguments that turn thinking on and off.
_SWITCHES = ("enable_thinking", "thinking")
_TAG = re.compile(r"<[^<>\s]{1,40}>|\[[^\[\]\s]{1,40}\]")


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for content: the template text before it, and which sides the template trims."""

    before: str
    strip_left: bool = False
    strip_right: bool = False

    def fill(self, content: str) -> str:
        """The template text, then the content, trimmed as in the template."""
        content = encodable(content)
        content = content.lstrip() if self.strip_left else content
        return self.before + (content.rstrip() if self.strip_right else content)


def encodable(text: str) -> str:
    """The text with question marks for lone surrogates, which no tokenizer accepts."""
    return text.encode("utf-8", "replace").decode("utf-8")


class RewritesHistory(ValueError):
    """The template shows an old answer differently from how it was sampled."""


class Template:
    """A tokenizer's chat template with its arguments bound."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, kwargs: Mapping[str, object] | None
    ) -> None:
        self.tokenizer = tokenizer
        self.kwargs: dict[str, Any] = {"strftime_now": CLOCK.strftime, **(kwargs or {})}
        self.kwargs["chat_template"] = _source(tokenizer, self.kwargs.get("chat_template"))

    @property
    def source(self) -> str:
        """The template's own code."""
        return str(self.kwargs["chat_template"])

    def unread(self, names: Iterable[str]) -> str:
        """The arguments that the template never reads, each with the most similar name that it
        does read; "" if it reads all."""
        from transformers.utils.chat_template_utils import _get_template_variables

        read = _get_template_variables(self.source) | {"chat_template"}
        return ", ".join(name + nearest(name, sorted(read)) for name in names if name not in read)

    def bound(self) -> str:
        """The template's code with the run's arguments as defaults, for programs that pass none,
        the date of `CLOCK` and, if it has no system role, the system text before the first user
        text."""
        from transformers.utils.chat_template_utils import _get_template_variables

        read, lines = _get_template_variables(self.source), list[str]()
        if "strftime_now" in self.source:
            dates = "".join(f".replace('{d}', '{CLOCK.strftime(d)}')" for d in _DIRECTIVES)
            lines += ["{%- macro strftime_now(format) -%}{{ format" + dates + " }}{%- endmacro -%}"]
        lines += [
            f"{{%- if {name} is not defined or {name} is none -%}}"
            f"{{%- set {name} = {value!r} -%}}{{%- endif -%}}"
            for name, value in self.kwargs.items()
            if name in read
        ]
        if not self.has_system():
            lines += [_FOLDED]
        new = [line for line in lines if line not in self.source]
        return "".join([*new, "{# as trained #}\n" * bool(new), self.source])

    @cached_property
    def literals(self) -> list[str]:
        """The text that the template itself can write: its plain text and its string constants."""
        return [
            value if kind == "data" else _unescaped(value)
            for _, kind, value in Environment().lex(self.source)
            if kind in ("data", "string")
        ]

    def writes(self, token: str) -> bool:
        """Whether the template writes this token's spelling, as a constant or in a conversation.

        Constants such as the markers of tool calls and thoughts count even if no conversation here
        shows them.
        """
        return token in self._plain or any(token in text for text in self.literals)

    def shows(self, key: str) -> bool:
        """Whether a conversation is rendered differently if its messages have this key."""
        try:
            return self.text([m | {key: SLOT.format(key)} for m in self._talk]) != self._plain
        except TemplateError:
            return True

    @cached_property
    def _talk(self) -> list[dict[str, str]]:
        """A conversation, with a system text if the template takes one."""
        talk = [say("user", 0), say("assistant", 0), say("user", 1)]
        return [say("system", 0), *talk] if self.has_system() else talk

    @cached_property
    def _plain(self) -> str:
        return self.text(self._talk)

    def text(self, messages: Sequence[Mapping[str, str]], **kwargs: object) -> str:
        """The rendering with its generation prompt; `kwargs` override the template's own."""
        return str(self._render(messages, tokenize=False, **kwargs))

    def ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of `apply_chat_template`, with the generation prompt."""
        return list(self._render(messages, tokenize=True, return_dict=False))

    def _render(self, messages: Sequence[Mapping[str, str]], **kwargs: object) -> Any:
        """A rendering as text or ids.

        A template is third-party code, so any exception becomes a TemplateError.
        """
        talk = [dict(m) for m in messages]
        merged: dict[str, Any] = {**self.kwargs, **kwargs}
        try:
            return self.tokenizer.apply_chat_template(talk, add_generation_prompt=True, **merged)
        except UndefinedError as error:
            raise TemplateError(f"the chat template fails: {error}") from error
        except TemplateError:
            raise
        except Exception as error:
            raise TemplateError(f"the chat template fails: {error!r}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Ids as readable text for comparison, special tokens spelled out."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def slots(self, messages: Sequence[Mapping[str, str]]) -> tuple[list[Slot], str]:
        """The slots of sentinel messages and the text after the last one.

        User and system slots record which sides the template trims.
        """
        where = " ".join(m["role"] for m in messages)
        plain = _cut(self.text(messages), messages, where=where)
        padded = [
            m
            if m["role"] == "assistant"
            else {**m, "content": f"{_PAD_LEFT}{m['content']}{_PAD_RIGHT}"}
            for m in messages
        ]
        pieces = _cut(self.text(padded), messages, where=f"{where}, contents padded with blanks")
        slots = []
        for i, message in enumerate(messages):
            strip_left = strip_right = False
            if message["role"] != "assistant":
                strip_left = not pieces[i].endswith(_PAD_LEFT)
                strip_right = not pieces[i + 1].startswith(_PAD_RIGHT)
                pieces[i] = pieces[i].removesuffix(_PAD_LEFT)
                pieces[i + 1] = pieces[i + 1].removeprefix(_PAD_RIGHT)
            slots.append(Slot(plain[i], strip_left, strip_right))
        for piece, expected in zip(pieces, plain, strict=True):
            check_same(piece, expected, where=f"{where}, contents padded with blanks")
        return slots, plain[-1]

    def turn(self, first: Slot, tail: str) -> tuple[Slot, str]:
        """The slot of any later user text, and the text between a user text and its answer in
        history.

        Raises ValueError unless all turns of a conversation have the same template text and the
        conversation starts like the first prompt.
        """
        talk = [say(role, i) for i in range(_NUM_TURNS) for role in ("user", "assistant")][:-1]
        slots, history_tail = self.slots(talk)
        users, answers = slots[0::2], slots[1::2]
        where = f"a conversation of {len(talk)} messages"
        check_same(users[0].before, first.before, where=f"{where}: its beginning")
        check_same(history_tail, tail, where=f"{where}: its generation prompt")
        for user, answer in zip(users[1:], answers, strict=True):
            check_same(user.before, users[1].before, where=f"{where}: from answer to user text")
            check_same(answer.before, answers[0].before, where=f"{where}: from user text to answer")
        return users[1], answers[0].before

    def old_answer(self, answer: str) -> str:
        """An old answer as the template shows it: all text between the user text before it and the
        text that ends the turn.

        Raises ValueError if the text around it differs from the text around other answers.
        """
        before, after = say("user", 0), say("user", 1)
        text = self.text([before, {"role": "assistant", "content": answer}, after])
        end = self._after_answer + after["content"]
        head, _, rest = text.partition(before["content"])
        shown, found, _ = rest.rpartition(end)
        if not head or not found:
            raise ValueError(f"an old answer must be between two user texts, got {text!r}")
        return shown

    def answer(self) -> Slot:
        """The slot of an answer, without template text: which sides the template trims."""
        shown = self.old_answer(f"{_PAD_LEFT}x{_PAD_RIGHT}")
        return Slot("", f"{_PAD_LEFT}x" not in shown, f"x{_PAD_RIGHT}" not in shown)

    @cached_property
    def _after_answer(self) -> str:
        """The template text between an answer and the next user text."""
        talk = [say("user", 0), say("assistant", 0), say("user", 1)]
        slots, _ = self.slots(talk)
        return slots[2].before

    def has_system(self) -> bool:
        """Whether the template writes a system text before the first user text.

        Gemma's template raises instead, and Mistral's may move it.
        """
        system = {"role": "system", "content": SLOT.format("system")}
        talk = [system, say("user", 0), say("assistant", 0), say("user", 1)]
        try:
            text = self.text(talk)
        except TemplateError:
            return False
        positions = [text.find(m["content"]) for m in talk]
        return text.count(system["content"]) == 1 and -1 < positions[0] < positions[1]


def _source(tokenizer: PreTrainedTokenizerFast, given: object) -> str:
    """The template's code: `given` as code or as the name of one of the tokenizer's templates.

    Without `given` it is the tokenizer's default template, or ChatML if there is none. Raises
    ValueError for an unknown name, and for ChatML without its special tokens.
    """
    own: Any = tokenizer.chat_template
    if isinstance(own, list | tuple):
        own = {template["name"]: template["template"] for template in own}
    if not isinstance(own, dict):
        own = {"default": own} if own else {}
    name = "default" if given is None else given
    if isinstance(name, str) and name in own:
        return str(own[name])
    if isinstance(given, str) and "{" in given:
        return given
    if own:
        raise ValueError(
            f"its chat_template must be the code of a template or one of {', '.join(sorted(own))}, "
            f"got {given!r}; set model.chat_template: {{chat_template: {min(own)}}}"
        )
    special = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
    missing = [t for t in ("<|im_start|>", "<|im_end|>") if t not in special]
    if missing:
        raise ValueError(
            "a tokenizer without a chat template is rendered as ChatML, which needs the "
            f"special tokens <|im_start|> and <|im_end|>; missing: {', '.join(missing)}. "
            "Add them with tokenizer.add_special_tokens({'additional_special_tokens': "
            "['<|im_start|>', '<|im_end|>']}) and "
            "model.resize_token_embeddings(len(tokenizer)), save both, or give the "
            "tokenizer folder a chat_template.jinja"
        )
    return CHATML


def _unescaped(constant: str) -> str:
    """The value of a jinja string constant, from its source."""
    return constant[1:-1].encode("ascii", "backslashreplace").decode("unicode-escape")


def say(role: str, turn: int) -> dict[str, str]:
    """A message whose content is a unique sentinel."""
    return {"role": role, "content": SLOT.format(f"{role}{turn}")}


def _cut(text: str, messages: Sequence[Mapping[str, str]], *, where: str) -> list[str]:
    """The pieces of a rendered text around its sentinels.

    Raises ValueError unless each sentinel appears once and in order.
    """
    pieces = []
    rest = text
    for message in messages:
        before, sentinel, rest = rest.partition(message["content"])
        if not sentinel or message["content"] in rest:
            raise ValueError(
                f"chat template, {where}: the {message['role']} text must appear once and in "
                f"order, got {text!r}"
            )
        pieces.append(before)
    return [*pieces, rest]


def leading_blanks(*, tail: str, header: str) -> str:
    """The blanks between the generation prompt and an answer in a template's history.

    `tail` follows a user text in a prompt, `header` in history. A longer tail is generation-only
    text (Qwen3's empty think block), which our context keeps because the answer was sampled after
    it. A longer header may add only blanks (Mistral's space), which the policy samples itself.
    Raises RewritesHistory if neither starts with the other.
    """
    blanks = header[len(tail) :]
    if header.startswith(tail) and not blanks.strip():
        return blanks
    if not tail.startswith(header):
        where = "the generation prompt does not open an answer as history shows it"
        try:
            check_same(tail, header, where=where)
        except ValueError as error:
            raise RewritesHistory(str(error)) from None
    return ""


def check_same(got: str, expected: str, *, where: str) -> None:
    """Raise ValueError with both texts around the first difference unless they are equal."""
    if got != expected:
        at = next(i for i, (a, b) in enumerate(zip_longest(got, expected)) if a != b)
        near = slice(max(0, at - 30), at + 30)
        raise ValueError(
            f"chat template, {where}: cannot be extended turn by turn; at character {at} "
            f"{got[near]!r} should be {expected[near]!r}. Set model.chat_template so that old "
            "turns stay unchanged, or give the tokenizer folder another chat_template.jinja"
        )


# --- thinking -------------------------------------------------------------------------------------


def think(text: str) -> str:
    """The text with an opening thought tag in front, in the form that templates use."""
    return OPEN + text.removeprefix("\n")


def opens_thought(tail: str) -> bool:
    """Whether a generation prompt opens a thought and leaves it open."""
    return tail.rstrip().endswith(OPEN.strip())


def check_thinking(template: Template, tail: str) -> None:
    """Raise RewritesHistory for a template that removes sampled thinking from old turns.

    It is accepted if its generation prompt `tail` closes the thinking block or thinking is off.
    """
    lost = _lost_markup(template)
    if lost is None or "</think>" in tail or _is_off(template):
        return
    raise RewritesHistory(
        f"the chat template removes {lost} and the text it marks from old turns, so a later prompt "
        f"would not extend the sampled tokens; {_remedy(template)}"
    )


def _lost_markup(template: Template) -> str | None:
    """The first tag that is removed from an old answer, possibly with text around it; None if none.

    Tries `<think>` and every tag that the template's own text contains.
    """
    thought, answer = SLOT.format("thought"), SLOT.format("said")
    pair = f"<think>\n{thought}\n</think>\n\n{answer}"
    tags = dict.fromkeys(tag for text in template.literals for tag in _TAG.findall(text))
    contents = {"<think>": pair} | {tag: f"{thought}\n{tag}\n{answer}" for tag in tags}
    for tag, content in contents.items():
        talk = [say("user", 0), {"role": "assistant", "content": content}, say("user", 1)]
        try:
            kept = content in template.text(talk)
        except TemplateError:  # gpt-oss refuses answers that contain its own tags
            kept = False
        if not kept:
            return tag
    return None


def _is_off(template: Template) -> bool:
    """Whether the template has a switch for thinking and its prompt equals the one with it off."""
    talk = [say("user", 0)]
    current = template.text(talk)
    return any(
        current == template.text(talk, **{name: False}) != template.text(talk, **{name: True})
        for name in _SWITCHES
    )


def _remedy(template: Template) -> str:
    """Advice for turning thinking off; a switch is suggested only if it works in this template."""
    for name in _SWITCHES:
        if _is_off(Template(template.tokenizer, {**template.kwargs, name: False})):
            return f"set model.chat_template: {{{name}: false}}"
    replace = "give the tokenizer folder a chat_template.jinja that keeps old turns"
    if "/no_think" in template.source:
        return (
            "it turns thinking off only for a text that contains /no_think, which no game writes: "
            f"{replace}, or one that always renders as after /no_think"
        )
    return f"use a model that does not think, or {replace}"
