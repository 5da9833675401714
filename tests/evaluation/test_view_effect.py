"""The view effect: what a seat loses by reading another private view, by hand-sized games."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dialop.kit import Kit, load_kit
from selfplay.chat.transcript import Transcript
from selfplay.config import load_config
from selfplay.engines.base import GameCoroutine
from selfplay.evaluation.evaluate import EvaluationContext, evaluate
from selfplay.evaluation.rows import ViewEffect, read_row
from selfplay.evaluation.tables import score_table
from selfplay.evaluation.view_effect import (
    SeenOtherwise,
    other_instance,
    view_controls,
    view_effect,
)
from selfplay.rollout.episode import GameSetup
from selfplay.warm_start.teachers import blind_teachers
from tests.evaluation.test_talk_effect import Hand, Meets, NoEngine, play
from tests.helpers.hand_games import HAND_GAMES
from tests.helpers.two_ranks import ALONE

KUHN = load_kit("examples/kuhn/kuhn.py")
DEALS = [instance for instance, _ in KUHN.deals(KUHN.Options())]
# Each deal twice: in games 4n and 4n + 1 seat 0 sees another card, in the two after them seat 1.
BOTH_SEATS = [deal for n in (0, 2, 4) for deal in (*DEALS[n : n + 2], *DEALS[n : n + 2])]


def kings(text: str) -> str:
    """Bet with a king, and call with any card."""
    return "[bet]" if "card K" in text or "[bet]" in text else "[pass]"


def effect_of(
    players: Sequence[Hand], deals: Sequence[Any], kit: Kit = KUHN, aborted: Sequence[int] = ()
) -> ViewEffect | None:
    game: Any = SimpleNamespace(kit=kit, options=kit.Options())
    setups = {
        number: GameSetup(kit.new_game(deal, game.options), tuple(players), str(number), 0)
        for number, deal in enumerate(deals)
    }
    controls = view_controls(setups, deals, game=game)
    others = play({number: control for number, (_, control) in controls.items()})
    seen = {number: (seat, others[number]) for number, (seat, _) in controls.items()}
    games = {number: game for number, game in play(setups).items() if number not in aborted}
    return view_effect(games, seen, world=ALONE)


def test_what_a_seat_loses_is_exact_in_kuhn_poker() -> None:
    """By hand, in chips, with the third card instead: seat 0 loses 1 with JQ, by a bet, and with KJ
    and KQ, without one, and gains 1 with QJ; seat 1 loses 1 with QJ, by a bet, and with JK and QK,
    without one, and gains 1 with JQ. So 2 for each seat in six deals; a chip is a quarter of the
    score."""
    policy = Hand(kings, Transcript())
    found = effect_of((policy, policy), BOTH_SEATS)
    assert found is not None and found.num_games == 12
    assert found.effect[0] == pytest.approx((2 + 2) / 12 / 4)
    assert found.effect[1] < found.effect[0] < found.effect[2]


def test_a_pair_with_an_aborted_game_is_left_out() -> None:
    policy = Hand(kings, Transcript())
    assert (found := effect_of((policy, policy), BOTH_SEATS, aborted=[0, 5])) is not None
    assert found.num_games == 10


def test_a_policy_that_ignores_its_view_loses_exactly_nothing() -> None:
    policy = Hand(lambda text: "[bet]", Transcript())
    found = effect_of((policy, policy), BOTH_SEATS)
    assert found is not None and found.effect[0] == 0 and found.effect[1] < 0 < found.effect[2]


def test_only_seats_of_the_policy_see_otherwise() -> None:
    """Seat 1 is a partner: in every game seat 0 sees another card, and loses 2 in six deals."""
    partner, policy = Hand(kings), Hand(kings, Transcript())
    found = effect_of((policy, partner), DEALS)
    assert found is not None and found.effect[0] == pytest.approx(2 / 6 / 4)
    assert effect_of((partner, partner), DEALS) is None


def test_a_game_without_vary_shows_the_next_instances_view() -> None:
    class Bare(Kit):
        def has(self, name: str) -> bool:
            return name != "vary" and super().has(name)

    bare = Bare(KUHN.name, cast(Any, KUHN)._module)
    assert other_instance(bare, DEALS, 5, 0) is DEALS[0]
    assert other_instance(bare, DEALS[:1], 0, 0) is None
    policy = Hand(kings, Transcript())
    found = effect_of((policy, policy), DEALS, bare)
    assert found is not None and found.num_games == 6


@pytest.mark.parametrize("brief", [False, True])
@pytest.mark.parametrize("name", HAND_GAMES)
def test_nothing_else_of_a_game_changes(name: str, brief: bool) -> None:
    """In the games of this package a seat with a private view reads another one where `vary` gives
    one; other seats and all that follows are the game's."""
    hand = HAND_GAMES[name]
    kit, options = load_kit(name.partition(",")[0]), replace(hand.options, brief=brief)
    make: Any = hand.kind
    num_private = 0
    for seat in range(len(kit.ROLES)):
        if (other := other_instance(kit, [hand.instance], 0, seat)) is None:
            continue
        num_private += 1
        plain, twin = hand.new(brief=brief), make(other, options)
        read = [twin.prompt(seat)]
        changed = SeenOtherwise(hand.new(brief=brief), seat, twin, follows=True)
        own = [plain.prompt(seat)]
        for each in range(len(kit.ROLES)):
            assert each == seat or changed.prompt(each) == plain.prompt(each)
        assert changed.prompt(seat) == read[0]
        for mover, move in hand.moves:
            copy, now, step = (each.step(mover, move) for each in (changed.clone(), changed, plain))
            assert copy == now
            read, own = [*read, now.observations[seat]], [*own, step.observations[seat]]
            seen = list(now.observations)
            seen[seat] = step.observations[seat]
            assert replace(now, observations=tuple(seen)) == step
        assert read != own, "vary changes what it reads"
        assert changed.outcome() == plain.outcome() and changed.state() == plain.state()
    assert num_private == {"matching": 2, "mediation": 2}.get(name.partition(",")[0], 1)


def test_a_twin_that_refuses_a_move_is_followed_no_more() -> None:
    """The seat then reads what the game shows."""
    hand = HAND_GAMES["collab"]
    make: Any = hand.kind
    over = make(hand.instance, hand.options)
    for mover, move in hand.moves:
        over.step(mover, move)
    changed = SeenOtherwise(hand.new(), 0, over, follows=True)
    plain = hand.new()
    for mover, move in hand.moves:
        assert changed.step(mover, move) == plain.step(mover, move)


def test_an_evaluation_measures_it_and_its_table_shows_it() -> None:
    """The tutorial's players lose when they read another calendar."""
    config = load_config(
        "examples/meeting/meeting.yaml", [f"rollout.player={Meets.__module__}:Meets"]
    )
    rendering = SimpleNamespace(stop_ids=(), pieces=lambda ids: ["x"] * len(ids))
    at_once: list[int] = []

    class Counting(NoEngine):
        def run_games(self, games: Iterable[GameCoroutine], *rest: Any) -> list[Any]:
            games = list(games)
            at_once.append(len(games))
            return super().run_games(games, *rest)

    context = EvaluationContext(config, cast(Any, Counting()), cast(Any, rendering), ALONE)
    instances = config.game.kit.generate(config.game.options, seed=1, num=40)
    row = evaluate(instances, context, talk_games=30)
    assert at_once == [40 + 30, 2 * 30]  # its controls play beside the games, those of talk after
    assert row.view is not None and row.view.num_games == 30 and row.view.effect[1] > 0.1
    alone = evaluate(instances, context, view_games=30)
    assert alone.talk is None and alone.view == row.view
    assert evaluate(instances, context).view is None
    head, (line,) = score_table({"sampled": row}, {})
    assert head[-1] == "view effect [95 %]" and line[-1].startswith(f"{row.view.effect[0]:+.3f} [")
    old = {"scores": [1.0], "interval": [1.0, 0.0, 1.0], "measures": {}}
    assert read_row(old, "old", type(row)).view is None


TEACHERS = {
    "examples/kuhn/kuhn.yaml": ("[blind]", "[honest]", "[blind*3, honest]"),
    "configs/tiny.yaml": ("[random]", "[solo]", "[random, honest]"),
    "configs/tiny_planning.yaml": ("[silent]", "[searcher]", "[silent, teller]"),
    "configs/tiny_mediation.yaml": ("[random]", "[honest]", "[random, honest]"),
}


@pytest.mark.parametrize("game", ["tictactoe/tictactoe.yaml", "textarena/dilemma.yaml"])
def test_no_teacher_is_named_in_a_game_without_private_views(game: str) -> None:
    if "textarena" in game:
        pytest.importorskip("textarena")
    assert blind_teachers(load_config(f"examples/{game}")) == []


def test_a_teacher_that_only_shifts_its_chances_by_its_view_looks_at_it() -> None:
    """`moody` bets with a chance of 0.1 to 0.9 by its card: one draw for all games would lie on the
    same side of most of these chances, a draw for each game does not."""
    assert blind_teachers(load_config("examples/kuhn/kuhn.yaml")) == []


@pytest.mark.parametrize("settings", TEACHERS)
def test_teachers_that_ignore_their_view_are_named_if_all_do(settings: str) -> None:
    """Random moves do not count as another move: both are drawn alike. Self-play from a mixture
    starts with some use of the view."""
    blind, seeing, mixed = (
        blind_teachers(load_config(settings, [f"warm_start.teachers={teachers}"]))
        for teachers in TEACHERS[settings]
    )
    assert [f"[{', '.join(blind)}]", seeing, mixed] == [TEACHERS[settings][0], [], []]
    if "planning" in settings:  # an agent has nothing to look at
        words = ["warm_start.teachers=[silent, searcher]"]
        assert blind_teachers(load_config(settings, words)) == ["silent"]
    assert blind_teachers(load_config(settings, ["warm_start=off"])) == []
