"""The seats that the policy can play, and the checks of players and partners before a run."""

from __future__ import annotations

from collections.abc import Sequence

from dialop.kit import Kit
from dialop.specs import nearest
from selfplay.config import COMPARED_IN_GROUPS, Config, GameConfig, RolloutConfig
from selfplay.config.player_spec import (
    POOL,
    SCRIPTED,
    SELF,
    Spec,
    parse_shares,
    parse_spec,
)
from selfplay.errors import SettingsError


def chosen_seats(game: GameConfig, rollout: RolloutConfig) -> tuple[int, ...] | None:
    """The seats that the policy has in every game if they are fewer than all; None if it can have
    all. They come from `rollout.policy_seats`, else from the game's `POLICY_SEATS`.

    Raises SettingsError for roles that the game lacks.
    """
    kit = game.kit
    for role in rollout.policy_seats:
        if role not in kit.ROLES:
            raise SettingsError(
                f"rollout.policy_seats must be roles of {game.name} "
                f"({', '.join(dict.fromkeys(kit.ROLES))}), got {role}{nearest(role, kit.ROLES)}"
            )
    named = tuple(s for s, role in enumerate(kit.ROLES) if role in rollout.policy_seats)
    seats = named or kit.POLICY_SEATS
    return None if len(seats) == len(kit.ROLES) else seats


def policy_of_seat(config: Config) -> tuple[str, ...]:
    """The name of the policy that has each seat; "" for a single policy.

    Raises SettingsError for unknown roles, and for a seat without a policy or with several.
    """
    game, roles = config.game.name, config.game.kit.ROLES
    if not config.policies:
        return ("",) * len(roles)
    owners: list[list[str]] = [[] for _ in roles]
    for name, of in config.policies.items():
        for chosen in of.seats or (name,):
            seats = [s for s, role in enumerate(roles) if chosen in (s, role)]
            if not seats:
                known = ", ".join(dict.fromkeys(roles))
                raise SettingsError(
                    f"policies.{name}.seats must be roles of {game} ({known}) or numbers of "
                    f"seats below {len(roles)}, got {chosen}{nearest(str(chosen), roles)}"
                )
            for seat in seats:
                owners[seat].append(name)
    for seat, (role, names) in enumerate(zip(roles, owners, strict=True)):
        if len(names) != 1:
            raise SettingsError(
                f"policies must give each seat of {game} to one policy, got "
                f"{' and '.join(names) or 'none'} for seat {seat} ({role})"
            )
    return tuple(names[0] for names in owners)


def partner_seats(game: GameConfig, rollout: RolloutConfig) -> list[int]:
    """The seats that a partner may have: those that the policy lacks, or all in turn."""
    chosen = chosen_seats(game, rollout) or ()
    return [seat for seat in range(len(game.kit.ROLES)) if seat not in chosen]


def able_seats(game: GameConfig, rollout: RolloutConfig) -> list[int]:
    """The seats that the policy has learned: the game's, and those set by the run."""
    kit = game.kit
    roles = enumerate(kit.ROLES)
    return [s for s, role in roles if s in kit.POLICY_SEATS or role in rollout.policy_seats]


def who_plays(config: Config) -> str | None:
    """Who has which role, in words: with several policies which seats each has, else with each of
    `rollout.partners`; None if all roles are equal or the policy plays only with itself."""
    game, rollout = config.game, config.rollout
    if config.policies:
        seats = zip(game.kit.ROLES, policy_of_seat(config), strict=True)
        return ", ".join(f"seat {s} ({role}) policy {name}" for s, (role, name) in enumerate(seats))
    kit, chosen = game.kit, chosen_seats(game, rollout)
    specs = [spec for spec, _ in parse_shares(rollout.partners)]
    everywhere = tuple(range(len(kit.ROLES)))
    if len(set(kit.ROLES)) == 1 or all(spec.kind == SELF for spec in specs):
        return None
    seatings = []
    for spec in specs:
        others = [spec.text] * len(kit.ROLES)
        if spec.kind == SCRIPTED:
            others = [f"{SCRIPTED}:{name}" for name in kit.seated(spec.argument)]
        in_turn = [chosen] if chosen else [(seat,) for seat in everywhere]
        for own in [everywhere] if spec.kind == SELF else in_turn:
            players = ("policy" if seat in own else others[seat] for seat in everywhere)
            seatings.append(" + ".join(map(" ".join, zip(kit.ROLES, players, strict=True))))
    held_out = "" if chosen else "; in held-out games the policy has all roles"
    return f"{', '.join(seatings)}{held_out}"


def read_spec(text: str, game: GameConfig, rollout: RolloutConfig, *, what: str) -> Spec:
    """Parse a partner spec.

    Raises SettingsError, which starts with `what`, for an invalid spec, a script that the game does
    not have, or a partner that can play none of the other seats.
    """
    kit, seats = game.kit, chosen_seats(game, rollout)
    try:
        spec = parse_spec(text, kit.SCRIPT_NAMES)
        if spec.kind == SCRIPTED:
            kit.make_script(spec.argument, seed=0)
    except ValueError as error:
        raise SettingsError(f"{what}: {error}") from None
    if seats is None:
        return spec
    others = [seat for seat in range(len(kit.ROLES)) if seat not in seats]
    limited = not set(others) & set(kit.POLICY_SEATS)
    names = ", ".join(f"{seat} ({kit.ROLES[seat]})" for seat in others)
    if spec.kind == SELF or (spec.kind == POOL and limited):
        such_as = f", {what}=[{able}] the others" if (able := _script_for(kit, others)) else ""
        raise SettingsError(
            f"{what} must not be the policy in {game.name} for seat {names}, which it does not "
            f"play, got {text!r}; rollout.policy_seats sets the roles it plays{such_as}"
        )
    if spec.kind == SCRIPTED:
        seated = kit.seated(spec.argument)
        if all(seated[seat] != spec.argument for seat in others):
            instead = f"; nearest is {able}" if (able := _script_for(kit, others)) else ""
            raise SettingsError(
                f"{what}: partner {text!r} cannot play seat {names} of {game.name}{instead}"
            )
    return spec


def _script_for(kit: Kit, seats: Sequence[int]) -> str:
    """The first scripted player that can play the first of these seats, "" if none can."""
    able = (name for name in kit.SCRIPT_NAMES if kit.seated(name)[seats[0]] == name)
    return next((f"{SCRIPTED}:{name}" for name in able), "")


def check_players(config: Config) -> None:
    """Raise SettingsError for a scripted partner that does not exist, and for seats or groups that
    do not fit the game."""
    rollout, game = config.rollout, config.game
    _check_policies(config)
    seats = chosen_seats(game, rollout)
    specs = [
        read_spec(spec.text, game, rollout, what="rollout.partners")
        for spec, _ in parse_shares(rollout.partners)
    ]
    if seats is None and any(spec.kind != SELF for spec in specs):
        _check_groups(
            config.rollout.group_size, config.algorithm.advantage, num_seats=len(game.kit.ROLES)
        )


def _check_policies(config: Config) -> None:
    """Raise SettingsError for a seat without one policy, and for partners that cannot play for
    theirs."""
    owners, kit = policy_of_seat(config), config.game.kit
    for name, of in config.policies.items():
        what, seats = (
            f"policies.{name}.partners",
            [s for s, own in enumerate(owners) if own == name],
        )
        for spec in (spec for spec, _ in parse_shares(of.partners) if spec.kind != SELF):
            if len(seats) == len(owners):
                raise SettingsError(
                    f"{what} must be [self] for a policy that has all seats, got {spec.text}: no "
                    "policy would train in such a game"
                )
            read_spec(spec.text, config.game, config.rollout, what=what)
            seated = kit.seated(spec.argument) if spec.kind == SCRIPTED else ()
            if seated and all(seated[seat] != spec.argument for seat in seats):
                roles = ", ".join(f"{seat} ({kit.ROLES[seat]})" for seat in seats)
                raise SettingsError(
                    f"{what}: partner {spec.text!r} cannot play seat {roles} of {config.game.name}"
                )


def _check_groups(size: int, method: str, *, num_seats: int) -> None:
    """Raise SettingsError unless the policy can have each seat in as many games of an instance."""
    most = "half" if num_seats == 2 else f"1 of {num_seats}"
    if size % num_seats:
        rule = "even" if num_seats == 2 else f"a multiple of {num_seats}"
        raise SettingsError(
            f"rollout.group_size must be {rule} with a partner other than self (the policy plays "
            f"each seat in {most} of the games), got {size}; nearest: "
            f"{size + num_seats - size % num_seats}"
        )
    if method in COMPARED_IN_GROUPS and size < 2 * num_seats:
        raise SettingsError(
            f"rollout.group_size must be at least {2 * num_seats} for {method} with a partner "
            f"other than self ({most} of the games form the group of each seat), got {size}; "
            f"nearest: {2 * num_seats}"
        )
