"""Streaming sessions (`engine.sessions`): SGLang keeps a seat's tokens from turn to turn.

Without a session a turn sends its whole prompt. SGLang looks it up in the prefix cache, and inserts
prompt and answer there when the turn ends, which costs Python time in every turn. In a streaming
session SGLang keeps the seat's tokens and their KV cache, so a turn sends only its new tokens. A
session's first prompt still shares the prefix cache with other games. Sampling is the same. SGLang
cannot evict a session from the KV cache, so `SessionPool` accounts for it. Sizes in tokens.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from selfplay.engines.sglang.fast.client import SchedulerClient
from selfplay.engines.sglang.requests import Answer
from selfplay.errors import EngineFault


def max_session_tokens(cache_tokens: int, context_length: int) -> int:
    """The tokens that all sessions of a process may hold: at most 0.8 of the cache, and so few that
    a request without a session always fits too, since SGLang cannot evict a session."""
    return max(0, min(cache_tokens * 4 // 5, cache_tokens - context_length - 1))


@dataclass(slots=True, eq=False)
class Session:
    """One seat's context: the ids of its last prompt and of the answer to it."""

    name: str
    first_prompt: tuple[int, ...]
    ids: tuple[int, ...] = ()
    reserved: int = 0  # tokens that the session may hold after its first prompt
    closed: bool = False


class SessionPool:
    """The sessions of one process: at most `slots`, with at most `max_tokens` in total.

    A first prompt counts once for all sessions that start with it. A new session uses only free
    space. A growing session closes the sessions that are idle longest, or itself if none is idle.
    """

    def __init__(self, client: SchedulerClient, *, slots: int, max_tokens: int) -> None:
        self.client, self.free_slots, self.max_tokens = client, slots, max_tokens
        self.num_tokens = 0  # held by all sessions at the end of their current turns, at most
        self._idle: dict[Session, None] = {}  # sessions between two turns, longest idle first
        self._first_prompts: Counter[tuple[int, ...]] = Counter()
        self._counter = itertools.count()

    def is_idle(self, session: Session) -> bool:
        """Whether the session is open and between two turns."""
        return session in self._idle

    def open(self, ids: Sequence[int], num_new: int) -> Session | None:
        """A session for this first prompt and its answer; None without space for it."""
        first = tuple(ids)
        prompt = 0 if self._first_prompts[first] else len(first)
        if not self.free_slots or self.num_tokens + prompt + num_new > self.max_tokens:
            return None
        self.free_slots -= 1
        self._first_prompts[first] += 1
        self.num_tokens += prompt + num_new
        session = Session(f"session-{next(self._counter)}", first, reserved=num_new)
        self.client.open_session(session.name)
        return session

    def begin_turn(self, session: Session, num: int) -> bool:
        """Start a turn in an idle session, which then holds at most `num` tokens. If that is too
        many and no other session is idle, the session is closed, and the result is False."""
        del self._idle[session]
        self._resize(session, num)
        while self.num_tokens > self.max_tokens and self._idle:
            self.close(next(iter(self._idle)))
        if self.num_tokens > self.max_tokens:
            self.close(session)
        return not session.closed

    def end_turn(self, session: Session, ids: Sequence[int], answer: Answer) -> None:
        """End the turn with this prompt. Raises EngineFault if the process does not hold the
        session's tokens."""
        if answer.num_prompt != len(ids):
            raise EngineFault(
                f"the engine's session has {answer.num_prompt} prompt tokens, expected {len(ids)}"
            )
        session.ids = (*ids, *answer.ids)
        self._resize(session, len(session.ids))
        self._idle[session] = None

    def _resize(self, session: Session, num: int) -> None:
        reserved = num - len(session.first_prompt)
        self.num_tokens += reserved - session.reserved
        session.reserved = reserved

    def close(self, session: Session) -> None:
        """Free the session's cache, once."""
        if session.closed:
            return
        session.closed = True
        self.client.close_session(session.name)
        self._idle.pop(session, None)
        self.num_tokens -= session.reserved
        self.free_slots += 1
        self._first_prompts[session.first_prompt] -= 1
        if not self._first_prompts[session.first_prompt]:
            del self._first_prompts[session.first_prompt]
            self.num_tokens -= len(session.first_prompt)


class GameSessions:
    """The sessions of one game. Close them when the game ends."""

    def __init__(self, pool: SessionPool) -> None:
        self.pool = pool
        self._sessions: list[Session] = []

    @contextlib.contextmanager
    def turn(self, ids: Sequence[int], num_new: int) -> Iterator[Session | None]:
        """The session that these prompt ids continue, or a new one; None without space for one.

        Inside the block call `SessionPool.end_turn` with the answer. Otherwise the session is
        closed, since the process's tokens are then unknown.
        """
        self._sessions = [session for session in self._sessions if not session.closed]
        session = next((s for s in self._sessions if self._continues(ids, s)), None)
        if session is None:
            session = self.pool.open(ids, num_new)
            if session is not None:
                self._sessions.append(session)
        elif not self.pool.begin_turn(session, len(ids) + num_new):
            session = None
        try:
            yield session
        finally:
            if session is not None and not self.pool.is_idle(session):
                self.pool.close(session)

    def close(self) -> None:
        """Free the cache of all sessions of the game."""
        for session in self._sessions:
            self.pool.close(session)

    def _continues(self, ids: Sequence[int], session: Session) -> bool:
        num, idle = len(session.ids), self.pool.is_idle(session)
        return idle and num < len(ids) and session.ids == tuple(ids[:num])
