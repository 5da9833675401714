"""Who sits where: the tables of a self-play step, of an evaluation and of the teachers' games.

Every table's draws are named (run seed, purpose, step, instance, episode), so any single game can
be played again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dialop.game import Instance
from selfplay.branch import branching_of
from selfplay.chat import Rendering
from selfplay.config import Config
from selfplay.data import named_seed
from selfplay.games import kit_of
from selfplay.play import Table
from selfplay.players import Player, PolicyPlayer, ScriptedPartner, Teacher
from selfplay.settings import SettingsError

SCRIPTED = "scripted:"


def self_play_tables(
    instances: Sequence[Instance], *, step: int, config: Config, rendering: Rendering
) -> list[Table]:
    """G episodes of each instance: the policy in both seats, or in each half the time beside a
    partner."""
    tables = []
    for instance in instances:
        for index in range(config.rollout.group_size):
            names = (config.seed, "play", step, instance.key, index)
            beside = config.rollout.train_seats == "one"
            players = seat_players(
                names,
                learner_seat=_learner_seat(config, index, beside=beside),
                partner=config.rollout.partner,
                config=config,
                rendering=rendering,
            )
            table = _table(instance, players, index, config)
            tables.append(replace(table, branching=branching_of(config, names)))
    return tables


def evaluation_tables(
    instances: Sequence[Instance], *, partner: str, config: Config, rendering: Rendering
) -> list[Table]:
    """One game an instance; beside a partner, not "self", the policy has seat 0 and 1 by turns."""
    tables = []
    for index, instance in enumerate(instances):
        players = seat_players(
            ("evaluation", instance.key),
            learner_seat=_learner_seat(config, index, beside=partner != "self"),
            partner=partner,
            config=config,
            rendering=rendering,
        )
        tables.append(_table(instance, players, 0, config))
    return tables


def scripted_tables(instances: Sequence[Instance], *, spec: str, config: Config) -> list[Table]:
    """One game an instance between two scripted players of one kind, to compare figures with."""
    return [
        _table(
            instance,
            tuple(
                _partner(SCRIPTED + each, ("evaluation", instance.key), seat, config)
                for seat, each in enumerate(kit_of(config.game).seated(spec))
            ),
            0,
            config,
        )
        for instance in instances
    ]


def teacher_tables(
    instances: Sequence[Instance], *, config: Config, rendering: Rendering
) -> list[Table]:
    """One game an instance between two teachers, each drawn from the warm start's mixture."""
    specs, weights = teacher_mixture(config)
    kit, tables = kit_of(config.game), []
    for instance in instances:
        players: list[Player] = []
        for seat in (0, 1):
            spec = _pick(specs, weights, named_seed(config.seed, "teacher", instance.key, seat))
            spec = kit.seated(spec)[seat]
            script = kit.make_script(
                spec, seed=named_seed(config.seed, "teacher's words", instance.key, seat)
            )
            # A seat that the policy never has is no one's to imitate.
            imitated = kit.LEARNER_SEAT in (None, seat)
            name = SCRIPTED + spec
            players.append(
                Teacher(script, rendering, name=name)
                if imitated
                else ScriptedPartner(script, name=name)
            )
        tables.append(_table(instance, tuple(players), 0, config))
    return tables


def check_players(config: Config) -> None:
    """Raise SettingsError for a teacher or partner that does not exist, before anything starts."""
    if config.warm_start.num_games or config.warm_start.replay or config.model.scratch:
        teacher_mixture(config)
    seat = kit_of(config.game).LEARNER_SEAT
    if seat is not None and config.rollout.train_seats == "both":
        raise SettingsError(
            f"rollout.train_seats must be one in {config.game.name}, where the policy has seat "
            f"{seat} alone, got both"
        )
    if config.rollout.train_seats == "one":
        _partner(config.rollout.partner, (), 1 - (seat or 0), config)


def usual_partner(config: Config) -> str:
    """Whom held-out games are played with: the policy itself, or in a game of unequal seats whoever
    it trains with."""
    return "self" if kit_of(config.game).LEARNER_SEAT is None else config.rollout.partner


def _learner_seat(config: Config, index: int, *, beside: bool) -> int | None:
    """The policy's seat in a table: both (None), or `beside` a partner by turns, or the only one it
    can have."""
    fixed = kit_of(config.game).LEARNER_SEAT
    if fixed is not None:
        return fixed
    return index % 2 if beside else None


def teacher_mixture(config: Config) -> tuple[list[str], list[float]]:
    """Specs and weights of the warm start's "spec*weight" teachers; the weight is 1 where none
    stands."""
    teachers, kit = config.warm_start.teachers, kit_of(config.game)
    specs, weights = [], []
    for entry in teachers:
        spec, _, weight = entry.partition("*")
        try:
            weights.append(float(weight) if weight else 1.0)
        except ValueError:
            raise SettingsError(
                f"warm_start.teachers: the weight in {entry!r} must be a number, as in 'solo*0.5'"
            ) from None
        if weights[-1] < 0:
            raise SettingsError(f"warm_start.teachers: the weight in {entry!r} must be at least 0")
        try:
            kit.make_script(spec, seed=0)
        except ValueError as error:
            raise SettingsError(f"warm_start.teachers: {error}") from None
        if kit.LEARNER_SEAT is not None and kit.seated(spec)[kit.LEARNER_SEAT] != spec:
            raise SettingsError(
                f"warm_start.teachers must play seat {kit.LEARNER_SEAT}, the policy's, got {spec!r}"
            )
        specs.append(spec)
    if sum(weights) <= 0:
        raise SettingsError(f"warm_start.teachers needs one positive weight, got {list(teachers)}")
    return specs, weights


def seat_players(
    names: tuple[object, ...],
    *,
    learner_seat: int | None,
    partner: str,
    config: Config,
    rendering: Rendering,
) -> tuple[Player, ...]:
    """Two players: the policy in both (learner_seat None) or in one seat, else `partner`."""
    return tuple(
        _policy(names, config, rendering)
        if learner_seat in (None, seat)
        else _partner(partner, names, seat, config)
        for seat in (0, 1)
    )


def _policy(names: tuple[object, ...], config: Config, rendering: Rendering) -> PolicyPlayer:
    return PolicyPlayer(
        rendering,
        seed_names=names,
        max_new_tokens=config.rollout.max_new_tokens,
        max_game_tokens=config.rollout.max_game_tokens,
    )


def _partner(partner: str, names: tuple[object, ...], seat: int, config: Config) -> ScriptedPartner:
    if not partner.startswith(SCRIPTED):
        raise SettingsError(
            f"a partner must be 'self' or 'scripted:NAME', as in 'scripted:honest', got {partner!r}"
        )
    spec, kit = partner.removeprefix(SCRIPTED), kit_of(config.game)
    try:
        seed = named_seed(*names, "partner", seat)
        script = kit.make_script(spec, seed=seed)
    except ValueError as error:
        raise SettingsError(f"partner {partner!r}: {error}") from None
    if kit.seated(spec)[seat] != spec:
        raise SettingsError(f"partner {partner!r} cannot have seat {seat} of {config.game.name}")
    return ScriptedPartner(script, name=partner)


def _table(instance: Instance, players: tuple[Player, ...], index: int, config: Config) -> Table:
    game = kit_of(config.game).new_game(instance, config.game)
    return Table(game=game, players=players, instance=instance.key, index=index)


def _pick(specs: Sequence[str], weights: Sequence[float], seed: int) -> str:
    """The spec whose share of the weights the seed's uniform draw falls into."""
    left = (seed / 2**63) * sum(weights)
    for spec, weight in zip(specs, weights, strict=True):
        left -= weight
        if left < 0:
            return spec
    return specs[-1]
