"""The example tic-tac-toe: its rules by hand, and the exact values of known players."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import train
from dialop.checks import check_kit
from dialop.kit import load_kit
from examples.tictactoe.exact import OPPONENTS, Exact, Node, Opponent
from examples.tictactoe.tictactoe import EMPTY, after, best_squares, free, is_over, value
from tests.helpers.shared_work import slow_except
from tests.helpers.tiny_run import metrics_of

GAME = Path(__file__).resolve().parents[2] / "examples/tictactoe/tictactoe.py"
KIT = load_kit(str(GAME))
OPTIONS = KIT.Options()


def played(squares: str) -> Any:
    (instance,) = KIT.generate(OPTIONS, seed=0, num=1)
    game = KIT.new_game(instance, OPTIONS)
    for number, square in enumerate(squares):
        assert game.step(number % 2, f"[move] {square}").error is None
    return game


class Erring(Exact):
    """Plays as the scripts do: any of the best moves, with a share of random ones."""

    def __init__(self, slip: float, most: int = 10**6, within: float = 1e-9) -> None:
        self.options, self.slip = Exact.Options(most=most, within=within), slip
        self.num_read = 0

    def read(
        self, seat: int, nodes: list[Node], policy: object
    ) -> Iterator[tuple[dict[int, float], float]]:
        self.num_read += len(nodes)
        for node in nodes:
            able, best = free(node.board), best_squares(node.board)
            random = self.slip / len(able)
            of_best = (1 - self.slip) / len(best)
            yield {square: random + of_best * (square in best) for square in able}, 1.0

    def ends(self, other: Opponent) -> list[tuple[float, float]]:
        """The lower and the upper end of the value in each seat."""
        return [self.value(seat, other, None)[:2] for seat in (0, 1)]


@cache
def walked(slip: float, other: Opponent) -> tuple[list[tuple[float, float]], int]:
    """The ends in each seat after all positions are read, and how many are."""
    erring = Erring(slip)
    return erring.ends(other), erring.num_read


def test_the_game_passes_the_checks_in_at_most_150_lines() -> None:
    assert len(GAME.read_text(encoding="utf-8").splitlines()) <= 150
    assert not [line.line() for line in check_kit(KIT, OPTIONS) if line.problem]


def test_games_by_hand() -> None:
    won = played("14253")  # X takes the first row
    assert won.outcome().over and won.outcome().rewards == (1.0, -1.0)
    assert won.measures((0,)) == {"lost": 0.0, "won": 1.0}
    assert won.measures((0, 1)) == {"lost": 0.5, "won": 0.5}
    drawn = played("123547698")
    assert drawn.outcome().over and drawn.outcome().seat_scores == (0.5, 0.5)
    game = played("51")
    assert game.step(0, "[move] 5").error_kind == "taken"
    assert game.step(0, "[move] 0").error_kind == "no_square"
    assert game.step(0, "[move] 9").observations == ("", "O . . . X . . . X")
    assert game.outcome_of_forfeit(1).rewards == (1.0, -1.0)
    assert len(game.legal_moves()) == 6


def test_there_are_5478_positions_and_perfect_play_draws() -> None:
    """Also known: 4,520 of them have a move."""
    seen, left = {EMPTY}, [EMPTY]
    while left:
        board = left.pop()
        new = {after(board, square) for square in free(board)} - seen if not is_over(board) else ()
        seen |= {*new}
        left += new
    assert len(seen) == 5478 and sum(not is_over(board) for board in seen) == 4520
    assert value(EMPTY) == 0 and best_squares(EMPTY) == list(range(9))
    assert value("X........") == 0 and best_squares("X........") == [4]


KNOWN = {  # in each seat, of players with a share of random moves
    1.0: ((0.223, 0.032), (0.925, 0.995)),
    0.2: ((0.794, 0.626), (0.271, 0.426)),
    0.1: ((0.894, 0.798), (0.141, 0.235)),
    0.0: ((1.0, 1.0), (0.0, 0.0)),
}


@pytest.mark.parametrize("slip", slow_except(KNOWN, 0.0, 0.2, 1.0))
def test_known_players_keep_and_lose_what_was_computed_over_positions(slip: float) -> None:
    """The walk is over sequences of moves, which the other reckoning did not use. The ends meet."""
    for other, expected in zip(OPPONENTS, KNOWN[slip], strict=True):
        lows, highs = zip(*walked(slip, other)[0], strict=True)
        assert lows == pytest.approx(expected, abs=6e-4)
        assert highs == pytest.approx(lows, abs=1e-6)


@pytest.mark.parametrize("most", [10, 300, 3000])
def test_what_is_not_read_leaves_bounds(most: int) -> None:
    few, (kept, won) = Erring(0.2, most=most), KNOWN[0.2]
    for other, expected in zip(OPPONENTS, (kept, won), strict=True):
        for (low, high), known in zip(few.ends(other), expected, strict=True):
            assert low - 6e-4 < known < high + 6e-4
            assert most == 3000 or high - low > 0.05
    assert few.num_read <= 4 * most


def test_positions_that_cannot_change_the_value_are_not_read() -> None:
    """To know to 0.01 that random moves lose nearly all, under two thirds of the positions."""
    near = Erring(1.0, within=0.01)
    near.ends(OPPONENTS[1])
    assert near.num_read < walked(1.0, OPPONENTS[1])[1] * 2 / 3


@pytest.mark.slow
def test_a_run_tells_bounds_of_its_policy(tmp_path: Path) -> None:
    """After few games to imitate much is no move at all, so the bounds are of what is left."""
    words = ["warm_start.num_games=600", "steps=2", "save_every=2", "eval.every=2"]
    words += ["eval.num_games=4", "eval.final_games=4", "device=cpu", f"game.name={GAME}"]
    exact = GAME.with_name("exact.py")
    words += [f"observers=[console, {{{exact}:Exact: {{every: 2, most: 8}}}}]"]
    settings = ["--config", str(GAME.with_name("tictactoe.yaml")), f"out={tmp_path / 'run'}"]
    assert train.main([*settings, *words]) == 0
    first, second = metrics_of(tmp_path / "run")
    assert "observed/not_lost" not in first
    assert 0 <= second["observed/not_lost"] < second["observed/not_lost_other"] <= 1
    assert -1 <= second["observed/won_by_best_other"] < second["observed/won_by_best"] <= 1
    assert 0 < second["observed/legal_mass"] <= 1
