"""Random cities and preferences, each a pure function of (recipe, seed, index).

Source of the distribution: the generator of DialOp's released code, except that positions are drawn
from `city.NEIGHBOURHOODS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from dialop.kit import check_options, option, stream_rng
from dialop.planning import preferences as wording
from dialop.planning.board import AGENT, MAX_SLOTS, MAX_WEIGHT, USER, PlanningInstance, Site
from dialop.planning.city import CATEGORIES, COMMON, FEATURES, NEIGHBOURHOODS, NUM_SITES
from dialop.planning.preferences import LISTED, TEMPLATES, Preference
from dialop.planning.score import referenced

T = TypeVar("T")

_NUM_FEATURES = 5  # features of a site, out of those that its category can have
_P_FEATURE = 0.5  # probability of a preference about a feature, before the limit on their number
_P_ONE_SITE = 0.25  # probability that a preference for sites is for a single site of any category
_MAX_DRAWS = 10_000


@dataclass(frozen=True)
class PlanningRecipe:
    """The distribution of instances: cities of `sites` sites, plans of `slots` sites.

    At most `preferences` of the drawn preferences are kept; `distance` adds the preference for
    short ways. With `simple`, for small models, every site has exactly the features of
    `city.COMMON`, and each preference is about one of them. The agent moves first in a share
    `agent_first` of the games (0.35 in the recorded human games).
    """

    sites: int = option(NUM_SITES, "sites of a city", low=2, high=NUM_SITES)
    slots: int = option(MAX_SLOTS, "sites of a plan", low=1, high=MAX_SLOTS)
    preferences: int = option(
        10, "most preferences of a user, not counting short ways", low=1, high=10
    )
    distance: bool = option(True, "whether users want short ways")
    simple: bool = option(False, "only boolean features that every site has, for small models")
    agent_first: float = option(0.0, "share of games in which the agent moves first", low=0, high=1)

    def __post_init__(self) -> None:
        check_options(self)
        if self.slots >= self.sites:
            raise ValueError(f"sites must be {self.slots + 1} to {NUM_SITES}, got {self.sites}")
        if self.simple and self.preferences > len(COMMON):
            raise ValueError(f"preferences must be 1 to {len(COMMON)}, got {self.preferences}")


def generate_instance(recipe: PlanningRecipe, *, seed: int, index: int) -> PlanningInstance:
    """Instance `index` of the stream `seed`, the same in every process and for every batch size.

    If all plans of a city are equally good, the city is drawn again.
    """
    rng = stream_rng(seed, index)
    for _ in range(_MAX_DRAWS):
        sites = _draw_sites(recipe, rng)
        preferences = _draw_preferences(recipe, sites, rng)
        instance = referenced(f"{seed}/{index}", sites, preferences, slots=recipe.slots)
        if instance.best > instance.worst:
            agent_first = rng.random() < recipe.agent_first
            return replace(instance, first_seat=AGENT if agent_first else USER)
    raise ValueError(f"no city of {recipe} has plans with different totals")


def other_preferences(instance: PlanningInstance, *, seed: int) -> PlanningInstance:
    """The same city with new preferences, none with the sentence of an old one."""
    rng = np.random.default_rng(seed)
    simple = all(set(site.features) <= set(COMMON) for site in instance.sites)
    num = len(COMMON) if simple else 10
    recipe = PlanningRecipe(preferences=num, distance=False, simple=simple)
    old = {p.text for p in instance.preferences}
    fresh: list[Preference] = []
    while not fresh:
        drawn = _draw_preferences(recipe, list(instance.sites), rng)
        fresh = [p for p in drawn if p.text not in old]
    other = referenced(instance.key, instance.sites, fresh, slots=instance.slots)
    return replace(other, first_seat=instance.first_seat)


def _draw_sites(recipe: PlanningRecipe, rng: np.random.Generator) -> list[Site]:
    named = _named(recipe.sites)
    chosen = [named[i] for i in rng.permutation(len(named))]
    weights = np.array([n.weight for n in NEIGHBOURHOODS], dtype=float)
    areas = rng.choice(len(NEIGHBOURHOODS), size=recipe.sites, p=weights / weights.sum())
    offsets = rng.normal(size=(recipe.sites, 2))
    sites = []
    for (name, category), number, offset in zip(chosen, areas, offsets, strict=True):
        area = NEIGHBOURHOODS[number]
        at = [
            round(float(c + area.spread * o), 3) for c, o in zip(area.centre, offset, strict=True)
        ]
        possible = [f for f, feature in FEATURES.items() if category in feature.categories]
        features = list(COMMON) if recipe.simple else _sample(possible, _NUM_FEATURES, rng)
        sites.append(
            Site(
                name=name,
                category=category,
                price=_one(CATEGORIES[category].prices, rng),
                at=(at[0], at[1]),
                features={f: _one(FEATURES[f].values, rng) for f in sorted(features)},
            )
        )
    return sites


def _named(num: int) -> list[tuple[str, str]]:
    """The (name, category) of the sites of a city of `num` sites.

    All cities of one size have the same sites; a small city has as many categories as possible.
    """
    ranked = [(*site, c) for c, each in CATEGORIES.items() for site in enumerate(each.names)]
    kept = sorted(ranked, key=lambda site: site[0])[:num]
    return [(name, c) for rank, name, c in ranked if (rank, name, c) in kept]


def _draw_preferences(
    recipe: PlanningRecipe, sites: list[Site], rng: np.random.Generator
) -> list[Preference]:
    if recipe.simple:
        drawn = [_draw_about(name, rng) for name in COMMON]
    else:
        names = [*dict.fromkeys(t.name for t in TEMPLATES), *LISTED, "ambience"]
        drawn = [_draw_about(name, rng) for name in names if rng.random() < _P_FEATURE]
        budget = _one(wording.BUDGETS, rng)
        text = f"keep budget below ${budget}"
        drawn.append(Preference("budget", text, _weight(rng), budget=budget))
        drawn.append(_draw_wanted(sites, rng))
        name = _one(tuple(CATEGORIES), rng)
        text = f"go to at least one {name}"
        drawn.append(Preference("category", text, _weight(rng), name=name, penalised=_coin(rng)))
    kept = [drawn[i] for i in rng.permutation(len(drawn))[: recipe.preferences]]
    if recipe.distance:
        kept.append(Preference("distance", wording.TRAVEL, _weight(rng)))
    return kept


def _draw_about(name: str, rng: np.random.Generator) -> Preference:
    """A preference about a feature."""
    weight = _weight(rng)
    values = FEATURES[name].values
    if name in LISTED:
        listed = _sample(values, int(rng.integers(1, len(values) + 1)), rng)
        cut = int(rng.integers(len(listed)))
        disliked, liked = tuple(listed[:cut]), tuple(listed[cut:])
        text = wording.listed_text(liked, disliked)
    elif name == "ambience":
        value, is_liked = _one(values, rng), _coin(rng)
        liked, disliked = ((value,), ()) if is_liked else ((), (value,))
        text = f"{'like' if is_liked else wording.DISLIKE} {value} places"
    else:
        return replace(_one(tuple(t for t in TEMPLATES if t.name == name), rng), weight=weight)
    return Preference("feature", text, weight, name=name, liked=liked, disliked=disliked)


def _draw_wanted(sites: list[Site], rng: np.random.Generator) -> Preference:
    """A preference for one site, or for one or two sites of one category."""
    penalised, weight = _coin(rng), _weight(rng)
    category = _one(tuple(dict.fromkeys(site.category for site in sites)), rng)
    if rng.random() < _P_ONE_SITE:
        names = [_one(tuple(site.name for site in sites), rng)]
    else:
        alike = [site.name for site in sites if site.category == category]
        names = _sample(alike, min(len(alike), int(rng.integers(1, 3))), rng)
    text = wording.sites_text(names, category=category, penalised=penalised)
    return Preference("sites", text, weight, sites=tuple(names), penalised=penalised)


def _weight(rng: np.random.Generator) -> int:
    return int(rng.integers(1, MAX_WEIGHT + 1))


def _coin(rng: np.random.Generator) -> bool:
    return bool(rng.random() < 0.5)


def _one(values: Sequence[T], rng: np.random.Generator) -> T:
    return values[int(rng.integers(len(values)))]


def _sample(values: Sequence[T], num: int, rng: np.random.Generator) -> list[T]:
    return [values[i] for i in rng.permutation(len(values))[:num]]
