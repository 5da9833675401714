"""The section `policies` of the settings; read without torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from functools import lru_cache
from typing import Annotated, Any, Self

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass
from typing_extensions import TypedDict

from dialop.specs import nearest
from selfplay.config import Config, GameConfig
from selfplay.config.hardware import EngineConfig
from selfplay.config.load import load
from selfplay.config.player_spec import parse_shares
from selfplay.config.schema import RULES
from selfplay.config.text import difference, plain
from selfplay.errors import SettingsError

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*$")
HOME, OF_RUN = "policies", ("seats", "rest", "partners")  # the keys that are no section
SECTIONS = ("model", "optim", "algorithm", "methods", "warm_start", "engine")


@dataclass(frozen=True, slots=True, config=RULES)
class PolicyConfig:
    """A policy with its own weights: its roles, and sections merged over the run's; null is the
    run's section, {} the section's defaults."""

    seats: tuple[Annotated[int, Field(ge=0)] | str, ...] = ()
    """its roles, or the numbers of its seats from 0; empty means the role of its name"""
    rest: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """[k, r]: it trains for k steps, rests for r, and so on; [k, r, first] starts the cycle with
    its step number `first`, from 0. A policy that rests plays with unchanged weights"""
    partners: tuple[str, ...] = ("self",)
    """who plays its seats while the other policies train, as 'spec*share' (docs/partners.md): self
    is the policy, pool an earlier version of it"""
    model: dict[str, Any] | None = None
    """its own model"""
    optim: dict[str, Any] | None = None
    """its own optimizer"""
    algorithm: dict[str, Any] | None = None
    """its own loss and advantage"""
    methods: dict[str, Any] | None = None
    """its own methods; one that chooses games (`after_play`) is set for the run"""
    warm_start: dict[str, Any] | None = None
    """its own warm start; without one, policies with the same model start from the same weights"""
    engine: dict[str, Any] | None = None
    """its own engine settings, of the run's engine.kind"""

    def trains(self, step: int) -> bool:
        """Whether it trains in the step after `step` finished ones."""
        if not self.rest:
            return True
        num_trained, num_rested, *first = self.rest
        return (step + sum(first)) % (num_trained + num_rested) < num_trained


class Policies(dict[str, PolicyConfig]):
    """Each policy's settings by its name, which is part of names of files and metrics."""

    EACH = PolicyConfig

    @classmethod
    def read(cls, given: Mapping[str, Any], context: Mapping[str, Any]) -> Self:
        """Raises ValueError for settings that only the run has, names that are no identifiers, and
        partners or rests that cannot be read."""
        if not given:
            return cls()
        valid = [field.name for field in fields(PolicyConfig)]
        of_run = {key for kind, _ in context["declared"][:1] for key in kind.__pydantic_fields__}
        for name, of in given.items():
            if not NAME.match(name):
                raise ValueError(
                    f"{HOME} must have names of letters, digits and _ that begin with a letter, "
                    f"got {name!r}"
                )
            context["declared"].append((PolicyConfig, f"{HOME}.{name}"))
            for key in of if isinstance(of, Mapping) else {}:
                if key in of_run and key not in valid:
                    raise ValueError(
                        f"{HOME}.{name}.{key} must be left out: {key} belongs to the run; a policy "
                        f"may set {', '.join(valid)}"
                    )
        kinds = TypedDict("Policies", dict.fromkeys(given, PolicyConfig))  # type: ignore[misc]
        plain = json.dumps({name: _said(of) for name, of in given.items()}, default=asdict)
        found = cls(TypeAdapter[Any](kinds).validate_json(plain))
        for name, policy in found.items():
            try:
                parse_shares(policy.partners)
            except ValueError as error:
                raise ValueError(f"{HOME}.{name}.partners: {error}") from None
            if (rest := policy.rest) and not (
                len(rest) in (2, 3) and rest[0] and sum(rest[2:]) < sum(rest[:2])
            ):
                raise ValueError(
                    f"{HOME}.{name}.rest must be [k, r] or [k, r, first], at least 1 step of "
                    "training, r steps of rest, and the first step's place in these, 0 to k + r - "
                    f"1, got {[*rest]}"
                )
        return found

    def check(self, config: Config) -> None:
        """Raise ValueError for settings of the run that do not fit its policies, and if all of them
        rest in the same step."""
        rollout = config.rollout
        if self and rollout.partners != ("self",):
            raise ValueError(
                f"rollout.partners must be left out with policies, got {[*rollout.partners]}; set "
                "policies.NAME.partners"
            )
        if self and rollout.policy_seats not in ((), all_roles(config.game)):
            raise ValueError(
                "rollout.policy_seats must be left out with policies, got "
                f"{[*rollout.policy_seats]}; set policies.NAME.seats"
            )
        length = math.lcm(*(sum(each.rest[:2]) for each in self.values() if each.rest))
        for step in range(length if self else 0):
            if not any(each.trains(step) for each in self.values()):
                raise ValueError(
                    f"{HOME} must not all rest at once, got rest of all in step {step + 1}"
                )
        for name, of in self.items():
            base = EngineConfig() if of.engine == {} else config.engine
            for key in ("kind", "tp_size"):
                of_run = getattr(config.engine, key)
                if (own := (of.engine or {}).get(key, getattr(base, key))) != of_run:
                    raise ValueError(
                        f"policies.{name}.engine.{key} must be the run's, {of_run}, got {own}"
                    )

    @staticmethod
    def difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
        """How the section differs between two settings, as `text.difference`: other policies by
        their names; of the same ones each key, also where only one side has a section."""
        if a.keys() != b.keys():
            return [f"{HOME}: {', '.join(a) or 'none'} -> {', '.join(b) or 'none'}"]
        lines = list[str]()
        for name, key in ((name, key) for name, of in a.items() for key in of):
            own, given = a[name][key], b[name][key]
            if type(own or given) is dict and bool(own) != bool(given):
                own, given = own or {}, given or {}
            lines += difference(own, given, f"{HOME}.{name}.{key}")
        return lines

    @staticmethod
    def settings(config: Config, name: str) -> Config:
        """The complete settings of this policy of a run with policies: its own sections over the
        run's."""
        return _settings(json.dumps(plain(config)), name)

    @staticmethod
    def with_all_roles(config: Config) -> Config:
        """The settings of a run, whose policies also have the roles that the game leaves to a
        partner. A game that is not imported keeps its settings."""
        if not config.policies or not config.game.is_imported:
            return config
        return replace(config, rollout=replace(config.rollout, policy_seats=all_roles(config.game)))

    @staticmethod
    def of_seats(config: Config) -> tuple[str, ...]:
        """The name of the policy that has each seat; "" for a single policy.

        Raises SettingsError for unknown roles, and for a seat without a policy or with several.
        """
        game, roles = config.game.name, config.game.kit.ROLES
        if not config.policies:
            return ("",) * len(roles)
        owners: list[list[str]] = [[] for _ in roles]
        policies, known = config.policies, ", ".join(dict.fromkeys(roles))
        stay = ""
        if 1 < len({*roles}) < len(policies):
            stay = "; a file's policies stay beside those given, unless policies={} is first"
        for name, of in policies.items():
            for chosen in of.seats or (name,):
                seats = [s for s, role in enumerate(roles) if chosen in (s, role)]
                if not seats and not of.seats:
                    others = [other for other in policies if other != name]
                    raise SettingsError(
                        f"policies.{name} must have the name of a role of {game} ({known}) or "
                        f"seats of its own, as seats: [0], got a policy {name} beside "
                        f"{', '.join(others) or 'none'}{nearest(name, roles) or stay}"
                    )
                if not seats:
                    raise SettingsError(
                        f"policies.{name}.seats must be roles of {game} ({known}) or numbers of "
                        f"seats below {len(roles)}, as [0], got {chosen}"
                        f"{nearest(str(chosen), roles)}"
                    )
                for seat in seats:
                    owners[seat].append(name)
        for seat, (role, names) in enumerate(zip(roles, owners, strict=True)):
            if len(names) != 1:
                by_role = [name for name in names if role in (policies[name].seats or (name,))]
                apart = f"; numbers tell seats of one role apart, as seats: [{seat}]"
                alike = len({*by_role}) > 1 and roles.count(role) > 1
                raise SettingsError(
                    f"policies must give each seat of {game} to one policy, got "
                    f"{' and '.join(names) or 'none'} for seat {seat} ({role})"
                    f"{apart if alike else stay}"
                )
        return tuple(names[0] for names in owners)

    @staticmethod
    @contextmanager
    def naming(config: Config, policy: str) -> Iterator[None]:
        """What raises ValueError in it for a setting that this policy has of its own raises a
        SettingsError that names the setting as the user wrote it.

        With `policy` "agent" a message about model.path is about policies.agent.model.path, where
        the policy sets model.path; a setting of the run keeps its name. `policy` "" is a run's
        only policy.
        """
        try:
            yield
        except ValueError as error:
            rule, own = str(error), config.policies.get(policy)
            given = [f"{of}.{key}" for of in SECTIONS for key in getattr(own, of, None) or ()]
            if own and own.model:  # its tokenizer may be of its own model
                given.append("model.chat_template")
            for key in dict.fromkeys(given):
                rule = re.sub(rf"(?<![\w.]){re.escape(key)}(?!\w)", f"{HOME}.{policy}.{key}", rule)
            if own:
                rule = rule.replace("rollout.partners", f"{HOME}.{policy}.partners")
            if rule == str(error):
                raise
            raise SettingsError(rule) from error.__cause__

    @staticmethod
    def values_of(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """What a policy sets of its own in the `values` of a run, as values of the run's sections,
        and that the run has no further policies."""
        own = dict(_said((values.get(HOME) or {}).get(name)))
        sections = {key: of for key, of in own.items() if key not in OF_RUN and of is not None}
        if isinstance(model := sections.get("model"), dict) and model:
            # A folder replaces the run's scratch model, and a scratch model its folder.
            for one, other in (("path", "scratch"), ("scratch", "path")):
                if model.get(one) is not None:
                    sections["model"] = {other: None, **model}
        return sections | {"rollout": {"partners": own.get("partners", ["self"])}}


def _said(of: Any) -> Any:
    """What a policy's settings say: run folders of earlier versions have each section, an empty one
    for the run's."""
    if isinstance(of, dict) and all(isinstance(of.get(section), dict) for section in SECTIONS):
        return {key: value for key, value in of.items() if value != {}}
    return {} if of is None else of


@lru_cache(maxsize=32)
def _settings(config: str, name: str) -> Config:
    """The settings of a policy in a run's, which are given as JSON: a start asks several times."""
    return load(Config, json.loads(config), own=f"{HOME}.{name}")


def all_roles(game: GameConfig) -> tuple[str, ...]:
    """The roles of the game; none for a game that is not imported."""
    return tuple(dict.fromkeys(game.kit.ROLES)) if game.is_imported else ()
