"""Sessions of games: which are opened, continued and closed, and the tokens that they hold."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfplay.engines.sglang.scheduler_client import Answer
from selfplay.engines.sglang.sessions import GameSessions, SessionPool, max_session_tokens
from selfplay.errors import EngineFault

PROMPT = list(range(10))


class Process:
    """Notes what is opened and closed, as a SchedulerClient."""

    def __init__(self) -> None:
        self.held: set[str] = set()

    def open_session(self, session: str) -> None:
        assert session not in self.held
        self.held.add(session)

    def close_session(self, session: str) -> None:
        self.held.remove(session)


def pool_of(slots: int, max_tokens: int) -> tuple[SessionPool, Process]:
    process: Any = Process()
    return SessionPool(process, slots=slots, max_tokens=max_tokens), process


def reply(ids: list[int], answer: list[int]) -> Answer:
    return Answer(answer, [], [], "stop", num_prompt=len(ids), num_cached=0)


def play(sessions: GameSessions, ids: list[int], answer: list[int]) -> str | None:
    """A turn of at most 5 new tokens; the name of its session."""
    with sessions.turn(ids, 5) as session:
        if session is None:
            return None
        sessions.pool.end_turn(session, ids, reply(ids, answer))
        return session.name


def test_a_turn_continues_the_session_whose_prompt_and_answer_it_begins_with() -> None:
    pool, process = pool_of(4, 100)
    sessions = GameSessions(pool)
    first = play(sessions, PROMPT, [50, 51])
    other = play(sessions, [1, *PROMPT], [50])
    assert first != other
    assert play(sessions, [*PROMPT, 50, 51, 7], [52]) == first
    assert play(sessions, [1, *PROMPT, 50, 8, 9], [52]) == other
    # Neither the same prompt again nor one with another answer continues it.
    assert play(sessions, [*PROMPT, 50, 51, 7, 52], [53]) not in (first, other)
    assert play(sessions, [*PROMPT, 50, 51, 7, 53], [53]) not in (first, other)
    sessions.close()
    assert (process.held, pool.free_slots, pool.num_tokens) == (set(), 4, 0)


def test_a_session_whose_tokens_the_process_does_not_hold_is_closed() -> None:
    pool, process = pool_of(4, 100)
    sessions = GameSessions(pool)
    fault = pytest.raises(EngineFault, match="has 9 prompt tokens, expected 10")
    with fault, sessions.turn(PROMPT, 5) as session:
        assert session is not None
        pool.end_turn(session, PROMPT, reply(PROMPT[1:], [50]))
    assert (process.held, pool.free_slots, pool.num_tokens) == (set(), 4, 0)


@given(cache=st.integers(1, 10_000), context=st.integers(1, 10_000))
def test_a_request_without_a_session_fits_beside_all_sessions(cache: int, context: int) -> None:
    limit = max_session_tokens(cache, context)
    assert limit <= 0.8 * cache
    assert limit == 0 or cache - limit > context


@given(
    turns=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 5), st.booleans()),
        max_size=60,
    ),
    slots=st.integers(0, 5),
    tokens=st.integers(0, 80),
)
def test_whatever_is_played_the_books_agree_with_the_process(
    turns: list[tuple[int, int, int, bool]], slots: int, tokens: int
) -> None:
    """Four games of two seats; pairs of games share their prompts; some turns get no answer."""
    pool, process = pool_of(slots, tokens)
    games = [GameSessions(pool) for _ in range(4)]
    texts = {(g, s): [g % 2, s] * 4 for g in range(4) for s in range(2)}
    for num, (place, seat, length, answered) in enumerate(turns):
        ids = texts[place, seat]
        answer = [100 + num] * length
        with contextlib.suppress(KeyError), games[place].turn(ids, 5) as session:
            if not answered:
                raise KeyError
            if session is not None:
                pool.end_turn(session, ids, reply(ids, answer))
            texts[place, seat] = [*ids, *answer, 1]
        assert pool.free_slots == slots - len(process.held) >= 0
        open_now = [s for sessions in games for s in sessions._sessions if not s.closed]
        assert {s.name for s in open_now} == process.held
        shared = {s.first_prompt for s in open_now}
        assert (
            pool.num_tokens
            == sum(s.reserved for s in open_now) + sum(map(len, shared))
            <= tokens + 5
        )
    for sessions in games:
        sessions.close()
    assert (process.held, pool.free_slots, pool.num_tokens) == (set(), slots, 0)
    assert not pool._first_prompts  # a run has millions
