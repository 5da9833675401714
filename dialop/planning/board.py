"""The records of a planning game: city, instance, options, moves, score sheet, a seat's view.

Sites and plans are indices into the instance's sites; prices are in dollars, positions in miles.
The bounds apply to data from files (`dialop.values.parsed`).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from reprlib import repr as short
from typing import Annotated

from pydantic import Field

from dialop.kit import option
from dialop.logged import Move, Rules, View
from dialop.planning.city import CATEGORIES, FEATURES, NUM_SITES, Value
from dialop.planning.preferences import Preference
from dialop.specs import folded
from dialop.values import Text

KINDS = ("message", "tool", "propose", "accept", "reject")
Plan = tuple[int | None, ...]  # one site for each slot, None for an empty slot

USER, AGENT = 0, 1
MAX_SLOTS = 3
MAX_PREFERENCES = 20
MAX_WEIGHT = 10
MAX_PRICE = 100_000
Dollars = Annotated[int, Field(ge=0, le=MAX_PRICE)]
Miles = Annotated[float, Field(ge=-100_000, le=100_000)]


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the city. `at` is its position in miles; `features` has the known features."""

    name: Text
    category: str
    price: Dollars
    at: tuple[Miles, Miles]
    features: dict[str, Value]


@dataclass(frozen=True, slots=True)
class PlanningInstance:
    """One city, one user's preferences, and the number of sites to choose.

    `best`, `worst` and `mean` are the highest, lowest and average total of all full plans, in
    points. `opening` holds moves made before play starts, from a recorded human game.
    """

    key: Text
    sites: tuple[Site, ...]
    preferences: tuple[Preference, ...]
    slots: Annotated[int, Field(ge=1, le=MAX_SLOTS)]
    best: int
    worst: int
    mean: float
    first_seat: Annotated[int, Field(ge=0, le=1)] = USER
    opening: tuple[Action, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sites, in order."""
        return tuple(site.name for site in self.sites)

    def norm(self, total: float) -> float:
        """A total's place between the worst (0) and the best (1); 1 if both are equal."""
        return (total - self.worst) / (self.best - self.worst) if self.best > self.worst else 1.0


@dataclass(frozen=True)
class PlanningOptions(Rules):
    """The rules of play. `search` allows `[tool]` moves."""

    search: bool = option(True, "allow the agent's search tool", play=True)


@dataclass(frozen=True, slots=True)
class Action(Move):
    """A legal move.

    `text` is a message, a query, or a proposal in its canonical form; "" for answers. `plan` is set
    for proposals, `result` for tool calls.
    """

    plan: Plan | None = None
    result: str = ""


@dataclass(frozen=True, slots=True)
class Sheet:
    """A plan's score sheet, in points.

    `sites[slot]` is 0 for an empty slot; `legs[i]` scores the way from slot i to the next.
    `checklist` holds the preferences that are scored once per plan.
    """

    sites: tuple[int, ...]
    legs: tuple[int, ...]
    checklist: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        return sum(self.sites) + sum(self.legs) + sum(points for _, points in self.checklist)


@dataclass(frozen=True, slots=True)
class PlanningView(View):
    """One seat's knowledge.

    `preferences` are the user's sentences and `sheets` the score sheets of the proposals so far;
    both are empty for the agent. `log` omits the other seat's tool calls.
    """

    names: tuple[str, ...]
    slots: int
    preferences: tuple[str, ...]
    sheets: tuple[Sheet, ...]
    log: tuple[Action, ...]
    pending: Plan | None


def check_city(sites: Sequence[Site], preferences: Sequence[Preference], *, slots: int) -> None:
    """Raise ValueError unless names are unique, every slot can have a different site, and all
    categories and features are known."""
    if not slots <= len(sites) <= NUM_SITES:
        raise ValueError(f"the number of sites must be {slots} to {NUM_SITES}, got {len(sites)}")
    forms = [plain_name(site.name) for site in sites]
    for form in forms:
        if not form or form == "null" or forms.count(form) > 1:
            raise ValueError(f"sites must have unique names other than NULL, got {short(form)}")
    if len(preferences) > MAX_PREFERENCES:
        rule = f"at most {MAX_PREFERENCES} preferences are allowed"
        raise ValueError(f"{rule}, got {len(preferences)}")
    wanted = [p.name for p in preferences if p.kind == "category"]
    for category in [*(site.category for site in sites), *wanted]:
        if category not in CATEGORIES:
            valid = ", ".join(CATEGORIES)
            raise ValueError(f"a category must be one of {valid}, got {short(category)}")
    for name, value in (item for site in sites for item in site.features.items()):
        values = FEATURES[name].values if name in FEATURES else ()
        # The types are compared because True equals 1.0.
        if (type(value), value) not in [(type(each), each) for each in values]:
            valid = ", ".join(map(str, values)) or f"named {', '.join(FEATURES)}"
            raise ValueError(f"a feature {short(name)} must be {valid}, got {short(value)}")


@lru_cache(maxsize=4096)
def plain_name(name: str) -> str:
    """A name's letters, digits and blanks in lower case, for comparing names."""
    name = folded(unicodedata.normalize("NFC", name))
    return " ".join("".join(c if c.isalnum() else " " for c in name).split())
