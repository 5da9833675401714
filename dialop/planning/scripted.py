"""Scripted users and agents, for imitation, evaluation and tests. They use only a view.

The first part has an agent's estimates: facts from searches, weights from stated scores, the best
plan. Weights are estimated in tenths of a point. Random draws are seeded by (seed, number of known
moves).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from dialop.game import Lesson
from dialop.kit import option
from dialop.planning.board import AGENT, USER, Action, Plan, PlanningView, Sheet, Site
from dialop.planning.city import FEATURES, Value
from dialop.planning.preferences import Preference, stated_in
from dialop.planning.proposal import render_plan
from dialop.planning.score import all_totals, legal_plans
from dialop.planning.search import Field, cell
from dialop.specs import ScriptedBase, made

# Weights are uniform from 1 to 10.
_MEAN_WEIGHT, _WEIGHT_VARIANCE = 5.5, 8.25
_TYPICAL_TENTHS = 17  # the mean distance between two sites
# An unmet category costs its weight in half of the games, so meeting it is worth 1.5 times its
# weight on average.
_CATEGORY_STAKE = 1.5
TRAVEL_LABEL, TOTAL_LABEL = "travel", "total"
_SCORED = re.compile(r"\s*(.+): (-?\d{1,6})\s*")
_RESULT_HEAD = "Search results"


@dataclass(slots=True)
class Facts:
    """The known facts of a city: values by site and field, and distances in tenths of a mile by
    pair of sites. A missing feature of a site has the value None."""

    values: dict[str, dict[str, Value | None]] = field(default_factory=dict)
    tenths: dict[tuple[str, str], int] = field(default_factory=dict)

    def knows(self, name: str, fields: Sequence[str]) -> bool:
        """Whether all these fields of a site are known."""
        return all(each in self.values.get(name, {}) for each in fields)


def facts_of(log: Sequence[Action]) -> Facts:
    """The facts in the moves' search results."""
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
    """The distinct preferences that the user has stated, in order, with weight 1."""
    stated = {}
    for action in log:
        if action.kind == "message" and action.seat == USER:
            stated.update({preference.text: preference for preference in stated_in(action.text)})
    return tuple(stated.values())


@dataclass(frozen=True, slots=True)
class Scored:
    """The stated part of a plan's score sheet: points of sites, legs and checklist; the total."""

    plan: Plan
    labels: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int | None:
        return next((points for label, points in self.labels if label == TOTAL_LABEL), None)


def scored_in(log: Sequence[Action]) -> list[Scored]:
    """The score sheets that the user stated, each with the plan proposed before."""
    found, plan = [], None
    for action in log:
        plan = action.plan or plan
        is_users = action.kind == "message" and action.seat == USER
        if plan is not None and is_users and (labels := scores_in(action.text)):
            found.append(Scored(plan, labels))
    return found


def scores_in(message: str) -> tuple[tuple[str, int], ...]:
    """The `label: points` items in a message, which semicolons separate."""
    items = [_SCORED.fullmatch(item) for item in message[:4000].split(";")]
    return tuple((m[1], int(m[2])) for m in items if m is not None)


def sheet_items(sheet: Sheet, names: Sequence[str]) -> list[tuple[str, int]]:
    """All `label: points` items of a plan's score sheet; `names` are the plan's sites."""
    travel = [(TRAVEL_LABEL, points) for points in sheet.legs]
    sites = zip(names, sheet.sites, strict=True)
    return [*sites, *travel, *sheet.checklist, (TOTAL_LABEL, sheet.total)]


def estimated_sites(names: Sequence[str], facts: Facts) -> list[Site]:
    """The sites with their known facts. An unknown category is "" and an unknown price 0."""
    sites = []
    for name in names:
        known = facts.values.get(name, {})
        category, price = str(known.get("category") or ""), int(known.get("price") or 0)
        features = {f: v for f, v in known.items() if f in FEATURES and v is not None}
        sites.append(Site(name, category, price, at=(0.0, 0.0), features=features))
    return sites


def best_plan(view: PlanningView) -> Plan:
    """The full plan with the highest estimated total. Stated totals of earlier plans are used."""
    facts = facts_of(view.log)
    sites, miles_SS = estimated_sites(view.names, facts), _miles(view.names, facts)
    stated = stated_preferences(view.log), scored_in(view.log)
    totals = estimated_totals(*stated, sites, miles_SS, slots=view.slots)
    return tuple(int(i) for i in np.unravel_index(np.argmax(totals), totals.shape))


def estimated_totals(
    stated: Sequence[Preference],
    scored: Sequence[Scored],
    sites: Sequence[Site],
    miles_SS: NDArray[np.int64],
    *,
    slots: int,
) -> NDArray[np.int64]:
    """The estimated total of every plan in tenths of a point, as in `all_totals`. Stated totals are
    used; plans with a repeated site have the smallest integer."""
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
    which are linear in the weights, under a normal prior and noise with variance 1."""
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
    """The sites of a plan whose distance to a neighbour in the plan is unknown; sites with the most
    unknown legs first."""
    facts, count = facts_of(view.log), Counter[int]()
    for first, second in pairwise(plan):
        if first is None or second is None:
            continue
        if (view.names[first], view.names[second]) not in facts.tenths:
            count.update((first, second))
    return [site for site, _ in count.most_common()]


def fields_of(stated: Sequence[Preference]) -> list[str]:
    """The fields of sites on which the stated preferences depend."""
    columns = {"category": "category", "budget": "price"}
    fields = (p.name if p.kind == "feature" else columns.get(p.kind) for p in stated)
    return list(dict.fromkeys(field for field in fields if field))


def _miles(names: Sequence[str], facts: Facts) -> NDArray[np.int64]:
    miles_SS = np.full((len(names), len(names)), _TYPICAL_TENTHS, dtype=np.int64)
    index = {name: i for i, name in enumerate(names)}
    for (first, second), tenths in facts.tenths.items():
        miles_SS[index[first], index[second]] = tenths
    return miles_SS


def _value(title: str, cell: str) -> Value:
    if cell in ("True", "False"):
        return cell == "True"
    is_number = title == "price" or (title in FEATURES and FEATURES[title].is_number)
    return float(cell) if is_number else cell


_USERS = ("teller", "silent")
ASK = "What would you like?"
GREETING = "Hello!"
_OPENERS = ("Hi! ", "I would like this: ", "My wishes are: ", "")
_GO_ON = "Please make a plan."
_MAX_LEGS = 4
_NEAR = 12  # sites that `_by_points` considers around each centre
_PATIENCE = 3  # most proposals that a teller sees after its rounds


@dataclass(frozen=True, slots=True)
class ScriptedPlayer(ScriptedBase):
    """One scripted user or agent.

    - teller: a user that states its preferences: all in one message ("all"), one per message
      ("one"), or all after a question ("asked"). It rejects the first `rounds` full plans, stating
      their score sheets or only their totals (`score`), and then accepts the best plan seen so far.
      Without messages it rejects at most `rounds` plans, and only if their total is below 0.
    - silent: a user that states nothing and accepts any plan.
    - searcher: an agent that asks if it knows no preference, searches by the stated ones, and
      proposes its best plan. It searches for all sites with the relevant fields ("table"), or for
      the sites that meet all preferences, then fewer preferences ("filter"). It looks up distances
      at most `legs` times per proposal. With `think` "points" it counts in private text and
      proposes `plans` plans (`_by_points`), then the plan with the best stated total. With
      probability `stray` each of these choices is random instead: the site of a block, its
      neighbours in the plan, and the final plan.
    - guesser: an agent that proposes random sites.
    - `slip`: the probability of an injected error: a malformed move first, which it then repairs.
    """

    OPTIONS: ClassVar = {
        "searcher": ("by", "legs", "think", "plans", "stray", "slip"),
        "guesser": ("slip",),
        "teller": ("tell", "rounds", "score", "slip"),
        "silent": ("slip",),
    }

    tell: Literal["all", "one", "asked"] = option("all")
    rounds: int = option(0, low=0, high=20)
    score: Literal["sheet", "total"] = option("sheet")
    by: Literal["table", "filter"] = option("table")
    legs: int = option(_MAX_LEGS, low=0, high=20)
    think: Literal["no", "points"] = option("no")
    plans: int = option(1, low=1, high=9)
    stray: float = option(0.0, low=0, high=1)
    slip: float = option(0.0, low=0, high=1)

    def __post_init__(self) -> None:
        if self.think != "no" and self.by != "table":
            raise ValueError(f"think={self.think} needs by=table")
        if self.plans > 1 and self.think != "points":
            raise ValueError(f"plans={self.plans} needs think=points")
        if self.stray and self.think != "points":
            raise ValueError(f"stray={self.stray:g} needs think=points")

    @property
    def seat(self) -> int:
        """The seat of this kind of player."""
        return USER if self.name in _USERS else AGENT

    def lesson(self, view: PlanningView) -> Lesson:
        """The next move as an example to imitate."""
        self.check_turn(view)
        rng = np.random.default_rng((self.seed, len(view.log)))
        text = _MOVES[self.name](self, view, rng)
        if self.slip and not view.num_errors_this_turn and rng.random() < self.slip:
            tag, _, content = text.partition("] ")
            text = content or tag.strip("[]")
        return Lesson(text)


make_scripted = partial(made, ScriptedPlayer)


def _teller(player: ScriptedPlayer, view: PlanningView, rng: np.random.Generator) -> str:
    if view.pending is not None:
        return "[accept]" if _accepts(player, view) else "[reject]"
    own = [a for a in view.log if a.kind == "message" and a.seat == USER]
    if view.log and view.log[-1].kind == "reject":
        total = f"{TOTAL_LABEL}: {view.sheets[-1].total}"
        return f"[message] {total if player.score == 'total' else _sheet_text(view)}"
    asked = any(a.kind == "message" and a.seat == AGENT for a in view.log)
    if player.tell == "asked" and not asked and not own:
        return f"[message] {GREETING}"
    unstated = [s for s in view.preferences if not any(s in a.text for a in own)]
    if not unstated:
        return f"[message] {_GO_ON}"
    if player.tell == "one":
        unstated = unstated[:1]
    opener = "" if view.options.brief else _OPENERS[rng.integers(len(_OPENERS))]
    return f"[message] {opener}{'; '.join(unstated)}"


def _silent(player: ScriptedPlayer, view: PlanningView, rng: np.random.Generator) -> str:
    return f"[message] {GREETING}" if view.pending is None else "[accept]"


def _searcher(player: ScriptedPlayer, view: PlanningView, rng: np.random.Generator) -> str:
    stated = stated_preferences(view.log)
    asked = sum(a.kind == "message" and a.seat == AGENT for a in view.log)
    if not stated:
        if view.options.messages and not asked:
            return f"[message] {ASK}"
        return _guesser(player, view, rng)
    if player.by == "filter":
        return _by_filter(view, stated)
    proposals = sum(a.kind == "propose" for a in view.log)
    if player.think == "points" and proposals < min(player.plans, len(view.names)):
        return _by_points(player, view, stated)
    totals = [scored for scored in scored_in(view.log) if scored.total is not None]
    if player.think == "points" and totals:
        best = max(totals, key=lambda scored: scored.total or 0)
        if player.stray and rng.random() < player.stray:
            best = totals[rng.integers(len(totals))]
        return f"[propose] {render_plan(best.plan, view.names)}"
    if view.options.search:
        fields, facts = fields_of(stated), facts_of(view.log)
        if fields and not all(facts.knows(name, fields) for name in view.names):
            return f"[tool] Search(fields=[{', '.join(fields)}])"
    plan = best_plan(view)
    move = f"[propose] {render_plan(plan, view.names)}"
    queries = sum(a.kind == "tool" and "distance_to" in a.text for a in view.log)
    if view.options.search and any(p.kind == "distance" for p in stated):
        legs = unknown_legs(view, plan)
        if legs and queries < player.legs * (1 + proposals):
            move = f"[tool] Search(sort_by=[distance_to({view.names[legs[0]]})])"
    return move


def _by_points(player: ScriptedPlayer, view: PlanningView, stated: tuple[Preference, ...]) -> str:
    """Count, in private text, the stated preferences that each site meets minus those that it
    violates. For each of `plans` equal blocks of the sites, in turn, look up the sites near the
    best site of the block and propose this site between the best two of its `_NEAR` nearest sites.

    The text starts with the text of `_counted`. After distances it has a line for each near site
    with its count and the best two sites so far with their counts. So each token is copied or
    follows from two earlier numbers. Prices are left out: few budgets can be kept, and stated
    totals include them. Ties go to the first site.
    """
    fields = tuple(name for name in fields_of(stated) if name != "price")
    looked_up = view.log[-1].kind == "tool" and "distance_to" in view.log[-1].text
    tables = tuple(a for a in view.log if a.kind == "tool" and "distance_to" not in a.text)
    counted = _counted(view.names, stated, tables, player.plans)
    if view.options.search and not all(counted.facts.knows(name, fields) for name in view.names):
        return f"[tool] Search(fields=[{', '.join(fields)}])"
    points, done = counted.points, sum(a.kind == "propose" for a in view.log)
    # The same draws before and after the distances are looked up.
    rng = np.random.default_rng((player.seed, done))
    centre, lines = counted.centres[done], "" if done or looked_up else counted.lines
    if rng.random() < player.stray:
        centre = str(rng.choice(counted.blocks[done]))
    far = view.options.search and any(p.kind == "distance" for p in stated)
    if far and not looked_up:
        return f"{lines}[tool] Search(sort_by=[distance_to({centre})], limit={_NEAR + 1})"
    near = view.log[-1].result.splitlines()[2:] if far else sorted(view.names)
    others: list[str] = []
    for name in (line.split("|")[0] for line in near):
        if name != centre:
            others = sorted([*others, name], key=lambda each: -points[each])[:2]
            lines += "|".join(f"{each} {points[each]}" for each in (name, *others)) + "\n"
    if rng.random() < player.stray:
        rest = [name for name in sorted(points) if name != centre]
        others = rng.choice(rest, min(2, len(rest)), replace=False).tolist()
    chosen = [*others[:1], centre, *others[1:]] if view.slots > 1 else [centre]
    plan = tuple(view.names.index(name) for name in chosen[: view.slots])
    return f"{lines}[propose] {render_plan(plan, view.names)}"


@dataclass(frozen=True, slots=True)
class _Counted:
    """The facts used, the counts of all sites, the sites and the best site of each block, and the
    private text that finds them."""

    facts: Facts
    points: dict[str, int]
    blocks: list[list[str]]
    centres: list[str]
    lines: str


@lru_cache(maxsize=64)
def _counted(
    names: tuple[str, ...], stated: tuple[Preference, ...], tables: tuple[Action, ...], plans: int
) -> _Counted:
    """Count the stated preferences that each site meets minus those that it violates.

    The text has a line for each site, ordered by name, which is the same order in all cities of one
    size: its name and its values from the searches `tables`, each followed by the count so far;
    then the best site of its block so far, with its count.
    """
    facts = facts_of(tables)
    lines, points, centres = "", dict[str, int](), list[str]()
    arrays = np.array_split(sorted(names), min(plans, len(names)))
    blocks: list[list[str]] = [array.tolist() for array in arrays]
    for block in blocks:
        best = block[0]
        for name in block:
            points[name] = sum(p.kind == "sites" and name in p.sites for p in stated)
            lines += f"{name} {points[name]}"
            for column, value in facts.values.get(name, {}).items():
                if value is not None:
                    points[name] += sum(_liked(p, column, value) for p in stated)
                    lines += f"|{cell(Field(column), value)} {points[name]}"
            best = name if points[name] > points[best] else best
            lines += f"|{best} {points[best]}\n"
        centres.append(best)
    return _Counted(facts, points, blocks, centres, lines)


def _liked(p: Preference, field: str, value: Value) -> int:
    """1 if a preference likes the value of a field, -1 if it dislikes it, 0 otherwise."""
    if p.kind == "category" and field == "category":
        return int(value == p.name)
    return (value in p.liked) - (value in p.disliked) if p.name == field else 0


def _guesser(player: ScriptedPlayer, view: PlanningView, rng: np.random.Generator) -> str:
    plan = tuple(int(i) for i in rng.permutation(len(view.names))[: view.slots])
    return f"[propose] {render_plan(plan, view.names)}"


def _by_filter(view: PlanningView, stated: tuple[Preference, ...]) -> str:
    """Search for sites that meet all preferences, then one preference fewer each time, until the
    results fill the plan; then propose them in the order found."""
    conditions = [condition for p in stated if (condition := _condition(p, view))]
    results = [a.result.splitlines()[2:] for a in view.log if a.kind == "tool"]
    names = list(dict.fromkeys(name for lines in results for name in lines))
    num = len(conditions) - len(results)
    if view.options.search and len(names) < view.slots and num > 0:
        return f"[tool] Search(filters=[{', '.join(conditions[:num])}])"
    names = list(dict.fromkeys([*names, *view.names]))[: view.slots]
    return f"[propose] {render_plan(tuple(map(view.names.index, names)), view.names)}"


def _condition(p: Preference, view: PlanningView) -> str:
    """A filter for the sites that meet a preference, "" if no filter can express it."""
    match p.kind:
        case "feature" if p.name == "rating":
            return f"rating >= {min(v for v in p.liked if isinstance(v, float)):g}"
        case "feature":
            return f"{p.name} == {p.liked[0]}" if p.liked else f"{p.name} != {p.disliked[0]}"
        case "category":
            return f"category == {p.name}"
        case "sites" if p.sites[0] in view.names:  # a user may name a site of another city
            return f"name == {p.sites[0]}"
        case "budget":
            return f"price <= {p.budget // view.slots}"
    return ""


def _accepts(player: ScriptedPlayer, view: PlanningView) -> bool:
    """Whether a teller accepts: after its rounds, the best full plan seen so far; without messages,
    a plan with a total of at least 0, and any plan after its rounds."""
    plans = [action.plan for action in view.log if action.plan is not None]
    totals = [
        sheet.total for plan, sheet in zip(plans, view.sheets, strict=True) if None not in plan
    ]
    is_late = len(totals) > player.rounds
    if not view.options.messages:
        return is_late or totals[-1] >= 0
    return len(totals) > player.rounds + _PATIENCE or (is_late and totals[-1] == max(totals))


def _sheet_text(view: PlanningView) -> str:
    """The last score sheet in words: `label: points` items."""
    proposal = [action for action in view.log if action.plan is not None][-1]
    names = proposal.text.strip("[]").split(", ")
    items = sheet_items(view.sheets[-1], names)
    return "; ".join(f"{label}: {points}" for label, points in items)


_MOVES = {"teller": _teller, "silent": _silent, "searcher": _searcher, "guesser": _guesser}
