"""Which players sit in which game: self-play, evaluation, scripted games and teachers' games.

Every random draw of a game has a name (run seed, purpose, step, instance, episode), so any single
game can be played again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dialop.game import Instance
from selfplay.chat.rendering import Rendering
from selfplay.config import Config, GameConfig, RolloutConfig
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
    """Who plays with the policy. `sit(names of the game's draws, seat)` makes the player.

    Without `sit` the policy plays with itself. `alone` means one game at a time (a person).
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
    game: GameConfig,
    rollout: RolloutConfig,
    seed: int,
    rendering: Rendering,
) -> list[GameSetup]:
    """`rollout.group_size` games of each instance.

    The policy has both seats, or with a partner each seat half the time. `partners` are (partner,
    share of the instances). An instance meets one partner, so the games of a group differ only in
    what was sampled.
    """
    setups = []
    chosen = _choose_partners(partners, instances, step=step, seed=seed)
    for instance, partner in zip(instances, chosen, strict=True):
        new_game = kit_of(game).new_game(instance, game)
        for index in range(rollout.group_size):
            names = (seed, "play", step, instance.key, index)
            players = seat_players(
                names, partner, index=index, game=game, rollout=rollout, rendering=rendering
            )
            branching = branching_of(rollout, names)
            setups.append(GameSetup(new_game.clone(), players, instance.key, index, branching))
    return setups


def _choose_partners(
    partners: Sequence[tuple[Partner, float]],
    instances: Sequence[Instance],
    *,
    step: int,
    seed: int,
) -> list[Partner]:
    """A partner for each instance, by systematic sampling: the numbers of instances are the shares
    rounded up or down, and equal to them on average."""
    if not instances:
        return []
    offset = named_seed(seed, "guests", step, instances[0].key) / 2**63
    points = [(place + offset) / len(instances) for place in range(len(instances))]
    return [_partner_at(partners, point) for point in points]


def _partner_at(partners: Sequence[tuple[Partner, float]], point: float) -> Partner:
    """The partner whose interval contains the point when the shares are laid out from 0 to 1."""
    for partner, share in partners:
        point -= share
        if point < 0:
            return partner
    return max(partners, key=lambda pair: pair[1])[0]  # the shares sum to slightly less than 1


def evaluation_games(
    instances: Sequence[Instance],
    *,
    partner: Partner,
    game: GameConfig,
    rollout: RolloutConfig,
    rendering: Rendering,
    seat: int | None = None,
) -> list[GameSetup]:
    """One game of each instance. With a partner the policy has `seat`, or seats 0 and 1 in turn."""
    setups = []
    for number, instance in enumerate(instances):
        names = ("evaluation", instance.key)
        index = number if seat is None else seat
        players = seat_players(
            names, partner, index=index, game=game, rollout=rollout, rendering=rendering
        )
        setups.append(_game_setup(instance, players, game))
    return setups


def scripted_games(
    instances: Sequence[Instance], *, spec: str, game: GameConfig, other: str | None = None
) -> list[GameSetup]:
    """One game of each instance between scripted players: `spec` in both seats, or `spec` in seat 0
    and `other` in seat 1."""
    seated = kit_of(game).seated(spec) if other is None else (spec, other)
    return [
        _game_setup(
            instance,
            tuple(
                scripted_partner(each, ("evaluation", instance.key), seat, game)
                for seat, each in enumerate(seated)
            ),
            game,
        )
        for instance in instances
    ]


def teacher_games(
    instances: Sequence[Instance],
    *,
    teachers: Sequence[str],
    game: GameConfig,
    seed: int,
    rendering: Rendering,
) -> list[GameSetup]:
    """One game of each instance between two teachers, each drawn from the warm start's mixture."""
    specs, weights = teacher_mixture(teachers, game)
    kit, setups = kit_of(game), []
    for instance in instances:
        players: list[Player] = []
        for seat in (0, 1):
            spec = pick(specs, weights, named_seed(seed, "teacher", instance.key, seat))
            spec = kit.seated(spec)[seat]
            script = kit.make_script(
                spec, seed=named_seed(seed, "teacher's words", instance.key, seat)
            )
            # Only seats that the policy can have are imitated.
            imitated = kit.LEARNER_SEAT in (None, seat)
            name = f"{SCRIPTED}:{spec}"
            players.append(
                Teacher(script, rendering, name=name)
                if imitated
                else ScriptedPartner(script, name=name)
            )
        setups.append(_game_setup(instance, tuple(players), game))
    return setups


def check_players(config: Config) -> None:
    """Raises SettingsError for a teacher or scripted partner that does not exist."""
    if config.warm_start.num_games or config.warm_start.auxiliary_weight or config.model.scratch:
        teacher_mixture(config.warm_start.teachers, config.game)
    for spec, _ in parse_shares(config.rollout.partners):
        read_spec(spec.text, config.game, what="rollout.partners")


def read_spec(text: str, game: GameConfig, *, what: str) -> Spec:
    """Parse a partner spec. Raises SettingsError, which begins with `what`, for an invalid spec, a
    script that the game does not have, or a partner that cannot have the other seat."""
    kit = kit_of(game)
    try:
        spec = parse_spec(text, kit.SCRIPT_NAMES)
        if spec.kind == SCRIPTED:
            kit.make_script(spec.argument, seed=0)
    except ValueError as error:
        raise SettingsError(f"{what}: {error}") from None
    seat = kit.LEARNER_SEAT
    if seat is not None and spec.kind in (SELF, POOL):
        raise SettingsError(
            f"{what} must not be the policy in {game.name}, where it can have only "
            f"seat {seat}, got {text!r}"
        )
    if seat is not None and spec.kind == SCRIPTED:
        other = 1 - seat
        if kit.seated(spec.argument)[other] != spec.argument:
            raise SettingsError(f"{what}: partner {text!r} cannot have seat {other} of {game.name}")
    return spec


def teacher_mixture(teachers: Sequence[str], game: GameConfig) -> tuple[list[str], list[float]]:
    """Specs and weights of "spec*weight" teachers; the weight defaults to 1."""
    kit = kit_of(game)
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
    names: tuple[object, ...],
    partner: Partner,
    *,
    index: int,
    game: GameConfig,
    rollout: RolloutConfig,
    rendering: Rendering,
) -> tuple[Player, ...]:
    """Two players. Without a partner the policy has both seats. With one it has seat `index % 2`,
    or the only seat that the game allows it."""
    fixed = kit_of(game).LEARNER_SEAT
    learner_seat = index % 2 if fixed is None else fixed
    return tuple(
        _policy_player(names, rollout, rendering)
        if partner.sit is None or seat == learner_seat
        else partner.sit(names, seat)
        for seat in (0, 1)
    )


def _policy_player(
    names: tuple[object, ...], rollout: RolloutConfig, rendering: Rendering
) -> PolicyPlayer:
    return PolicyPlayer(
        rendering,
        seed_names=names,
        max_new_tokens=rollout.max_new_tokens,
        max_game_tokens=rollout.max_game_tokens,
    )


def scripted_partner(
    spec: str, names: tuple[object, ...], seat: int, game: GameConfig
) -> ScriptedPartner:
    """A scripted player such as "honest:tell=top", its draws named by game and seat."""
    script = kit_of(game).make_script(spec, seed=named_seed(*names, "partner", seat))
    return ScriptedPartner(script, name=f"{SCRIPTED}:{spec}")


def _game_setup(instance: Instance, players: tuple[Player, ...], game: GameConfig) -> GameSetup:
    new_game = kit_of(game).new_game(instance, game)
    return GameSetup(game=new_game, players=players, instance=instance.key, index=0)
