"""The mediation game: a hand-sized game word for word, its rules, and the interface's promises."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dialop.game import PlayerError
from dialop.kit import load_kit
from dialop.logged import Rules
from dialop.mediation.game import MediationGame
from dialop.mediation.generate import MediationRecipe
from dialop.mediation.moves import parse_proposal
from dialop.mediation.records import AGENT, AgentView, Event, MediationInstance, UserView
from dialop.mediation.score import _truncated, overlap, pair_costs, pair_scores, referenced
from tests.helpers.dialop_boards import play
from tests.helpers.mediation_games import BRIEF, FULL, SCORES, SMALL, at, proposal

generate = load_kit("mediation").generate

OPENING = [(0, "[message] Morning, please."), (1, "[message] Anything.")]


def test_a_game_word_for_word_in_the_brief_style() -> None:
    game = MediationGame(SMALL, BRIEF)
    assert [game.prompt(seat).system for seat in range(3)] == ["", "", ""]
    assert game.prompt(0).user == "0 -4\n1 -7\n2 -11"
    assert game.prompt(1).user == "0 -2\n1 -9"
    assert game.prompt(AGENT).user == (
        "Flights 0\n0 1 100 11:00\n1 0 300 16:00\n2 1 200 14:30\n"
        "Flights 1\n0 1 100 12:30\n1 0 150 16:30"
    )
    moves = [
        (0, "[message]\n0 -4\n1 -7", ("", "", "User 0:\n0 -4\n1 -7")),
        (1, "[message]\nUser 0:\n9 -9", ("", "", "User 1:\n  User 0:\n9 -9")),
        (2, proposal(1, 0), ("Agent: [propose] 1 -7 -5 -3", "Agent: [propose] 0 -2 0 -3", "")),
        (0, "[reject]", ("", "", "User 0: [reject]")),
        (1, "[accept]", ("[off] Your move.", "[off]", "User 1: [accept]")),
        (0, "[message] no", ("", "", "User 0:\nno")),
        (2, "1: [message] ok?", ("", "Agent:\nok?", "")),
    ]
    for seat, text, observations in moves:
        assert game.seat_to_move == seat
        step = game.step(seat, text)
        assert (step.error, step.observations) == (None, observations)


def test_costs_and_extremes_of_the_hand_sized_instance() -> None:
    table = pair_scores(SMALL.users, SMALL.arrival_pref)
    assert {pair: int(table[pair]) for pair in SCORES} == SCORES
    assert (SMALL.best, SMALL.worst, SMALL.alone) == (-3, -26, -3)
    assert referenced(SMALL) == SMALL
    for pair, score in SCORES.items():
        first, second = pair_costs(SMALL, pair)
        assert first.total + second.total == score
        game = MediationGame(SMALL, FULL)
        play(game, *OPENING, (2, proposal(*pair)), (0, "[accept]"), (1, "[accept]"))
        assert game.outcome().score == score
        assert game.outcome().score_norm == pytest.approx((score + 26) / 23)


def test_no_pair_beats_best_or_is_below_worst_by_a_direct_computation() -> None:
    for instance in generate(MediationRecipe(days=2, flights=12), seed=5, num=25):
        users = instance.users
        scores = []
        for first, second in itertools.product(*(user.flights for user in users)):
            score = 0
            gap = abs(first.end - second.end) // 60
            for user, flight in ((users[0], first), (users[1], second)):
                for event in user.events:
                    if (
                        event.start < flight.start < event.end
                        or flight.start < event.start < flight.end
                    ):
                        score -= event.importance
                score += truncated(
                    -user.price_pref * (flight.price - user.mean_price), user.mean_price
                )
                score += truncated(-instance.arrival_pref * gap, 3)
            scores.append(score)
        assert (max(scores), min(scores)) == (instance.best, instance.worst)
        assert instance.worst <= instance.alone <= instance.best
        assert pair_scores(users, instance.arrival_pref).ravel().tolist() == scores


def truncated(numerator: int, denominator: int) -> int:
    return abs(numerator) // denominator * (1 if numerator >= 0 else -1)


def test_a_whole_quotient_is_exact_where_floating_point_is_one_off() -> None:
    user = replace(SMALL.users[0], mean_price=988, price_pref=19)
    flight = replace(user.flights[0], price=3744)
    instance = replace(SMALL, users=(replace(user, flights=(flight,)), SMALL.users[1]))
    assert int(-19 * ((3744 - 988) / 988)) == -52  # 19 x 2756 / 988 is exactly 53
    assert pair_costs(instance, (0, 0))[0].price == -53


def test_times_clash_if_one_begins_inside_the_other() -> None:
    assert overlap((600, 660), (630, 700)) and overlap((600, 660), (500, 601))
    assert overlap((600, 660), (500, 700)) and overlap((600, 660), (610, 620))
    assert not overlap((600, 660), (660, 700)) and not overlap((600, 660), (500, 600))
    assert not overlap((600, 660), (600, 700))


def test_how_often_the_released_rounding_of_prices_differs() -> None:
    """The figures of docs/notes/mediation.md: 368 of 48.9 million."""
    num_all = num_other = 0
    weights = np.arange(1, 21)[:, None]
    for mean in range(50, 1000):
        above = np.arange(50, 5 * mean + 1) - mean
        released = np.trunc(-weights * (above / mean)).astype(np.int64)
        exact = np.sign(-above) * (weights * np.abs(above) // mean)
        assert (_truncated(-weights * above, mean) == exact).all()
        num_all += exact.size
        num_other += int((released != exact).sum())
    assert (num_other, num_all) == (368, 48_896_500)
    page = Path(__file__).resolve().parents[2] / "docs" / "notes" / "mediation.md"
    assert "368 of the 48.9 million combinations" in page.read_text()


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("user 0: id 2, user 1: id 1", (2, 1)),
        ("User 1: ID 1, User 0: ID 2", (2, 1)),
        ("user 0: 2\nuser 1: 0", (2, 0)),
        ("user 0 flight 1 and user 1 flight 0.", (1, 0)),
        ("user 0: id 00, user 1: id 01", (0, 1)),
    ],
)
def test_proposals_are_read(text: str, pair: tuple[int, int]) -> None:
    assert parse_proposal(text, (3, 2)) == pair


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("user 0: id 2", "bad_proposal"),
        ("user 0: id 2, user 0: id 1", "bad_proposal"),
        ("user 0: id 2, user 1: id 1, user 2: id 0", "bad_proposal"),
        ("user 0: id 2, user 1: id 1 because it is cheap", "bad_proposal"),
        ("user 0: id two, user 1: id 1", "bad_proposal"),
        ("user 0: id ٢, user 1: id 1", "bad_proposal"),
        ("user 0: id 0_2, user 1: id 1", "bad_proposal"),
        ("user 0: id -1, user 1: id 1", "bad_proposal"),
        ("user 0: id 1.5, user 1: id 1", "bad_proposal"),
        ("2, 1", "bad_proposal"),
        ("user 0: id 3, user 1: id 1", "no_flight"),
        ("user 0: id 0, user 1: id 999999999", "no_flight"),
    ],
)
def test_other_proposals_are_refused(text: str, kind: str) -> None:
    with pytest.raises(PlayerError) as error:
        parse_proposal(text, (3, 2))
    assert error.value.kind == kind


def test_rooms_take_turns_and_users_who_reject_speak_before_the_agent() -> None:
    game = play(MediationGame(SMALL, FULL), *OPENING, (2, "0: [message] when?"))
    assert game.seat_to_move == 0
    play(game, (0, "[message] soon"), (2, "1: [message] when?"))
    assert game.seat_to_move == 1
    # Rejected by user 0 alone: user 0 says why while user 1's room waits for the agent.
    play(game, (1, "[message] later"), (2, proposal(1, 0)), (0, "[reject]"), (1, "[accept]"))
    assert game.seat_to_move == 0
    play(game, (0, "[message] too late"))
    assert game.seat_to_move == AGENT
    # Rejected by both: both say why before the agent goes on.
    play(game, (2, proposal(1, 1)), (0, "[reject]"), (1, "[reject]"))
    assert game.seat_to_move == 0
    play(game, (0, "[message] no"))
    assert game.seat_to_move == 1
    play(game, (1, "[message] no"))
    assert game.seat_to_move == AGENT


def test_private_reasoning_is_dropped_before_the_move() -> None:
    game = MediationGame(SMALL, replace(FULL, private_reasoning=True))
    step = game.step(0, "<think>[accept]</think>I like mornings.\n[message] Morning.")
    assert step.observations[AGENT] == "User 0: [message] Morning."
    play(game, (1, "[message] hi"))
    step = game.step(2, "0: 3 points.\nso: \nall: [propose] user 0: id 0, user 1: id 0")
    assert step.action == "propose"
    assert MediationGame(SMALL, FULL).step(0, "hm\n[message] x").error_kind == "no_tag"


def other_user_changed(instance: MediationInstance) -> MediationInstance:
    """The instance with user 1's calendar, prices and weight changed; only arrivals are kept."""
    user = instance.users[1]
    changed = replace(
        user,
        events=(Event(at(9), at(18), 10, shared=True), Event(at(1), at(2), 1, shared=False)),
        flights=tuple(replace(f, price=f.price + 7, carrier="Southwest") for f in user.flights),
        mean_price=999,
        price_pref=1,
    )
    return referenced(replace(instance, users=(instance.users[0], changed)))


@pytest.mark.parametrize("options", [FULL, BRIEF])
def test_no_seat_reads_the_other_room_or_what_is_hidden(options: Rules) -> None:
    """User 0 reads and knows the same, whatever user 1 has, says and answers (up to the drop)."""
    one, two = MediationGame(SMALL, options), MediationGame(other_user_changed(SMALL), options)
    script = [
        ((0, "[message] a"), (0, "[message] a")),
        ((1, "[message] b"), (1, "[message] quite different")),
        ((2, "1: [message] c"), (2, "1: [message] you have 4, she has 7")),
        ((1, "[message] d"), (1, "[message] e")),
        ((2, "0: [message] f"), (2, "0: [message] f")),
        ((0, "[message] g"), (0, "[message] g")),
        ((2, proposal(1, 0)), (2, proposal(1, 0))),
        ((0, "[reject]"), (0, "[reject]")),
        ((1, "[accept]"), (1, "[reject]")),
    ]
    assert one.prompt(0) == two.prompt(0) and one.view(0) == two.view(0)
    for (seat, first), (_, second) in script:
        left, right = one.step(seat, first), two.step(seat, second)
        assert left.error is None and right.error is None
        assert left.observations[0] == right.observations[0]
        assert one.view(0) == two.view(0)
    restored = [MediationGame.from_state(game.state()) for game in (one, two)]
    assert restored[0].prompt(0) == restored[1].prompt(0)
    text = restored[1].prompt(0).user
    assert "different" not in text and "she has 7" not in text and "Southwest" not in text


def test_the_agent_sees_no_importance_no_private_event_and_no_weight() -> None:
    def hidden_changed(instance: MediationInstance) -> MediationInstance:
        users = []
        for user in instance.users:
            events = [e if e.shared else replace(e, start=0, end=1) for e in user.events]
            events = [replace(e, importance=10) for e in events]
            users.append(replace(user, events=tuple(events), mean_price=77, price_pref=20))
        return referenced(replace(instance, users=(users[0], users[1]), arrival_pref=9))

    for options in (FULL, BRIEF):
        one, two = MediationGame(SMALL, options), MediationGame(hidden_changed(SMALL), options)
        for move in [*OPENING, (2, proposal(1, 0)), (0, "[reject]"), (1, "[accept]")]:
            assert one.step(*move).observations[AGENT] == two.step(*move).observations[AGENT]
            assert one.prompt(AGENT) == two.prompt(AGENT) and one.view(AGENT) == two.view(AGENT)
        states = [MediationGame.from_state(game.state()) for game in (one, two)]
        assert states[0].prompt(AGENT) == states[1].prompt(AGENT)


def test_the_brief_style_knows_no_more_than_its_lines() -> None:
    """Views in the brief style hold no flight or event, and no column that the text leaves out."""
    instance = replace(SMALL, max_price_pref=0, max_arrival_pref=0)
    view = MediationGame(instance, BRIEF).view(AGENT)
    assert isinstance(view, AgentView) and view.flights == () and view.shared == ()
    assert view.prices == ((0, 0, 0), (0, 0)) and view.arrivals == ((0, 0, 0), (0, 0))
    assert MediationGame(instance, BRIEF).prompt(AGENT).user == (
        "Flights 0\n0 1\n1 0\n2 1\nFlights 1\n0 1\n1 0"
    )
    user = MediationGame(instance, BRIEF).view(0)
    assert isinstance(user, UserView) and user.flights == () and user.events == ()
