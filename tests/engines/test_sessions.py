"""Sessions of games: which are opened, continued and closed, and the tokens that they hold."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfplay.engines.sglang.fast.sessions import GameSessions, SessionPool, max_session_tokens
from selfplay.engines.sglang.requests import Answer
from selfplay.errors import EngineFault


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


@given(cache=st.integers(1, 10_000), context=st.integers(1, 10_000))
def test_a_request_without_a_session_fits_beside_all_sessions(cache: int, context: int) -> None:
    limit = max_session_tokens(cache, context)
    assert limit <= 0.8 * cache
    assert limit == 0 or cache - limit > context


@given(
    turns=st.lists(
        st.tuples(
            *(st.integers(0, most) for most in (3, 1, 5)),
            st.sampled_from(["answered", "forgotten", "lost", "unanswered"]),
        ),
        max_size=60,
    ),
    slots=st.integers(0, 5),
    tokens=st.integers(0, 80),
)
def test_whatever_is_played_the_books_agree_with_the_process(
    turns: list[tuple[int, int, int, str]], slots: int, tokens: int
) -> None:
    """Four games of two seats; pairs of games share their prompts. A turn continues the open
    session whose prompt and answer it begins with, and no other; one without an answer, or whose
    tokens the process does not hold ("lost"), closes its session."""
    pool, process = pool_of(slots, tokens)
    games = [GameSessions(pool) for _ in range(4)]
    texts = {(g, s): [g % 2, s] * 4 for g in range(4) for s in range(2)}
    last: dict[tuple[int, int], str] = {}  # the session that a seat's next turn continues
    for num, (place, seat, length, how) in enumerate(turns):
        ids = texts[place, seat]
        answer = [100 + num] * length
        due = last.pop((place, seat), "")
        was_open, before = due in process.held, set(process.held)
        faults = pytest.raises(EngineFault, match=f"has {len(ids) - 1} prompt tokens, expected")
        with contextlib.suppress(KeyError), games[place].turn(ids, 5) as session:
            if session is not None:
                assert session.name == due if was_open else session.name not in before
            if how == "unanswered":
                raise KeyError
            if session is not None and how == "lost":
                with faults:
                    pool.end_turn(session, ids, reply(ids[1:], answer))
            elif session is not None:
                pool.end_turn(session, ids, reply(ids, answer))
                last[place, seat] = session.name if how == "answered" else ""
            # The game goes on from another answer than the session's.
            texts[place, seat] = [*ids, *answer, 1] if how == "answered" else [9, *ids]
        assert pool.free_slots == slots - len(process.held) >= 0
        open_now = [s for sessions in games for s in sessions._sessions if not s.closed]
        assert {s.name for s in open_now} == process.held
        shared = {s.first_prompt for s in open_now}
        reserved = sum(s.reserved for s in open_now)
        assert pool.num_tokens == reserved + sum(map(len, shared)) <= tokens + 5
    for sessions in games:
        sessions.close()
    assert (process.held, pool.free_slots, pool.num_tokens) == (set(), slots, 0)
    assert not pool._first_prompts  # a run has millions
