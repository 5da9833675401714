"""What pages draw of the matching game: a seat's table, the finished game, the forms of moves."""

from __future__ import annotations

from typing import Any

import numpy as np

from dialop.forms import ACCEPT_OR_REJECT, Form, say
from dialop.matching.board import MatchingInstance, best_pairs
from dialop.matching.game import MatchingGame
from dialop.matching.proposal import Pairs
from dialop.matching.roster import display_names
from dialop.matching.statements import stated_cells


def board(game: MatchingGame, seat: int) -> dict[str, Any]:
    """The seat's own table, with the pending proposal marked."""
    view = game.view(seat)
    rows, columns = display_names(view.reviewers, view.papers, brief=True)
    unknown = view.public_unknown
    return {
        "rows": rows,
        "columns": columns,
        "cells": view.displayed,
        "note": "in its own units" if unknown is None else "",
        "key": "" if unknown is None else f"A value that nobody sees counts as {unknown}.",
        "marks": view.pending or (),
        "marked_by": view.pending_seat,
    }


def forms(game: MatchingGame, seat: int) -> list[Form]:
    """Answers to a proposal, or a message and a proposal: a reviewer for each paper."""
    if game.answer_due:
        return list(ACCEPT_OR_REJECT)
    view = game.view(seat)
    brief = view.options.brief
    names, titles = display_names(view.reviewers, view.papers, brief=brief)
    choices = [(title, [(f"{title}: {name}", name) for name in names]) for title in titles]
    before = "[propose]\n" if brief else "[propose]\nProposal:\n"
    propose = Form("Propose", before, choices=choices, between="\n", distinct=True, grid=True)
    return [*([say()] if view.options.messages else ()), propose]


def talk(game: MatchingGame, seat: int) -> list[tuple[int, str, str]]:
    """All moves: both seats know them."""
    return [(action.seat, action.kind, action.text) for action in game.view(seat).log]


def picture(game: MatchingGame, num: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The table of a finished game, and what each of its last `num` moves proposes or states."""
    instance, log = game.instance, game.view(0).log
    own = [board(game, seat) for seat in (0, 1)]
    sees = instance.masks
    size = range(instance.size)
    table = {
        "title": "Both tables together",
        "rows": own[0]["rows"],
        "columns": own[0]["columns"],
        "cells": instance.table,
        "seen": [[[s for s in (0, 1) if sees[s][r][p]] for p in size] for r in size],
        "note": f"best {instance.best:g}",
        "key": "Framed: the proposal, with the value that each pair loses. Dotted: a best "
        "assignment. Dots: the seats that see the cell.",
        "best": best_pairs(instance.table),
        "own": own,
    }
    moves: list[dict[str, Any]] = []
    for action in log[len(log) - num :]:
        if action.pairs is not None:
            moves.append(_proposal(instance, action.pairs, own[0]["columns"]))
        elif cells := stated_cells(action.text, instance) if action.kind == "message" else ():
            moves.append({"notes": [_statements(cells, own[action.seat])]})
        else:
            moves.append({})
    return table, moves


def lost(instance: MatchingInstance, pairs: Pairs) -> tuple[Pairs, list[int]]:
    """A best assignment, and what each pair of a proposal loses against it.

    The losses belong to the pairs in order: the value that the best assignment has for the same
    paper minus the pair's own. They add up to the best value minus the proposal's. Of several best
    assignments the one that shares most pairs with the proposal is taken.
    """
    chosen, size = dict(pairs), range(instance.size)
    shared = np.array([[float(chosen.get(r) == p) for p in size] for r in size])
    # Values are whole numbers, so shared pairs, at most `size`, only decide between equal plans.
    best = best_pairs(np.asarray(instance.table) * (instance.size + 1.0) + shared)
    reviewer_of = {paper: reviewer for reviewer, paper in best}
    return best, [instance.table[reviewer_of[p]][p] - instance.table[r][p] for r, p in pairs]


def _proposal(instance: MatchingInstance, pairs: Pairs, papers: list[str]) -> dict[str, Any]:
    best, losses = lost(instance, pairs)
    value = instance.value(pairs)
    signs = [f"{'−' if loss > 0 else '+'}{abs(loss)}" if loss else "" for loss in losses]
    named = [f"{papers[p]} {sign}" for (_, p), sign in zip(pairs, signs, strict=True) if sign]
    ending = f"against the best: {', '.join(named)}" if named else "nothing is lost"
    return {
        "proposal": {
            "cells": [[r, p, sign] for (r, p), sign in zip(pairs, signs, strict=True)],
            "best": best,
            "label": f"{value:g} ({instance.norm(value):.3f})",
        },
        "notes": [[f"value {value:g} of {instance.best:g}; {ending}"]],
    }


def _statements(cells: list[tuple[int, int, int]], own: dict[str, Any]) -> list[Any]:
    pieces: list[Any] = ["states "]
    for number, (r, p, value) in enumerate(cells):
        true = own["cells"][r][p]
        said = f"{own['rows'][r]} {own['columns'][p]} {value}"
        seen = "unseen" if true is None else true
        right = f"{said} ✓" if true == value else {"wrong": f"{said} ✗ (own table: {seen})"}
        pieces += [", ", right] if number else [right]
    return pieces
