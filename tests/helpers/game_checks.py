"""Checks that any game must pass, whatever its rules: used by test_game_api.py for each game."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from dialop.game import Game, Step

Restore = Callable[[dict[str, Any]], Game]
JUNK = ("", "hello", "[", "[]", "[dance] now", "[accept", "\x00[message]", "[message]", "🙂")


def comparable(state: dict[str, Any]) -> dict[str, Any]:
    """A state without its error counts, the only thing a refused move may change."""
    play = {k: v for k, v in state["play"].items() if not k.startswith("num_errors")}
    return {**state, "play": play}


def check_play(
    game: Game,
    moves: Sequence[tuple[int, str]],
    *,
    restore: Restore,
    junk: Sequence[str] = JUNK,
) -> None:
    """Play legal moves to the end and check the interface's promises before and after each.

    `junk` is what the game refuses from any seat at any time.
    """
    check_prompts(game)
    for seat, text in moves:
        assert game.seat_to_move == seat
        check_refusals(game, junk)
        check_clone(game, seat, text)
        check_restore(game, seat, text, restore=restore)
        step = game.step(seat, text)
        check_step(game, step, seat)
    assert game.seat_to_move is None
    check_over(game)


def check_prompts(game: Game) -> None:
    for seat in range(game.num_seats):
        prompt = game.prompt(seat)
        assert prompt.user and prompt == game.prompt(seat)


def check_step(game: Game, step: Step, seat: int) -> None:
    """A legal move: an action, no error, a text for whoever moves next."""
    assert step.seat == seat and step.action is not None
    assert step.error is None and step.error_kind is None
    assert len(step.observations) == game.num_seats
    if game.seat_to_move is not None:
        assert step.observations[game.seat_to_move]
    outcome = game.outcome()
    assert outcome.over == (game.seat_to_move is None)
    assert 0 <= outcome.score_norm <= 1 and len(outcome.rewards) == game.num_seats
    assert all(type(value) is float for value in outcome.facts.values())


def check_refusals(game: Game, junk: Sequence[str] = JUNK) -> None:
    """Junk from any seat, and any move out of turn, changes nothing but the error count."""
    mover = game.seat_to_move
    for seat in range(game.num_seats):
        for text in junk:
            twin = game.clone()
            before = comparable(twin.state())
            step = twin.step(seat, text)
            assert step.action is None and step.error and step.error_kind, text
            assert step.error_kind.replace("_", "").isalpha()
            assert not any(step.observations)
            assert comparable(twin.state()) == before
            assert twin.state() != game.state()
            assert twin.seat_to_move == mover and twin.outcome() == game.outcome()


def check_clone(game: Game, seat: int, text: str) -> None:
    """Playing on in a copy leaves the original where it was, and the other way round."""
    before = game.state()
    twin = game.clone()
    assert twin.state() == before and type(twin) is type(game)
    assert twin.step(seat, text).action is not None
    assert game.state() == before and twin.state() != before


def check_restore(game: Game, seat: int, text: str, *, restore: Restore) -> None:
    """A state survives JSON and plays on exactly like the game it was taken from."""
    state = json.loads(json.dumps(game.state()))
    twin, copy = restore(state), game.clone()
    assert twin.state() == state and twin.seat_to_move == game.seat_to_move
    assert [twin.view(s) for s in range(game.num_seats)] == [
        game.view(s) for s in range(game.num_seats)
    ]
    assert twin.step(seat, text) == copy.step(seat, text)
    assert twin.state() == copy.state() and twin.outcome() == copy.outcome()


def check_over(game: Game) -> None:
    """After the end every move of every seat is refused."""
    final = game.outcome()
    for seat in range(game.num_seats):
        step = game.step(seat, "[accept]")
        assert step.action is None and step.error_kind == "over"
    assert game.outcome() == final and game.seat_to_move is None
