"""What the page draws of one game's own things: the tables and proposals of matching, what each
proposal of planning and mediation is worth.

A game without a picture is shown by its texts alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dialop.kit import load_kit
from dialop.matching.board import KINDS, MatchingInstance, action_from_dict, instance_from_dict
from dialop.matching.proposal import Pairs
from dialop.matching.roster import display_names
from dialop.matching.solve import best_pairs
from dialop.matching.statements import stated_cells
from dialop.mediation.score import pair_costs
from dialop.planning.score import sheet_of


def draw_matching(state: Mapping[str, Any], turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The tables of a finished matching game, and what each turn proposes and states.

    `turns` are those of the game's record. Tables are [reviewer][paper]. `turns` of the result has
    one dict for each turn: `proposal` (see `drawn_proposal`) and `stated`, a list of [reviewer,
    paper, value, whether it is true in the speaker's own table].

    Raises LookupError, TypeError or ValueError for a state that is not one of matching.
    """
    instance = instance_from_dict(state["instance"])
    log = [action_from_dict(action) for action in state["play"]["log"]]
    num_legal = sum(turn["error"] is None for turn in turns)
    legal = iter(log[len(log) - num_legal :])
    shown = [instance.displayed(seat) for seat in (0, 1)]
    drawn: list[dict[str, Any]] = []
    for turn in turns:
        extra: dict[str, Any] = {}
        action = next(legal, None) if turn["error"] is None else None
        if action is not None and action.pairs is not None:
            extra["proposal"] = drawn_proposal(instance, action.pairs)
        if action is not None and action.kind == "message":
            own = shown[action.seat]
            cells = stated_cells(action.text, instance)
            extra["stated"] = [[r, p, value, own[r][p] == value] for r, p, value in cells]
        drawn.append(extra)
    return {**drawn_tables(instance), "turns": drawn, "tags": list(KINDS)}


def proposal_values(
    name: str, state: Mapping[str, Any], turns: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """One dict for each turn of a planning or mediation game. That of a full proposal has `worth`:
    its points, and its place between the worst (0) and the best (1).

    Raises as `draw_matching`.
    """
    instance = load_kit(name).restore(state).instance  # type: ignore[attr-defined]
    num_legal = sum(turn["error"] is None for turn in turns)
    log = state["play"]["log"]
    legal: Iterator[Mapping[str, Any]] = iter(log[len(log) - num_legal :])
    drawn: list[dict[str, Any]] = []
    for turn in turns:
        act = next(legal, {}) if turn["error"] is None else {}
        points = None
        if act.get("plan") and None not in act["plan"]:
            points = sheet_of(instance.sites, instance.preferences, tuple(act["plan"])).total
        elif act.get("flights"):
            points = sum(costs.total for costs in pair_costs(instance, tuple(act["flights"])))
        worth = None if points is None else [points, round(instance.norm(points), 4)]
        drawn.append({"worth": worth} if worth else {})
    return drawn


def drawn_tables(instance: MatchingInstance) -> dict[str, Any]:
    """The pooled table, each seat's own one, and a best assignment."""
    reviewers, papers = display_names(instance.reviewers, instance.papers, brief=True)
    return {
        "rows": reviewers,
        "columns": papers,
        "values": instance.table,
        "shown": [instance.displayed(seat) for seat in (0, 1)],
        "scaled": instance.scales != (1.0, 1.0),
        "best": best_pairs(instance.table),
        "best_value": instance.best,
    }


def drawn_proposal(instance: MatchingInstance, pairs: Pairs) -> dict[str, Any]:
    """A proposal with its value and what it loses.

    `lost[i]` belongs to the i-th pair: the value that a best assignment has for the same paper
    minus the pair's own. The losses add up to the best value minus the proposal's. Of several best
    assignments the one that shares most pairs with the proposal is taken.
    """
    chosen = dict(pairs)
    shared = np.array(
        [[float(chosen.get(r) == p) for p in range(instance.size)] for r in range(instance.size)]
    )
    # Values are whole numbers, so shared pairs, at most `size`, only decide between equal plans.
    best = best_pairs(np.asarray(instance.table) * (instance.size + 1.0) + shared)
    reviewer_of = {paper: reviewer for reviewer, paper in best}
    value = instance.value(pairs)
    return {
        "pairs": pairs,
        "value": value,
        "share": round(instance.norm(value), 4),
        "best": best,
        "lost": [instance.table[reviewer_of[p]][p] - instance.table[r][p] for r, p in pairs],
    }
