"""Reads the chats that a warm start imitates: rows with `messages`, each with role and content.

The source is a .jsonl or .parquet file, a folder from `save_to_disk` of `datasets`, or a data set's
folder of the hub, local or by its name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from reprlib import repr as short
from typing import Any

from dialop.rows import read_rows
from selfplay.data.instances import local_data, state_of
from selfplay.errors import SettingsError

_KEY = "warm_start.chats"
# The other keys that a message may have. They have no effect, unless the model's chat template
# shows them (`check_shown`). Any other key would be lost silently.
PASSED = ("name", "id", "metadata")
_WHOSE = "warm_start.chat_roles selects whose turns are imitated"
_EMPTY: tuple[Any, ...] = (None, "", [], {})
# Columns that affect what the model reads or imitates. Others are labels and sources.
_MEANT = re.compile(
    r"(?i)(?:^|_)(?:tools?|functions?|documents|system|chat_template|weights?|masks?|loss|train"
    r"|trainable)(?:_|$)"
)


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation: the system text ("" for none), the user's texts, and the answers to them.

    There are as many answers as user texts, or one less. `name` is the row's location in its file.
    `unread` has its other columns, and other keys of its messages as messages.KEY.
    """

    name: str
    system: str
    users: tuple[str, ...]
    answers: tuple[str, ...]
    unread: frozenset[str] = frozenset()


def read_chats(source: str, roles: Collection[str]) -> tuple[Chat, ...]:
    """The chats of a file or folder, which is read again only if it has changed. A final user text
    is dropped unless `roles`, whose turns are imitated, includes "user".

    Raises:
        SettingsError: one line, for a source that cannot be read or is empty, and for the first row
            that is not a chat; names the file and the row.
    """
    path = local_data(source, _KEY)
    return _chats(path, tuple(roles), state_of(path))


def check_shown(chats: Iterable[Chat], shown: Collection[str]) -> None:
    """Raise SettingsError for the first chat whose messages have a key in `shown`, the keys of
    PASSED that the chat template would show."""
    for chat in chats:
        for key in shown:
            if f"messages.{key}" in chat.unread:
                raise SettingsError(
                    f"{_KEY}: {chat.name}: its messages must not have {key}, which the chat "
                    "template shows and games lack; remove it"
                )


@lru_cache(maxsize=1)
def _chats(path: Path, roles: tuple[str, ...], state: object) -> tuple[Chat, ...]:
    chats = []
    try:
        for location, row in read_rows(path):
            try:
                chats.append(_chat(row, roles, name=location))
            except ValueError as error:
                raise ValueError(f"{location}: {error}") from None
    except (OSError, ValueError) as error:
        raise SettingsError(f"{_KEY}: {error}") from None
    if not chats:
        raise SettingsError(f"{_KEY}: {path} contains no chats")
    return tuple(chats)


def _chat(row: Mapping[str, Any], roles: Collection[str], *, name: str) -> Chat:
    """The chat in a row. Raises ValueError for messages that some chat templates refuse."""
    if "messages" not in row:
        raise ValueError(f"must have messages, got {', '.join(map(str, row)) or 'no column'}")
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages must be a list of messages, got {short(messages)}")
    others = {key: value for key, value in row.items() if key != "messages" and value not in _EMPTY}
    for key in others:
        if _MEANT.search(key) and (key, others[key]) != ("weight", 1):
            raise ValueError(
                f"must not have {key} next to messages, got {short(others[key])}; put all text "
                f"into messages, and {_WHOSE}"
            )
    texts = [_text(message, number) for number, message in enumerate(messages)]
    system = texts.pop(0)[1] if texts[0][0] == "system" else ""
    skipped = len(messages) - len(texts)
    for number, (role, text) in enumerate(texts):
        expected = ("user", "assistant")[number % 2]
        if role != expected:
            raise ValueError(
                "messages must be at most one system message, then user and assistant alternating: "
                f"message {number + skipped} must be {expected}, got {role}"
            )
        if role in roles and not text.strip():
            raise ValueError(f"message {number + skipped} must have text to imitate, got {text!r}")
    if "user" not in roles:
        texts = texts[: len(texts) // 2 * 2]
    if not texts:
        raise ValueError(f"messages must have a turn to imitate ({', '.join(roles)}), got none")
    said = [text for _, text in texts]
    passed = {key for message in messages for key in PASSED if message.get(key) not in _EMPTY}
    unread = frozenset(others) | {f"messages.{key}" for key in passed}
    return Chat(name, system, tuple(said[0::2]), tuple(said[1::2]), unread)


def _text(message: Any, number: int) -> tuple[str, str]:
    """The role and the content of a message."""
    if not isinstance(message, Mapping):
        raise ValueError(f"message {number} must have a role and a content, got {short(message)}")
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "user", "assistant"):
        raise ValueError(
            f"the role of message {number} must be system, user or assistant, got {short(role)}"
        )
    if not isinstance(content, str):
        got = short(content) if "content" in message else f"only {', '.join(message)}"
        raise ValueError(f"the content of message {number} must be text, got {got}")
    if message.get("weight", 1) not in (1, None):
        raise ValueError(
            f"message {number} must have weight 1 or none, got {message['weight']!r}; {_WHOSE}"
        )
    for key, value in message.items():
        if key not in ("role", "content", "weight", *PASSED) and value not in _EMPTY:
            raise ValueError(
                f"message {number} must be only text, got {key} {short(value)}; put all that the "
                "model should write into its content (a thought between <think> and </think>), and "
                f"{_WHOSE}"
            )
    return role, content
