"""Who sits where: the tables of a self-play step, of an evaluation and of the teachers' games.

Every table's draws are named (run seed, purpose, step, instance, episode), so any single game can
be played again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dialop.game import Instance
from selfplay.chat.rendering import Rendering
from selfplay.config import Config
from selfplay.config.player_spec import POOL, SCRIPTED, SELF, Spec, parse_shares, parse_spec
from selfplay.config.settings import SettingsError
from selfplay.data.seeds import named_seed, pick
from selfplay.games import kit_of
from selfplay.rollout.branches import branching_of
from selfplay.rollout.episode import GameSetup
from selfplay.rollout.players import Player, PolicyPlayer, ScriptedPartner, Teacher

MAX_WEIGHT = 1e6  # of a teacher against the others
Sit = Callable[[tuple[object, ...], int], Player]


@dataclass(frozen=True, slots=True)
class Partner:
    """Who sits beside the policy: `sit(names of the table's draws, seat)` makes the player.

    Without `sit` it is the policy itself. `alone` asks for one game at a time.
    """

    name: str
    sit: Sit | None = None
    alone: bool = False


SELF_PLAY = Partner(SELF)


def self_play_games(
    instances: Sequence[Instance],
    partners: Sequence[tuple[Partner, float]] = ((SELF_PLAY, 1.0),),
    *,
    step: int,
    config: Config,
    rendering: Rendering,
) -> list[GameSetup]:
    """G episodes of each instance: the policy in both seats, or in each half the time beside a
    guest. An instance meets one guest, so that a group's games differ in nothing but what was said;
    `partners` with their shares of the instances are dealt out by the step's seed."""
    tables = []
    dealt = _deal(partners, instances, step=step, seed=config.seed)
    for instance, partner in zip(instances, dealt, strict=True):
        game = kit_of(config.game).new_game(instance, config.game)
        for index in range(config.rollout.group_size):
            names = (config.seed, "play", step, instance.key, index)
            players = seat_players(names, partner, index=index, config=config, rendering=rendering)
            branching = branching_of(config, names)
            tables.append(GameSetup(game.clone(), players, instance.key, index, branching))
    return tables


def _deal(
    partners: Sequence[tuple[Partner, float]],
    instances: Sequence[Instance],
    *,
    step: int,
    seed: int,
) -> list[Partner]:
    """A guest for each instance: systematic sampling, which is as near to the shares as whole games
    can be and right on average."""
    if not instances:
        return []
    offset = named_seed(seed, "guests", step, instances[0].key) / 2**63
    return [_at(partners, (place + offset) / len(instances)) for place in range(len(instances))]


def _at(partners: Sequence[tuple[Partner, float]], point: float) -> Partner:
    """The guest whose part of the shares, laid end to end from 0 to 1, holds the point."""
    for partner, share in partners:
        point -= share
        if point < 0:
            return partner
    return max(partners, key=lambda pair: pair[1])[0]  # shares that add up to a hair under 1


def evaluation_games(
    instances: Sequence[Instance],
    *,
    partner: Partner,
    config: Config,
    rendering: Rendering,
    seat: int | None = None,
) -> list[GameSetup]:
    """One game an instance; beside a guest the policy has this `seat`, or seat 0 and 1 by turns."""
    tables = []
    for number, instance in enumerate(instances):
        names = ("evaluation", instance.key)
        index = number if seat is None else seat
        players = seat_players(names, partner, index=index, config=config, rendering=rendering)
        tables.append(_table(instance, players, 0, config))
    return tables


def scripted_games(
    instances: Sequence[Instance], *, spec: str, config: Config, other: str | None = None
) -> list[GameSetup]:
    """One game an instance between two scripted players: of one kind, to compare figures with, or
    `spec` in seat 0 and `other` in seat 1."""
    seated = kit_of(config.game).seated(spec) if other is None else (spec, other)
    return [
        _table(
            instance,
            tuple(
                scripted_partner(each, ("evaluation", instance.key), seat, config)
                for seat, each in enumerate(seated)
            ),
            0,
            config,
        )
        for instance in instances
    ]


def teacher_games(
    instances: Sequence[Instance], *, config: Config, rendering: Rendering
) -> list[GameSetup]:
    """One game an instance between two teachers, each drawn from the warm start's mixture."""
    specs, weights = teacher_mixture(config)
    kit, tables = kit_of(config.game), []
    for instance in instances:
        players: list[Player] = []
        for seat in (0, 1):
            spec = pick(specs, weights, named_seed(config.seed, "teacher", instance.key, seat))
            spec = kit.seated(spec)[seat]
            script = kit.make_script(
                spec, seed=named_seed(config.seed, "teacher's words", instance.key, seat)
            )
            # A seat that the policy never has is no one's to imitate.
            imitated = kit.LEARNER_SEAT in (None, seat)
            name = f"{SCRIPTED}:{spec}"
            players.append(
                Teacher(script, rendering, name=name)
                if imitated
                else ScriptedPartner(script, name=name)
            )
        tables.append(_table(instance, tuple(players), 0, config))
    return tables


def check_players(config: Config) -> None:
    """Raise SettingsError for a teacher or scripted partner that does not exist, before anything
    starts."""
    if config.warm_start.num_games or config.warm_start.auxiliary_weight or config.model.scratch:
        teacher_mixture(config)
    for spec, _ in parse_shares(config.rollout.partners):
        read_spec(spec.text, config, what="rollout.partners")


def read_spec(text: str, config: Config, *, what: str) -> Spec:
    """A partner as written. Raises SettingsError that begins with `what` for one that is none, a
    script that the game does not have, or one that cannot have the seat beside the policy."""
    kit = kit_of(config.game)
    try:
        spec = parse_spec(text, kit.SCRIPT_NAMES)
        if spec.kind == SCRIPTED:
            kit.make_script(spec.argument, seed=0)
    except ValueError as error:
        raise SettingsError(f"{what}: {error}") from None
    seat = kit.LEARNER_SEAT
    if seat is not None and spec.kind in (SELF, POOL):
        raise SettingsError(
            f"{what} must be somebody else than the policy in {config.game.name}, where it has "
            f"seat {seat} alone, got {text!r}"
        )
    if seat is not None and spec.kind == SCRIPTED:
        other = 1 - seat
        if kit.seated(spec.argument)[other] != spec.argument:
            raise SettingsError(
                f"{what}: partner {text!r} cannot have seat {other} of {config.game.name}"
            )
    return spec


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
        if not 0 <= weights[-1] <= MAX_WEIGHT:
            raise SettingsError(
                f"warm_start.teachers: the weight in {entry!r} must be from 0 to {MAX_WEIGHT:g}"
            )
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
    names: tuple[object, ...], partner: Partner, *, index: int, config: Config, rendering: Rendering
) -> tuple[Player, ...]:
    """Two players: the policy in both seats by itself; beside a guest in the only seat it can have,
    or in seat 0 and 1 by turns of `index`."""
    fixed = kit_of(config.game).LEARNER_SEAT
    learner_seat = index % 2 if fixed is None else fixed
    return tuple(
        _policy(names, config, rendering)
        if partner.sit is None or seat == learner_seat
        else partner.sit(names, seat)
        for seat in (0, 1)
    )


def _policy(names: tuple[object, ...], config: Config, rendering: Rendering) -> PolicyPlayer:
    return PolicyPlayer(
        rendering,
        seed_names=names,
        max_new_tokens=config.rollout.max_new_tokens,
        max_game_tokens=config.rollout.max_game_tokens,
    )


def scripted_partner(
    spec: str, names: tuple[object, ...], seat: int, config: Config
) -> ScriptedPartner:
    """A scripted player such as "honest:tell=top", its draws named by table and seat."""
    script = kit_of(config.game).make_script(spec, seed=named_seed(*names, "partner", seat))
    return ScriptedPartner(script, name=f"{SCRIPTED}:{spec}")


def _table(
    instance: Instance, players: tuple[Player, ...], index: int, config: Config
) -> GameSetup:
    game = kit_of(config.game).new_game(instance, config.game)
    return GameSetup(game=game, players=players, instance=instance.key, index=index)
