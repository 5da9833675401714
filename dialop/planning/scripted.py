"""Scripted users and agents, for imitation, evaluation and tests. They use only a view.

Random draws are seeded by (seed, moves it knows of).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar, Literal

import numpy as np

from dialop.game import Lesson
from dialop.kit import option
from dialop.planning.board import AGENT, USER, Action, PlanningView
from dialop.planning.city import Value
from dialop.planning.estimate import (
    TOTAL_LABEL,
    Facts,
    best_plan,
    facts_of,
    fields_of,
    scored_in,
    sheet_items,
    stated_preferences,
    unknown_legs,
)
from dialop.planning.preferences import Preference
from dialop.planning.proposal import render_plan
from dialop.planning.search import Field, cell
from dialop.specs import ScriptedBase, made

_USERS = ("teller", "silent")
ASK = "What would you like?"
GREETING = "Hello!"
_OPENERS = ("Hi! ", "I would like this: ", "My wishes are: ", "")
_GO_ON = "Please make a plan."
_MAX_LEGS = 4
_NEAR = 12  # sites that `_by_points` looks at around each of its centres
_PATIENCE = 3  # the most proposals that a teller sees after its rounds


@dataclass(frozen=True, slots=True)
class ScriptedPlayer(ScriptedBase):
    """One scripted user or agent.

    - teller: a user who tells its preferences: all in one message ("all"), one in each message
      ("one"), or all once it is asked ("asked"). It rejects the first `rounds` full plans, telling
      their score sheets or only their totals (`score`), and then accepts the best that it has
      seen. Without messages it rejects at most `rounds` plans, those of a total below 0.
    - silent: a user who tells nothing and accepts any plan.
    - searcher: an agent who asks if it knows no preference, searches for the stated ones, and
      proposes its best plan. It searches for all sites with the fields that matter ("table"), or
      for the sites that meet all preferences, then fewer of them ("filter"). It looks up distances
      at most `legs` times for each proposal. With `think` "points" it counts in private and
      proposes `plans` plans (`_by_points`), then the one of them with the best told total. With
      probability `stray` each of these choices is a random one instead: the site of a block, the
      sites beside it, and the plan at the end.
    - guesser: an agent who proposes random sites.
    - `slip`: the probability that it first sends a malformed move and then repairs it.
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
        """The seat that this kind of player can have."""
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
    told = [scored for scored in scored_in(view.log) if scored.total is not None]
    if player.think == "points" and told:
        best = max(told, key=lambda scored: scored.total or 0)
        if player.stray and rng.random() < player.stray:
            best = told[rng.integers(len(told))]
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
    """Count, in private text, the stated preferences that each site meets minus those that it goes
    against. For each of `plans` equal blocks of the sites, in turn, look up what is near the best
    site of the block and propose this site between the best two of its `_NEAR` nearest ones.

    The text begins as `_counted` says. After distances it has a line for each near site with its
    count and the best two so far with theirs. So each token is copied or follows from two numbers
    before it. Prices are left out: few budgets can be kept, and told totals have them. Of equal
    sites the first one is taken.
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
        beside = [name for name in sorted(points) if name != centre]
        others = rng.choice(beside, min(2, len(beside)), replace=False).tolist()
    chosen = [*others[:1], centre, *others[1:]] if view.slots > 1 else [centre]
    plan = tuple(view.names.index(name) for name in chosen[: view.slots])
    return f"{lines}[propose] {render_plan(plan, view.names)}"


@dataclass(frozen=True, slots=True)
class _Counted:
    """The counts of all sites, the sites and the best site of each block, and the text that finds
    them."""

    facts: Facts
    points: dict[str, int]
    blocks: list[list[str]]
    centres: list[str]
    lines: str


@lru_cache(maxsize=64)
def _counted(
    names: tuple[str, ...],
    stated: tuple[Preference, ...],
    tables: tuple[Action, ...],
    plans: int,
) -> _Counted:
    """Count the stated preferences that each site meets minus those that it goes against.

    The text has a line for each site, in the order of the names, which is the same in all cities of
    one size: its name and its values as the searches `tables` showed them, with the count so far
    after each; then the best site of its block so far, with its count.
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
            for field, value in facts.values.get(name, {}).items():
                if value is not None:
                    points[name] += sum(_liked(p, field, value) for p in stated)
                    lines += f"|{cell(Field(field), value)} {points[name]}"
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
    """Search for sites that meet all preferences, then one fewer each time, until the results fill
    the plan; then propose them in the order found."""
    conditions = [condition for p in stated if (condition := _condition(p, view))]
    results = [a.result.splitlines()[2:] for a in view.log if a.kind == "tool"]
    names = list(dict.fromkeys(name for lines in results for name in lines))
    num = len(conditions) - len(results)
    if view.options.search and len(names) < view.slots and num > 0:
        return f"[tool] Search(filters=[{', '.join(conditions[:num])}])"
    names = list(dict.fromkeys([*names, *view.names]))[: view.slots]
    return f"[propose] {render_plan(tuple(map(view.names.index, names)), view.names)}"


def _condition(p: Preference, view: PlanningView) -> str:
    """A filter for sites that meet a preference, "" if no filter can express it."""
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
    """Whether a teller accepts: after its rounds, the best full plan that it has seen; without
    messages, a plan of a total of at least 0, and any plan after its rounds."""
    plans = [action.plan for action in view.log if action.plan is not None]
    totals = [
        sheet.total for plan, sheet in zip(plans, view.sheets, strict=True) if None not in plan
    ]
    if not view.options.messages:
        return len(totals) > player.rounds or totals[-1] >= 0
    if len(totals) > player.rounds + _PATIENCE:
        return True
    return len(totals) > player.rounds and totals[-1] == max(totals)


def _sheet_text(view: PlanningView) -> str:
    """The last score sheet in words: `label: points` items."""
    proposal = [action for action in view.log if action.plan is not None][-1]
    names = proposal.text.strip("[]").split(", ")
    items = sheet_items(view.sheets[-1], names)
    return "; ".join(f"{label}: {points}" for label, points in items)


_MOVES = {"teller": _teller, "silent": _silent, "searcher": _searcher, "guesser": _guesser}
