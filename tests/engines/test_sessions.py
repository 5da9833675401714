"""Sessions of games: which are opened, continued and closed, and the tokens that they hold."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfplay.engines.sglang.requests import sessions_room
from selfplay.engines.sglang.sessions import Room, Sessions

PROMPT = list(range(10))


class Process:
    """Notes what is opened and closed, as a Line."""

    def __init__(self) -> None:
        self.held: set[str] = set()

    def open(self, session: str) -> None:
        assert session not in self.held
        self.held.add(session)

    def close(self, session: str) -> None:
        self.held.remove(session)


def room_of(slots: int, tokens: int) -> tuple[Room, Process]:
    process: Any = Process()
    return Room(process, slots, tokens), process


def play(sessions: Sessions, ids: list[int], answer: list[int]) -> str | None:
    """A turn of at most 5 new tokens; the name of its session."""
    with sessions.turn(ids, 5) as session:
        if session is None:
            return None
        sessions.room.end(session, (*ids, *answer))
        return session.name


def test_a_turn_continues_the_session_whose_prompt_and_answer_it_begins_with() -> None:
    room, process = room_of(4, 100)
    sessions = Sessions(room)
    first = play(sessions, PROMPT, [50, 51])
    other = play(sessions, [1, *PROMPT], [50])
    assert first != other
    assert play(sessions, [*PROMPT, 50, 51, 7], [52]) == first
    assert play(sessions, [1, *PROMPT, 50, 8, 9], [52]) == other
    # Neither the same prompt again nor one with another answer continues it.
    assert play(sessions, [*PROMPT, 50, 51, 7, 52], [53]) not in (first, other)
    assert play(sessions, [*PROMPT, 50, 51, 7, 53], [53]) not in (first, other)
    sessions.close()
    assert (process.held, room.slots, room.held) == (set(), 4, 0)


def test_a_first_prompt_counts_once_and_a_turn_holds_its_limit_until_it_ends() -> None:
    room, _ = room_of(9, 100)
    one, two = Sessions(room), Sessions(room)
    with one.turn(PROMPT, 5) as session:
        assert room.held == 10 + 5
        assert session is not None
        room.end(session, (*PROMPT, 1, 2))
    assert room.held == 10 + 2
    play(two, PROMPT, [1])
    assert room.held == 10 + 2 + 1
    one.close()
    assert room.held == 10 + 1
    two.close()
    assert room.held == 0


def test_a_session_that_outgrows_the_room_while_all_others_play_goes_on_without_one() -> None:
    """So does every game whose partner answers at once: its session never waits for others."""
    room, process = room_of(9, 60)
    games = [Sessions(room) for _ in range(3)]
    prompts = [[n] * 10 for n in range(3)]
    with contextlib.ExitStack() as playing:
        running = [
            playing.enter_context(sessions.turn(ids, 5))
            for sessions, ids in zip(games[:2], prompts, strict=False)
        ]
        assert room.held == 30 and all(running)
        name = play(games[2], prompts[2], [7])
        assert name in process.held and room.held == 30 + 11
        assert play(games[2], [*prompts[2], 7, *[8] * 20], [7]) is None
        assert name not in process.held and room.held == 30
        for session, ids in zip(running, prompts, strict=False):
            assert session is not None
            room.end(session, (*ids, 7))
    again = play(games[2], [*prompts[2], 7, *[8] * 20, 7], [7])
    assert again in process.held, "32 + 5 tokens fit beside 22"
    for sessions in games:
        sessions.close()
    assert (process.held, room.slots, room.held) == (set(), 9, 0)


@given(cache=st.integers(1, 10_000), context=st.integers(1, 10_000))
def test_a_request_without_a_session_fits_beside_all_sessions(cache: int, context: int) -> None:
    room = sessions_room(cache, context)
    assert room <= 0.8 * cache
    assert room == 0 or cache - room > context


def test_a_new_session_takes_what_is_free_and_a_growing_one_closes_the_longest_waiting() -> None:
    room, process = room_of(9, 50)
    games = [Sessions(room) for _ in range(4)]
    prompts = [[n] * 10 for n in range(4)]
    names = [play(sessions, ids, [7]) for sessions, ids in zip(games, prompts, strict=True)]
    assert None not in names[:3] and names[3] is not None and room.held == 44
    assert play(Sessions(room), [9] * 10, [7]) is None  # 44 + 15 > 50
    grown = play(games[1], [*prompts[1], 7, 1, 2], [8])  # 44 + 2 + 5 > 50: the first is closed
    assert grown == names[1] and names[0] not in process.held
    assert room.held == 44 - 11 + 3
    again = play(games[0], [*prompts[0], 7, 3], [8])  # does without one, or opens a new one
    assert again is None or again != names[0]


def test_no_room_no_session() -> None:
    assert play(Sessions(room_of(0, 1000)[0]), PROMPT, [1]) is None
    assert play(Sessions(room_of(5, 14)[0]), PROMPT, [1]) is None  # the prompt and 5 new tokens
    assert play(Sessions(room_of(5, 15)[0]), PROMPT, [1]) is not None


def test_a_turn_without_an_answer_closes_its_session() -> None:
    room, process = room_of(2, 100)
    sessions = Sessions(room)
    with pytest.raises(KeyError), sessions.turn(PROMPT, 5):
        raise KeyError
    with sessions.turn(PROMPT, 5):
        pass
    assert (process.held, room.slots, room.held) == (set(), 2, 0)


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
    room, process = room_of(slots, tokens)
    games = [Sessions(room) for _ in range(4)]
    texts = {(g, s): [g % 2, s] * 4 for g in range(4) for s in range(2)}
    for num, (place, seat, length, answered) in enumerate(turns):
        ids = texts[place, seat]
        answer = [100 + num] * length
        with contextlib.suppress(KeyError), games[place].turn(ids, 5) as session:
            if not answered:
                raise KeyError
            if session is not None:
                room.end(session, (*ids, *answer))
            texts[place, seat] = [*ids, *answer, 1]
        assert room.slots == slots - len(process.held) >= 0
        open_now = [s for sessions in games for s in sessions._own if not s.closed]
        assert {s.name for s in open_now} == process.held
        shared = {s.first_prompt for s in open_now}
        assert room.held == sum(s.own for s in open_now) + sum(map(len, shared)) <= tokens + 5
    for sessions in games:
        sessions.close()
    assert (process.held, room.slots, room.held) == (set(), slots, 0)
    assert not room._first_prompts  # a run has millions
