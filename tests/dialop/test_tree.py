"""Exact values of whole games: Kuhn poker by hand, by its solution, and beside OpenSpiel."""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dialop.checks import check_kit
from dialop.game import GameError
from dialop.kit import load_kit
from dialop.tree import (
    Average,
    Tree,
    ViewUse,
    entropies,
    mean_over_moves,
    own_reach,
    tree_of,
    values_of,
    view_use,
)
from tests.helpers.changed_games import changed

GAME = Path(__file__).resolve().parents[2] / "examples/kuhn/kuhn.py"
KIT = load_kit(str(GAME))
TREE = tree_of(KIT, KIT.Options())
CARDS = "JQK"


def policy_of(bets: dict[str, float]) -> list[list[float]]:
    """The policy that bets with these probabilities, by card and the moves before: "K pass bet"."""
    found = []
    for info in TREE.sets:
        words = info.name.replace("seat 0:", "").replace("seat 1:", "")
        for mark in "[]/:":
            words = words.replace(mark, " ")
        _, _, *key = words.split()
        bet = bets[" ".join(key)]
        found.append([1.0 - bet, bet])
    return found


def equilibrium(alpha: float) -> list[list[float]]:
    """Kuhn's solution: the first player bets a jack with probability alpha from 0 to 1/3, a king
    three times as often, and calls with a queen alpha + 1/3 of the time."""
    first = {"J": alpha, "Q": 0.0, "K": 3 * alpha}
    called = {"J pass bet": 0.0, "Q pass bet": alpha + 1 / 3, "K pass bet": 1.0}
    second = {"J pass": 1 / 3, "Q pass": 0.0, "K pass": 1.0, "J bet": 0.0, "Q bet": 1 / 3}
    return policy_of({**first, **called, **second, "K bet": 1.0})


def random_policy(seed: int, tree: Tree = TREE) -> list[list[float]]:
    draw = random.Random(seed)
    weights = [[draw.random() ** 3 for _ in info.moves] for info in tree.sets]
    return [[each / sum(row) for each in row] for row in weights]


def test_the_game_passes_the_checks_and_has_twelve_information_sets() -> None:
    assert not [line.line() for line in check_kit(KIT, KIT.Options()) if line.problem]
    assert len(TREE.sets) == 12 and len(TREE.deals) == 6


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1 / 3])
def test_an_equilibrium_cannot_be_exploited_and_the_first_player_loses_an_eighteenth(
    alpha: float,
) -> None:
    values = values_of(TREE, equilibrium(alpha))
    assert values.exploitability == pytest.approx(0.0, abs=1e-12)
    assert values.own == pytest.approx((-1 / 18, 1 / 18))


def test_who_bets_with_every_card_loses_a_third_of_a_chip() -> None:
    """The best response passes a jack and calls with a king; with a queen it does not matter. It
    loses 1 with a jack, wins 2 with a king, breaks even with a queen: (-1 + 2 + 0) / 3."""
    values = values_of(TREE, [[0.0, 1.0]] * 12)
    assert values.own == pytest.approx((0.0, 0.0))
    assert values.best == pytest.approx((1 / 3, 1 / 3))


def test_a_best_response_written_by_hand_wins_what_is_computed() -> None:
    """Against a second player who bets and calls with a king alone. A jack that bets wins 1 from a
    queen and loses 2 to a king, -1/2, but -1 if it passes. A queen that passes wins 1 from a jack
    and gives up 1 to a king, 0. A king wins 1. So seat 0 is paid (-1/2 + 0 + 1) / 3 = 1/6, which
    the games themselves pay too."""
    keys = ("J", "Q", "J pass bet", "Q pass bet", "J pass", "Q pass", "J bet", "Q bet")
    kings = ("K", "K pass bet", "K pass", "K bet")
    tight = policy_of(dict.fromkeys(keys, 0.0) | dict.fromkeys(kings, 1.0))
    assert values_of(TREE, tight).best[0] == pytest.approx(1 / 6)
    paid = 0.0
    for instance, share in KIT.deals(KIT.Options()):
        game = KIT.new_game(instance, KIT.Options())
        game.step(0, "[pass]" if instance.cards[0] == "Q" else "[bet]")
        game.step(1, "[bet]" if instance.cards[1] == "K" else "[pass]")
        if game.seat_to_move == 0:
            game.step(0, "[pass]")
        paid += share * game.outcome().rewards[0]
    assert paid == pytest.approx(1 / 6)


@pytest.mark.parametrize("seed", range(20))
def test_exploitability_is_that_of_openspiel(seed: int) -> None:
    """Of random policies of Kuhn poker: their values, NashConv and half of it."""
    pyspiel = pytest.importorskip("pyspiel")
    from open_spiel.python.algorithms import expected_game_score, exploitability
    from open_spiel.python.policy import tabular_policy_from_callable

    policy = random_policy(seed)
    bets = {}
    for info, (_, bet) in zip(TREE.sets, policy, strict=True):
        card = CARDS.index(info.name.partition("card ")[2][0])
        bets[f"{card}{''.join(move[1] for move in info.path)}"] = bet
    game = pyspiel.load_game("kuhn_poker")

    def of(state: Any) -> list[tuple[int, float]]:
        bet = bets[state.information_state_string()]
        return [(0, 1.0 - bet), (1, bet)]

    theirs, ours = tabular_policy_from_callable(game, of), values_of(TREE, policy)
    assert ours.exploitability == pytest.approx(exploitability.exploitability(game, theirs))
    assert ours.exploitability == pytest.approx(exploitability.nash_conv(game, theirs) / 2)
    assert ours.own == pytest.approx(
        expected_game_score.policy_value(game.new_initial_state(), [theirs, theirs])
    )


def test_the_average_is_what_a_draw_of_its_policies_plays() -> None:
    """Against any opponent it is paid the mean of what they are paid, which a mean of their
    probabilities, without weights, is not."""
    one, other, opponent = (random_policy(seed) for seed in (1, 2, 3))
    average = Average()
    for policy in (one, other):
        average.add(TREE, policy)
    found = average.policy(TREE)
    plain = [
        [(a + b) / 2 for a, b in zip(*rows, strict=True)] for rows in zip(one, other, strict=True)
    ]

    def paid(policy: Sequence[Sequence[float]], seat: int) -> float:
        seated = [
            policy[at] if info.seat == seat else opponent[at] for at, info in enumerate(TREE.sets)
        ]
        return values_of(TREE, seated).own[seat]

    for seat in (0, 1):
        mean = (paid(one, seat) + paid(other, seat)) / 2
        assert paid(found, seat) == pytest.approx(mean)
    assert abs(paid(plain, 0) - (paid(one, 0) + paid(other, 0)) / 2) > 1e-3
    again = Average(average.sums)
    assert again.policy(TREE) == found and again.sums is not average.sums


def test_the_weight_of_a_set_is_how_often_its_seat_goes_there() -> None:
    """The second move of the first player is reached as often as it passes first."""
    policy = random_policy(5)
    reach = own_reach(TREE, policy)
    for info, weight in zip(TREE.sets, reach, strict=True):
        start = info.name.partition(" / [pass] / seat 1")[0]
        first = next(at for at, each in enumerate(TREE.sets) if each.name == start)
        assert weight == pytest.approx(policy[first][0] if len(info.path) == 2 else 1.0)


def test_equilibria_averaged_stay_equilibria() -> None:
    average = Average()
    for alpha in (0.0, 0.1, 0.3):
        average.add(TREE, equilibrium(alpha))
    assert values_of(TREE, average.policy(TREE)).exploitability == pytest.approx(0.0, abs=1e-12)


def test_the_entropy_of_a_move_by_hand() -> None:
    """Two equally likely moves everywhere, or only at the first of two moves."""
    even = [[0.5, 0.5]] * 12
    assert mean_over_moves(TREE, even, entropies(even)) == pytest.approx(math.log(2))
    bets = {"J": 0.5, "Q": 0.5, "K": 0.5} | {f"{card} bet": 1.0 for card in CARDS}
    first = policy_of(
        bets | {f"{card} {moves}": 0.0 for card in CARDS for moves in ("pass", "pass bet")}
    )
    assert mean_over_moves(TREE, first, entropies(first)) == pytest.approx(math.log(2) / 2)


def test_a_policy_that_ignores_its_card_has_no_view_effect() -> None:
    assert view_use(TREE, [[0.25, 0.75]] * 12) == ViewUse(0.0, 0.0)


def test_the_view_effect_by_hand() -> None:
    """Seat 0 bets a king alone and never calls, seat 1 never bets or calls. With a king seat 0 is
    paid 1 whatever it plays; with a jack or a queen it passes, and so does seat 1. It is paid 1, 0
    and -1 with king, queen and jack, mean 0. As with another card it bets a jack or a queen half of
    the time, for 1: a jack then gets (-1 + 1) / 2 = 0, a queen (0 + 1) / 2, a king 1. So it is paid
    1/2 more, the effect is 0 - 1/2. The moves of seat 1 do not depend on its card, and the mean of
    the seats is -1/4. The bets 0, 0, 1 are 0, 1 and 1 apart, so of the six pairs of views at the
    first of four places to move four are 1 apart, and none at the others."""
    keys = [info.name.split(" / ") for info in TREE.sets]
    policy = [[0.0, 1.0] if key == ["0: card K"] else [1.0, 0.0] for key in keys]
    found = view_use(TREE, policy)
    assert found.effect == pytest.approx(-1 / 4)
    assert found.distance == pytest.approx(4 / 24)


@pytest.mark.parametrize(
    ("part", "instead", "said"),
    [
        ('return ("[pass]", "[bet]")', 'return ("[pass]", "[raise]")', "legal_moves.*'.raise.'"),
        ('return ("[pass]", "[bet]")', 'return ("[pass]",) * 2', "legal_moves.*once.*pass"),
        ('return ("[pass]", "[bet]")', "return ()", "legal_moves.*list each move.*got "),
        ("1 / len(DEALS)", "0.15", "deals of game .*sum to 1, got 0.9 over 6 deals"),
        ("1 / len(DEALS)", "-1 / 6", "deals of game .*sum to 1, got -1"),
        ("1 / len(DEALS)", "float('nan')", "deals of game .*sum to 1, got nan"),
        ("1 / len(DEALS)", "'even'", "deals of game .*pairs .*'even'"),
        (", 1 / len(DEALS))", ")", "deals of game .*pairs .*Instance"),
        ('return ("[pass]", "[bet]")', "return None", "legal_moves.*as texts, got None"),
        ('return ("[pass]", "[bet]")', "return (1, 2)", r"legal_moves.*as texts, got \(1, 2"),
        ('return ("[pass]", "[bet]")', 'return "[pass]"', r"legal_moves.*as texts, got '\[pass"),
        (
            'return ("[pass]", "[bet]")',
            'return ("[pass]", "[bet]")[:: 1 if self.instance.cards[1] == "J" else -1]',
            "legal_moves.*the same moves wherever.*0: card",
        ),
    ],
)
def test_a_game_that_breaks_a_rule_is_refused_in_one_line(
    part: str, instead: str, said: str, tmp_path: Path
) -> None:
    kit = load_kit(str(changed(tmp_path, "kuhn", {part: instead})))
    with pytest.raises(GameError, match=said) as refused:
        tree_of(kit, kit.Options())
    assert "\n" not in str(refused.value)


def test_a_policy_whose_probabilities_do_not_sum_to_one_is_refused() -> None:
    policy = random_policy(0)
    policy[3] = [0.5, 0.4]
    with pytest.raises(ValueError, match=r"2 probabilities that sum to 1.*got \[0.5, 0.4\]"):
        values_of(TREE, policy)


def test_rewards_of_single_moves_are_paid_too(tmp_path: Path) -> None:
    """Half a chip from seat 1 to seat 0 for each bet: two in a game in which both always bet."""
    step = """    def step(self, seat, text):
        done = super().step(seat, text)
        return dataclasses.replace(done, rewards=(0.5, -0.5)) if done.action == "bet" else done

    def outcome(self):"""
    change = {"    def outcome(self):": step, "import itertools": "import dataclasses, itertools"}
    kit = load_kit(str(changed(tmp_path, "kuhn", change)))
    tree = tree_of(kit, kit.Options())
    assert values_of(tree, [[0.0, 1.0]] * 12).own == pytest.approx((1.0, -1.0))
