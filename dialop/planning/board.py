"""The records of a planning game: city, instance, options, moves, score sheet, a seat's view.

Pure data, checked where it comes from files. Sites and plans are indices into the instance's sites;
prices are in dollars, positions in miles. Knows no texts and no turn rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from reprlib import repr as short
from typing import Any, Literal

from dialop.kit import option
from dialop.logged import Rules
from dialop.planning.city import CATEGORIES, FEATURES, NUM_SITES, Value
from dialop.planning.preferences import KINDS as PREFERENCE_KINDS
from dialop.planning.preferences import Preference
from dialop.values import checked_bool, checked_int, checked_list, checked_number, checked_text

Kind = Literal["message", "tool", "propose", "accept", "reject"]
KINDS: tuple[Kind, ...] = ("message", "tool", "propose", "accept", "reject")
Plan = tuple[int | None, ...]  # one site for each slot, None for an empty slot

USER, AGENT = 0, 1
MAX_SLOTS = 3
MAX_PREFERENCES = 20
MAX_WEIGHT = 10
MAX_PRICE = 100_000
MAX_MILES = 100_000.0


@dataclass(frozen=True, slots=True)
class Site:
    """A place of the city. `at` is its position in miles; `features` has only what is known."""

    name: str
    category: str
    price: int
    at: tuple[float, float]
    features: dict[str, Value]


@dataclass(frozen=True, slots=True)
class PlanningInstance:
    """One city, one user's preferences, and the number of sites to choose.

    `best` and `worst` are the highest and lowest total of all full plans, `mean` the average of
    them, in points. `opening` holds moves made before play starts, from a recorded human game.
    """

    key: str
    sites: tuple[Site, ...]
    preferences: tuple[Preference, ...]
    slots: int
    best: int
    worst: int
    mean: float
    first_seat: int = USER
    opening: tuple[Action, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sites, in order."""
        return tuple(site.name for site in self.sites)

    def norm(self, total: float) -> float:
        """A total as its place between the worst (0) and the best (1); 1 if both are equal."""
        return (total - self.worst) / (self.best - self.worst) if self.best > self.worst else 1.0


@dataclass(frozen=True)
class PlanningOptions(Rules):
    """How the game is played. `search` allows `[tool]` moves."""

    search: bool = option(True, "allow the agent's search tool", play=True)


@dataclass(frozen=True, slots=True)
class Action:
    """A legal move.

    `text` is a message, a query, or a proposal in its canonical form; "" for answers. `plan` is set
    for proposals, `result` for tool calls.
    """

    seat: int
    kind: Kind
    text: str
    plan: Plan | None = None
    result: str = ""


@dataclass(frozen=True, slots=True)
class Sheet:
    """A plan's score sheet, in points.

    `sites[slot]` is 0 for an empty slot; `legs[i]` is for the way from slot i to the next.
    `checklist` holds the preferences that are scored once for the plan.
    """

    sites: tuple[int, ...]
    legs: tuple[int, ...]
    checklist: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        return sum(self.sites) + sum(self.legs) + sum(points for _, points in self.checklist)


@dataclass(frozen=True, slots=True)
class PlanningView:
    """What one seat may know.

    `preferences` are the user's sentences and `sheets` the score sheets of the proposals so far;
    both are empty for the agent. `log` holds only the seat's own tool calls.
    """

    seat: int
    names: tuple[str, ...]
    slots: int
    preferences: tuple[str, ...]
    sheets: tuple[Sheet, ...]
    log: tuple[Action, ...]
    pending: Plan | None
    to_move: int | None
    num_errors_this_turn: int
    options: PlanningOptions


def instance_from_dict(data: dict[str, Any]) -> PlanningInstance:
    """An instance from its plain JSON form, checked, except for its reference values.

    Raises:
        ValueError: names the field, its rule and the value.
    """
    _check_keys(data, PlanningInstance, "the instance", optional=("first_seat", "opening"))
    names = checked_list(data["sites"], "sites")
    instance = PlanningInstance(
        key=checked_text(data["key"], "key"),
        sites=tuple(_site(site, f"sites[{i}]") for i, site in enumerate(names)),
        preferences=tuple(
            preference_from_dict(p, f"preferences[{i}]")
            for i, p in enumerate(checked_list(data["preferences"], "preferences"))
        ),
        slots=checked_int(data["slots"], "slots", low=1, high=MAX_SLOTS),
        best=checked_int(data["best"], "best", low=-(10**9), high=10**9),
        worst=checked_int(data["worst"], "worst", low=-(10**9), high=10**9),
        mean=checked_number(data["mean"], "mean", most=1e9),
        first_seat=checked_int(data.get("first_seat", USER), "first_seat", low=0, high=1),
        opening=tuple(
            action_from_dict(a, slots=data["slots"], num_sites=len(names))
            for a in checked_list(data.get("opening", ()), "opening")
        ),
    )
    check_city(instance.sites, instance.preferences, slots=instance.slots)
    return instance


def check_city(sites: Sequence[Site], preferences: Sequence[Preference], *, slots: int) -> None:
    """Raise ValueError unless names are unique and every slot can have a different site."""
    if not slots <= len(sites) <= NUM_SITES:
        raise ValueError(f"sites must be {slots} to {NUM_SITES}, got {len(sites)}")
    forms = [plain_name(site.name) for site in sites]
    for form in forms:
        if not form or form == "null" or forms.count(form) > 1:
            raise ValueError(f"sites must have different names other than NULL, got {short(form)}")
    if len(preferences) > MAX_PREFERENCES:
        raise ValueError(f"preferences must be at most {MAX_PREFERENCES}, got {len(preferences)}")


def plain_name(name: str) -> str:
    """A name's letters, digits and blanks in lower case, for comparing names."""
    return " ".join("".join(c if c.isalnum() else " " for c in name.casefold()).split())


def action_from_dict(data: Any, *, slots: int, num_sites: int) -> Action:
    """A move from its plain JSON form. Raises ValueError for an invalid one."""
    _check_keys(data, Action, "a move", optional=("text", "plan", "result"))
    kind, text, result = data["kind"], data.get("text", ""), data.get("result", "")
    if kind not in KINDS:
        raise ValueError(f"the kind of a move must be one of {', '.join(KINDS)}, got {short(kind)}")
    if not isinstance(text, str) or not isinstance(result, str):
        raise ValueError(f"text and result of a move must be text, got {short((text, result))}")
    plan = None if data.get("plan") is None else checked_list(data["plan"], "the plan of a move")
    if (plan is None) == (kind == "propose") or (plan is not None and len(plan) != slots):
        raise ValueError(f"a proposal, and no other move, has a plan of {slots}, got {short(plan)}")
    for site in plan or ():
        if site is not None:
            checked_int(site, "a site of a plan", low=0, high=num_sites - 1)
    return Action(
        checked_int(data["seat"], "a move's seat", low=0, high=1), kind, text, plan, result
    )


def preference_from_dict(data: Any, where: str) -> Preference:
    """A preference from its plain JSON form. Raises ValueError for an invalid one."""
    _check_keys(data, Preference, where, optional=tuple(f.name for f in fields(Preference))[3:])
    kind = data["kind"]
    if kind not in PREFERENCE_KINDS:
        raise ValueError(
            f"{where}.kind must be one of {', '.join(PREFERENCE_KINDS)}, got {short(kind)}"
        )
    name = data.get("name", "")
    if not isinstance(name, str):
        raise ValueError(f"{where}.name must be text, got {short(name)}")
    if kind == "category" and name not in CATEGORIES:
        raise ValueError(f"{where}.name must be a category, got {short(name)}")
    values = {
        part: tuple(
            value_of(v, f"{where}.{part}")
            for v in checked_list(data.get(part, ()), f"{where}.{part}")
        )
        for part in ("liked", "disliked")
    }
    return Preference(
        kind=kind,
        text=checked_text(data["text"], f"{where}.text"),
        weight=checked_int(data["weight"], f"{where}.weight", low=0, high=MAX_WEIGHT),
        name=name,
        **values,
        sites=tuple(
            checked_text(s, f"{where}.sites")
            for s in checked_list(data.get("sites", ()), f"{where}.sites")
        ),
        budget=checked_int(data.get("budget", 0), f"{where}.budget", low=0, high=MAX_PRICE),
        penalised=checked_bool(data.get("penalised", False), f"{where}.penalised"),
    )


def _site(data: Any, where: str) -> Site:
    _check_keys(data, Site, where)
    category = data["category"]
    if category not in tuple(CATEGORIES):  # a list cannot be looked up in a dict
        raise ValueError(
            f"{where}.category must be one of {', '.join(CATEGORIES)}, got {short(category)}"
        )
    at = checked_list(data["at"], f"{where}.at", low=2, high=2)
    features = data["features"]
    if not isinstance(features, dict):
        raise ValueError(f"{where}.features must be an object, got {short(features)}")
    for name, value in features.items():
        if name not in FEATURES:
            raise ValueError(
                f"{where}.features must be among {', '.join(FEATURES)}, got {short(name)}"
            )
        value = value_of(value, name)
        # True equals 1.0, so types are compared too.
        if (type(value), value) not in [(type(v), v) for v in FEATURES[name].values]:
            raise ValueError(
                f"{where}.features.{name} must be one of "
                f"{', '.join(map(str, FEATURES[name].values))}, got {short(value)}"
            )
    return Site(
        name=checked_text(data["name"], f"{where}.name"),
        category=category,
        price=checked_int(data["price"], f"{where}.price", low=0, high=MAX_PRICE),
        at=(
            checked_number(at[0], f"{where}.at", most=MAX_MILES),
            checked_number(at[1], f"{where}.at", most=MAX_MILES),
        ),
        features={name: value_of(value, name) for name, value in features.items()},
    )


def value_of(value: Any, name: str) -> Value:
    """A feature's value: a bool, a finite number (as float), or text. A bool is not a number."""
    if isinstance(value, bool | str):
        return value
    return checked_number(value, name, most=1e9)


def _check_keys(data: Any, record: type, where: str, *, optional: Sequence[str] = ()) -> None:
    """Raise ValueError unless `data` has the keys of the dataclass `record`."""
    if not isinstance(data, dict):
        raise ValueError(f"{where} must be an object, got {short(data)}")
    names = [f.name for f in fields(record)]
    missing = [name for name in names if name not in optional and data.get(name) is None]
    if missing:
        raise ValueError(f"{where} has no {', '.join(missing)}")
    extra = [name for name in data if name not in names]
    if extra:
        raise ValueError(f"{where} must have only {', '.join(names)}, got {short(extra[0])}")
