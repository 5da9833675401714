"""Held-out games: a policy's score with its interval, beside scripted players and people.

Scores are shares of the best possible value, one a game, in the order of the instances. Knows no
gradients and writes no files.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dialop.game import Instance
from dialop.matching.game import MatchingInstance
from dialop.matching.recorded import agreed, said_in
from selfplay.chat.rendering import Rendering
from selfplay.config import Config, GameConfig, RolloutConfig
from selfplay.distributed import World, gather_objects
from selfplay.engines.base import Engine, Sampling
from selfplay.games import kit_of
from selfplay.metrics.bootstrap import bootstrap_interval
from selfplay.metrics.console import progress
from selfplay.metrics.step import add_up, game_measures, game_record, tally
from selfplay.rollout.driver import play_games, play_scripted
from selfplay.rollout.episode import Episode, limits_of
from selfplay.rollout.seating import SELF_PLAY, Partner, evaluation_games, scripted_games

NUM_SHOWN = 8  # first games an evaluation keeps in full, the same instances in every evaluation


class AllVoid(RuntimeError):
    """An evaluation none of whose games came to an end."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One kind of pair on a set of instances: a score a game, means over games, games in full.

    `interval` is (mean, low, high) of the score, a bootstrap 95 % interval over games. `games` are
    those of the first instances, `examples` the "best", "typical" and "worst" by score.
    """

    name: str
    scores: tuple[float, ...]
    interval: tuple[float, float, float]
    measures: dict[str, float]
    games: tuple[dict[str, Any], ...]
    examples: dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class EvaluationContext:
    """Where held-out games are played: the engine, who sits beside the policy, the ranks that
    share the games, and the settings of game and play. `max_batch` is the engine's, in games."""

    engine: Engine | None
    partner: Partner
    rendering: Rendering
    world: World
    game: GameConfig
    rollout: RolloutConfig
    max_batch: int

    @classmethod
    def of(
        cls,
        config: Config,
        engine: Engine | None,
        *,
        rendering: Rendering,
        world: World,
        partner: Partner = SELF_PLAY,
    ) -> EvaluationContext:
        """The context of a run's settings."""
        return cls(
            engine, partner, rendering, world, config.game, config.rollout, config.engine.max_batch
        )


def evaluate(
    instances: Sequence[Instance],
    context: EvaluationContext,
    *,
    temperature: float | None = None,
    seat: int | None = None,
) -> Evaluation:
    """One game an instance, spread over the ranks; temperature None samples as in training, 0 is
    greedy. Every rank calls, also one that shares another's engine and so plays nothing. Beside a
    guest the policy has this `seat`, or seat 0 and 1 by turns.

    Void games are left out of scores and means; `num_void` among the measures counts them.

    Raises:
        AllVoid: when no game is left.
    """
    played = play_kept_back(instances, context, temperature=temperature, seat=seat)
    return summed(played, partner=context.partner, world=context.world)


@dataclass(frozen=True, slots=True)
class Kept:
    """This rank's games of an evaluation by the place of their instance, and how many were void."""

    games: dict[int, Episode]
    num_void: int


def summed(played: Kept, *, partner: Partner, world: World) -> Evaluation:
    """All ranks' games as one evaluation. Raises AllVoid when no game is left."""
    name = "policy" if partner.sit is None else f"policy with {partner.name}"
    return _evaluation(name, played.games, world=world, num_void=played.num_void)


def play_kept_back(
    instances: Sequence[Instance],
    context: EvaluationContext,
    *,
    temperature: float | None = None,
    seat: int | None = None,
) -> Kept:
    """This rank's share of the games that `evaluate` scores."""
    tables = evaluation_games(
        instances,
        partner=context.partner,
        game=context.game,
        rollout=context.rollout,
        rendering=context.rendering,
        seat=seat,
    )
    sampling = Sampling(
        temperature=context.rollout.temperature if temperature is None else temperature,
        stop_ids=context.rendering.stop_ids,
    )
    engine, partner, world = context.engine, context.partner, context.world
    mine = world.replica.share(len(tables))
    # A wave engine reads at most max_batch prompts at once anyway, so waiting for that many games
    # to end costs little.
    in_waves = engine is not None and not engine.streaming
    at_once = context.max_batch if in_waves else max(1, len(mine))
    at_once = 1 if partner.alone else at_once
    played: dict[int, Episode] = {}
    num_void = 0
    # Where somebody plays at the terminal, a bar would only be in the way.
    silent = int(partner.alone) or world.rank
    with progress(len(mine), "evaluation", rank=silent) as bar:
        for start in range(0, len(mine), at_once):
            places = mine[start : start + at_once]
            episodes, stats = play_games(
                [tables[place] for place in places],
                engine,
                sampling=sampling,
                limits=limits_of(context.rollout),
                ended=bar.update,
            )
            kept = [place for number, place in enumerate(places) if number not in stats.void]
            played.update(zip(kept, episodes, strict=True))
            num_void += len(stats.void)
            if partner.alone and episodes:
                score = episodes[0].outcome.score_norm
                print(f"\nThe game is over ({episodes[0].ended}): {score:.3f} of the best.\n")
    return Kept(played, num_void)


def evaluate_scripted(
    instances: Sequence[Instance],
    *,
    spec: str,
    game: GameConfig,
    rollout: RolloutConfig,
    other: str | None = None,
) -> Evaluation:
    """Two scripted players on the same instances, of one kind or `spec` in seat 0 and `other` in
    seat 1; every rank plays them all."""
    tables = scripted_games(instances, spec=spec, game=game, other=other)
    episodes = play_scripted(tables, limits=limits_of(rollout))
    return _evaluation(spec, dict(enumerate(episodes)), world=None)


def evaluate_people(
    records: Sequence[Mapping[str, Any]], instances: Sequence[MatchingInstance]
) -> Evaluation:
    """What the people of recorded games did on these very tables.

    The score is the recorded one, so that a game counts whose proposals name another roster. Two
    measures are left out: slips were not recorded, and the reader of scripted statements finds
    next to none in people's prose, too few to call them honest or not. A note between two moves of
    one person counts as a message like any other.
    """
    scores, tallies = [], []
    for record, instance in zip(records, instances, strict=True):
        log = record["action_log"]
        accepted = agreed(record)
        score = instance.norm(float(record["proposal_reward"])) if accepted else 0.0
        said = said_in(record)
        scores.append(score)
        tallies.append(
            {
                "games": 1.0,
                "score": score,
                "agreement": float(accepted),
                "optimal": float(score > 1 - 1e-9),
                "talk_value": score - instance.norm(max(instance.solo)),
                "messages": float(len(said)),
                "words": float(sum(len(text.split()) for text in said)),
                "proposals": float(sum(entry["type"] == "proposal" for entry in log)),
                "turns": float(len(log)),
            }
        )
    interval = bootstrap_interval(scores, seed=0)
    measures = game_measures(add_up(tallies))
    return Evaluation("people", tuple(scores), interval, measures, (), {})


def check_room(
    instances: Iterable[Instance],
    *,
    rendering: Rendering,
    game: GameConfig,
    rollout: RolloutConfig,
    max_positions: int | None,
) -> None:
    """Refuse, before anything is played, boards whose opening prompt leaves no token to speak with.

    `max_positions` is the longest transcript the model can read, None where it has no limit.

    Raises:
        ValueError: names the longest prompt, the limit and what to set.
    """
    room = rollout.max_game_tokens
    if max_positions is not None and room > max_positions:
        raise ValueError(
            f"rollout.max_game_tokens must be at most {max_positions}, the positions the model "
            f"has, got {room}"
        )
    longest, where = 0, ""
    for instance in instances:
        new_game = kit_of(game).new_game(instance, game)
        for seat in range(new_game.num_seats):
            prompt = new_game.prompt(seat)
            length = len(rendering.first(system=prompt.system, user=prompt.user))
            if length > longest:
                longest, where = length, f"instance {instance.key}, seat {seat}"
    if longest < room:
        return
    if max_positions is None or longest < max_positions:
        roomy = 2 * longest if max_positions is None else min(2 * longest, max_positions)
        advice = f"give rollout.max_game_tokens={roomy}"
    else:
        advice = f"the model reads at most {max_positions}, so give it smaller boards"
        advice += "" if game.brief else " or game.brief=true"
    raise ValueError(
        f"rollout.max_game_tokens must be above the longest prompt, which has {longest} tokens "
        f"({where}), got {room}; {advice}"
    )


def example_places(scores: Sequence[float]) -> dict[str, int]:
    """Which games to read: the best, the worst and the one nearest the median score.

    The first of equals is taken and none twice, so fewer than three games give fewer examples.
    """
    middle = statistics.median(scores)
    wanted = {
        "best": lambda place: -scores[place],
        "worst": lambda place: scores[place],
        "typical": lambda place: abs(scores[place] - middle),
    }
    chosen: dict[str, int] = {}
    for name, rank in wanted.items():
        left = [place for place in range(len(scores)) if place not in chosen.values()]
        if left:
            chosen[name] = min(left, key=rank)
    return {name: chosen[name] for name in ("best", "typical", "worst") if name in chosen}


def _evaluation(
    name: str, mine: Mapping[int, Episode], *, world: World | None, num_void: int = 0
) -> Evaluation:
    """This rank's games, by the place of their instance, joined with all others' (world None: there
    are no others)."""
    scores_here = {place: episode.outcome.score_norm for place, episode in mine.items()}
    parts = _gather((scores_here, tally(list(mine.values())), num_void), world)
    scores_by_place: dict[int, float] = {}
    for part_scores, _, _ in parts:
        scores_by_place |= part_scores
    num_void = sum(part_void for _, _, part_void in parts)
    if not scores_by_place:
        raise AllVoid(f"{name}: all {num_void} games ended void, so there is nothing to score")
    # Void games leave gaps among the places, none among the scores.
    places = sorted(scores_by_place)
    scores = tuple(scores_by_place[place] for place in places)
    chosen = {label: places[number] for label, number in example_places(scores).items()}
    shown = {*places[:NUM_SHOWN], *chosen.values()}
    records: dict[int, dict[str, Any]] = {}
    for part in _gather({p: game_record(mine[p], step=0) for p in shown if p in mine}, world):
        records |= part
    return Evaluation(
        name=name,
        scores=scores,
        interval=bootstrap_interval(scores, seed=0),
        measures=game_measures(add_up(part_sums for _, part_sums, _ in parts))
        | ({"num_void": float(num_void)} if num_void else {}),
        games=tuple(records[place] for place in places[:NUM_SHOWN]),
        examples={label: records[place] for label, place in chosen.items()},
    )


def _gather(value: Any, world: World | None) -> list[Any]:
    """Every rank's value; ranks that played nothing give empty ones."""
    return [value] if world is None else gather_objects(value, world)
