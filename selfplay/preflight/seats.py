"""Who plays in which seat of a run, in words, and the checks of it before a run starts."""

from __future__ import annotations

from collections.abc import Set

from selfplay.config import COMPARED_IN_GROUPS, Config
from selfplay.config.player_spec import SCRIPTED, SELF, parse_shares
from selfplay.errors import SettingsError
from selfplay.partners.specs import read_spec
from selfplay.rollout.seat_rules import chosen_seats


def who_plays(config: Config) -> str | None:
    """Who has which role, in words: with several policies which seats each has, else with each of
    `rollout.partners`; None if all roles are equal or the policy plays only with itself."""
    game, rollout = config.game, config.rollout
    if config.policies:
        seats = zip(game.kit.ROLES, config.policy_of_seat, strict=True)
        words = [f"seat {s} ({role}) policy {name}" for s, (role, name) in enumerate(seats)]
        for name, own in config.policies.items():
            if rests := {step + 1 for step in range(config.steps) if not own.trains(step)}:
                words.append(f"{name} rests in steps {_ranges(rests)}")
        return ", ".join(words)
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


def _ranges(steps: Set[int], most: int = 4) -> str:
    """Steps as "1 to 15, 21", at most so many ranges of them."""
    begins = sorted(step for step in steps if step - 1 not in steps)
    ends = sorted(step for step in steps if step + 1 not in steps)
    words = [f"{a} to {b}" if a < b else f"{a}" for a, b in zip(begins, ends, strict=True)]
    return ", ".join(words[:most]) + (" and so on" if len(words) > most else "")


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
    owners, kit = config.policy_of_seat, config.game.kit
    for name, of in config.policies.items():
        what = f"policies.{name}.partners"
        seats = [seat for seat, owner in enumerate(owners) if owner == name]
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
