"""The metrics of played games and of a step, as plain numbers.

docs/metrics.md has the formula and the warning signs of each.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dialop.game import GameError
from selfplay.advantages.advantages import CreditStats
from selfplay.advantages.rewards import sample_name
from selfplay.config.player_spec import SELF
from selfplay.distributed import World, gather_objects
from selfplay.rollout.branches import siblings_of
from selfplay.rollout.driver import RolloutStats
from selfplay.rollout.episode import BranchPoint, Episode

_REWARD_OF = "reward/"  # prefix of rewards by seat
_NO_MEANS = ("true_statements", "score_if_agreed")  # sums that are not averaged over all games


@dataclass(frozen=True, slots=True)
class GameSums:
    """Sums over games; sums of several ranks are added with `+`.

    `measures` are by name, `games` and `scores` by partner and the seat that counts. `paid` has the
    game's own rewards by seat, `unequal` the number of games that reward seats differently.
    """

    measures: dict[str, float] = field(default_factory=dict)
    games: dict[str, float] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    paid: dict[str, float] = field(default_factory=dict)
    unequal: int = 0

    def __add__(self, other: GameSums) -> GameSums:
        return GameSums(
            add_up((self.measures, other.measures)),
            add_up((self.games, other.games)),
            add_up((self.scores, other.scores)),
            add_up((self.paid, other.paid)),
            self.unequal + other.unequal,
        )

    @property
    def num(self) -> float:
        """The number of games."""
        return sum(self.games.values())

    def means(self) -> dict[str, float]:
        """Means over games; empty without games.

        `honesty` is the share of stated cell values that are true in the speaker's own table; it is
        missing if nothing was stated, `score_if_agreed` without an agreement. Scores by partner and
        seat are added if there was a partner, rewards by seat if a game rewards seats differently.
        """
        num, sums = self.num, self.measures
        if not num:
            return {}
        means = {name: value / num for name, value in sums.items() if name not in _NO_MEANS}
        if self.unequal:
            means |= {f"{_REWARD_OF}{seat}": value / num for seat, value in self.paid.items()}
        if self.games.keys() - {SELF}:
            means |= {f"score/{p}": self.scores[p] / games for p, games in self.games.items()}
        if sums.get("statements"):
            means["honesty"] = sums["true_statements"] / sums["statements"]
        if sums.get("agreement") and "score_if_agreed" in sums:
            means["score_if_agreed"] = sums["score_if_agreed"] / sums["agreement"]
        return means


def game_sums(episodes: Sequence[Episode], *, paid: bool = False) -> GameSums:
    """The sums over these games, with each seat's own rewards if `paid` (at the end and for single
    moves). Words, statements and errors are counted for the seats that count."""
    counts = Counter[str]()
    scores, games, of_partner, of_seat = (defaultdict[str, float](float) for _ in range(4))
    own: dict[str, float] = {}
    unequal = 0
    for episode in episodes:
        counted = set(episode.counted_seats)
        turns = [t for t in episode.turns if t.seat in counted]
        counts["agreement"] += episode.outcome.agreed
        scores["score_if_agreed"] += episode.score if episode.outcome.agreed else 0.0
        counts["optimal"] += episode.outcome.score_norm > 1 - 1e-9
        if episode.outcome.seat_scores:
            scores["score_norm"] += episode.outcome.score_norm
        counts["messages"] += sum(turn.action == "message" for turn in turns)
        counts["turns"] += len(episode.turns)
        counts["errors"] += sum(turn.error is not None for turn in turns)
        counts.update(f"errors_{turn.error_kind}" for turn in turns if turn.error_kind)
        partner = _partner_and_seat(episode)
        games[partner] += 1
        of_partner[partner] += episode.score
        sent = episode.messages(counted)
        words = {"words": float(sum(len(text.split()) for text in sent))}
        own = add_up((own, words | episode.measures))
        if paid:
            rewards = seat_rewards(episode)
            unequal += len(set(rewards)) > 1
            for seat, reward in enumerate(rewards):
                of_seat[str(seat)] += reward
    score = {"score": sum(e.score for e in episodes)} if episodes else {}
    measures = {**{name: float(num) for name, num in counts.items()}, **scores, **own, **score}
    return GameSums(measures, dict(games), dict(of_partner), dict(of_seat), unequal)


def _partner_and_seat(episode: Episode) -> str:
    """ "partner/seat that counts", or "self" if the policy has all seats or none; several are
    joined by +."""
    own = episode.counted_seats
    if not 0 < len(episode.policy_seats) < len(episode.players):
        return SELF
    partners = dict.fromkeys(p for seat, p in enumerate(episode.players) if seat not in own)
    return f"{'+'.join(partners)}/{'+'.join(map(str, own))}"


def seat_rewards(episode: Episode) -> list[float]:
    """Each seat's total reward from the game itself, at the end and for single moves."""
    paid = [episode.outcome.rewards, *(turn.rewards for turn in episode.turns if turn.rewards)]
    return [sum(of_seat) for of_seat in zip(*paid, strict=True)]


def add_up(tallies: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sums over all tallies, by name."""
    sums: dict[str, float] = {}
    for one in tallies:
        for name, value in one.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


# --- the reward that a step trains on


def reward_tally(episodes: Sequence[Episode], credited: CreditStats) -> dict[str, float]:
    """Sums of the samples' rewards over the trained seats of games, in total and by seat; `add_up`
    adds them over ranks."""
    sums: defaultdict[str, float] = defaultdict(float)
    for episode in episodes:
        for seat in episode.policy_seats:
            if (name := sample_name(episode, seat)) in credited.rewards:
                reward, _ = credited.rewards[name]
                sums["num"] += 1
                sums["squares"] += reward**2
                sums[f"num/{seat}"] += 1
                sums[f"{_REWARD_OF}{seat}"] += reward
    return dict(sums)


def reward_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """The mean and standard deviation of the reward over trained seats of games, and the mean of
    each seat if there are several; empty without a trained seat."""
    if not sums:
        return {}
    by_seat = {name: total for name, total in sums.items() if name.startswith(_REWARD_OF)}
    mean = sum(by_seat.values()) / sums["num"]
    variance = max(0.0, sums["squares"] / sums["num"] - mean**2)
    means = {name: by_seat[name] / sums[f"num/{name[len(_REWARD_OF) :]}"] for name in by_seat}
    return {
        "reward": mean,
        "reward_std": math.sqrt(variance),
        **(dict(sorted(means.items())) if len(means) > 1 else {}),
    }


def step_metrics(
    episodes: Sequence[Episode],
    played: RolloutStats,
    credited: CreditStats,
    learned: dict[str, float],
    world: World,
) -> dict[str, float]:
    """The metrics of one step over all ranks: games, groups, the update (`learned`), the engine.

    `engine_s` is the mean over replicas. Every rank must call.
    """
    of_step = {
        "num_instances": float(len({episode.instance for episode in episodes})),
        "num_groups": float(credited.num_groups),
        "num_zero_variance_groups": float(credited.num_zero_variance_groups),
        "num_generated_tokens": float(played.num_generated_tokens),
        "num_prompt_tokens": float(played.num_prompt_tokens),
        "num_void": float(played.num_void),
        "engine_s": played.engine_s,
    }
    # Kept separate, because a game may choose any name.
    separate = (
        game_sums(episodes),
        reward_tally(episodes, credited),
        of_step,
        branch_tally(episodes, credited) if any(one.branches for one in episodes) else {},
    )
    own, *others = zip(*gather_objects(separate, world), strict=True)
    games: GameSums = sum(own, GameSums())
    rewards, counts, branches = map(add_up, others)
    engine_s = counts.pop("engine_s") / world.replica.num
    num_zero_variance = counts.pop("num_zero_variance_groups")
    of_games = games.means()
    of_run = {
        **reward_metrics(rewards),
        **learned,
        "zero_variance_groups": num_zero_variance / max(1, counts["num_groups"]),
        "num_games": games.num,
        **counts,
        "void_share": counts["num_void"] / max(1.0, counts["num_void"] + games.num),
        **(branch_metrics(branches) if branches else {}),
        "engine_s": engine_s,
        "tokens_per_s": counts["num_generated_tokens"] / engine_s if engine_s else 0.0,
    }
    for name in of_games.keys() & of_run.keys():
        raise GameError(
            "Game.measures and algorithm.loss must use other names than the run's metrics, got "
            f"{name!r}"
        )
    return of_games | of_run


# --- branch points: a turn's value is the mean normalized score (0 to 1) of its continuations


def branch_tally(episodes: Sequence[Episode], credited: CreditStats) -> dict[str, float]:
    """Sums over branch points; `add_up` adds them over ranks.

    `num_branch_tokens` counts the tokens sampled in sibling turns and in continuations,
    `num_continuation_tokens` only those in continuations. Neither counts the played games' own
    tokens.
    """
    points = [(episode, point) for episode in episodes for point in episode.branches]
    values_K = [turn_values(episode, point) for episode, point in points]
    num_turn_tokens, num_continuation_tokens = 0, 0
    for episode, point in points:
        # Sibling 0 is the played game's own turn. Each other sibling was sampled once, whatever its
        # number of continuations.
        for continuations in siblings_of(episode, point)[1:]:
            num_turn_tokens += continuations[0].turns[point.turn].num_tokens
        for continuation in point.continuations.values():
            later = continuation.turns[point.turn + 1 :]
            num_continuation_tokens += sum(turn.num_tokens for turn in later)
    return {
        "num_branch_points": float(len(points)),
        "num_branch_games": float(sum(len(point.continuations) for _, point in points)),
        "num_branch_tokens": float(num_turn_tokens + num_continuation_tokens),
        "num_continuation_tokens": float(num_continuation_tokens),
        "turns": float(sum(len(values) for values in values_K)),
        "groups": float(credited.num_branch_groups),
        "zero_variance_groups": float(credited.num_zero_variance_branch_groups),
        "squares": sum(
            sum((value - _mean(values)) ** 2 for value in values) for values in values_K
        ),
    }


def branch_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step from the sums of all ranks. No branch point may have been of a policy
    that trains."""
    flat, groups = sums["zero_variance_groups"], sums["groups"]
    return {
        **{name: total for name, total in sums.items() if name.startswith("num_")},
        **({"zero_variance_branches": flat / groups} if groups else {}),
        "branch_variance": sums["squares"] / sums["turns"],
    }


def turn_values(episode: Episode, point: BranchPoint) -> list[float]:
    """The mean score of each sibling turn's continuations, the played game's own turn first."""
    return [
        _mean([continuation.score for continuation in continuations])
        for continuations in siblings_of(episode, point)
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
