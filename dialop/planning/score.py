"""The score of a plan, and the best and worst of all full plans. In points; distances in miles.

Distances are whole tenths of a mile, so that weight x miles is rounded exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce
from itertools import combinations, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dialop.planning.board import Plan, PlanningInstance, Sheet, Site
from dialop.planning.preferences import Preference


def tenths(first: Site, second: Site) -> int:
    """The distance between two sites in tenths of a mile, rounded."""
    dx, dy = first.at[0] - second.at[0], first.at[1] - second.at[1]
    return int(np.rint(10 * np.hypot(dx, dy)))


def sheet_of(sites: Sequence[Site], preferences: Sequence[Preference], plan: Plan) -> Sheet:
    """The score sheet of a plan, full or not. A leg next to an empty slot scores 0."""
    chosen = [None if i is None else sites[i] for i in plan]
    legs = []
    for first, second in pairwise(chosen):
        miles = 0 if first is None or second is None else tenths(first, second)
        distances = [p for p in preferences if p.kind == "distance"]
        legs.append(-sum(p.weight * miles // 10 for p in distances))
    return Sheet(
        sites=tuple(0 if site is None else site_points(site, preferences) for site in chosen),
        legs=tuple(legs),
        checklist=tuple(
            (p.text, plan_points(p, [site for site in chosen if site is not None]))
            for p in preferences
            if p.of_plan
        ),
    )


def site_points(site: Site, preferences: Sequence[Preference]) -> int:
    """The points that a site gets for its features."""
    points = 0
    for p in preferences:
        if p.kind == "feature" and p.name in site.features:
            value = site.features[p.name]
            points += p.weight * ((value in p.liked) - (value in p.disliked))
    return points


def plan_points(preference: Preference, chosen: Sequence[Site]) -> int:
    """The points of a plan for one preference that is scored once per plan."""
    if preference.kind == "budget":
        over = sum(site.price for site in chosen) > preference.budget
        return -preference.weight if over else 0
    if any(satisfies(site, preference) for site in chosen):
        return preference.weight
    return -preference.weight if preference.penalised else 0


def satisfies(site: Site, preference: Preference) -> bool:
    """Whether a site meets a "sites" or "category" preference."""
    if preference.kind == "sites":
        return site.name in preference.sites
    return site.category == preference.name


def all_totals(
    sites: Sequence[Site],
    preferences: Sequence[Preference],
    *,
    slots: int,
    miles_SS: NDArray[np.int64] | None = None,
) -> NDArray[Any]:
    """The total of every plan, indexed by the site of each slot: an array with `slots` axes.

    Plans with a repeated site are included. `miles_SS`, in tenths of a mile, replaces the distances
    between the sites' positions.
    """
    at = np.indices((len(sites),) * slots, sparse=True)  # the site of each slot, on its own axis
    points = np.array([site_points(site, preferences) for site in sites])
    prices = np.array([site.price for site in sites])
    miles_SS = tenths_between(sites) if miles_SS is None else miles_SS
    legs_SS = sum(
        (-(p.weight * miles_SS // 10) for p in preferences if p.kind == "distance"),
        start=np.zeros_like(miles_SS),
    )
    legs = (legs_SS[first, second] for first, second in pairwise(at))
    totals = sum((*(points[site] for site in at), *legs), start=np.zeros((), np.int64))
    for p in preferences:
        if p.kind == "budget":
            totals = totals - p.weight * (sum(prices[site] for site in at) > p.budget)
        elif p.of_plan:
            met = np.array([satisfies(site, p) for site in sites])
            any_met = reduce(np.logical_or, (met[site] for site in at))
            totals = totals + np.where(any_met, p.weight, -p.weight if p.penalised else 0)
    return totals


def tenths_between(sites: Sequence[Site]) -> NDArray[np.int64]:
    """The distance between every two sites in tenths of a mile, rounded: [site, site]."""
    at = np.array([site.at for site in sites], dtype=float)
    dx, dy = np.moveaxis(at[:, None] - at[None], -1, 0)
    return np.rint(10 * np.hypot(dx, dy)).astype(np.int64)


def referenced(
    key: str, sites: Sequence[Site], preferences: Sequence[Preference], *, slots: int
) -> PlanningInstance:
    """An instance of a city and preferences, with the best, worst and mean total of full plans."""
    totals = all_totals(sites, preferences, slots=slots)[legal_plans(len(sites), slots)]
    return PlanningInstance(
        key=key,
        sites=tuple(sites),
        preferences=tuple(preferences),
        slots=slots,
        best=int(totals.max()),
        worst=int(totals.min()),
        mean=float(totals.mean()),
    )


def check_reference(instance: PlanningInstance) -> None:
    """Raise ValueError if the instance's reference values differ from its plans' totals."""
    inst = instance
    right = referenced(inst.key, inst.sites, inst.preferences, slots=inst.slots)
    for name, value in (("best", right.best), ("worst", right.worst)):
        if getattr(instance, name) != value:
            raise ValueError(f"{name} must be {value}, got {getattr(instance, name)}")
    if abs(instance.mean - right.mean) > 1e-6:
        raise ValueError(f"mean must be {right.mean:.6f}, got {instance.mean}")


@lru_cache(maxsize=32)
def legal_plans(num: int, slots: int) -> NDArray[np.bool_]:
    """A mask of the legal plans, without a repeated site: `slots` axes of length `num`."""
    allowed = np.ones((num,) * slots, dtype=bool)
    for first, second in combinations(np.indices(allowed.shape, sparse=True), 2):
        allowed &= first != second
    allowed.flags.writeable = False
    return allowed
