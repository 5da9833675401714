"""What a program asks in a chat call, and how it is answered: OpenAI's chat completions.

Tools are texts in the Hermes format, as in the chat templates of Qwen2.5 and Qwen3: the system text
lists the functions, an answer calls one in `<tool_call>`, and a user text has its result in
`<tool_response>`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>{}\n"
    "</tools>\n\nFor each function call, return a json object with function name and arguments "
    'within <tool_call></tool_call> XML tags:\n<tool_call>\n{{"name": <function-name>, '
    '"arguments": <args-json-object>}}\n</tool_call>'
)
_CALL = re.compile(r"\n?<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
# What a call may give only with this value, and what is read; the run decides everything else.
_FIXED = {"n": 1, "response_format": {"type": "text"}, "logit_bias": {}}
_MOST = ("max_completion_tokens", "max_tokens")
_READ = {*_FIXED, *_MOST, "model", "messages", "tools", "stream", "stream_options", "stop"}


class Refused(Exception):
    """A request that is not answered: an HTTP status, a reason of one line, and a code for it."""

    def __init__(self, status: int, reason: str, code: str | None = None) -> None:
        super().__init__(reason)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat call: the system text, and the texts of users and answers in turn, both ends a user's.

    `most` limits the new tokens, 0 does not; a text of `stops` ends the answer. `left_out` names
    the settings that have no effect.
    """

    system: str
    texts: tuple[str, ...]
    most: int
    stops: tuple[str, ...]
    left_out: tuple[str, ...]

    def key(self, texts: Sequence[str]) -> tuple[str, ...]:
        """What equal chats have in common; spaces around an answer do not count."""
        return (self.system, *(t.strip() if n % 2 else t for n, t in enumerate(texts)))


def read_chat(body: Mapping[str, Any], model: str) -> Chat:
    """The chat of a request's body, for the policy that is served as `model`.

    Raises Refused for another model, for messages that no chat template takes in turn, and for what
    cannot be answered exactly, such as several answers or an image.
    """
    if body.get("model") != model:
        raise Refused(404, f"model must be {model!r}, got {body.get('model')!r}")
    for name, value in _FIXED.items():
        if (given := body.get(name)) not in (None, value):
            raise Refused(400, f"{name} must be {json.dumps(value)}, got {json.dumps(given)}")
    most = [body[name] for name in _MOST if body.get(name) is not None]
    if any(type(each) is not int or each < 1 for each in most):
        raise Refused(400, f"max_tokens must be an integer of at least 1, got {most[0]!r:.80}")
    stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise Refused(400, f"stop must be a text or a list of texts, got {stops!r:.80}")
    try:
        messages, tools = list(body["messages"]), list(body.get("tools") or ())
        named = messages[0]["role"] in ("system", "developer")
        by_role = groupby(messages[named:], lambda each: each["role"] == "assistant")
        turns = [(is_answer, list(of)) for is_answer, of in by_role]
        system, texts = "".join(map(_text, messages[:named])), tuple(_read(of) for _, of in turns)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Refused(400, f"messages must be as in OpenAI's API, got {error!r:.120}") from None
    if len(turns) % 2 == 0 or turns[0][0] or any(a and len(of) > 1 for a, of in turns):
        rule = "messages must have users and assistant in turn and end with a user or a tool"
        raise Refused(400, f"{rule}, got {', '.join(each['role'] for each in messages[-6:])}")
    if tools:
        listed = "".join(f"\n{json.dumps(tool)}" for tool in tools)
        system += "\n\n" * bool(system) + _TOOLS.format(listed)
    given = {name for name, value in body.items() if value not in (None, False, "auto", [], {})}
    left_out = tuple(sorted(given - _READ))
    return Chat(system, texts, min(most, default=0), tuple(stops), left_out)


def _read(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of one turn: an answer with its calls, or what is read between two answers."""
    text = ""
    for each in messages:
        said, role = _text(each), each["role"]
        if role not in ("user", "assistant", "tool"):
            raise ValueError(f"a later message of {role}")
        if role == "tool":
            said = f"<tool_response>\n{said}\n</tool_response>"
        for call in each.get("tool_calls") or ():
            name, given = call["function"]["name"], json.loads(call["function"]["arguments"])
            called = json.dumps({"name": name, "arguments": given})
            said += f"{chr(10) * bool(said)}<tool_call>\n{called}\n</tool_call>"
        text += ("\n" if role == "tool" else "\n\n") * bool(text) + said
    return text


def _text(message: Mapping[str, Any]) -> str:
    """A message's text; its parts are joined. Raises ValueError for an image or a sound."""
    content = message.get("content") or ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if other := [part["type"] for part in parts if part["type"] != "text"]:
        raise ValueError(f"content of {other[0]}")
    return "".join(part["text"] for part in parts)


def answered(chat: Chat, text: str, cut: bool, model: str, name: str) -> tuple[Any, str]:
    """The response with this text, and the text as which later calls of the program have it.

    `cut` tells whether a limit of tokens ended the answer; `name` makes its id and those of its
    calls unique. A block that is no call of a function stays in the text.
    """
    said, calls = text, list[dict[str, Any]]()
    for match in _CALL.finditer(text) if "<tools>" in chat.system else ():
        try:
            called = json.loads(match[1])
            function = {"name": called["name"], "arguments": json.dumps(called["arguments"])}
        except (ValueError, LookupError, TypeError):
            continue  # no call: the program reads it as text
        calls.append({"id": f"call-{name}-{len(calls)}", "type": "function", "function": function})
        said = said.replace(match[0], "", 1)
    finish = "length" if cut else "tool_calls" if calls else "stop"
    message: dict[str, Any] = {"role": "assistant", "content": said or None if calls else said}
    message |= {"tool_calls": calls} if calls else {}
    choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
    head = {"id": f"chatcmpl-{name}", "object": "chat.completion", "created": int(time.time())}
    return head | {"model": model, "choices": [choice]}, _read([message])


def streamed(answer: dict[str, Any], body: Mapping[str, Any]) -> Iterator[str]:
    """The response to this body as server-sent events, ended by `[DONE]`.

    The engine gives a turn at once, so one event has all of the answer.
    """
    head = answer | {"object": "chat.completion.chunk", "usage": None}
    message, finish = (answer["choices"][0][name] for name in ("message", "finish_reason"))
    calls = [{"index": n} | call for n, call in enumerate(message.get("tool_calls", ()))]
    deltas = [(message | ({"tool_calls": calls} if calls else {}), None), ({}, finish)]
    parts: list[Any] = [[{"index": 0, "delta": of, "finish_reason": end}] for of, end in deltas]
    events = [json.dumps(head | {"choices": choices}) for choices in parts]
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append(json.dumps(answer | {"object": head["object"], "choices": []}))
    yield from (f"data: {event}\n\n" for event in (*events, "[DONE]"))
