"""Rewards and group-relative advantages, calculated by hand."""

import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dialop.matching.game import MatchingGame
from selfplay.advantages import advantages
from selfplay.advantages.advantages import (
    CreditStats,
    SampleStatistics,
    batch_moments,
    compute_advantages,
    group_std,
    imitation_samples,
    leave_one_out,
    reward_samples,
    sample_statistics,
)
from selfplay.advantages.rewards import seat_reward, with_rewards
from selfplay.advantages.sample import Sample
from selfplay.chat.transcript import Transcript
from selfplay.config import AlgorithmConfig, RewardConfig
from selfplay.distributed import init_world
from selfplay.errors import OwnFault
from selfplay.rollout.episode import Episode, Turn
from tests.helpers.dialop_boards import BEST, BRIEF, SMALL, WORST
from tests.helpers.hand_episodes import episode, said, with_advantages

NO_STD = AlgorithmConfig(advantage="dr_grpo")


def credited(
    episodes: list[Episode], *, algorithm: AlgorithmConfig, reward: RewardConfig
) -> tuple[list[Sample], CreditStats]:
    """Both steps of credit: rewards, then advantages."""
    samples, stats = reward_samples(episodes, algorithm=algorithm, reward=reward)
    return with_advantages(samples, algorithm=algorithm), stats


def test_seats_share_the_score_and_pay_for_their_own_errors() -> None:
    played = episode((0.75, 0.75), errors=(0, 2))
    config = RewardConfig(error_penalty=0.25)
    assert [seat_reward(played, seat, config=config) for seat in (0, 1)] == [0.75, 0.25]
    assert seat_reward(played, 1, config=RewardConfig()) == 0.75
    assert seat_reward(played, 1, config=RewardConfig(error_penalty=0.5)) == -0.25, "no floor"


def test_kind_accept_rewards_any_agreement() -> None:
    config = RewardConfig(function="accept", error_penalty=0.25)
    (erred,) = with_rewards([episode((0.1, 0.1), errors=(1, 0))], config)
    assert seat_reward(erred, 0, config=config) == 0.75
    (open_ended,) = with_rewards([episode((0.3, 0.3), agreed=False)], config)
    assert seat_reward(open_ended, 0, config=config) == 0.0


def by_method(
    method: str, rewards: list[float], *, eps: float = 0.0, num: tuple[int, ...] = ()
) -> list[float]:
    """Seat 0's advantages in one group whose episodes have these rewards and `num` tokens each."""
    algorithm = AlgorithmConfig(advantage=method, advantage_eps=eps)
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
    # With std 0.5 and eps 0.5 the largest advantage is 0.5, not 1.
    assert by_method("grpo", [0.0, 1.0], eps=0.5) == [-0.5, 0.5]


def test_leave_one_out_by_hand() -> None:
    """0 against the mean of 0.5 and 1; 0.5 against that of 0 and 1; 1 against that of 0, 0.5."""
    assert by_method("rloo", [0.0, 0.5, 1.0]) == [-0.75, 0.0, 0.75]
    assert leave_one_out([0.3]) == [0.3]
    rewards = [0.1, 0.4, 0.4, 0.9]
    centred = by_method("dr_grpo", rewards)
    assert by_method("rloo", rewards) == pytest.approx([c * 4 / 3 for c in centred])


def test_rewards_of_moves_set_leave_one_out_apart_from_a_scaled_group_mean() -> None:
    """Returns 1, 0.5 and 0, 0: means 0.75 and 0, so the baselines of the first are 0 and 0.375 and
    its advantages 1, 0.5 and 0.625, 0.125, which no factor makes equal."""
    rewarded = [
        Sample(str(i), [1, 2], [1, 1], [0.0] * 2, [0.0] * 2, returns, group="g")
        for i, returns in enumerate([[1.0, 0.5], [0.0, 0.0]])
    ]
    of = {
        method: with_advantages(rewarded, algorithm=AlgorithmConfig(advantage=method))[0].advantages
        for method in ("rloo", "dr_grpo")
    }
    assert of == {"rloo": [1.0, 0.5], "dr_grpo": [0.625, 0.125]}


def test_reinforce_pp_normalizes_over_all_tokens_of_the_batch() -> None:
    """One token of reward 0 and three of reward 1: mean 3/4, variance 3/16."""
    std = math.sqrt(3 / 16)
    batch = [SampleStatistics("", "", "", num, mean, 0.0) for num, mean in ((1, 0.0), (3, 1.0))]
    assert batch_moments(batch) == (0.75, std)
    advantages = by_method("reinforce_pp", [0.0, 1.0], num=(1, 3))
    assert advantages == pytest.approx([-0.75 / std, 0.25 / std])
    # Two zero-variance groups, one above the batch's mean and one below.
    episodes = [
        episode((r, r), i, instance=name, transcripts=(said(10), None))
        for name, r in (("good", 1.0), ("bad", 0.0))
        for i in (0, 1)
    ]
    algorithm = AlgorithmConfig(advantage="reinforce_pp", advantage_eps=0.0)
    samples, stats = credited(episodes, algorithm=algorithm, reward=RewardConfig())
    assert stats.num_zero_variance_groups == 2
    assert [s.advantages[-1] for s in samples] == [1.0, 1.0, -1.0, -1.0]
    equal, _ = credited(
        episodes[:2], algorithm=AlgorithmConfig(advantage="reinforce_pp"), reward=RewardConfig()
    )
    assert [s.advantages[-1] for s in equal] == [0.0, 0.0]


def moving(index: int, *, move: float, end: float, last: bool) -> Episode:
    """Seat 0 makes two moves of one token. The game pays `move` for one of them, its last or its
    first, and `end` at the end."""
    transcript = Transcript()
    for token in (10, 11):
        transcript.observe([1])
        transcript.act([token], logprobs=[-0.5])
    moves = [Turn(0, "?", "message", None, None, ("", ""), 1) for _ in range(2)]
    moves[last] = replace(moves[last], rewards=(move, 0.0))
    played = episode((end, end), index, transcripts=(transcript, None))
    return replace(played, turns=tuple(moves))


def test_a_group_has_zero_variance_if_all_its_tokens_have_the_same_return() -> None:
    """Equal rewards of the last move count for both tokens: every return is 0.25 + 0.5, also where
    one game has 0.5 + 0.25. Those of the first move count for the first token alone, which then has
    0.75 and the second 0.5, around the baseline 0.625."""
    algorithm, reward = AlgorithmConfig(advantage="dr_grpo"), RewardConfig()
    equal = [moving(0, move=0.25, end=0.5, last=True), moving(1, move=0.5, end=0.25, last=True)]
    samples, stats = credited(equal, algorithm=algorithm, reward=reward)
    assert samples == [] and stats.num_zero_variance_groups == 1
    early = [moving(index, move=0.25, end=0.5, last=False) for index in (0, 1)]
    samples, stats = credited(early, algorithm=algorithm, reward=reward)
    assert stats.num_zero_variance_groups == 0
    assert [s.advantages for s in samples] == [[0.0, 0.125, 0.0, -0.125]] * 2


@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "rloo", "turns"])
def test_a_built_in_called_by_ones_own_function_gives_the_same_samples(
    method: str, tmp_path: Path
) -> None:
    """Both leave out the groups of instance b, whose games have equal rewards."""
    file = tmp_path / f"own_{method}.py"
    file.write_text(
        f"from selfplay.advantages.advantages import {method} as given\n\n"
        "def advantage(samples, state, algorithm):\n"
        "    return given(samples, state, algorithm)\n"
    )
    games = [
        replace(episode((reward, reward), index), instance=instance)
        for instance, rewards in (("a", (0.0, 1.0)), ("b", (0.5, 0.5)))
        for index, reward in enumerate(rewards)
    ]
    found = [
        credited(games, algorithm=AlgorithmConfig(advantage=name), reward=RewardConfig())
        for name in (method, f"{file}:advantage")
    ]
    assert found[0] == found[1]
    samples, stats = found[0]
    assert (len(samples), stats.num_groups, stats.num_zero_variance_groups) == (4, 4, 2)


def test_a_moving_average_is_kept_for_each_seating() -> None:
    """The baselines of step 1 are its own means, 0.5 and 0.25. Step 2 uses these, then moves them a
    fifth of the way to its own means."""
    algorithm, world = AlgorithmConfig(advantage="ema"), init_world(device="cpu")

    def step(
        rewards: list[tuple[float, float]], baselines: dict[str, float]
    ) -> tuple[list[float], dict[str, float]]:
        episodes = [episode((a, b), i) for i, (a, b) in enumerate(rewards)]
        samples, _ = reward_samples(episodes, algorithm=algorithm, reward=RewardConfig())
        samples, baselines = compute_advantages(
            samples, baselines, algorithm=algorithm, world=world
        )
        return [s.advantages[-1] for s in samples], baselines

    advantages, baselines = step([(0.0, 0.25), (1.0, 0.25)], {})
    assert advantages == [-0.5, 0.5, 0.0, 0.0]
    assert baselines == {"seat 0": 0.5, "seat 1": 0.25}
    advantages, baselines = step([(1.0, 0.25), (1.0, 0.75)], baselines)
    assert advantages == [0.5, 0.5, 0.0, 0.5], "a zero-variance group counts too"
    assert baselines == pytest.approx({"seat 0": 0.6, "seat 1": 0.3})
    averages = {"seat 0": 1.0}
    assert compute_advantages([], averages, algorithm=algorithm, world=world)[1] == averages


def erring(index: int, reward: float, *, errors: int) -> Episode:
    """Seat 0 has `errors` refused moves, then a legal one, each of one token."""
    transcript = Transcript()
    for token in range(errors + 1):
        transcript.observe([1])
        transcript.act([10 + token], logprobs=[-0.5])
    played = episode((reward, reward), index, errors=(errors, 0), transcripts=(transcript, None))
    good = Turn(0, "?", "propose", None, None, ("", ""), 1)
    return replace(played, turns=(*played.turns, good))


def test_a_rewarded_move_changes_the_returns_of_the_tokens_up_to_it() -> None:
    """Game 0: a move of -0.25, then 1.0 at the end; game 1: 0.5. Returns 0.75, 1.0 | 0.5, so means
    0.875 and 0.5, baseline 0.6875."""
    games = [erring(0, 1.0, errors=1), erring(1, 0.5, errors=0)]
    samples, _ = reward_samples(games, algorithm=NO_STD, reward=RewardConfig())
    samples[0] = replace(samples[0], returns=[0.75, 0.75, 1.0, 1.0])
    assert [s.total_reward for s in samples] == [0.75, 0.5]
    found = with_advantages(samples, algorithm=NO_STD)
    assert [s.advantages for s in found] == [[0.0, 0.0625, 0.0, 0.3125], [0.0, -0.1875]]
    # grpo divides by the standard deviation of the returns, with equal weight for each game.
    grpo = replace(NO_STD, advantage="grpo", advantage_eps=0.0)
    divisor = math.sqrt(((0.1875**2 + 0.125**2) + 0.1875**2) / 2)
    (first, _) = with_advantages(samples, algorithm=grpo)
    assert first.advantages == pytest.approx([0.0, 0.0625 / divisor, 0.0, 0.3125 / divisor])
    statistics = [
        SampleStatistics("", "", "", num, mean, variance)
        for num, mean, variance in ((2, 0.875, 0.125**2), (1, 0.5, 0.0))
    ]
    assert group_std(statistics) == pytest.approx(divisor)


def test_kind_regret_rewards_a_pending_proposal_less_than_an_accepted_one() -> None:
    """SMALL's best is 12. Without a proposal 0; then half of the last proposal's score; once it is
    accepted, all of it."""
    config = RewardConfig(function="regret")
    game = MatchingGame(SMALL, BRIEF)

    def reward() -> float:
        (played,) = with_rewards([replace(episode((0.0, 0.0)), outcome=game.outcome())], config)
        return seat_reward(played, 0, config=config)

    assert reward() == 0.0
    game.step(0, WORST)
    assert reward() == pytest.approx(0.5 * 8 / 12)
    game.step(1, "[reject]")
    assert reward() == pytest.approx(0.5 * 8 / 12), "a rejected proposal stays the last one"
    game.step(1, BEST)
    assert reward() == 0.5
    game.step(0, "[reject]")
    game.step(0, WORST)
    game.step(1, "[accept]")
    assert reward() == pytest.approx(8 / 12) == pytest.approx(game.outcome().score_norm)


def test_two_seats_never_share_a_baseline() -> None:
    """Only seat 1 has a penalty. Each is compared with the same seat of the other episodes."""
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


def test_instances_never_share_a_baseline_and_zero_variance_groups_are_dropped() -> None:
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


def test_partners_and_seats_without_sampled_tokens_form_no_group() -> None:
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
    # The policy sampled in seat 1 in one episode only: a group of one has zero variance.
    assert (stats.num_groups, stats.num_zero_variance_groups) == (2, 1)


def test_a_group_on_several_ranks_has_one_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of one tensor parallel row hold the same sample, which counts once."""
    episodes = [episode((r, r), i, instance="i") for i, r in enumerate((0.0, 0.3, 0.9))]
    samples, _ = reward_samples(episodes, algorithm=NO_STD, reward=RewardConfig())
    alone = {s.name: s.advantages for s in with_advantages(samples, algorithm=NO_STD)}
    parts = [samples[:2], samples[2:], samples[2:]]
    everyone = [sample_statistics(part) for part in parts]
    monkeypatch.setattr(advantages, "gather_objects", lambda own, world: everyone)
    for part in parts:
        for sample in with_advantages(part, algorithm=NO_STD):
            assert sample.advantages == pytest.approx(alone[sample.name])


def test_games_with_different_partners_never_share_a_baseline() -> None:
    episodes = [
        replace(episode((r, r), i, transcripts=(said(i), None)), players=("policy", partner))
        for i, (r, partner) in enumerate(
            [(0.0, "scripted:solo"), (0.2, "scripted:solo"), (0.6, "pool"), (1.0, "pool")]
        )
    ]
    samples, stats = credited(episodes, algorithm=NO_STD, reward=RewardConfig())
    assert stats.num_groups == 2
    assert {s.seating for s in samples} == {"seat 0 beside scripted:solo", "seat 0 beside pool"}
    assert [s.advantages[-1] for s in samples] == pytest.approx([-0.1, 0.1, -0.2, 0.2])


def test_imitation_gives_every_token_of_a_legal_turn_advantage_1() -> None:
    """The policy's own refused turn counts in no imitation, and stays in its transcript."""
    game = erring(0, 1.0, errors=1)
    (sample,) = imitation_samples([game])
    assert [*sample.ids] == [1, 10, 1, 11]
    assert [*sample.mask] == [*sample.advantages] == [0, 0, 0, 1]
    own = game.transcripts[0]
    assert own is not None and own.mask == [0, 1, 0, 1]
    own.mark_untrained(1)  # as a teacher's detour
    assert imitation_samples([game]) == []


# An advantage of one's own that passes the check before a run, in a step that finds 4 samples.
ADVANTAGES_IN_A_STEP = {
    "return pairs[1:]": r"\(baseline, divisor\) for each of 4 samples, got .* of 3;",
    "return None": r"it must return \(baseline, divisor\) for each of 4 samples, got None",
    "return [(0.0, 0)] * 4": "baselines must be .* divisors above 0, got 0.0 and 0 in a group",
    "return [(0.0, 1e-300)] * 4": "no advantage may be beyond 1e\\+15",
    "return [((0.0, 0.0, 0.0), 1.0)] * 4": "one for all turns or for each of 1, ",
    "samples.reverse()": "it must not change samples",
    "object.__setattr__(samples[0], 'turns', (9.0,))": "it must not change samples",
    "state['mean'] = float('nan')": "its state must be numbers by name, .*got {'mean': nan}",
    "state[0] = 1.0": "its state must be numbers by name",
    "state['all'] = [1.0]": "its state must be numbers by name",
    "sys.exit(0)": r"own_\w+\.py:6 advantage: SystemExit: 0",
    "1 / 0": r"own_\w+\.py:6 advantage: ZeroDivisionError",
    "torch.set_default_dtype(torch.float64)": "custom code must not change torch.set_default_d",
}


@pytest.mark.parametrize("line", ADVANTAGES_IN_A_STEP)
def test_an_advantage_of_ones_own_that_fails_in_a_step_is_one_line(
    line: str, tmp_path: Path
) -> None:
    own = tmp_path / f"own_{tmp_path.name}.py"
    own.write_text(
        "import sys, torch\n"
        "def advantage(samples, state, algorithm):\n"
        "    pairs = [(0.0, 1.0) for _ in samples]\n"
        "    if len(samples) != 4:\n"
        "        return pairs\n"
        f"    {line}\n"
        "    return pairs\n"
    )
    algorithm = AlgorithmConfig(advantage=f"{own}:advantage")
    samples, _ = reward_samples(
        [episode((1.0, 0.0), i) for i in (0, 1)], algorithm=algorithm, reward=RewardConfig()
    )
    state, rule = {"mean": 0.5}, ADVANTAGES_IN_A_STEP[line]
    try:
        with pytest.raises(OwnFault, match=rf"^algorithm.advantage {own}:advantage: .*{rule}"):
            with_advantages(samples, algorithm=algorithm, baselines=state)
    finally:
        torch.set_default_dtype(torch.float32)
    assert state == {"mean": 0.5}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("one.mean, 1.0", True),
        ("one.turns, 1.0", True),
        ("0.0, 1e300", True),
        ("0.5, 1.0", False),
        ("one.mean - 1e-60, 1.0", True),
    ],
)
def test_advantages_of_ones_own_that_are_all_0_are_told(
    given: str, told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two games of unequal rewards; with equal ones no advantage can tell them apart."""
    own = tmp_path / f"own_{tmp_path.name}.py"
    own.write_text(f"def advantage(samples, state, algorithm):\n    return [({given})]")
    own.write_text(own.read_text()[:-1] + " for one in samples]\n")
    algorithm = AlgorithmConfig(advantage=f"{own}:advantage")
    for rewards, differ in (((1.0, 0.0), True), ((1.0, 1.0), False)):
        games = [episode((reward, 0.0), i) for i, reward in enumerate(rewards)]
        samples, _ = reward_samples(games, algorithm=algorithm, reward=RewardConfig())
        with_advantages(samples, algorithm=algorithm)
        line = f"warning: algorithm.advantage {own}:advantage: every advantage is 0"
        assert (line in capsys.readouterr().err) is (told and differ)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ("[1e308, -1e308], ()", r"none beyond 1e\+15, got \(\[1e\+308, -1e\+308\]"),
        ("[1.0, 1.0], [[0.0, float('nan')]] * 2", "2 lists, one per turn"),
        ("[1j, 1.0], ()", "2 finite numbers"),
        ("episode.measures.update(a=1.0) or [1.0, 1.0], ()", "it must not change the episode"),
        ("episode.transcripts[0].mask.reverse() or [1.0, 1.0], ()", "it must not change the epi"),
        ("episode.transcripts[1].logprobs.clear() or [1.0, 1.0], ()", "it must not change the "),
        ("[sys.exit(0), 1.0], ()", r"own_\w+\.py:3 reward: SystemExit: 0 \(in instance hand/0 "),
        (
            "[episode.best, 1.0], ()",
            r"own_\w+\.py:3 reward: AttributeError: .* \(in instance hand/0 ",
        ),
    ],
)
def test_a_reward_of_ones_own_that_fails_in_a_step_is_one_line(
    given: str, rule: str, tmp_path: Path
) -> None:
    own = tmp_path / f"own_{tmp_path.name}.py"
    own.write_text(f"import sys\ndef reward(episode):\n    return {given}\n")
    config = RewardConfig(function=f"{own}:reward")
    with pytest.raises(OwnFault, match=rf"^reward.function {own}:reward: .*{rule}"):
        with_rewards([episode((0.5, 0.5), errors=(1, 1))], config)


@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.integers(-4, 4), st.integers(0, 5), st.integers(-4, 4)),
        min_size=1,
        max_size=5,
    )
)
def test_the_moments_of_a_batch_are_those_of_all_its_tokens(
    drawn: list[tuple[int, int, int, int]],
) -> None:
    """Each sample has so many tokens, a final reward, and one for a move at one of its tokens."""
    samples, returns = [], []
    for number, (num, final, at, paid) in enumerate(drawn):
        at = min(at, num - 1)
        own = [float(final + paid * (token <= at)) for token in range(num)]
        zeros = [0.0] * num
        samples.append(Sample(f"{number}", [1] * num, [1] * num, zeros, zeros, own, group="all"))
        returns += own
    mean, deviation = batch_moments(sample_statistics(samples))
    assert mean == pytest.approx(statistics.fmean(returns))
    assert deviation == pytest.approx(statistics.pstdev(returns), abs=1e-9)
