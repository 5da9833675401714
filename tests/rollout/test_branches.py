"""Games forked at chosen turns: values, advantages, what trains; the played game is unchanged."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import pytest

from dialop.game import Game
from dialop.matching.game import MatchingGame
from dialop.matching.scripted import make_scripted
from selfplay.advantages.advantages import CreditStats, reward_samples
from selfplay.advantages.branches import branch_samples
from selfplay.advantages.rewards import episode_samples
from selfplay.advantages.sample import Sample
from selfplay.chat.rendering import Rendering
from selfplay.chat.transcript import Transcript
from selfplay.config import AlgorithmConfig, RewardConfig
from selfplay.data.seeds import named_seed
from selfplay.engines.base import Completion, Generate, Request
from selfplay.metrics.records import branch_records
from selfplay.metrics.step import (
    branch_metrics,
    branch_tally,
    reward_metrics,
    reward_tally,
    turn_values,
)
from selfplay.rollout.branches import play_branched, siblings_of
from selfplay.rollout.driver import RolloutStats, play_games
from selfplay.rollout.episode import BranchPoint, Episode, GameSetup, Turn
from selfplay.rollout.options import BranchConfig
from selfplay.rollout.players import Move, Player, ScriptedPartner
from tests.helpers import hand_episodes
from tests.helpers.dialop_boards import BEST, BRIEF, SMALL, WORST
from tests.helpers.hand_episodes import with_advantages
from tests.helpers.scripted_engine import StreamEngine, WaveEngine
from tests.helpers.small_games import LIMITS, SAMPLING, Lines, policies, tokens

MESSAGE = "[message] BLEU Ava 3"
DECISIONS = BranchConfig("decisions", siblings=3)
FIRST = BranchConfig("first", siblings=2, continuations=2)
Texts = Mapping[tuple[object, ...], str]

# The played game: seat 0 sends a message, seat 1 proposes the best matching (12 of 12), seat 0
# accepts.
PLAYED: Texts = {(0, 0): MESSAGE, (1, 0): BEST, (0, 1): "[accept]"}
# Other answers to the proposal: reject and agree on 8 of 12, or reject and fail to make a move.
ANSWERS: Texts = {
    ("branch", 2, 1, 0, 1): "[reject]",
    ("branch", 2, 1, 0, 0, 2): WORST,
    ("branch", 2, 1, 0, 1, 1): "[accept]",
    ("branch", 2, 2, 0, 1): "[reject]",
    ("branch", 2, 2, 0, 0, 2): "hm",
    ("branch", 2, 2, 0, 0, 3): "hm",
}
# A game of two turns: seat 0 proposes the best matching, seat 1 accepts. Another continuation of
# this proposal. Another proposal, accepted in one continuation and without an answer in the other.
SHORT: Texts = {(0, 0): BEST, (1, 0): "[accept]"}
PROPOSALS: Texts = {
    ("branch", 0, 0, 1, 1, 0): "[reject]",
    ("branch", 0, 0, 1, 1, 1): WORST,
    ("branch", 0, 0, 1, 0, 1): "[accept]",
    ("branch", 0, 1, 0, 0): WORST,
    ("branch", 0, 1, 0, 1, 0): "[accept]",
    ("branch", 0, 1, 1, 1, 0): "hm",
    ("branch", 0, 1, 1, 1, 1): "hm",
}


def hand_setup(rendering: Rendering, number: int = 0) -> GameSetup:
    """The hand-sized board with the policy in both seats; draws are named ("hand", …)."""
    names = ("hand", number) if number else ("hand",)
    players = policies(rendering, *names)
    return GameSetup(MatchingGame(SMALL, BRIEF), players, SMALL.key, number)


def play_all(
    setups: Sequence[GameSetup], engine: WaveEngine, branch: BranchConfig
) -> tuple[list[Episode], RolloutStats]:
    play = partial(play_branched, branch=branch)
    return play_games(setups, engine, sampling=SAMPLING, limits=LIMITS, play=play)


def prepared(texts: Texts) -> dict[int, str]:
    """Seeds of draws to texts; keys are the names after the episode's: (…, seat, its turn)."""
    return {named_seed("hand", *names): text for names, text in texts.items()}


def played(
    rendering: Rendering, branch: BranchConfig, texts: Texts, game: Texts = PLAYED
) -> tuple[Episode, WaveEngine]:
    engine = WaveEngine(rendering, prepared({**game, **texts}))
    (episode,), _ = play_all([hand_setup(rendering)], engine, branch)
    return episode, engine


def test_the_value_of_an_answer_is_the_score_that_followed_it(rendering: Rendering) -> None:
    """Accepting has value 1; rejecting led to 8 of 12 once and to 0 once."""
    episode, _ = played(rendering, DECISIONS, ANSWERS)
    (point,) = episode.branches
    assert (point.turn, point.seat) == (2, 0)
    assert turn_values(episode, point) == pytest.approx([1.0, 8 / 12, 0.0])
    taken, settled, lost = (continuations[0] for continuations in siblings_of(episode, point))
    assert taken is episode
    assert [turn.text for turn in settled.turns] == [MESSAGE, BEST, "[reject]", WORST, "[accept]"]
    assert (settled.ended, lost.ended) == ("finished", "retries")
    (record,) = branch_records(episode)
    assert (record["turn"], record["seat"]) == (2, 0)
    assert [(s["text"], s["scores"]) for s in record["siblings"]] == [
        ("[accept]", [1.0]),
        ("[reject]", [pytest.approx(8 / 12)]),
        ("[reject]", [0.0]),
    ]


def test_the_value_of_a_turn_is_the_mean_of_its_continuations(rendering: Rendering) -> None:
    """The played proposal led to 1 and to 8 of 12; the other one to 8 of 12 and to 0."""
    episode, engine = played(rendering, FIRST, PROPOSALS, SHORT)
    (point,) = episode.branches
    assert (point.turn, point.seat) == (0, 0)
    assert sorted(point.continuations) == [(0, 1), (1, 0), (1, 1)]
    assert turn_values(episode, point) == pytest.approx([(1 + 8 / 12) / 2, (8 / 12 + 0) / 2])
    # The played game; its turn's other continuation; the other turn, once; its two continuations.
    seeds = [request.seed for request in engine.asked]
    assert len(seeds) == len(set(seeds)) == 2 + 3 + 1 + (1 + 2)


@pytest.mark.parametrize(
    ("branch", "texts", "game"), [(DECISIONS, ANSWERS, PLAYED), (FIRST, PROPOSALS, SHORT)]
)
def test_a_branch_has_the_exact_tokens_of_the_played_game(
    rendering: Rendering, branch: BranchConfig, texts: Texts, game: Texts
) -> None:
    """They are copied, not rendered or sampled again."""
    episode, engine = played(rendering, branch, texts, game)
    (point,) = episode.branches
    for (sibling, _), continuation in point.continuations.items():
        assert continuation.turns[: point.turn] == episode.turns[: point.turn]
        for seat in (0, 1):
            original, twin = episode.transcripts[seat], continuation.transcripts[seat]
            # Continuations of sibling 0 share the played game's turn as well.
            num_shared = point.turn + (sibling == 0)
            num = sum(turn.seat == seat for turn in episode.turns[:num_shared])
            end = original.spans[num - 1].end if num else 0
            assert twin.spans[:num] == original.spans[:num]
            assert twin.ids[:end] == original.ids[:end]
            assert twin.logprobs[:end] == original.logprobs[:end]
    at_point = [r.prompt_ids for r in engine.asked if r.seed in _seeds_at(point.turn, point.seat)]
    assert len(at_point) == branch.siblings and len(set(at_point)) == 1
    num_all = sum(len(rendering.action_ids(t)) for t in {**game, **texts}.values())
    num_played = sum(len(rendering.action_ids(text)) for text in game.values())
    sums = branch_tally([episode], CreditStats(0, 0, 1, 0))
    assert sums["num_branch_tokens"] == num_all - num_played


def _seeds_at(turn: int, seat: int) -> list[int]:
    """The seeds of the played turn and of its siblings."""
    place = turn // 2
    names = [(seat, place), *(("branch", turn, sibling, seat, place) for sibling in (1, 2))]
    return [named_seed("hand", *name) for name in names]


def credited(
    episode: Episode, *, algorithm: AlgorithmConfig, penalty: float = 0.0
) -> tuple[dict[str, Sample], CreditStats]:
    """Samples by what follows the episode in their names."""
    reward = RewardConfig(error_penalty=penalty)
    samples, stats = reward_samples([episode], algorithm=algorithm, reward=reward)
    samples = with_advantages(samples, algorithm=algorithm)
    return {s.name.removeprefix("instance hand/0 episode 0 "): s for s in samples}, stats


def test_sibling_turns_form_a_group_and_so_do_their_continuations(rendering: Rendering) -> None:
    """The answers have values 1, 2/3 and 0, mean 5/9, and only their own tokens train. After
    the two rejections seat 0 got 2/3 or 0: 1/3 above and below the mean."""
    episode, _ = played(rendering, DECISIONS, ANSWERS)
    samples, stats = credited(episode, algorithm=AlgorithmConfig(advantage="dr_grpo"))
    turns = [samples.pop(f"turn 2 sibling {k}") for k in (0, 1, 2)]
    answers = ("[accept]", "[reject]", "[reject]")
    for sample, text, value in zip(turns, answers, (1.0, 8 / 12, 0.0), strict=True):
        ids = rendering.action_ids(text)
        assert sample.ids[-len(ids) :] == ids, "no tokens after the turn"
        before = len(sample.ids) - len(ids)
        assert sample.mask == [0] * before + [1] * len(ids)
        advantage = pytest.approx(value - 5 / 9)
        assert sample.advantages == [0.0] * before + [advantage] * len(ids)
    settled, lost = samples.values()
    assert list(samples) == [f"turn 2 sibling {k} continuation 0 seat 0" for k in (1, 2)]
    for sample, text, advantage in ((settled, WORST, 1 / 3), (lost, "hm", -1 / 3)):
        ids = rendering.action_ids(text)
        assert sample.ids[-len(ids) :] == ids and sample.mask[-len(ids) :] == [1] * len(ids)
        assert sum(sample.mask) == len(ids) * (1 if text == WORST else 2)
        assert sum(sample.advantages) == pytest.approx(advantage * sum(sample.mask))
    # Zero variance: the played game's two groups of one sample, and seat 1 after the rejections,
    # which had a turn in only one game.
    assert replace(stats, rewards={}) == CreditStats(
        2, 2, num_branch_groups=3, num_zero_variance_branch_groups=1
    )


def test_a_refused_turn_is_penalized_and_equal_turns_are_dropped(rendering: Rendering) -> None:
    """Sibling 1 is refused, then accepts: its value is 1 - 1/4. The other siblings lead to the same
    score without a penalty."""
    texts = {
        ("branch", 2, 1, 0, 1): "hm",
        ("branch", 2, 1, 0, 0, 2): "[accept]",
        ("branch", 2, 2, 0, 1): "[accept]",
    }
    episode, _ = played(rendering, DECISIONS, texts)
    algorithm = AlgorithmConfig(advantage="dr_grpo")
    samples, _ = credited(episode, algorithm=algorithm, penalty=0.25)
    advantages = [samples[f"turn 2 sibling {k}"].advantages[-1] for k in (0, 1, 2)]
    assert advantages == pytest.approx([1 / 12, -1 / 6, 1 / 12])
    samples, stats = credited(episode, algorithm=AlgorithmConfig())
    assert samples == {}
    assert (stats.num_branch_groups, stats.num_zero_variance_branch_groups) == (2, 2)


def test_the_continuations_of_one_point_form_a_group(rendering: Rendering) -> None:
    """Turns of value 5/6 and 1/3. After them seat 1 got 2/3 twice and 0 once, mean 4/9; seat 0 had
    a turn in one of the three games only. The rest of the played game is in neither group."""
    episode, _ = played(rendering, FIRST, PROPOSALS, SHORT)
    samples, stats = credited(episode, algorithm=AlgorithmConfig(advantage="dr_grpo"))
    assert {name: s.advantages[-1] for name, s in samples.items()} == {
        "turn 0 sibling 0": pytest.approx(1 / 4),
        "turn 0 sibling 1": pytest.approx(-1 / 4),
        "turn 0 sibling 0 continuation 1 seat 1": pytest.approx(2 / 9),
        "turn 0 sibling 1 continuation 0 seat 1": pytest.approx(2 / 9),
        "turn 0 sibling 1 continuation 1 seat 1": pytest.approx(-4 / 9),
    }
    slips = samples["turn 0 sibling 1 continuation 1 seat 1"]
    assert sum(slips.mask) == 2 * len(rendering.action_ids("hm"))
    assert replace(stats, rewards={}) == CreditStats(
        1, 1, num_branch_groups=3, num_zero_variance_branch_groups=1
    )


class Babbler(WaveEngine):
    """Picks a text by the request's seed; every token has its own log-prob."""

    TEXTS: tuple[str, ...] = (MESSAGE, BEST, WORST, "[accept]", "[accept]", "[reject]", "hm")

    def answer(self, request: Request) -> Completion:
        num_before = sum(len(self.rendering.action_ids(self.text(r))) for r in self.asked)
        self.asked.append(request)
        ids = self.rendering.action_ids(self.text(request))
        return Completion(ids, [-float(num_before + k) for k in range(len(ids))], "stop", 0)

    def text(self, request: Request) -> str:
        return self.TEXTS[request.seed % len(self.TEXTS)]


class Messenger(Babbler):
    TEXTS = (MESSAGE,)


def babble(rendering: Rendering, branch: BranchConfig) -> tuple[list[Episode], Babbler]:
    engine = Babbler(rendering, {})
    setups = [hand_setup(rendering, number) for number in range(3)]
    episodes, stats = play_all(setups, engine, branch)
    num_played = sum(turn.num_tokens for episode in episodes for turn in episode.turns)
    sums = branch_tally(episodes, CreditStats(0, 0, 1, 0))
    assert stats.num_generated_tokens == num_played + sums["num_branch_tokens"]
    return episodes, engine


def trained_tokens(episodes: Sequence[Episode]) -> Counter[float]:
    """How often each token is trained, by its log-prob."""
    reward = RewardConfig()
    samples = [*episode_samples(episodes, reward=reward), *branch_samples(episodes, reward=reward)]
    assert len({sample.name for sample in samples}) == len(samples)
    return Counter(
        logprob
        for sample in samples
        for logprob, m in zip(sample.old_logprobs, sample.mask, strict=True)
        if m
    )


@pytest.mark.parametrize(("siblings", "continuations"), [(2, 1), (3, 1), (2, 3)])
@pytest.mark.parametrize("rule", ["all", "first", "decisions"])
def test_every_sampled_token_trains_once(
    rendering: Rendering, rule: str, siblings: int, continuations: int
) -> None:
    """In exactly one sample, before zero-variance groups are dropped. Both seats train."""
    branch = BranchConfig(rule, 2, siblings, continuations)
    episodes, engine = babble(rendering, branch)
    generated = sum(len(rendering.action_ids(engine.text(r))) for r in engine.asked)
    assert trained_tokens(episodes) == Counter([-float(k) for k in range(generated)])
    if rule != "decisions":
        assert {point.seat for e in episodes for point in e.branches} == {0, 1}


@pytest.mark.parametrize("rule", ["all", "first", "decisions"])
def test_waves_and_streams_play_the_same_branches(rendering: Rendering, rule: str) -> None:
    branch = BranchConfig(rule, per_game=2, siblings=3, continuations=2)
    texts = {
        request.seed: engine.text(request)
        for engine in (babble(rendering, branch)[1],)
        for request in engine.asked
    }
    (one, _), (other, _) = (
        play_all(
            [hand_setup(rendering, number) for number in range(3)], engine(rendering, texts), branch
        )
        for engine in (WaveEngine, StreamEngine)
    )
    assert sum(len(episode.branches) for episode in one) > 0
    for a, b in zip(one, other, strict=True):
        assert branch_records(a) == branch_records(b)
        for left, right in zip(a.branches, b.branches, strict=True):
            assert left.continuations.keys() == right.continuations.keys()
            for place, continuation in left.continuations.items():
                other_transcripts = right.continuations[place].transcripts
                for seat in (0, 1):
                    assert tokens(continuation.transcripts[seat]) == tokens(other_transcripts[seat])


def test_rules_choose_turns_by_what_came_before_them(rendering: Rendering) -> None:
    def points(branch: BranchConfig) -> list[list[int]]:
        return [[p.turn for p in e.branches] for e in babble(rendering, branch)[0]]

    turns = [len(e.turns) for e in babble(rendering, DECISIONS)[0]]
    assert points(replace(DECISIONS, turns="all")) == [list(range(n)) for n in turns]
    assert points(replace(DECISIONS, turns="first", per_game=2)) == [[0, 1][:n] for n in turns]
    for episode in babble(rendering, replace(DECISIONS, per_game=9))[0]:
        waiting, due = False, []
        for number, turn in enumerate(episode.turns):
            if waiting:
                due.append(number)
            if turn.error is None:
                waiting = turn.action == "propose"
        assert [p.turn for p in episode.branches] == due


def test_a_copied_partner_draws_anew_and_its_turns_are_no_branch_points(
    rendering: Rendering,
) -> None:
    setup = hand_setup(rendering)
    partner = ScriptedPartner(make_scripted("random", seed=1), name="scripted:random")
    players: tuple[Player, ...] = (setup.players[0], partner)
    rule = replace(DECISIONS, turns="first", siblings=20)
    engine = Messenger(rendering, {})
    (episode,), _ = play_all([replace(setup, players=players)], engine, rule)
    (point,) = episode.branches
    assert {continuation.turns[1].text for continuation in point.continuations.values()} == {
        BEST,
        WORST,
    }
    every = replace(rule, turns="all", siblings=2)
    setup = replace(hand_setup(rendering), players=(partner, setup.players[0].fork()))
    (episode,), _ = play_all([setup], engine, every)
    assert [turn.seat for turn in episode.turns][:2] == [0, 1]
    assert {point.seat for point in episode.branches} == {1}


def test_metrics_by_hand(rendering: Rendering) -> None:
    """Values 5/6 and 1/3 are 1/4 from their mean: variance 1/16."""
    episode, _ = played(rendering, FIRST, PROPOSALS, SHORT)
    _, stats = credited(episode, algorithm=AlgorithmConfig(advantage="dr_grpo"))
    size = {text: len(rendering.action_ids(text)) for text in (WORST, "[accept]", "[reject]", "hm")}
    continuations = size["[reject]"] + size[WORST] + 2 * size["[accept]"] + 2 * size["hm"]
    assert branch_metrics(branch_tally([episode], stats)) == {
        "num_branch_points": 1,
        "num_branch_games": 3,
        "num_branch_tokens": size[WORST] + continuations,
        "num_continuation_tokens": continuations,
        "zero_variance_branches": pytest.approx(1 / 3),
        "branch_variance": pytest.approx(1 / 16),
    }
    resting = branch_metrics(branch_tally([episode], CreditStats()))  # the policy of these turns
    assert "zero_variance_branches" not in resting
    assert resting["branch_variance"] == pytest.approx(1 / 16)
    # The only turn of seat 0 is the branch point; the reward of its game counts all the same.
    assert [*stats.rewards.values()] == [(episode.score, episode.score)] * 2
    assert reward_metrics(reward_tally([episode], stats))["reward"] == episode.score


class Walker(Lines):
    """Accepts everything, but leaves the game that follows sibling 1 of the first turn."""

    leaves = False

    async def move(self, game: Game, seat: int, observation: str, generate: Generate) -> Move:
        return Move("[accept]", complete=True, num_tokens=0, void="gone" if self.leaves else None)

    def fork(self, *names: object) -> Lines:
        twin = Walker()
        twin.leaves = self.leaves or names == ("branch", 0, 1)
        return twin


def test_a_void_continuation_has_no_value(rendering: Rendering) -> None:
    setup = hand_setup(rendering)
    texts = {(0, 0): BEST, ("branch", 0, 1, 0, 0): WORST, ("branch", 0, 2, 0, 0): WORST}
    engine = WaveEngine(rendering, prepared(texts))
    setups = [replace(setup, players=(setup.players[0], Walker()))]
    (episode,), _ = play_all(setups, engine, replace(DECISIONS, turns="first"))
    (point,) = episode.branches
    assert turn_values(episode, point) == pytest.approx([1.0, 8 / 12])
    samples, _ = credited(episode, algorithm=AlgorithmConfig(advantage="dr_grpo"))
    assert [s.advantages[-1] for s in samples.values()] == pytest.approx([1 / 6, -1 / 6])


def test_a_sibling_turn_earns_its_own_moves_reward_and_none_before_it() -> None:
    """Seat 0 is paid 0.5 for its first move and then 0.25 or 0.125 for its second, a branch point;
    the game pays 1 or 0 at its end."""

    def game(final: float, own: float) -> Episode:
        first, second = Transcript(), Transcript()
        for transcript, tokens_of_turns in ((first, ([5], [6])), (second, ([7],))):
            for ids in tokens_of_turns:
                transcript.observe([1])
                transcript.act(ids, logprobs=[-0.5])
        paid = {0: (0.5, 0.0), 1: (), 2: (own, 0.0)}
        turns = [
            Turn(number % 2, "", "message", None, None, ("", ""), 1, rewards)
            for number, rewards in paid.items()
        ]
        ended = hand_episodes.episode((final, final))
        return replace(ended, turns=tuple(turns), transcripts=(first, second))

    point = BranchPoint(2, 0, {(1, 0): game(0.0, 0.125)})
    played = replace(game(1.0, 0.25), branches=(point,))
    turns = branch_samples([played], reward=RewardConfig())
    assert [sample.total_reward for sample in turns] == [1.25, 0.125]
