"""Turns chat text into token ids, exactly as the model's own chat template does, piece by piece.

Earlier ids are never tokenized again: a prompt is the previous prompt, the sampled ids, and
`following`. If the template rewrites old turns (it drops thoughts), each prompt is the whole
conversation as the template renders it. Contents cannot forge markers: a private copy of the
tokenizer (markers.py) spells each marker with a secret, and the template's own text uses that
spelling. A typed `<|im_end|>` is therefore plain text, while template text and content are still
tokenized together. Units: token ids.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product, zip_longest
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError

from selfplay.chat.markers import THOUGHT, Markers, private_markers
from selfplay.chat.template import (
    CLOCK,
    CLOSE,
    RewritesHistory,
    Slot,
    Template,
    check_same,
    check_thinking,
    encodable,
    leading_blanks,
    opens_thought,
    say,
    think,
)
from selfplay.data.chats import PASSED
from selfplay.errors import SettingsError

if TYPE_CHECKING:  # it imports torch, which a program that draws a page does not need
    from transformers import PreTrainedTokenizerFast

_PART = "\N{REPLACEMENT CHARACTER}"  # decoded from an incomplete character
_CACHE_SIZE = 256  # texts whose ids are cached; the games of a group start with the same prompt
# Texts that `make_rendering` checks a template with.
_USERS = ("Hello, world 12.", "  padded\n", "line one\n\nline two: a_b <3", "Grüße, 世界 🙂 1½")
_SYSTEM, _ANSWER = "Play well.\nBe brief ", "Fine, {} it is."
_THOUGHT = "12 or 13?\nMaybe."


@dataclass(frozen=True, slots=True)
class Rendering:
    """How one tokenizer's chat template turns new text into ids; created by `make_rendering`.

    tokenizer: its chat template has the run's arguments as defaults, also in exports.
    stop_ids: ids that end a sample: the template's end-of-turn token, then the tokenizer's eos and
        those of the model's configs if they differ.
    end_id: the end-of-turn id.
    folds_system: the template has no system role, so the system text precedes the first user text,
        with a blank line between them.
    rewritten: why the template cannot be extended turn by turn; empty if it can. If set, each
        prompt is rendered from scratch (`conversation`), and `following` is not used.
    typeable: text that opens a turn in this template without a marker, so any player can type it;
        empty if a marker opens every turn.
    unread: given template arguments that the template does not read.
    kept: text before old answers that was in their prompts and that the template, and so a server,
        leaves out of later prompts; the run keeps it.
    shows: keys of a message other than role and content that the template shows; unused here.
    """

    tokenizer: PreTrainedTokenizerFast
    stop_ids: tuple[int, ...]
    end_id: int
    folds_system: bool
    typeable: str
    rewritten: str
    unread: str
    kept: str
    shows: tuple[str, ...]
    _markers: Markers
    _encode: Callable[[str], list[int]]
    _system: Slot
    _user_after_system: Slot
    _user_alone: Slot
    _user_later: Slot
    _tail: str
    _answer: Slot
    _before_answer: str  # text that a policy samples before an answer, such as spaces
    _end: str
    _header: str
    _splits: bool  # system text and first user text can be tokenized separately
    _opened: bool
    _shown: Callable[[str], str]

    @property
    def served(self) -> list[str]:
        """What a server of the policy must know, one line per item."""
        lines = []
        if self.kept:
            lines.append(
                f"the run's later prompts keep {self.kept!r} before old answers; a server that "
                "renders the conversation drops it (docs/chat_templates.md)"
            )
        if "macro strftime_now" in str(self.tokenizer.chat_template):
            lines.append(
                f"the chat template prints a date, which is {CLOCK:%d %b %Y} in all prompts and in "
                "the exported template (docs/chat_templates.md)"
            )
        return lines

    def first(self, *, system: str, user: str) -> list[int]:
        """The first prompt with its generation prompt; no system message if `system` is empty."""
        before, text = self._opening(system, user)
        return [*before, *self._encode(text + self._tail)]

    def _opening(self, system: str, user: str) -> tuple[list[int], str]:
        """The first prompt without its generation prompt: ids of the system text, if it can be
        tokenized separately, and the text after them."""
        if not system:
            return [], self._user_alone.fill(user)
        if self.folds_system:
            return [], self._user_alone.fill(f"{system}\n\n{user}")
        before, text = self._system.fill(system), self._user_after_system.fill(user)
        return (self._encode(before), text) if self._splits else ([], before + text)

    def conversation(self, system: str, users: Sequence[str], answers: Sequence[str]) -> list[int]:
        """The prompt after these user texts and the answers between them, with its generation
        prompt.

        Answers appear as in the template's history if it rewrites old turns, else as in
        `action_ids`.
        """
        ids = self.first(system=system, user=users[0])
        if not self.rewritten:
            for answer, user in zip(answers, users[1:], strict=True):
                ids += self.action_ids(answer) + self.following(user, closed=True)
            return ids
        before, text = self._opening(system, users[0])
        for answer, user in zip(answers, users[1:], strict=True):
            text += self._old_answer(answer) + self._user_later.fill(user)
        return [*before, *self._encode(text + self._tail)]

    def _old_answer(self, answer: str) -> str:
        """An old answer as the template shows it, after its header. Markers in the header have
        their secret spelling; markers in the answer are plain text."""
        shown = self._shown(encodable(answer))
        opened = commonprefix([shown, self._header])
        return self._markers.hide(opened) + shown[len(opened) :]

    def following(self, user: str, *, closed: bool) -> list[int]:
        """The ids from the end of the sample to the end of the next generation prompt.

        closed: the sample ended with the end-of-turn token (`ends_turn`). Otherwise the ids start
        with that token.
        """
        ids = self._encode(self._user_later.fill(user) + self._tail)
        return ids[1:] if closed else list(ids)

    def continued(self, context: Sequence[int], user: str) -> tuple[int, list[int]]:
        """The next prompt after a context that ends with a sample: how many ids of the context it
        keeps, and the ids after them.

        It keeps all, except for a stop token other than the template's, which is replaced by the
        template's.
        """
        closed = self.ends_turn(context)
        kept = len(context) - (not closed and context[-1] in self.stop_ids)
        return kept, self.following(user, closed=closed)

    def action_ids(self, text: str) -> list[int]:
        """The ids that a policy would sample for `text` after a generation prompt.

        They end with the end-of-turn token.
        """
        return self._sampled(self._before_answer + encodable(text))

    def answer_ids(self, text: str) -> list[int]:
        """As `action_ids`, for an answer of a recorded chat: trimmed as the template trims answers,
        and the tags of a leading thought become the tokens that a policy samples."""
        text = self._answer.fill(text)
        opening, closing = THOUGHT
        thought, closed, said = text.partition(closing)
        if not (closed and thought.startswith(opening)):
            return self.action_ids(text)
        thought = thought.removeprefix(opening)
        if self._opened:  # the prompt opens the thought and ends with a line end
            thought = thought.removeprefix("\n")
        else:
            thought = self._markers.hide(opening) + thought
        return self._sampled(thought + self._markers.hide(closing) + said)

    def _sampled(self, answer: str) -> list[int]:
        """The ids of a text after a generation prompt, including the end of its turn."""
        answer += self._end
        prompt_ids = self._encode(self._tail)
        ids = self._markers.encode(self._tail + answer)
        if ids[: len(prompt_ids)] == prompt_ids:
            return ids[len(prompt_ids) :]
        # A policy samples after fixed prompt ids, so the text's first characters must not merge
        # with the prompt's last ones (such as a newline). A marker before the text prevents that,
        # and keeps the tokenizer from treating it as the start of a text.
        return self._markers.encode(self._end + answer)[1:]

    def token_ranges(self, text: str, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Map character ranges [start, end) of `text` to token ranges [start, end) of its
        `action_ids`.

        A token that overlaps a range belongs to it.
        """
        ids, answer = self.action_ids(text), self._before_answer + text + self._end
        for before in (self._tail, self._end):
            encoded = self._markers.backend.encode(before + answer, add_special_tokens=False)
            if encoded.ids[-len(ids) :] == ids:
                break
        shift = len(before) + len(self._before_answer)
        offsets = encoded.offsets[-len(ids) :]
        token_ranges = []
        for start, end in ranges:
            overlapping = [
                i for i, (a, b) in enumerate(offsets) if a < end + shift and b > start + shift
            ]
            token_ranges.append((overlapping[0], overlapping[-1] + 1))
        return token_ranges

    def last_user(self, user: str) -> tuple[int, int]:
        """The last user text of a prompt as a token range counted from the prompt's end: (-9, -4)
        is `prompt[-9:-4]`. It includes the end-of-turn token, if users' turns have one."""
        text = self._user_later.fill(user)
        encoded = self._markers.backend.encode(text + self._tail, add_special_tokens=False)
        start = len(self._user_later.before)
        end = len(text) + len(self._end) * self._tail.startswith(self._end)
        inside = [i for i, (a, b) in enumerate(encoded.offsets) if a < end and b > start]
        first, last = (inside[0], inside[-1] + 1) if inside else (0, 0)
        return first - len(encoded.ids), last - len(encoded.ids)

    def readable(self, ids: Sequence[int]) -> str:
        """Ids as readable text, with every marker in its public spelling."""
        text = self._markers.backend.decode(list(ids), skip_special_tokens=False)
        for public, secret in self._markers.spelling.items():
            text = text.replace(secret, public)
        return text

    def ends_turn(self, ids: Sequence[int]) -> bool:
        """Whether sampled ids end with the template's end-of-turn token."""
        return bool(ids) and ids[-1] == self.end_id

    def decode(self, ids: Sequence[int]) -> str:
        """The sampled text without its stop token.

        Any other special token becomes U+FFFD, never its spelling. Markers that are not flagged
        special (`<think>`) keep their spelling; in a later prompt that is plain text. A thought
        that the prompt opened is opened in the text.
        """
        body = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        text = self._markers.decode(body)
        if self._opened and not text.startswith(self._before_answer):
            return think(text)
        return text.removeprefix(self._before_answer)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token, for display. If a character spans several tokens, the first one
        gets the text of all of them."""
        texts = [self._markers.decode([i]) for i in ids]
        for at, text in enumerate(texts):
            for end in range(at + 2, at + 5) if _PART in text else ():
                if _PART not in (joined := self._markers.decode(ids[at:end])):
                    texts[at:end] = [joined, *[""] * (len(ids[at:end]) - 1)]
                    break
        return texts


def make_rendering(
    tokenizer: PreTrainedTokenizerFast,
    *,
    template_kwargs: Mapping[str, object] | None = None,
    ends: Sequence[int] = (),
) -> Rendering:
    """Read the chat template by rendering it around sentinels, and check the result against it.

    A tokenizer without a template gets ChatML. `template_kwargs`, the setting
    `model.chat_template`, are passed to the template (`enable_thinking: false`). `ends` are further
    ids that end a sample (`model.policy.end_ids`).

    Raises:
        SettingsError: one line, for a template that can neither be extended token by token nor be
            rendered from scratch each turn (it has no single end-of-turn token, marks thoughts by
            tags other than <think>, fails, ...). Names the rendering that failed and the setting
            that helps.
    """
    try:
        try:
            return _make_rendering(tokenizer, template_kwargs, ends)
        except RewritesHistory as rewrites:
            try:
                return _make_rendering(tokenizer, template_kwargs, ends, rewritten=str(rewrites))
            except (TemplateError, ValueError) as error:
                raise ValueError(f"{rewrites}; turn by turn: {error}") from error
    except (TemplateError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SettingsError(
            "model.chat_template and the tokenizer of "
            f"{tokenizer.name_or_path or 'model.scratch'}: {reason}"
        ) from error


def _make_rendering(
    tokenizer: PreTrainedTokenizerFast,
    template_kwargs: Mapping[str, object] | None,
    ends: Sequence[int],
    *,
    rewritten: str = "",
) -> Rendering:
    """The rendering: extended turn by turn, or from scratch each turn if `rewritten` gives a
    reason. Raises RewritesHistory if the template requires the latter."""
    template = Template(tokenizer, template_kwargs)
    markers = private_markers(tokenizer, template)
    if markers.encode("one") == markers.encode("two"):
        # transformers makes such a tokenizer for a folder that has only its config.
        raise ValueError(
            "a tokenizer must distinguish words, got one without a vocabulary; give the folder its "
            "tokenizer.json, or vocab.json and merges.txt"
        )
    folds = not template.has_system()
    (user_alone,), tail = template.slots([say("user", 0)])
    if folds:
        system, user_after_system = Slot(""), user_alone
    else:
        (system, user_after_system), system_tail = template.slots(
            [say("system", 0), say("user", 0)]
        )
        check_same(system_tail, tail, where="the generation prompt after a system text")
    user_later, header = template.turn(user_alone, tail)
    opened = bool(rewritten) and opens_thought(tail)
    if not rewritten:
        check_thinking(template, tail)
        before_answer = leading_blanks(tail=tail, header=header)
    else:
        before_answer = CLOSE if opened else ""
    end = _turn_end(user_later.before, markers)
    end_id = markers.encode(markers.hide(end))[0]
    hidden_system = markers.hide_slot(system)
    hidden_user = markers.hide_slot(user_after_system)
    stop_ids = dict.fromkeys((end_id, tokenizer.eos_token_id, *ends))
    rendering = Rendering(
        tokenizer=_exported(tokenizer, template, template_kwargs or {}),
        stop_ids=tuple(int(i) for i in stop_ids if i is not None),
        end_id=end_id,
        folds_system=folds,
        rewritten=rewritten,
        unread=template.unread(template_kwargs or ()),
        kept="" if rewritten else tail[len(header) :],
        shows=tuple(filter(template.shows, PASSED)),
        typeable=_typeable((tail, user_later.before), markers, ends=(end, tokenizer.eos_token)),
        _markers=markers,
        _encode=lru_cache(maxsize=_CACHE_SIZE)(markers.encode),
        _system=hidden_system,
        _user_after_system=hidden_user,
        _user_alone=markers.hide_slot(user_alone),
        _user_later=markers.hide_slot(user_later),
        _tail=markers.hide(tail),
        _answer=template.answer(),
        _before_answer=before_answer,
        _end=markers.hide(end),
        _header=header,
        _splits=_splits(hidden_system, hidden_user, markers),
        _opened=opened,
        _shown=lru_cache(maxsize=_CACHE_SIZE)(template.old_answer),
    )
    _check_first(rendering, template)
    if rewritten:
        _check_anew(rendering, template)
        return rendering
    for system_text, stop in product(("", _SYSTEM), rendering.stop_ids):
        _check_extends(rendering, template, system=system_text, stop=stop)
    return rendering


def _exported(
    tokenizer: PreTrainedTokenizerFast, template: Template, given: Mapping[str, object]
) -> PreTrainedTokenizerFast:
    """The tokenizer; a copy with a bound chat template if that differs from its own."""
    own: Any = tokenizer.chat_template
    if isinstance(own, list | tuple):
        own = {of["name"]: of["template"] for of in own}
    bound: Any = template.bound()
    if isinstance(own, dict):
        names = {"default", given.get("chat_template")} & {"default", *own}
        bound = own | dict.fromkeys(names, bound)
    if bound == own:
        return tokenizer
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = bound
    return tokenizer


def _turn_end(after_answer: str, markers: Markers) -> str:
    """The public spelling of the end-of-turn token, from the template text after an answer.

    Raises ValueError unless that text starts with a marker.
    """
    match = markers.pattern.search(after_answer)
    if match is None or after_answer[: match.start()].strip():
        raise ValueError(
            "the chat template must end an answer with one special token of the tokenizer, got "
            f"{after_answer!r}; give the tokenizer folder a chat_template.jinja that ends answers "
            "with a token that the model was trained to use for this, such as its eos token"
        )
    if match.start():
        raise ValueError(
            f"the chat template writes {after_answer[: match.start()]!r} between an answer and its "
            f"end {match[0]!r}, which no policy samples; give the tokenizer folder a "
            "chat_template.jinja without it"
        )
    return match[0]


def _splits(system: Slot, user: Slot, markers: Markers) -> bool:
    """Whether the first user text starts with a marker, where every tokenizer splits a text, and
    the marker absorbs no spaces from the system text before it."""
    text, *rest = system.fill(_SYSTEM), *map(user.fill, _USERS)
    return user.before.startswith(tuple(markers.spelling.values())) and all(
        markers.encode(text + more) == markers.encode(text) + markers.encode(more) for more in rest
    )


def _typeable(headers: Sequence[str], markers: Markers, *, ends: Sequence[str | None]) -> str:
    """The first text that opens a turn and contains no marker; "" if there is none.

    The token that ends the previous turn does not count as a marker here, unless nothing else opens
    the next turn (GLM).
    """
    for header in headers:
        opening = header
        for end in ends:
            opening = opening.replace(end, "") if end else opening
        if opening.strip() and not markers.pattern.search(opening):
            return header
    return ""


def _opening(rendering: Rendering, *, system: str, user: str) -> list[dict[str, str]]:
    """The messages equivalent to `Rendering.first`."""
    if system and not rendering.folds_system:
        return [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return [{"role": "user", "content": f"{system}\n\n{user}" if system else user}]


def _check_first(rendering: Rendering, template: Template) -> None:
    """Raise ValueError unless every first prompt equals the template's own, id for id."""
    for user in _USERS:
        for system in ("", _SYSTEM):
            talk = _opening(rendering, system=system, user=user)
            got = rendering.first(system=system, user=user)
            where = f"first prompt for {talk!r}"
            _check_same_ids(got, template.ids(talk), template, where=where)


def _check_extends(rendering: Rendering, template: Template, *, system: str, stop: int) -> None:
    """Raise ValueError unless a conversation grown piece by piece, with `stop` at the end of the
    sampled answers, equals the template's rendering.

    The ids that follow an answer must be equal. The full conversation must be equal as text only,
    because an answer's first token may be split differently after fixed prompt ids than inside a
    finished text; the policy saw the grown ids. If the template leaves generation-only text out of
    old turns, we keep it (`kept`), so only the text from the last answer on is compared.
    """
    drops = bool(rendering.kept)
    ids = rendering.first(system=system, user=_USERS[0])
    talk = _opening(rendering, system=system, user=_USERS[0])
    for number, user in enumerate(_USERS[1:]):
        answer = _ANSWER.format(number)
        start = len(ids) if drops else 0
        ids = [*ids, *rendering.action_ids(answer)[:-1], stop]
        kept, following = rendering.continued(ids, user)
        ids = ids[:kept] + following
        talk += [{"role": "assistant", "content": answer}, {"role": "user", "content": user}]
        expected = template.ids(talk)
        where = f"a conversation of {len(talk)} messages grown turn by turn"
        _check_same_ids(following, expected[-len(following) :], template, where=where)
        text, expected_text = template.decode(ids[start:]), template.decode(expected)
        check_same(text, expected_text[-len(text) :] if drops else expected_text, where=where)


def _check_anew(rendering: Rendering, template: Template) -> None:
    """Raise ValueError unless thoughts are dropped and every prompt of a conversation equals the
    template's own, id for id, with thoughts in all, some or none of the answers."""
    answers = [_ANSWER.format(number) for number in range(len(_USERS) - 1)]
    shown = template.old_answer(think(f"{_THOUGHT}\n{CLOSE}{answers[0]}"))
    if _THOUGHT in shown or not shown.endswith(answers[0]):
        raise ValueError(
            "a template that drops thoughts must drop everything before </think> in an old answer "
            f"and keep the rest, got {shown!r}"
        )
    for thinks in ((), (0,), tuple(range(len(answers)))):
        conversation = [
            think(f"{_THOUGHT}\n{CLOSE}{answer}") if number in thinks else answer
            for number, answer in enumerate(answers)
        ]
        for system in ("", _SYSTEM):
            talk = _opening(rendering, system=system, user=_USERS[0])
            for number, user in enumerate(_USERS[1:]):
                talk.append({"role": "assistant", "content": conversation[number]})
                talk.append({"role": "user", "content": user})
                users = _USERS[: number + 2]
                got = rendering.conversation(system, users, conversation[: number + 1])
                where = f"a conversation of {len(talk)} messages"
                _check_same_ids(got, template.ids(talk), template, where=where)


def _check_same_ids(
    got: Sequence[int], expected: Sequence[int], template: Template, *, where: str
) -> None:
    """Raise ValueError with texts and ids around the first difference unless the ids are equal."""
    if list(got) != list(expected):
        at = next(i for i, (a, b) in enumerate(zip_longest(got, expected)) if a != b)
        near = slice(max(0, at - 8), at + 8)
        raise ValueError(
            f"chat template, {where}: ids differ from apply_chat_template at token {at}: "
            f"{template.decode(got[near])!r} {list(got[near])} against "
            f"{template.decode(expected[near])!r} {list(expected[near])}"
        )
