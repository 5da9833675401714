"""Plays held-out games and scores them: a policy, scripted players, or people's recorded games.

Scores are fractions of the best possible value, one per game, in the order of the instances.
"""

from __future__ import annotations

import statistics
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

from dialop.game import Instance
from selfplay.chat.rendering import Rendering
from selfplay.config import Config, EngineConfig, GameConfig, RolloutConfig
from selfplay.config.player_spec import ENDPOINT, SELF
from selfplay.distributed import World, gather_objects
from selfplay.engines.base import Sampling
from selfplay.engines.kinds import engine_kind
from selfplay.errors import RunEnds
from selfplay.evaluation.plan import ITSELF, Matches, MatrixPlayer
from selfplay.evaluation.rows import OTHERS_SENT, SCRIPT, Row
from selfplay.evaluation.tables import mean_interval
from selfplay.evaluation.talk_effect import talk_effect
from selfplay.evaluation.view_effect import view_controls, view_effect
from selfplay.metrics.progress import progress
from selfplay.metrics.records import Pieces, game_record
from selfplay.metrics.step import GameSums, add_up, game_sums
from selfplay.partners.checkpoints import Source
from selfplay.partners.partners import Partners
from selfplay.partners.router import Live
from selfplay.rollout.driver import FinishedGames, play_games, play_scripted
from selfplay.rollout.episode import Episode, GameSetup, limits_of
from selfplay.rollout.players import opening_ids
from selfplay.rollout.seat_rules import chosen_seats
from selfplay.rollout.seating import (
    SELF_PLAY,
    Cast,
    Partner,
    evaluation_games,
    pieces_of,
    scripted_games,
    whole_cast,
)
from selfplay.weight_sync.start import choose_engine, load_engine
from selfplay.weight_sync.supervised import Supervised

_SEEN = "another view"  # before the number of a control of the view effect
NUM_SHOWN = 32  # games that an evaluation keeps in full: those of the first instances


class AllAborted(RunEnds):
    """All games of an evaluation were aborted."""


@dataclass(frozen=True, slots=True)
class EvaluationContext:
    """The settings, the engine, the ranks that share the games, and the policy's partner."""

    config: Config
    engine: Supervised
    rendering: Rendering
    world: World
    partner: Partner = SELF_PLAY
    cast: Cast = ()  # of several policies, whose first one's engine this is

    @property
    def seated(self) -> Cast:
        """The policy of each seat."""
        return self.cast or whole_cast(self.rendering, self.config.game)


def evaluate(
    instances: Sequence[Instance],
    context: EvaluationContext,
    *,
    temperature: float | None = None,
    seat: int | None = None,
    talk_games: int = 0,
    view_games: int | None = None,
    num_shown: int = NUM_SHOWN,
    turned: bool = False,
) -> Row:
    """Play one game per instance, spread over the ranks. Every rank must call, even one that shares
    another rank's engine and plays no games.

    `temperature` None samples as in training, 0 is greedy. With a partner the policy has seat
    `seat`, or takes its seats in turn if `seat` is None (`seat_in_turn`). Aborted games are left
    out of scores and means; the measure `num_void` counts them. The talk effect is measured on the
    first `talk_games` games, the view effect on the first `view_games`, by default as many, except
    with an endpoint. The first `num_shown` are returned in full. With `turned` the row is the
    partner's, and the policy's is its `partner`.

    Raises:
        AllAborted: if no game is left.
    """
    config, partner, world = context.config, context.partner, context.world
    sampling = Sampling(
        temperature=config.rollout.temperature if temperature is None else temperature,
        stop_ids=context.rendering.stop_ids,
    )
    setups = evaluation_games(
        instances,
        partner=partner,
        game=config.game,
        rollout=config.rollout,
        cast=context.seated,
        seat=seat,
    )

    def play(games: Mapping[Any, GameSetup]) -> dict[Any, Episode]:
        numbers, finished = [*games], FinishedGames()
        with progress(len(games), "evaluation", rank=world.rank, at_once=True) as bar:
            play_games(
                list(games.values()),
                context.engine,
                sampling=sampling,
                limits=limits_of(config.rollout),
                on_end=bar.update,
                finished=finished,
            )
        return {numbers[index]: episode for index, episode in finished.episodes.items()}

    own = {number: setups[number] for number in world.replica.share(len(instances))}
    num_views = talk_games if view_games is None else view_games
    num_views = 0 if partner.name.startswith(ENDPOINT) else num_views
    seen = {number: setup for number, setup in own.items() if number < num_views}
    views = view_controls(seen, instances, game=config.game)
    # The controls of the talk effect read messages of these games, so they are played after them.
    beside = {(_SEEN, number): setup for number, (_, setup) in views.items()}
    played = play({**own, **beside})
    games = {number: played[number] for number in own if number in played}
    first = {number: game for number, game in games.items() if number < talk_games}
    # Where the policy takes the seats in turn, a seat's rewards belong to two players.
    alone = partner.make_player is None
    in_turn = not alone and seat is None and chosen_seats(config.game, config.rollout) is None
    joined = partial(
        _evaluation,
        world=world,
        by_seat=not in_turn,
        num_void=len(own) - len(games),
        pieces=pieces_of(context.seated),
        num_shown=num_shown,
    )
    if alone:
        row = joined("policy", games)
    else:
        row = _of_two(
            (f"policy with {partner.name}", games),
            (f"{partner.name} with policy", _of_others(games)),
            joined,
            turned=turned,
        )
    if talk_games:
        row = replace(row, talk=talk_effect(first, setups, play, world))
    if num_views:
        controls = {
            number: (seat, played[_SEEN, number])
            for number, (seat, _) in views.items()
            if (_SEEN, number) in played
        }
        row = replace(row, view=view_effect(games, controls, world))
    return row


def evaluate_scripted(
    instances: Sequence[Instance],
    *,
    spec: str,
    game: GameConfig,
    rollout: RolloutConfig,
    other: str | None = None,
) -> Row:
    """Play two scripted players: `spec` in both seats, or `spec` in seat 0, whose score counts, and
    `other` in seat 1. With `spec` in both, the score is that of the seats the policy plays. Not
    spread over ranks.
    """
    setups = scripted_games(instances, spec=spec, game=game, other=other)
    episodes = play_scripted(setups, limits=limits_of(rollout))
    joined = partial(_evaluation, world=None)
    if other is not None and other != spec:
        games = {index: episode.counting([0]) for index, episode in enumerate(episodes)}
        others = (f"{SCRIPT}{other}", _of_others(games))
        return _of_two((f"{SCRIPT}{spec}", games), others, joined)
    if other is None and (seats := chosen_seats(game, rollout)) is not None:
        episodes = [episode.counting(seats) for episode in episodes]
    row = joined(f"{SCRIPT}{spec}", dict(enumerate(episodes)))
    unseen = [t for e in episodes for t in e.turns if t.seat not in e.counted_seats]
    if sent := sum(turn.action == "message" for turn in unseen):
        row = replace(row, measures=row.measures | {OTHERS_SENT: float(sent)})
    return row


def evaluate_people(
    records: Sequence[Mapping[str, Any]], instances: Sequence[Any], game: GameConfig
) -> Row:
    """Score people's recorded games on these instances with the game's kit. Raises ValueError for
    a record with an invalid log."""
    scores, sums = [], dict[str, float]()
    for number, (record, instance) in enumerate(zip(records, instances, strict=True)):
        try:
            tally = game.kit.recorded_tally(record, instance)
        except ValueError as error:
            raise ValueError(f"recorded game {number} (from 0): {error}") from error
        scores.append(tally["score"])
        sums = add_up((sums, tally))
    measures = GameSums(sums, {SELF: float(len(scores))}).means()
    return Row("people", tuple(scores), mean_interval(scores), measures)


def play_matches(
    plan: Matches,
    *,
    instances: Sequence[Any],
    policies: Mapping[Source, tuple[Config, Rendering]],
    world: World,
    num_shown: int = NUM_SHOWN,
) -> dict[str, Row]:
    """Play every match on the same instances with the same seeds; returns the rows by match name.
    In a matrix a row scores the player in seat 0, its `partner` the player in seat 1. Every rank
    must call. At most two models are in memory at a time, or those of a cast and a partner.

    `policies` holds the settings, which name the weights, and the rendering of each policy with
    weights.

    Raises:
        AllAborted: if all games of a match were aborted.
        RunEnds: if an engine fails three times in a row.
        SettingsError: for a partner whose weights or API key cannot be used.
    """
    rows: dict[str, Row] = {}
    for (source, _), own in groupby(plan.matches, key=lambda m: (m.one.source, m.one.spec)):
        if source is None:
            for match in own:
                specs = (match.one.spec.argument, match.other.spec.argument)
                first, second = specs[::-1] if match.seat == 1 else specs
                rows[match.name] = evaluate_scripted(
                    instances,
                    spec=first,
                    other=second,
                    game=plan.config.game,
                    rollout=plan.config.rollout,
                )
            continue
        renderings = {each: rendering for each, (_, rendering) in policies.items()}
        shared, rendering = policies[source]
        shared, _ = choose_engine(shared, source.weights, world, rewritten=rendering.rewritten)
        pairs = [(pair, [*of]) for pair, of in groupby(own, key=lambda m: (m.one, m.other))]
        most = max(len(one.others) for (one, _), _ in pairs)
        whole, kind = shared.engine, engine_kind(shared.engine.kind)
        with ExitStack() as cleanup:
            shared = replace(shared, engine=kind.parted([whole] * (1 + most))[0])
            engine = load_engine(shared, source.weights, world, cleanup=cleanup)
            for (one, other), matches in pairs:
                config, spec = one.settings(shared), ITSELF if other == one else other.spec
                # The partner's model is freed before the next one is loaded.
                with ExitStack() as of_pair:
                    live = _live_engines(one, policies, whole, world, cleanup=of_pair)
                    seated = [spec, *(each for each in one.others if each.argument not in live)]
                    partners = Partners(seated, config, rendering=rendering, world=world)
                    of_pair.callback(partners.close)
                    routed = partners.routed(engine, live=live)
                    supervised = Supervised(engine, world, runner=routed)
                    supervised.beside = [Supervised(each.engine, world) for each in live.values()]
                    named = [str(source.weights), *live] if live else [""]  # for messages, requests
                    for each, name in zip([supervised, *supervised.beside], named, strict=True):
                        each.name = name
                    context = EvaluationContext(
                        config,
                        supervised,
                        rendering,
                        world,
                        partners.named(spec.text),
                        one.seated(renderings),
                    )
                    for match in matches:
                        rows[match.name] = evaluate(
                            instances,
                            context,
                            temperature=match.temperature,
                            seat=match.seat,
                            talk_games=plan.talk_games,
                            num_shown=num_shown,
                            turned=match.seat == 1,
                        )
                        if world.rank == 0:
                            print(f"played: {match.name}", flush=True)
    return rows


def _live_engines(
    player: MatrixPlayer,
    policies: Mapping[Source, tuple[Config, Rendering]],
    first: EngineConfig,
    world: World,
    *,
    cleanup: ExitStack,
) -> dict[str, Live]:
    """The engines of a cast's policies but the first, by the model of their requests; they share
    the GPU with one of the settings `first`. None in the trainer's process, where they answer as
    frozen ones."""
    kind, live = engine_kind(first.kind), dict[str, Live]()
    others = dict.fromkeys(each for each in player.cast if each != player.source)
    chosen = {
        source: choose_engine(
            policies[source][0], source.weights, world, rewritten=policies[source][1].rewritten
        )[0]
        for source in (() if kind.in_trainer else others)
    }
    _, *parts = kind.parted([first, *(config.engine for config in chosen.values())])
    for (source, config), part in zip(chosen.items(), parts, strict=True):
        config = replace(config, engine=part)
        engine = load_engine(config, source.weights, world, cleanup=cleanup)
        live[str(source.weights)] = Live(engine, policies[source][1].stop_ids)
    return live


def check_room(
    instances: Iterable[Instance],
    rendering: Rendering,
    config: Config,
    *,
    max_positions: int | None,
) -> None:
    """Refuse, before any game, instances whose first prompt leaves no room for a reply.

    `max_positions` is the longest transcript the model can read, in tokens; None means no limit.

    Raises:
        ValueError: names the longest prompt, the limit and a value that works.
    """
    game, limit = config.game, config.rollout.max_game_tokens
    if max_positions is not None and limit > max_positions:
        raise ValueError(
            f"rollout.max_game_tokens must be at most {max_positions}, the model's positions, "
            f"got {limit}"
        )
    longest, where = 0, ""
    for instance in instances:
        new_game = game.kit.new_game(instance, game.options)
        for seat in range(new_game.num_seats):
            length = len(opening_ids(rendering, new_game.prompt(seat)))
            if length > longest:
                longest, where = length, f"instance {instance.key}, seat {seat}"
    if longest >= limit:
        positions = "" if max_positions is None else f"; the model has {max_positions} positions"
        raise ValueError(
            f"rollout.max_game_tokens must be above the longest prompt, which has {longest} tokens "
            f"({where}), got {limit}{positions}"
        )


def example_games(scores: Sequence[float]) -> dict[str, int]:
    """The indices of the best game, the game nearest the median score, and the worst; ties go to
    the first. No game is chosen twice: fewer than three games give fewer examples."""
    median = statistics.median(scores)
    ranks = {
        "best": lambda index: -scores[index],
        "worst": lambda index: scores[index],
        "typical": lambda index: abs(scores[index] - median),
    }
    chosen: dict[str, int] = {}
    for name, rank in ranks.items():
        if left := set(range(len(scores))) - set(chosen.values()):
            chosen[name] = min(sorted(left), key=rank)
    return {name: chosen[name] for name in ("best", "typical", "worst") if name in chosen}


Games = Mapping[int, Episode]  # by the index of their instance


def _of_others(games: Games) -> dict[int, Episode]:
    """The same games, scored for the player in the seats that do not count."""
    return {
        index: game.counting({*range(len(game.players))} - {*game.counted_seats})
        for index, game in games.items()
    }


def _of_two(
    one: tuple[str, Games],
    other: tuple[str, Games],
    joined: Callable[..., Row],
    *,
    turned: bool = False,
) -> Row:
    """The row of `one` (a name and games) with the row of `other` as its partner; `turned` swaps
    them. `joined` makes a row. The partner's row keeps no games."""
    first, second = (other, one) if turned else (one, other)
    return replace(joined(*first), partner=joined(*second, num_shown=None))


def _evaluation(
    name: str,
    games: Mapping[int, Episode],
    *,
    world: World | None,
    by_seat: bool = True,
    num_void: int = 0,
    pieces: Pieces | None = None,
    num_shown: int | None = NUM_SHOWN,
) -> Row:
    """The row of all ranks' games; `games` are this rank's, by the index of their instance.
    `world` None means that `games` are all games, `num_shown` None that the row keeps no games.
    `by_seat` adds each seat's rewards."""
    own_scores = {index: episode.score for index, episode in games.items()}
    own_sums = game_sums(list(games.values()), paid=by_seat)
    of_ranks = _gather((own_scores, own_sums, num_void), world)
    rank_scores, rank_sums, rank_void = zip(*of_ranks, strict=True)
    num_void = sum(rank_void)
    all_scores = dict(sorted(each for by_index in rank_scores for each in by_index.items()))
    if not all_scores:
        raise AllAborted(f"{name}: all {num_void} games were aborted, so there are no scores")
    # Aborted games leave gaps in the indices but not in the scores.
    indices, scores = [*all_scores], tuple(all_scores.values())
    share = num_void / (num_void + len(scores))
    examples = {} if num_shown is None else example_games(scores)
    chosen = {label: indices[number] for label, number in examples.items()}
    first = indices[: num_shown or 0]
    shown = games.keys() & {*first, *chosen.values()}
    own = {index: game_record(games[index], step=0, pieces=pieces) for index in shown}
    records = dict(ChainMap(*_gather(own, world)))
    return Row(
        name=name,
        scores=scores,
        interval=mean_interval(scores),
        measures=sum(rank_sums, GameSums()).means()
        | ({"num_void": float(num_void), "void_share": share} if num_void else {}),
        games=tuple(records[index] for index in first),
        examples={label: records[index] for label, index in chosen.items()},
    )


def _gather(value: Any, world: World | None) -> list[Any]:
    """Every rank's value; only this rank's without `world`."""
    return [value] if world is None else gather_objects(value, world)
