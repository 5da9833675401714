"""Keeps the contexts of a game's seats inside SGLang between their turns: streaming sessions.

Without a session a turn sends its whole prompt. SGLang looks it up in the prefix cache, and enters
prompt and answer there when the turn ends, which is Python for each turn. In a session SGLang keeps
the seat's tokens and its KV cache from turn to turn, so a turn sends only what is new. A session's
first prompt still shares the prefix cache with other games. Sampling is the same.

SGLang cannot evict a session's part of the KV cache, so `Room` counts it. Written for SGLang
0.5.17. Sizes in tokens.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from selfplay.engines.sglang.line import Line


@dataclass(slots=True, eq=False)
class Session:
    """One seat's context: the ids of its last prompt and of the answer to it."""

    name: str
    first_prompt: tuple[int, ...]
    ids: tuple[int, ...] = ()
    own: int = 0  # tokens that the session may hold after its first prompt
    closed: bool = False


class Room:
    """The sessions of one process, at most `slots`, which hold at most `tokens`.

    A first prompt is counted once for all sessions that begin with it. A new session takes what is
    free. A session that grows closes those that have waited longest, or itself if none waits.
    """

    def __init__(self, line: Line, slots: int, tokens: int) -> None:
        self._line, self.slots, self.tokens = line, slots, tokens
        self.held = 0
        self._waiting: dict[Session, None] = {}  # those between two turns, the longest first
        self._first_prompts: Counter[tuple[int, ...]] = Counter()
        self._numbers = itertools.count()

    def waits(self, session: Session) -> bool:
        """Whether the session is open and between two turns."""
        return session in self._waiting

    def open(self, ids: Sequence[int], num_new: int) -> Session | None:
        """A session for this first prompt and its answer, or None if no room is left."""
        first = tuple(ids)
        prompt = 0 if self._first_prompts[first] else len(first)
        if not self.slots or self.held + prompt + num_new > self.tokens:
            return None
        self.slots -= 1
        self._first_prompts[first] += 1
        self.held += prompt + num_new
        session = Session(f"session-{next(self._numbers)}", first, own=num_new)
        self._line.open(session.name)
        return session

    def begin(self, session: Session, num: int) -> bool:
        """A waiting session begins a turn, after which it holds at most `num` tokens. If that is
        too many although no other session waits, it is closed, and the result is False."""
        del self._waiting[session]
        self._resize(session, num)
        while self.held > self.tokens and self._waiting:
            self.close(next(iter(self._waiting)))
        if self.held > self.tokens:
            self.close(session)
        return not session.closed

    def end(self, session: Session, ids: tuple[int, ...]) -> None:
        """The turn has ended; `ids` are its prompt and answer."""
        session.ids = ids
        self._resize(session, len(ids))
        self._waiting[session] = None

    def _resize(self, session: Session, num: int) -> None:
        own = num - len(session.first_prompt)
        self.held += own - session.own
        session.own = own

    def close(self, session: Session) -> None:
        """Free the session's cache, once."""
        if session.closed:
            return
        session.closed = True
        self._line.close(session.name)
        self._waiting.pop(session, None)
        self.held -= session.own
        self.slots += 1
        self._first_prompts[session.first_prompt] -= 1
        if not self._first_prompts[session.first_prompt]:
            del self._first_prompts[session.first_prompt]
            self.held -= len(session.first_prompt)


class Sessions:
    """The sessions of one game. Close them when the game ends."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self._own: list[Session] = []

    @contextlib.contextmanager
    def turn(self, ids: Sequence[int], num_new: int) -> Iterator[Session | None]:
        """The session that these prompt ids continue, or a new one; None if there is no room.

        Inside the block call `Room.end` with the answer. If that does not happen, the session is
        closed, since what the process holds is then unknown.
        """
        self._own = [session for session in self._own if not session.closed]
        session = next((s for s in self._own if self._continues(ids, s)), None)
        if session is None:
            session = self.room.open(ids, num_new)
            if session is not None:
                self._own.append(session)
        elif not self.room.begin(session, len(ids) + num_new):
            session = None
        try:
            yield session
        finally:
            if session is not None and not self.room.waits(session):
                self.room.close(session)

    def close(self) -> None:
        """Free the cache of all sessions of the game."""
        for session in self._own:
            self.room.close(session)

    def _continues(self, ids: Sequence[int], session: Session) -> bool:
        num = len(session.ids)
        waits = self.room.waits(session)
        return waits and num < len(ids) and session.ids == tuple(ids[:num])
