"""Rewards and group-relative advantages worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from dialop_boards import BEST, BRIEF, SMALL, WORST

from dialop.game import Outcome
from dialop.matching.game import MatchingGame
from selfplay.chat.transcript import Transcript
from selfplay.config import AlgorithmConfig, RewardConfig
from selfplay.credit.advantages import (
    CreditStats,
    assign_advantages,
    imitation_samples,
    reward_samples,
    sample_statistics,
    updated_baselines,
)
from selfplay.credit.baselines import batch_moments, leave_one_out, moved_average, reward_std
from selfplay.credit.rewards import seat_reward
from selfplay.credit.sample import Sample
from selfplay.rollout.episode import Episode, Turn

NO_STD = AlgorithmConfig(method="dr_grpo")


def said(token: int, *, num: int = 1, trained: bool = True) -> Transcript:
    """A prompt 1 2, then `num` sampled tokens."""
    transcript = Transcript()
    transcript.observe([1, 2])
    transcript.act([token] * num, logprobs=[-0.5] * num, version=0, finish="stop", trained=trained)
    return transcript


def episode(
    rewards: tuple[float, float],
    index: int = 0,
    *,
    instance: str = "hand/0",
    errors: tuple[int, int] = (0, 0),
    agreed: bool = True,
    transcripts: tuple[Transcript | None, ...] | None = None,
) -> Episode:
    turns = [
        Turn(seat, "?", None, "Error: no", "no_tag", ("", ""), 1)
        for seat in (0, 1)
        for _ in range(errors[seat])
    ]
    game = MatchingGame(SMALL, BRIEF)
    return Episode(
        instance=instance,
        index=index,
        players=("policy", "policy"),
        prompts=(game.prompt(0), game.prompt(1)),
        turns=tuple(turns),
        transcripts=transcripts or (said(10 + index), said(20 + index, num=2)),
        views=(game.view(0), game.view(1)),
        outcome=Outcome(True, agreed, 0.0, rewards[0], rewards, {}),
        ended="agreed",
    )


def credited(
    episodes: list[Episode], *, algorithm: AlgorithmConfig, reward: RewardConfig
) -> tuple[list[Sample], CreditStats]:
    """Both steps of credit, with nothing in between."""
    samples, stats = reward_samples(episodes, algorithm=algorithm, reward=reward)
    return assign_advantages(samples, algorithm=algorithm), stats


def test_rewards_share_the_score_and_charge_each_seat_for_its_own_errors() -> None:
    played = episode((0.75, 0.75), errors=(0, 2))
    config = RewardConfig(error_penalty=0.25)
    assert [seat_reward(played, seat, config=config) for seat in (0, 1)] == [0.75, 0.25]
    assert seat_reward(played, 1, config=RewardConfig()) == 0.75
    assert seat_reward(played, 1, config=RewardConfig(error_penalty=0.5)) == 0.0, "never below 0"


def test_accept_only_rewards_any_agreement() -> None:
    config = RewardConfig(kind="accept", error_penalty=0.25)
    assert seat_reward(episode((0.1, 0.1), errors=(1, 0)), 0, config=config) == 0.75
    assert seat_reward(episode((0.0, 0.0), agreed=False), 0, config=config) == 0.0


def by_method(
    method: str, rewards: list[float], *, eps: float = 0.0, num: tuple[int, ...] = ()
) -> list[float]:
    """Seat 0's advantages in one group whose episodes earned these, `num` tokens each."""
    algorithm = AlgorithmConfig(method=method, advantage_eps=eps)
    episodes = [
        episode((r, r), i, transcripts=(said(10, num=num[i] if num else 1), None))
        for i, r in enumerate(rewards)
    ]
    samples, _ = credited(episodes, algorithm=algorithm, reward=RewardConfig())
    return [sample.advantages[-1] for sample in samples]


def test_advantages_by_hand() -> None:
    """Mean 0.5; deviations -0.5, 0, 0.5; population standard deviation sqrt(1/6)."""
    rewards = [0.0, 0.5, 1.0]
    assert by_method("dr_grpo", rewards, eps=9.0) == [-0.5, 0.0, 0.5]
    std = math.sqrt(1 / 6)
    assert by_method("grpo", rewards) == pytest.approx([-0.5 / std, 0.0, 0.5 / std])
    # The added constant damps: with std 0.5 and eps 0.5 the largest advantage is 0.5, not 1.
    assert by_method("grpo", [0.0, 1.0], eps=0.5) == [-0.5, 0.5]


def test_leave_one_out_by_hand() -> None:
    """0 against the mean of 0.5 and 1; 0.5 against that of 0 and 1; 1 against that of 0, 0.5."""
    assert by_method("rloo", [0.0, 0.5, 1.0]) == [-0.75, 0.0, 0.75]
    assert leave_one_out([0.3]) == [0.3]
    rewards = [0.1, 0.4, 0.4, 0.9]
    centred = by_method("dr_grpo", rewards)
    assert by_method("rloo", rewards) == pytest.approx([c * 4 / 3 for c in centred])


def test_the_batch_is_normalised_over_all_its_tokens() -> None:
    """One token worth 0 and three worth 1: mean 3/4, variance 3/16."""
    std = math.sqrt(3 / 16)
    assert batch_moments([0.0, 1.0], [0.0, 0.0], [1, 3]) == (0.75, std)
    got = by_method("reinforce_pp", [0.0, 1.0], num=(1, 3))
    assert got == pytest.approx([-0.75 / std, 0.25 / std])
    # Two instances, each flat within itself, are still better and worse than the batch.
    episodes = [
        episode((r, r), i, instance=name, transcripts=(said(10), None))
        for name, r in (("good", 1.0), ("bad", 0.0))
        for i in (0, 1)
    ]
    algorithm = AlgorithmConfig(method="reinforce_pp", advantage_eps=0.0)
    samples, stats = credited(episodes, algorithm=algorithm, reward=RewardConfig())
    assert stats.num_zero_variance_groups == 2
    assert [s.advantages[-1] for s in samples] == [1.0, 1.0, -1.0, -1.0]
    flat, _ = credited(
        episodes[:2], algorithm=AlgorithmConfig(method="reinforce_pp"), reward=RewardConfig()
    )
    assert [s.advantages[-1] for s in flat] == [0.0, 0.0], "no difference anywhere, no gradient"


def test_rewards_added_on_the_way_count_from_their_token_on_in_the_batch() -> None:
    """reinforce_pp: tokens worth 1 - 0.5 and 1 (then 0.5, 1 less the mean 0.75); grpo and the rest
    see the sum alone."""
    episodes = [episode((1.0, 1.0), 0, transcripts=(None, said(20, num=2)))]
    algorithm = AlgorithmConfig(method="reinforce_pp", advantage_eps=0.0)
    (sample,), _ = reward_samples(episodes, algorithm=algorithm, reward=RewardConfig())
    charged = replace(sample, rewards=[0.0, 0.0, -0.5, 1.0])
    (found,) = assign_advantages([charged], algorithm=algorithm)
    assert found.advantages == [0.0, 0.0, -1.0, 1.0]


def test_a_moving_average_is_kept_for_each_role() -> None:
    """Decay 0.75. Step 1 compares with its own means, 0.5 and 0.25; step 2 with these, then moves
    them a quarter of the way to its own."""
    algorithm = AlgorithmConfig(method="ema", ema_decay=0.75)

    def step(
        rewards: list[tuple[float, float]], baselines: dict[str, float]
    ) -> tuple[list[float], dict[str, float]]:
        episodes = [episode((a, b), i) for i, (a, b) in enumerate(rewards)]
        samples, _ = reward_samples(episodes, algorithm=algorithm, reward=RewardConfig())
        among = [sample_statistics(samples, algorithm=algorithm)]
        found = assign_advantages(samples, algorithm=algorithm, baselines=baselines)
        return (
            [s.advantages[-1] for s in found],
            updated_baselines(baselines, among, algorithm=algorithm),
        )

    advantages, baselines = step([(0.0, 0.25), (1.0, 0.25)], {})
    assert advantages == [-0.5, 0.5, 0.0, 0.0]
    assert baselines == {"seat 0": 0.5, "seat 1": 0.25}
    advantages, baselines = step([(1.0, 0.25), (1.0, 0.75)], baselines)
    assert advantages == [0.5, 0.5, 0.0, 0.5], "a flat group still beats the average"
    assert baselines == {"seat 0": 0.75 * 0.5 + 0.25, "seat 1": 0.75 * 0.25 + 0.25 * 0.5}
    assert moved_average(None, 0.3, decay=0.75) == 0.3
    assert updated_baselines({}, [], algorithm=AlgorithmConfig()) == {}


def erring(index: int, reward: float, *, errors: int) -> Episode:
    """Seat 0 tries `errors` moves of one token that are refused, then one of one token."""
    transcript = Transcript()
    for token in range(errors + 1):
        transcript.observe([1])
        transcript.act([10 + token], logprobs=[-0.5], version=0, finish="stop")
    played = episode((reward, reward), index, errors=(errors, 0), transcripts=(transcript, None))
    good = Turn(0, "?", "propose", None, None, ("", ""), 1)
    return replace(played, turns=(*played.turns, good))


def test_with_turn_credit_the_refused_turn_alone_is_charged() -> None:
    """Episode 0: a refused turn, then 1.0; episode 1: 0.5. Charge 0.25. Values: 0.75, 1.0 | 0.5, so
    means 0.875 and 0.5, baseline 0.6875."""
    algorithm = AlgorithmConfig(method="dr_grpo", error_credit="turn")
    episodes = [erring(0, 1.0, errors=1), erring(1, 0.5, errors=0)]
    reward = RewardConfig(error_penalty=0.25)
    samples, _ = reward_samples(episodes, algorithm=algorithm, reward=reward)
    assert [s.token_rewards() for s in samples] == [[0.0, -0.25, 0.0, 1.0], [0.0, 0.5]]
    found = assign_advantages(samples, algorithm=algorithm)
    assert [s.advantages for s in found] == [[0.0, 0.0625, 0.0, 0.3125], [0.0, -0.1875]]
    # grpo divides by the deviation of the values, each episode weighing the same.
    grpo = replace(algorithm, method="grpo", advantage_eps=0.0)
    divisor = math.sqrt(((0.1875**2 + 0.125**2) + 0.1875**2) / 2)
    (first, _) = assign_advantages(samples, algorithm=grpo)
    assert first.advantages == pytest.approx([0.0, 0.0625 / divisor, 0.0, 0.3125 / divisor])
    assert reward_std([0.875, 0.5], [0.125**2, 0.0]) == pytest.approx(divisor)


def test_turn_credit_learns_where_all_scores_are_equal_and_changes_nothing_without_errors() -> None:
    reward = RewardConfig(error_penalty=0.25)
    turn, whole = (AlgorithmConfig(error_credit=mode) for mode in ("turn", "episode"))
    both_erred = [erring(0, 1.0, errors=1), erring(1, 1.0, errors=1)]
    found, stats = credited(both_erred, algorithm=turn, reward=reward)
    assert stats.num_zero_variance_groups == 0
    assert [s.advantages for s in found] == [pytest.approx([0, -1, 0, 1], rel=1e-3)] * 2
    assert credited(both_erred, algorithm=whole, reward=reward)[1].num_zero_variance_groups == 1
    clean = [erring(i, r, errors=0) for i, r in enumerate((0.1, 0.7, 0.9))]
    assert [s.advantages for s in credited(clean, algorithm=turn, reward=reward)[0]] == [
        s.advantages for s in credited(clean, algorithm=whole, reward=reward)[0]
    ]


def test_a_proposal_on_the_table_earns_a_share_but_less_than_accepting_it() -> None:
    """SMALL's best is 12. Nothing proposed: 0; then half of the last proposal's share; then all."""
    config = RewardConfig(kind="regret", table_share=0.5)
    game = MatchingGame(SMALL, BRIEF)

    def earned() -> float:
        played = replace(episode((0.0, 0.0)), outcome=game.outcome())
        return seat_reward(played, 0, config=config)

    assert earned() == 0.0
    game.step(0, WORST)
    assert earned() == pytest.approx(0.5 * 8 / 12)
    game.step(1, "[reject]")
    assert earned() == pytest.approx(0.5 * 8 / 12), "it lies there until another is made"
    game.step(1, BEST)
    assert earned() == 0.5
    game.step(0, "[reject]")
    game.step(0, WORST)
    game.step(1, "[accept]")
    assert earned() == pytest.approx(8 / 12) == pytest.approx(game.outcome().score_norm)


def test_two_seats_never_share_a_baseline() -> None:
    """Seat 1 is fined, seat 0 is not: each is compared with its own seat of the other episodes."""
    episodes = [
        episode((1.0, 1.0), 0, errors=(0, 1)),
        episode((1.0, 1.0), 1, errors=(0, 0)),
        episode((0.4, 0.4), 2, errors=(0, 0)),
    ]
    samples, stats = credited(episodes, algorithm=NO_STD, reward=RewardConfig(error_penalty=0.2))
    by_name = {sample.name: sample.advantages[-1] for sample in samples}
    assert by_name == pytest.approx(
        {
            "instance hand/0 episode 0 seat 0": 0.2,
            "instance hand/0 episode 1 seat 0": 0.2,
            "instance hand/0 episode 2 seat 0": -0.4,
            "instance hand/0 episode 0 seat 1": 0.8 - 2.2 / 3,
            "instance hand/0 episode 1 seat 1": 1.0 - 2.2 / 3,
            "instance hand/0 episode 2 seat 1": 0.4 - 2.2 / 3,
        }
    )
    assert (stats.num_groups, stats.num_zero_variance_groups) == (2, 0)


def test_instances_never_share_a_baseline_and_flat_groups_are_dropped() -> None:
    episodes = [
        episode((0.2, 0.2), 0, instance="easy"),
        episode((0.4, 0.4), 1, instance="easy"),
        episode((0.9, 0.9), 0, instance="flat"),
        episode((0.9, 0.9), 1, instance="flat"),
    ]
    samples, stats = credited(episodes, algorithm=NO_STD, reward=RewardConfig())
    assert (stats.num_groups, stats.num_zero_variance_groups) == (4, 2)
    assert [s.name for s in samples] == [
        f"instance easy episode {i} seat {seat}" for seat in (0, 1) for i in (0, 1)
    ]
    assert [s.advantages[-1] for s in samples] == pytest.approx([-0.1, 0.1, -0.1, 0.1])


def test_an_advantage_stands_on_trained_tokens_alone() -> None:
    episodes = [episode((0.0, 0.0), 0), episode((1.0, 1.0), 1)]
    samples, _ = credited(episodes, algorithm=NO_STD, reward=RewardConfig())
    assert [s.ids for s in samples] == [[1, 2, 10], [1, 2, 11], [1, 2, 20, 20], [1, 2, 21, 21]]
    assert samples[3].mask == [0, 0, 1, 1]
    assert samples[3].advantages == [0.0, 0.0, 0.5, 0.5]
    assert samples[3].old_logprobs == [0.0, 0.0, -0.5, -0.5]


def test_partners_and_seats_that_never_spoke_form_no_group() -> None:
    silent = Transcript()
    silent.observe([1, 2])
    episodes = [
        episode((0.0, 0.0), 0, transcripts=(said(10), None)),
        episode((1.0, 1.0), 1, transcripts=(said(11), None)),
        episode((0.5, 0.5), 2, transcripts=(None, silent)),
        episode((0.5, 0.5), 3, transcripts=(None, said(23))),
    ]
    samples, stats = credited(episodes, algorithm=NO_STD, reward=RewardConfig())
    assert [s.ids[-1] for s in samples] == [10, 11]
    # The policy in seat 1 spoke in one episode only: a group of one is flat.
    assert (stats.num_groups, stats.num_zero_variance_groups) == (2, 1)


def test_a_reward_stands_at_the_last_trained_token_and_may_be_added_to() -> None:
    """A charge of 0.25 on episode 1's first token, as a trainer may add one between the steps."""
    episodes = [episode((0.0, 0.0), 0), episode((1.0, 1.0), 1)]
    samples, _ = reward_samples(episodes, algorithm=NO_STD, reward=RewardConfig())
    assert [s.rewards for s in samples] == [[0, 0, 0.0], [0, 0, 1.0], [0, 0, 0, 0], [0, 0, 0, 1]]
    assert [s.group for s in samples] == [f"seat {seat} of hand/0" for seat in (0, 0, 1, 1)]
    assert all(not any(s.advantages) for s in samples)
    charged = replace(samples[3], rewards=[0.0, 0.0, -0.25, 1.0])
    found = assign_advantages([*samples[:3], charged], algorithm=NO_STD)
    assert [s.advantages[-1] for s in found] == [-0.5, 0.5, -0.375, 0.375]


def test_a_group_dealt_to_several_ranks_is_compared_as_a_whole() -> None:
    """Rank 1 holds what a second rank of its tensor parallel row holds too: it counts once."""
    episodes = [episode((r, r), i, instance="i") for i, r in enumerate((0.0, 0.3, 0.9))]
    samples, _ = reward_samples(episodes, algorithm=NO_STD, reward=RewardConfig())
    whole = {s.name: s.advantages for s in assign_advantages(samples, algorithm=NO_STD)}
    parts = [samples[:2], samples[2:], samples[2:]]
    among = [sample_statistics(part, algorithm=NO_STD) for part in parts]
    for part in parts:
        for sample in assign_advantages(part, algorithm=NO_STD, everyone=among):
            assert sample.advantages == pytest.approx(whole[sample.name])


def test_beside_different_partners_nothing_is_compared() -> None:
    episodes = [
        replace(episode((r, r), i, transcripts=(said(i), None)), players=("policy", partner))
        for i, (r, partner) in enumerate(
            [(0.0, "scripted:solo"), (0.2, "scripted:solo"), (0.6, "pool"), (1.0, "pool")]
        )
    ]
    samples, stats = credited(episodes, algorithm=NO_STD, reward=RewardConfig())
    assert stats.num_groups == 2
    assert {s.role for s in samples} == {"seat 0 beside scripted:solo", "seat 0 beside pool"}
    assert [s.advantages[-1] for s in samples] == pytest.approx([-0.1, 0.1, -0.2, 0.2])


def test_imitation_weighs_every_token_worth_imitating() -> None:
    masked = said(10, num=2)
    masked.observe([3])
    masked.act([11], logprobs=[0.0], version=0, finish="stop")
    masked.mark_untrained(0)
    (sample,) = imitation_samples([episode((1.0, 1.0), transcripts=(masked, None))])
    assert sample.ids == [1, 2, 10, 10, 3, 11]
    assert sample.mask == [0, 0, 0, 0, 0, 1]
    assert sample.advantages == [0, 0, 0, 0, 0, 1]
