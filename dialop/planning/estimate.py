"""The scripted agent's estimates: facts from searches, weights from stated scores, the best plan.

Everything here is read from the agent's own texts. Weights are estimated in tenths of a point.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dialop.planning.board import USER, Action, Plan, PlanningView, Sheet, Site
from dialop.planning.city import FEATURES, Value
from dialop.planning.preferences import Preference, stated_in
from dialop.planning.score import all_totals, legal_plans

# Weights are uniform from 1 to 10.
_MEAN_WEIGHT, _WEIGHT_VARIANCE = 5.5, 8.25
_TYPICAL_TENTHS = 17  # the mean distance between two sites
# An unmet category costs its weight in half of the games, so on average meeting it is worth 1.5
# times its weight.
_CATEGORY_STAKE = 1.5
TRAVEL_LABEL, TOTAL_LABEL = "travel", "total"
_SCORED = re.compile(r"\s*(.+): (-?\d{1,6})\s*")
_RESULT_HEAD = "Search results"


@dataclass(slots=True)
class Facts:
    """The known facts of a city: values by site and field, and distances in tenths of a mile by
    pair of sites. A feature that a site lacks has the value None."""

    values: dict[str, dict[str, Value | None]] = field(default_factory=dict)
    tenths: dict[tuple[str, str], int] = field(default_factory=dict)

    def knows(self, name: str, fields: Sequence[str]) -> bool:
        """Whether all these fields of a site are known."""
        return all(each in self.values.get(name, {}) for each in fields)


def facts_of(log: Sequence[Action]) -> Facts:
    """The facts in the search results among the moves."""
    facts = Facts()
    for action in log:
        lines = action.result.splitlines()
        if len(lines) < 3 or not lines[0].startswith(_RESULT_HEAD):
            continue
        header = lines[1].split("|")
        for line in lines[2:]:
            name, *rest = line.split("|")
            known = facts.values.setdefault(name, {})
            for title in header[1:]:
                if title.startswith("distance_to("):
                    pair = (name, title.removeprefix("distance_to(")[:-1])
                    facts.tenths[pair] = facts.tenths[pair[::-1]] = round(10 * float(rest.pop(0)))
                elif rest and rest[0].startswith(f"{title} "):
                    known[title] = _value(title, rest.pop(0).removeprefix(f"{title} "))
                else:
                    known[title] = None
    return facts


def stated_preferences(log: Sequence[Action]) -> tuple[Preference, ...]:
    """The different preferences that the user has stated, in order, with weight 1."""
    stated = {}
    for action in log:
        if action.kind == "message" and action.seat == USER:
            stated.update({preference.text: preference for preference in stated_in(action.text)})
    return tuple(stated.values())


@dataclass(frozen=True, slots=True)
class Scored:
    """What was stated of one plan's score sheet: points of sites, legs and checklist; the total."""

    plan: Plan
    labels: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int | None:
        return next((points for label, points in self.labels if label == TOTAL_LABEL), None)


def scored_in(log: Sequence[Action]) -> list[Scored]:
    """The score sheets that the user stated, each with the plan that was proposed before."""
    found, plan = [], None
    for action in log:
        plan = action.plan or plan
        if plan is not None and action.kind == "message" and action.seat == USER:
            labels = scores_in(action.text)
            if labels:
                found.append(Scored(plan, labels))
    return found


def scores_in(message: str) -> tuple[tuple[str, int], ...]:
    """The `label: points` items in a message, which semicolons separate."""
    items = [_SCORED.fullmatch(item) for item in message[:4000].split(";")]
    return tuple((m[1], int(m[2])) for m in items if m is not None)


def sheet_items(sheet: Sheet, names: Sequence[str]) -> list[tuple[str, int]]:
    """All `label: points` items of the score sheet of a plan of these names."""
    travel = [(TRAVEL_LABEL, points) for points in sheet.legs]
    sites = zip(names, sheet.sites, strict=True)
    return [*sites, *travel, *sheet.checklist, (TOTAL_LABEL, sheet.total)]


def estimated_sites(names: Sequence[str], facts: Facts) -> list[Site]:
    """The sites with their known facts. An unknown category is "" and an unknown price 0."""
    sites = []
    for name in names:
        known = facts.values.get(name, {})
        category, price = known.get("category"), known.get("price")
        features = {f: v for f, v in known.items() if f in FEATURES and v is not None}
        sites.append(
            Site(
                name=name,
                category=category if isinstance(category, str) else "",
                price=int(price) if isinstance(price, float) else 0,
                at=(0.0, 0.0),
                features=features,
            )
        )
    return sites


def best_plan(view: PlanningView) -> Plan:
    """The full plan with the highest estimated total. Told totals of earlier plans are used."""
    facts = facts_of(view.log)
    sites, miles_SS = estimated_sites(view.names, facts), _miles(view.names, facts)
    told = stated_preferences(view.log), scored_in(view.log)
    totals = estimated_totals(*told, sites, miles_SS, slots=view.slots)
    return tuple(int(i) for i in np.unravel_index(np.argmax(totals), totals.shape))


def estimated_totals(
    stated: Sequence[Preference],
    scored: Sequence[Scored],
    sites: Sequence[Site],
    miles_SS: NDArray[np.int64],
    *,
    slots: int,
) -> NDArray[np.int64]:
    """The estimated total of every plan in tenths of a point, as in `all_totals`; told totals are
    used, and plans with a repeated site have the least integer."""
    weights = estimated_weights(stated, sites, miles_SS, scored)
    staked = [
        replace(p, weight=round(10 * w * (_CATEGORY_STAKE if p.kind == "category" else 1)))
        for p, w in zip(stated, weights, strict=True)
    ]
    totals = all_totals(sites, staked, slots=slots, miles_SS=miles_SS)
    for sheet in scored:
        if sheet.total is not None and None not in sheet.plan:
            totals[sheet.plan] = 10 * sheet.total
    return np.where(legal_plans(len(sites), slots), totals, np.iinfo(np.int64).min)


def estimated_weights(
    stated: Sequence[Preference],
    sites: Sequence[Site],
    miles_SS: NDArray[np.int64],
    scored: Sequence[Scored],
) -> NDArray[np.float64]:
    """The weights of the stated preferences, in points: the posterior mean given the stated scores,
    which are linear in the weights, under a normal prior and noise of variance 1."""
    rows, points = [], []
    index = {name: i for i, name in enumerate(site.name for site in sites)}
    for sheet in scored:
        legs = iter(pairwise(sheet.plan))
        for label, stated_points in sheet.labels:
            row = [0.0] * len(stated)
            leg = next(legs, None) if label == TRAVEL_LABEL else None
            for i, p in enumerate(stated):
                if p.kind == "distance" and leg is not None and None not in leg:
                    row[i] = -float(miles_SS[leg]) / 10
                elif p.kind == "feature" and label in index:
                    value = sites[index[label]].features.get(p.name)
                    row[i] = float((value in p.liked) - (value in p.disliked))
                elif p.of_plan and p.text == label and stated_points:
                    row[i] = 1.0 if stated_points > 0 else -1.0
            if any(row):
                rows.append(row)
                points.append(float(stated_points))
    prior = np.eye(len(stated)) / _WEIGHT_VARIANCE
    if not rows:
        return np.full(len(stated), _MEAN_WEIGHT)
    design = np.array(rows)
    left = design.T @ design + prior
    right = design.T @ np.array(points) + prior @ np.full(len(stated), _MEAN_WEIGHT)
    solved: NDArray[np.float64] = np.clip(np.linalg.solve(left, right), 0.0, 10.0)
    return solved


def unknown_legs(view: PlanningView, plan: Plan) -> list[int]:
    """The sites of a plan whose distance to a neighbour in the plan is unknown; those with most
    unknown legs first."""
    facts = facts_of(view.log)
    count: dict[int, int] = {}
    for first, second in pairwise(plan):
        if first is None or second is None:
            continue
        if (view.names[first], view.names[second]) not in facts.tenths:
            for site in (first, second):
                count[site] = count.get(site, 0) + 1
    return sorted(count, key=lambda site: -count[site])


def fields_of(stated: Sequence[Preference]) -> list[str]:
    """The fields of sites on which the stated preferences depend."""
    fields: dict[str, None] = {}
    for p in stated:
        if p.kind == "feature":
            fields[p.name] = None
        elif p.kind == "category":
            fields["category"] = None
        elif p.kind == "budget":
            fields["price"] = None
    return list(fields)


def _miles(names: Sequence[str], facts: Facts) -> NDArray[np.int64]:
    miles_SS = np.full((len(names), len(names)), _TYPICAL_TENTHS, dtype=np.int64)
    index: Mapping[str, int] = {name: i for i, name in enumerate(names)}
    for (first, second), tenths in facts.tenths.items():
        miles_SS[index[first], index[second]] = tenths
    return miles_SS


def _value(title: str, cell: str) -> Value:
    if cell in ("True", "False"):
        return cell == "True"
    is_number = title == "price" or (title in FEATURES and FEATURES[title].is_number)
    return float(cell) if is_number else cell
