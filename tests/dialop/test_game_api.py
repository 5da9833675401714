"""The matching game fulfils the interface of dialop.game in every style and condition."""

from __future__ import annotations

import pytest
from dialop_boards import BEST, BRIEF, FULL, SCALED, SILENT, SMALL, WORST
from game_checks import check_play

from dialop.logged import Rules
from dialop.matching.game import MatchingGame, MatchingInstance


@pytest.mark.parametrize("instance", [SMALL, SCALED])
@pytest.mark.parametrize("options", [FULL, BRIEF, SILENT])
def test_matching_keeps_the_game_interface(instance: MatchingInstance, options: Rules) -> None:
    first, second = instance.first_seat, 1 - instance.first_seat
    talk = [(first, "[message] Ava BLEU 3"), (second, "[message] I see.")]
    moves = [(first, WORST), (second, "[reject]"), (second, BEST), (first, "[accept]")]
    if options.messages:
        moves = talk + moves
    check_play(MatchingGame(instance, options), moves, restore=MatchingGame.from_state)


def test_a_seat_that_does_not_exist_is_the_callers_mistake() -> None:
    game = MatchingGame(SMALL, FULL)
    for seat in (-1, 2):
        with pytest.raises(ValueError, match=f"seat must be 0 to 1, got {seat}"):
            game.step(seat, BEST)
