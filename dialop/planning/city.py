"""Constants of cities: kinds of site with their names, prices and features, and neighbourhoods.

Source: the released generator of Lin et al., "Decision-Oriented Dialogue" (2024). Its fixed points
on a map are replaced by neighbourhoods with the same distribution of distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Value = bool | float | str


def shown(value: Value) -> str:
    """A feature's value as texts show it."""
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class Category:
    """A kind of site. `prices` are the possible prices in dollars, `names` its sites, in order."""

    prices: Sequence[int]
    names: tuple[str, ...]


def _several(names: str) -> tuple[str, ...]:
    return tuple(names.split(", "))


CATEGORIES: dict[str, Category] = {
    "restaurant": Category(
        range(10, 200, 10),
        _several(
            "Saul's, Mad Seoul, Earthbar, Cookies Cream, Lucia's, The Dockside Grill, "
            "Caribbean Corner, Taqueria y Mas, El Toro Steakhouse, The Cakery"
        ),
    ),
    "bar": Category(
        range(10, 100, 10),
        _several("A-Trane, Kozy Kar, Harper and Rye, Bards n Brews, The Jazz Spot, The Dive"),
    ),
    "cafe": Category(
        (5, 15),
        _several("Asha Tea House, Schwarzes Cafe, Common Grounds, The Cupcake Bar, Coffee Nook"),
    ),
    "museum": Category(
        range(0, 50, 10), _several("BAMPFA, City Museum of Art, Historical Society")
    ),
    "landmark": Category(
        (0, 10),
        _several("Liberty Memorial, Hindenberg Memorial, Einstein's summer house, The Tower"),
    ),
    "park": Category(
        (0,),
        _several(
            "Atlas Park, Moabit Garden, Riverside Trail, Lincoln Park, The Arboretum, "
            "Garden of Wonders"
        ),
    ),
    "shop": Category(
        range(50, 500, 10),
        _several("Vista Ridge Mall, Central Plaza, The Mall, Market Street, Artisan Street Fair"),
    ),
}
NUM_SITES = sum(len(category.names) for category in CATEGORIES.values())

BOOLS: tuple[Value, ...] = (False, True)
RATINGS: tuple[Value, ...] = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0)
CUISINES: tuple[Value, ...] = _several(
    "american, chinese, japanese, korean, french, ethiopian, spanish, kosher, thai, seafood"
)
AMBIENCES: tuple[Value, ...] = _several(
    "divey, hipster, casual, trendy, intimate, romantic, classy, serious"
)
DRINKS: tuple[Value, ...] = ("beer", "wine", "cocktails")


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature of sites: its possible values, and the categories that can have it."""

    values: tuple[Value, ...]
    categories: tuple[str, ...]

    @property
    def is_bool(self) -> bool:
        return self.values is BOOLS

    @property
    def is_number(self) -> bool:
        return self.values is RATINGS


_ALL = tuple(CATEGORIES)
_EATING = ("restaurant", "cafe", "bar")
FEATURES: dict[str, Feature] = {
    "rating": Feature(RATINGS, _ALL),
    "has parking": Feature(BOOLS, _ALL),
    "touristy": Feature(BOOLS, _ALL),
    "open late": Feature(BOOLS, _ALL),
    "good for groups": Feature(BOOLS, _ALL),
    "good for kids": Feature(BOOLS, tuple(c for c in _ALL if c != "bar")),
    "has takeout": Feature(BOOLS, ("restaurant",)),
    "accepts reservations": Feature(BOOLS, ("restaurant",)),
    "cuisine": Feature(CUISINES, ("restaurant",)),
    "ambience": Feature(AMBIENCES, _EATING),
    "outdoor seating": Feature(BOOLS, _EATING),
    "vegetarian options": Feature(BOOLS, ("restaurant", "cafe")),
    "vegan options": Feature(BOOLS, ("restaurant", "cafe")),
    "live music": Feature(BOOLS, ("restaurant", "bar")),
    "has wifi": Feature(BOOLS, ("cafe",)),
    "alcohol type": Feature(DRINKS, ("bar",)),
    "viewpoint": Feature(BOOLS, ("park",)),
}
# The features of small cities: boolean, and possible for every site.
COMMON = ("has parking", "touristy", "good for groups")


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """A part of the city. Sites lie around `centre`, normally distributed with `spread` on each
    axis, all in miles. `weight` is the relative number of its sites."""

    centre: tuple[float, float]
    spread: float
    weight: int


# Fitted to the distances between recorded sites (quartiles 0.85, 1.69 and 2.37 miles).
NEIGHBOURHOODS = (
    Neighbourhood((5.3, 2.7), 0.09, 2),
    Neighbourhood((0.1, 2.0), 0.15, 3),
    Neighbourhood((4.0, 0.2), 0.12, 6),
    Neighbourhood((2.6, 3.8), 0.20, 10),
    Neighbourhood((4.0, 2.2), 0.19, 22),
    Neighbourhood((1.3, 2.5), 0.33, 14),
    Neighbourhood((3.2, 2.5), 0.19, 28),
    Neighbourhood((1.7, 3.3), 0.28, 15),
)
