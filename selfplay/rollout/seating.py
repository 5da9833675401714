"""The players of each seat and game: self-play, evaluation and scripted games.

Every random draw of a game has a name (run seed, purpose, step, instance, episode), so any single
game can be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from dialop.game import Instance
from selfplay.chat.rendering import Rendering
from selfplay.config import GameConfig, RolloutConfig
from selfplay.config.player_spec import SCRIPTED, SELF
from selfplay.config.plugins import function_of
from selfplay.data.seeds import named_seed
from selfplay.rollout.episode import GameSetup
from selfplay.rollout.players import Player, PolicyPlayer, ScriptedPartner
from selfplay.rollout.seat_rules import chosen_seats

MakePlayer = Callable[[tuple[object, ...], int], Player]


@dataclass(frozen=True, slots=True)
class Partner:
    """The policy's partner. `make_player(names, seat)` makes the player; `names` seed the game's
    random draws. It takes `seats`, or if empty those that the policy does not have.

    Without `make_player` the policy plays with itself.
    """

    name: str
    make_player: MakePlayer | None = None
    seats: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Seated:
    """The policy of a seat: its name, its exact texts, and the model of its requests, "" if its
    engine runs the games."""

    name: str
    rendering: Rendering
    model: str = ""


Cast = Sequence[Seated]  # of all seats, in order


def whole_cast(rendering: Rendering, game: GameConfig) -> Cast:
    """A single policy in every seat.

    Its requests name no model: its engine runs the games.
    """
    return [Seated("", rendering)] * len(game.kit.ROLES)


def pieces_of(cast: Cast) -> Callable[[Sequence[int], str], list[str]]:
    """The text of each token that the policy of a name sampled."""
    renderings = {seated.name: seated.rendering for seated in cast}
    return lambda ids, policy: renderings[policy].pieces(ids)


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
    cast: Cast,
) -> list[GameSetup]:
    """`rollout.group_size` games of each instance.

    The policies of `cast` have all seats, or with a partner those of `policy_seats_in`. `partners`
    are (partner, share of the instances). All games of an instance have the same partner, so the
    games of a group differ only in the sampled tokens.
    """
    setups = []
    seated = partial(seat_players, game=game, rollout=rollout, cast=cast)
    chosen = _choose_partners(partners, instances, step=step, seed=seed)
    for instance, partner in zip(instances, chosen, strict=True):
        new_game = game.kit.new_game(instance, game.options)
        for index in range(rollout.group_size):
            names = (seed, "play", step, instance.key, index)
            players = seated(names, partner, index=index)
            setups.append(GameSetup(new_game, players, instance.key, index, partner.name))
    return setups


def seat_players(
    names: tuple[object, ...],
    partner: Partner,
    *,
    index: int,
    game: GameConfig,
    rollout: RolloutConfig,
    cast: Cast,
) -> tuple[Player, ...]:
    """The player of each seat: its policy in the seats of `policy_seats_in`, else the partner."""
    seats = policy_seats_in(game, rollout, partner=partner, index=index)
    return tuple(
        policy_player(names, rollout, cast[seat])
        if partner.make_player is None or seat in seats
        else partner.make_player(names, seat)
        for seat in range(len(game.kit.ROLES))
    )


def policy_seats_in(
    game: GameConfig, rollout: RolloutConfig, *, partner: Partner, index: int
) -> tuple[int, ...]:
    """The seats of the policy in game number `index` of its instance.

    In self-play these are all seats. With a partner they are the seats that it does not take: those
    of `rollout.policy_seats`, else those the game allows the policy; if it allows all, one seat per
    game, in turn.
    """
    num_seats = len(game.kit.ROLES)
    if partner.make_player is None:
        return tuple(range(num_seats))
    if partner.seats:
        return tuple(seat for seat in range(num_seats) if seat not in partner.seats)
    chosen = chosen_seats(game, rollout)
    return (index % num_seats,) if chosen is None else chosen


def seat_in_turn(number: int, num_seats: int) -> int:
    """The seat of a player that changes seats from game to game: 0, 1, 1, 0 of two seats, repeated.
    If the starting seat alternates over the instances, the player has each seat as often when it
    starts as when another seat does."""
    return (number + number // num_seats) % num_seats


def policy_player(
    names: tuple[object, ...], rollout: RolloutConfig, seated: Seated
) -> PolicyPlayer:
    """A `rollout.player` that plays for a policy in training; `names` seed the game's draws."""
    named = {"model": seated.model} if seated.model else {}  # a custom player may take no model
    player: PolicyPlayer = function_of("rollout.player", rollout.player)(
        seated.rendering,
        seed_names=names,
        max_new_tokens=rollout.max_new_tokens,
        max_game_tokens=rollout.max_game_tokens,
        **named,
    )
    player.transcript.policy = seated.name
    return player


def _choose_partners(
    partners: Sequence[tuple[Partner, float]],
    instances: Sequence[Instance],
    *,
    step: int,
    seed: int,
) -> list[Partner]:
    """A partner for each instance, by systematic sampling: the number of a partner's instances is
    its share of them, rounded up or down, and equals its share on average."""
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
    cast: Cast,
    seat: int | None = None,
) -> list[GameSetup]:
    """One game of each instance. With a partner the policies have seat `seat`, or the seats of
    `seat_in_turn` if it is None."""
    setups = []
    for number, instance in enumerate(instances):
        names = ("evaluation", instance.key)
        index = seat_in_turn(number, len(game.kit.ROLES)) if seat is None else seat
        players = seat_players(names, partner, index=index, game=game, rollout=rollout, cast=cast)
        setups.append(game_setup(instance, players, game))
    return setups


def scripted_games(
    instances: Sequence[Instance], *, spec: str, game: GameConfig, other: str | None = None
) -> list[GameSetup]:
    """One game of each instance between scripted players: `spec` in each seat that it can play and
    the game's choice in the others, or `spec` in seat 0 and `other` in seat 1."""
    seated = game.kit.seated(spec) if other is None else (spec, other)
    return [
        game_setup(
            instance,
            tuple(
                scripted_partner(each, ("evaluation", instance.key), seat, game)
                for seat, each in enumerate(seated)
            ),
            game,
        )
        for instance in instances
    ]


def scripted_partner(
    spec: str, names: tuple[object, ...], seat: int, game: GameConfig
) -> ScriptedPartner:
    """A scripted player such as "honest:tell=top", seeded by game and seat. In a seat that it
    cannot play, the game chooses another scripted player."""
    kit = game.kit
    spec = kit.seated(spec)[seat]
    script = kit.make_script(spec, seed=named_seed(*names, "partner", seat))
    return ScriptedPartner(script, name=f"{SCRIPTED}:{spec}")


def game_setup(instance: Instance, players: tuple[Player, ...], game: GameConfig) -> GameSetup:
    new_game = game.kit.new_game(instance, game.options)
    return GameSetup(game=new_game, players=players, instance=instance.key, index=0)
