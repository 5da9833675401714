"""Which players sit in which game: self-play, evaluation, scripted games and teachers' games.

Every random draw of a game has a name (run seed, purpose, step, instance, episode), so any single
game can be played again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dialop.game import Instance
from dialop.specs import nearest
from selfplay.chat.rendering import Rendering
from selfplay.config import COMPARED_IN_GROUPS, Config, GameConfig, RolloutConfig
from selfplay.config.player_spec import POOL, SCRIPTED, SELF, Spec, parse_shares, parse_spec
from selfplay.data.seeds import named_seed, pick
from selfplay.errors import SettingsError
from selfplay.rollout.branches import branching_of
from selfplay.rollout.episode import GameSetup
from selfplay.rollout.players import Player, PolicyPlayer, ScriptedPartner, Teacher

MAX_WEIGHT = 1e6  # of a teacher in the mixture
MakePlayer = Callable[[tuple[object, ...], int], Player]


@dataclass(frozen=True, slots=True)
class Partner:
    """Who plays with the policy. `make_player(names, seat)` makes the player; `names` seed the
    game's random draws.

    Without `make_player` the policy plays with itself.
    """

    name: str
    make_player: MakePlayer | None = None


SELF_PLAY = Partner(SELF)
PARTNER_SEED = "guests"  # an older word for partners; it keeps the draws of old runs


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

    The policy has all seats, or with a partner those of `policy_seats_in`. `partners` are (partner,
    share of the instances). All games of an instance have the same partner, so the games of a group
    differ only in what was sampled.
    """
    setups = []
    chosen = _choose_partners(partners, instances, step=step, seed=seed)
    for instance, partner in zip(instances, chosen, strict=True):
        new_game = game.kit.new_game(instance, game.options)
        for index in range(rollout.group_size):
            names = (seed, "play", step, instance.key, index)
            players = seat_players(
                names, partner, index=index, game=game, rollout=rollout, rendering=rendering
            )
            branching = branching_of(rollout, names)
            setups.append(GameSetup(new_game, players, instance.key, index, branching))
    return setups


def _choose_partners(
    partners: Sequence[tuple[Partner, float]],
    instances: Sequence[Instance],
    *,
    step: int,
    seed: int,
) -> list[Partner]:
    """A partner for each instance, by systematic sampling: a partner's number of instances is its
    share of them, rounded up or down, and on average exactly its share."""
    if not instances:
        return []
    offset = named_seed(seed, PARTNER_SEED, step, instances[0].key) / 2**63
    points = [(number + offset) / len(instances) for number in range(len(instances))]
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
    """One game of each instance. With a partner the policy has `seat`, or the seats in turn."""
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
    """One game of each instance between scripted players: `spec` in each seat that it can play and
    the game's own players in the others, or `spec` in seat 0 and `other` in seat 1."""
    seated = game.kit.seated(spec) if other is None else (spec, other)
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
    """One game of each instance between teachers. Each seat's teacher is drawn from those in the
    warm start's mixture that can play it. If none can, the game chooses the seat's player."""
    mixture = list(zip(*teacher_mixture(teachers, game), strict=True))
    kit, setups = game.kit, []
    for instance in instances:
        players: list[Player] = []
        for seat in range(len(kit.ROLES)):
            able = [entry for entry in mixture if kit.seated(entry[0])[seat] == entry[0]]
            specs, weights = zip(*(able or mixture), strict=True)
            spec = pick(specs, weights, named_seed(seed, "teacher", instance.key, seat))
            spec = kit.seated(spec)[seat]
            script = kit.make_script(
                spec, seed=named_seed(seed, "teacher's words", instance.key, seat)
            )
            # Only seats that the policy can have are imitated.
            imitated = seat in kit.POLICY_SEATS
            name = f"{SCRIPTED}:{spec}"
            players.append(
                Teacher(script, rendering, name=name)
                if imitated
                else ScriptedPartner(script, name=name)
            )
        setups.append(_game_setup(instance, tuple(players), game))
    return setups


def check_players(config: Config) -> None:
    """Raise SettingsError for a teacher or scripted partner that does not exist, and for seats or
    groups that do not fit the game."""
    warm = config.warm_start
    if warm.num_games or warm.auxiliary_weight or config.model.scratch:
        teacher_mixture(warm.teachers, config.game)
    if warm.first_games:
        teacher_mixture(warm.first_teachers, config.game, key="warm_start.first_teachers")
    rollout, game = config.rollout, config.game
    seats = chosen_seats(game, rollout)
    specs = [
        read_spec(spec.text, game, what="rollout.partners", seats=seats)
        for spec, _ in parse_shares(rollout.partners)
    ]
    if seats is None and any(spec.kind != SELF for spec in specs):
        _check_groups(
            config.rollout.group_size, config.algorithm.method, num_seats=len(game.kit.ROLES)
        )


def _check_groups(size: int, method: str, *, num_seats: int) -> None:
    """Raise SettingsError unless the policy can have each seat in equally many games of a group."""
    most = "half" if num_seats == 2 else f"1 of {num_seats}"
    if size % num_seats:
        rule = "even" if num_seats == 2 else f"a multiple of {num_seats}"
        raise SettingsError(
            f"rollout.group_size must be {rule} with another partner than self (the policy plays "
            f"each seat in {most} of the games), got {size}; nearest: "
            f"{size + num_seats - size % num_seats}"
        )
    if method in COMPARED_IN_GROUPS and size < 2 * num_seats:
        raise SettingsError(
            f"rollout.group_size must be at least {2 * num_seats} for {method} with another "
            f"partner than self ({most} of the games form the group of each seat), got {size}; "
            f"nearest: {2 * num_seats}"
        )


def chosen_seats(game: GameConfig, rollout: RolloutConfig) -> tuple[int, ...] | None:
    """The seats that the policy has in every game, fewer than all; None if it can have all.

    Raises SettingsError for roles that the game lacks or that the policy cannot have.
    """
    kit = game.kit
    able = [kit.ROLES[seat] for seat in kit.POLICY_SEATS]
    for role in rollout.policy_seats:
        if role not in able:
            raise SettingsError(
                f"rollout.policy_seats must be roles that the policy can play in {game.name} "
                f"({', '.join(dict.fromkeys(able))}), got {role}{nearest(role, able)}"
            )
    if rollout.policy_seats:
        seats = tuple(s for s in kit.POLICY_SEATS if kit.ROLES[s] in rollout.policy_seats)
        return None if len(seats) == len(kit.ROLES) else seats
    return None if len(able) == len(kit.ROLES) else kit.POLICY_SEATS


def read_spec(
    text: str, game: GameConfig, *, what: str, seats: tuple[int, ...] | None = None
) -> Spec:
    """Parse a partner spec. `seats` are those that the policy always has; None means those that the
    game allows it.

    Raises SettingsError, which begins with `what`, for an invalid spec, a script that the game does
    not have, or a partner that can play none of the other seats.
    """
    kit = game.kit
    if seats is None and len(kit.POLICY_SEATS) < len(kit.ROLES):
        seats = kit.POLICY_SEATS
    try:
        spec = parse_spec(text, kit.SCRIPT_NAMES)
        if spec.kind == SCRIPTED:
            kit.make_script(spec.argument, seed=0)
    except ValueError as error:
        raise SettingsError(f"{what}: {error}") from None
    if seats is None:
        return spec
    others = [seat for seat in range(len(kit.ROLES)) if seat not in seats]
    if spec.kind == SELF:
        names = [f"{seat} ({kit.ROLES[seat]})" for seat in others]
        raise SettingsError(
            f"{what} must not be the policy in {game.name} for seat {', '.join(names)}, which it "
            f"does not play, got {text!r}"
        )
    limited = not set(others) & set(kit.POLICY_SEATS)
    if spec.kind == POOL and limited:
        raise SettingsError(
            f"{what} must not be the policy in {game.name}, where it can have only "
            f"seat {', '.join(map(str, kit.POLICY_SEATS))}, got {text!r}"
        )
    if spec.kind == SCRIPTED:
        seated = kit.seated(spec.argument)
        if all(seated[seat] != spec.argument for seat in others):
            raise SettingsError(
                f"{what}: partner {text!r} cannot have seat {', '.join(map(str, others))} of "
                f"{game.name}"
            )
    return spec


def teacher_mixture(
    teachers: Sequence[str], game: GameConfig, *, key: str = "warm_start.teachers"
) -> tuple[list[str], list[float]]:
    """Specs and weights of "spec*weight" teachers; the weight defaults to 1.

    Raises SettingsError, which names `key`, for a teacher that does not exist or cannot teach.
    """
    kit = game.kit
    specs, weights = [], []
    for entry in teachers:
        spec, _, weight = entry.partition("*")
        try:
            weights.append(float(weight) if weight else 1.0)
        except ValueError:
            raise SettingsError(
                f"{key}: the weight in {entry!r} must be a number, as in 'solo*0.5'"
            ) from None
        if not 0 <= weights[-1] <= MAX_WEIGHT:
            raise SettingsError(f"{key}: the weight in {entry!r} must be from 0 to {MAX_WEIGHT:g}")
        try:
            kit.make_script(spec, seed=0)
        except ValueError as error:
            raise SettingsError(f"{key}: {error}") from None
        specs.append(spec)
    if sum(weights) <= 0:
        raise SettingsError(f"{key} needs one positive weight, got {list(teachers)}")
    if not any(kit.seated(spec)[seat] == spec for spec in specs for seat in kit.POLICY_SEATS):
        seats = ", ".join(map(str, kit.POLICY_SEATS))
        raise SettingsError(f"{key} must play seat {seats}, the policy's, got {list(teachers)}")
    return specs, weights


def policy_seats_in(
    game: GameConfig, rollout: RolloutConfig, *, partner: Partner, index: int
) -> tuple[int, ...]:
    """The seats of the policy in the game `index` of its group.

    In self-play these are all seats. With a partner they are those of `rollout.policy_seats` or
    those that the game allows the policy; if it allows every seat, one seat a game, in turn.
    """
    num_seats = len(game.kit.ROLES)
    chosen = chosen_seats(game, rollout)
    if partner.make_player is None:
        return tuple(range(num_seats))
    return (index % num_seats,) if chosen is None else chosen


def seat_players(
    names: tuple[object, ...],
    partner: Partner,
    *,
    index: int,
    game: GameConfig,
    rollout: RolloutConfig,
    rendering: Rendering,
) -> tuple[Player, ...]:
    """The player of each seat: the policy where `policy_seats_in` says so, else the partner."""
    seats = policy_seats_in(game, rollout, partner=partner, index=index)
    return tuple(
        policy_player(names, rollout, rendering)
        if partner.make_player is None or seat in seats
        else partner.make_player(names, seat)
        for seat in range(len(game.kit.ROLES))
    )


def policy_player(
    names: tuple[object, ...], rollout: RolloutConfig, rendering: Rendering
) -> PolicyPlayer:
    """The policy in training; `names` seed the game's random draws."""
    return PolicyPlayer(
        rendering,
        seed_names=names,
        max_new_tokens=rollout.max_new_tokens,
        max_game_tokens=rollout.max_game_tokens,
    )


def scripted_partner(
    spec: str, names: tuple[object, ...], seat: int, game: GameConfig
) -> ScriptedPartner:
    """A scripted player such as "honest:tell=top", seeded by game and seat. For a seat that it
    cannot play, the game chooses another scripted player."""
    kit = game.kit
    spec = kit.seated(spec)[seat]
    script = kit.make_script(spec, seed=named_seed(*names, "partner", seat))
    return ScriptedPartner(script, name=f"{SCRIPTED}:{spec}")


def _game_setup(instance: Instance, players: tuple[Player, ...], game: GameConfig) -> GameSetup:
    new_game = game.kit.new_game(instance, game.options)
    return GameSetup(game=new_game, players=players, instance=instance.key, index=0)
