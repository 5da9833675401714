"""Credit of single turns: rewards of messages, and baselines of the same turn."""

from dataclasses import replace
from itertools import product

import pytest

from dialop.game import Game
from dialop.kit import load_kit
from dialop.logged import Rules
from dialop.matching.game import MatchingGame
from selfplay.advantages.advantages import (
    SampleStatistics,
    reward_samples,
    sample_statistics,
    turn_baselines,
    turn_std,
)
from selfplay.advantages.rewards import episode_samples, message_credit, with_rewards
from selfplay.chat.transcript import Transcript
from selfplay.config import AlgorithmConfig, RewardConfig
from selfplay.errors import SettingsError
from selfplay.rollout.episode import Episode, Turn
from tests.dialop.test_reach import ROWS
from tests.helpers.dialop_boards import BEST, WORST
from tests.helpers.hand_episodes import episode, with_advantages


def played(game: Game, *moves: tuple[int, str]) -> Episode:
    """The game after these tries at moves, each of one token."""
    turns, transcripts = [], [Transcript() for _ in range(game.num_seats)]
    for number, (seat, text) in enumerate(moves):
        step = game.step(seat, text)
        tried = step.action, step.error, step.error_kind, step.observations
        turns.append(Turn(seat, text, *tried, 1, step.rewards))
        transcripts[seat].observe([1])
        transcripts[seat].act([number], logprobs=[-0.5])
    return replace(
        episode((0.0, 0.0)),
        turns=tuple(turns),
        transcripts=tuple(transcripts),
        outcome=game.outcome(),
        game=game,
    )


@pytest.mark.parametrize(("said", "gain"), [("Electra 8", 0.5), ("Electra 7", 0.0), ("hello", 0.0)])
def test_a_message_earns_what_its_listener_can_reach_more(said: str, gain: float) -> None:
    """Seat 0 can reach 0.5 at the start and 1 with the truth; the rise is the reward of seat 1.
    Nothing else is paid, and the end takes nothing back."""
    said = f"[message] Daniel {said}"
    talk = (1, said), (0, "[message] go on"), (1, said)
    end = (0, "[oops]"), (0, BEST), (1, "[accept]")
    rewards, moves = message_credit(played(MatchingGame(ROWS, Rules()), *talk, *end))
    assert rewards == (1.0, 1.0)
    first, *others = [of_seats[1] for of_seats in moves]
    assert first == gain
    assert others == [0.0] * 5, "another's words, a repetition, a mistake, a plan, an answer"


def test_a_lie_and_the_truth_after_it_earn_no_more_than_the_truth() -> None:
    said = [f"[message] Daniel Electra {n}" for n in (8, 7, 8)]
    talk = [(1, said[0]), (0, "[message] hm"), (1, said[1]), (0, "[message] hm"), (1, said[2])]
    _, moves = message_credit(played(MatchingGame(ROWS, Rules()), *talk))
    assert [of_seats[1] for of_seats in moves] == [0.5, 0.0, -0.5, 0.0, 0.5]


def test_a_true_message_that_misleads_by_itself_is_charged() -> None:
    """Seat 0 sees 5 and 6, takes 5 for the rest, and chooses 6 + 2 = 8 of 8. Told only the true 2
    it chooses 5 + 1 = 6 (5 + 5 looks better than 6 + 2); the other cell sets it right. So does a
    lie about the first, which earns what the truth was charged."""
    board = replace(ROWS, table=((5, 6), (2, 1)), best=8)
    for then in ("Electra 1", "BLEU 9"):
        said = (1, "[message] Daniel BLEU 2"), (0, "[message] hm"), (1, f"[message] Daniel {then}")
        _, moves = message_credit(played(MatchingGame(board, Rules()), *said))
        assert [of_seats[1] for of_seats in moves] == [-0.25, 0.0, 0.25]


def returns_of(*moves: tuple[int, str]) -> list[tuple[float, ...]]:
    """What each turn of each seat returns, on the board of the test above."""
    reward = RewardConfig(function="message_credit")
    shaped = with_rewards([played(MatchingGame(ROWS, Rules()), *moves)], reward)
    samples = episode_samples(shaped, reward=reward)
    return [one.turns for one in sample_statistics(samples)]


TOLD = (1, "[message] Daniel Electra 8")


def test_a_message_returns_what_it_told_and_the_end() -> None:
    """Seat 1 says nothing of use, is answered, and tells the truth, which earns 0.5; then a poor
    plan of 0.5 is agreed."""
    late = (1, "[message] hm"), (0, "[message] hm"), TOLD, (0, WORST), (1, "[accept]")
    assert returns_of(*late) == [(0.5, 0.5), (1.0, 1.0, 0.5)]


def test_to_end_with_a_poor_plan_returns_more_than_to_talk_until_the_end() -> None:
    talk = ((0, "[message] hm"), (1, "[message] hm")) * 2
    ended = returns_of(TOLD, (0, WORST), (1, "[accept]"))
    talked = returns_of(TOLD, *talk)
    assert ended[1][0] == talked[1][0] + 0.5 and ended[0][0] == talked[0][0] + 0.5


@pytest.mark.parametrize("wait", [[(0, "[oops]")], [(0, "[message] hm"), (1, "[message] hm")]])
def test_to_put_off_a_poor_plan_earns_nothing(wait: list[tuple[int, str]]) -> None:
    """By a refused move or empty messages: the truth and the plan return what they do at once."""
    end = (0, WORST), (1, "[accept]")
    (planned,), (told, *_) = returns_of(TOLD, *end)
    waited, (told_before, *_) = returns_of(TOLD, *wait, *end)
    assert (*waited, told_before) == (planned, planned, told)


@pytest.mark.parametrize("name", ["matching", "planning", "mediation"])
def test_a_game_pays_for_messages_what_they_told_and_at_most_what_was_left(name: str) -> None:
    """However it is played: honest and random players, mistakes, and games that are cut off."""
    kit = load_kit(name)
    specs = {
        "matching": ("honest:tell=top,slip=0.3", "random"),
        "planning": ("teller:rounds=1+searcher:slip=0.3", "teller+guesser"),
        "mediation": ("honest:tell=top,probe=1,slip=0.3", "random"),
    }[name]
    paid = []
    for index, board in enumerate(kit.generate(kit.Options(), seed=5, num=6)):
        spec = specs[index % 2]
        seats = tuple(spec.split("+")) if "+" in spec else kit.seated(spec)
        scripts = [kit.make_script(spec, seed=index) for spec in seats]
        game, moves = kit.new_game(board, kit.Options()), list[tuple[int, str]]()
        start = game.reach()[0]
        while (seat := game.seat_to_move) is not None and len(moves) < 3 * index + 2:
            moves.append((seat, scripts[seat].act(game.view(seat))))
            game.step(*moves[-1])
        given = played(kit.new_game(board, kit.Options()), *moves)
        rewards, shaped = message_credit(given)
        assert rewards == given.outcome.rewards
        for seat in range(len(seats)):
            others = [of for i, of in enumerate(start) if i != seat]
            paid.append(sum(of_seats[seat] for of_seats in shaped))
            assert paid[-1] <= 1 - sum(others) / len(others) + 1e-9
    assert max(paid) > 0.005


def test_a_game_that_does_not_tell_what_can_be_reached_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"message_credit needs a game .* \(instance hand/0"):
        message_credit(replace(episode((0.0, 0.0)), game=None))


def games(*returns: tuple[float, ...]) -> list[SampleStatistics]:
    """Games whose turns have these returns, one token each."""
    return [
        SampleStatistics(str(i), "g", "seat 0", len(of), sum(of) / len(of), 0.0, of)
        for i, of in enumerate(returns)
    ]


def test_a_turn_is_compared_with_the_same_turn_of_the_other_games() -> None:
    """The third turn, which no other game has, is compared with the mean of their means, 0.6."""
    group = games((1.0, 0.5, 0.25), (0.2,), (0.8, 1.2))
    assert turn_baselines(group, 0) == pytest.approx((0.5, 1.2, 0.6))
    assert turn_baselines(group, 1) == pytest.approx((0.9,))
    assert turn_baselines(group, 2) == pytest.approx((0.6, 0.5))
    assert turn_baselines(group[1:2], 0) == (0.2,), "the only game is its own baseline"


def test_baselines_of_turns_leave_the_gradient_unbiased_and_their_means_do_not() -> None:
    """Games of one or two turns: the first stops (0.3) or goes on (0.4), the second gets 1 or 0.

    The expected gradient over all groups of three games is summed exactly, with the divisor 1.
    Against the mean of all games that have a turn, itself included, the first turn has 2/3 of the
    gradient and the second 0.35 of it: of two other games one goes on with chance 0.48, both with
    0.16.
    """
    go_on, best = 0.4, 0.5
    kinds = {(0.3,): 1 - go_on, (1.0, 1.0): go_on * best, (0.0, 0.0): go_on * (1 - best)}
    # d log pi / d logit of the choice that was taken, for each turn.
    scores = {(0.3,): (-go_on,), (1.0, 1.0): (1 - go_on, 1 - best), (0.0, 0.0): (1 - go_on, -best)}
    true = go_on * (1 - go_on) * (best - 0.3), go_on * best * (1 - best)

    def gradient(naive: bool, *, divided: bool = False) -> list[float]:
        found = [0.0, 0.0]
        for group in product(kinds, repeat=3):
            chance = kinds[group[0]] * kinds[group[1]] * kinds[group[2]]
            for i, returns in enumerate(group):
                baselines = turn_baselines(games(*group), i)
                divisor = turn_std(games(*group)) + 1e-4 if divided else 1.0
                for turn, score in enumerate(scores[returns]):
                    same = [other[turn] for other in group if len(other) > turn]
                    baseline = sum(same) / len(same) if naive else baselines[turn]
                    found[turn] += chance * score * (returns[turn] - baseline) / 3 / divisor
        return found

    assert gradient(naive=False) == pytest.approx(true)
    first, second = (found / right for found, right in zip(gradient(True), true, strict=True))
    assert first == pytest.approx(2 / 3)
    assert second == pytest.approx(0.48 * 1 / 2 + 0.16 * 2 / 3)
    divided = zip(gradient(naive=False, divided=True), true, strict=True)
    assert [a / b for a, b in divided] == pytest.approx([0.27, 1.90], abs=0.01), "by its divisor"


def test_turns_divides_by_the_deviation_of_turns_from_their_own_baselines() -> None:
    """Seat 1 tells in two games; seat 0 proposes the best plan in the first. The returns of seat 1
    are 1.5, 1 | 1, 0.5: gaps 0.5, 0.5 | -0.5, -0.5, whose root mean square is 0.5. Equal games have
    no gaps and are dropped, though their turns differ."""
    told, ends = (1, "[message] Daniel Electra 8"), ((0, BEST), (0, WORST))
    reward = RewardConfig(function="message_credit")
    algorithm = AlgorithmConfig(advantage="turns", advantage_eps=0.0)
    games = [
        replace(played(MatchingGame(ROWS, Rules()), told, end, (1, "[accept]")), index=i)
        for i, end in enumerate(ends)
    ]
    samples, _ = reward_samples(with_rewards(games, reward), algorithm=algorithm, reward=reward)
    found = with_advantages(samples, algorithm=algorithm)
    expected = [[0, 1], [0, -1], [0, 1, 0, 1], [0, -1, 0, -1]]
    assert [s.advantages for s in found] == [pytest.approx(of) for of in expected]
    equal = with_rewards([games[0], replace(games[0], index=1)], reward)
    samples, stats = reward_samples(equal, algorithm=algorithm, reward=reward)
    assert with_advantages(samples, algorithm=algorithm) == []
    assert stats.num_zero_variance_groups == stats.num_groups == 2
