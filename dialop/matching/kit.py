"""The kit of matching (`dialop.kit`): settings, files, scripted players, forms, pictures."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from dialop import people, rows, starts
from dialop.forms import ACCEPT_OR_REJECT, Form, say
from dialop.game import Game
from dialop.kit import option
from dialop.logged import Rules, part_of
from dialop.matching import recorded, scripted, texts
from dialop.matching.board import Action, MatchingInstance, MatchingView, best_pairs, referenced
from dialop.matching.game import MatchingGame
from dialop.matching.generate import MatchingRecipe, generate_instance
from dialop.matching.proposal import Pairs, render_proposal
from dialop.matching.roster import display_names
from dialop.matching.statements import stated_cells
from dialop.values import check_fields, parsed

TITLE = "reviewer–paper matching (DialOp)"
ROLES: tuple[str, ...] = ("player", "player")
SCRIPT_NAMES: tuple[str, ...] = tuple(scripted.ScriptedPlayer.OPTIONS)
BASELINES: tuple[str, ...] = ("honest", "solo", "random")
PLAYED_BY_PEOPLE: bool = True
FACTS = {
    "best": "value of the best assignment",
    **{f"solo_{seat}": f"share of it that seat {seat} finds alone" for seat in (0, 1)},
}
RECORD_FIELDS = ("table",)
_DEMONSTRATED = 2**62  # the stream of demonstrated boards
NEW_GAME = "This game is over. A new game begins, with another partner."
_MOST_MOVES = 100  # of a demonstration
_PLANS_SHOWN = 3  # in a demonstration

make_script = scripted.make_scripted
restore = MatchingGame.from_state
rescore = recorded.rescore
instance_from_record, moves_from_record = recorded.instance_from_record, recorded.moves_from_record


@dataclass(frozen=True)
class Options(MatchingRecipe, Rules):
    """The recipe of instances and the rules of play."""

    demonstrations: int = option(
        0,
        "finished games of scripted players that every prompt shows first; they have no loss",
        low=0,
        high=16,
        play=True,
    )


def easy(options: Options) -> Options:
    """The options that keep boards of any difficulty (any value of the seats' solo plans)."""
    return replace(options, keep="all")


def new_game(instance: MatchingInstance, options: Options) -> MatchingGame:
    """A new game on a board, with `demonstrations` games in its prompts."""
    shown = _demonstrations(options) if options.demonstrations else ((), "")
    return MatchingGame(instance, part_of(options, Rules), demonstrations=shown)


@lru_cache(maxsize=8)
def _demonstrations(options: Options) -> tuple[tuple[tuple[str, str], ...], str]:
    """The demonstration games under these rules, the same for every game of every run."""
    recipe, rules = easy(options), part_of(options, Rules)
    shown = []
    for index in range(options.demonstrations):
        board = generate_instance(recipe, seed=_DEMONSTRATED, index=index)
        players = [partial(_shown_move, 10 * index + number) for number in (1, 2)]
        shown.append((MatchingGame(board, rules), players))
    return demonstrated(shown)


def _shown_move(seed: int, view: MatchingView) -> str:
    """The move of a player that states all its cells, proposes random plans, and rejects all but
    the third.

    A model copies the plans that it has read. If they are several and random, the games of a group
    propose different plans, and their advantages compare the plans.
    """
    proposed = sum(action.kind == "propose" for action in view.log)
    if view.pending is not None and proposed < _PLANS_SHOWN:
        return "[reject]"
    return make_script("honest:reply=tell,plan=random", seed=seed).act(view)


def demonstrated(
    games: Sequence[tuple[Game, Sequence[Callable[[Any], str]]]],
) -> tuple[tuple[tuple[str, str], ...], str]:
    """`Prompt.earlier` and `Prompt.between` from these new games, each with its seats' players as
    functions from a view to a move.

    The first game is shown from the view of the seat that moves first, the second from the other
    seat's view, and so on. Raises ValueError if a game does not end or a move is invalid.
    """
    earlier: list[tuple[str, str]] = []
    between = ""
    for number, (game, players) in enumerate(games):
        first = game.seat_to_move
        assert first is not None
        shown = (first + number) % game.num_seats
        unread = [""] * game.num_seats
        opening = game.prompt(shown).user
        for _ in range(_MOST_MOVES):
            seat = game.seat_to_move
            if seat is None:
                break
            text = players[seat](game.view(seat))
            if seat == shown:
                parts = (between, opening, unread[seat])
                earlier.append(("\n".join(filter(None, parts)), text))
                between = opening = unread[seat] = ""
            step = game.step(seat, text)
            if step.error is not None:
                raise ValueError(f"a demonstration must have legal moves, got {step.error}")
            new = zip(unread, step.observations, strict=True)
            unread = ["\n".join(filter(None, pair)) for pair in new]
        else:
            raise ValueError(f"a demonstration must end within {_MOST_MOVES} moves")
        between = "\n".join(filter(None, (unread[shown], NEW_GAME)))
    return tuple(earlier), between


def vary(instance: MatchingInstance, seat: int, *, seed: int) -> MatchingInstance | None:
    """The board with other values in the cells that only this seat sees; None if none changes."""
    mine, other = instance.masks[seat], instance.masks[1 - seat]
    draw, rows = random.Random(seed), [list(row) for row in instance.table]
    for r, p in product(range(instance.size), repeat=2):
        if mine[r][p] and not other[r][p]:
            rows[r][p] = draw.randrange(instance.max_value)
    table = tuple(map(tuple, rows))
    return None if table == instance.table else referenced(replace(instance, table=table))


def recorded_tally(record: Mapping[str, Any], instance: MatchingInstance) -> dict[str, float]:
    """The measures of a recorded human game.

    The score is the recorded one, so games whose proposals use another roster are included. Errors
    were not recorded, and the parser of scripted statements finds almost none in people's prose. A
    note between two moves by one person counts as a message.
    """
    agreed = recorded.agreed(record)
    score = instance.norm(float(record["proposal_reward"])) if agreed else None
    return starts.tally(recorded.moves_of_any_roster(record), score)


def written(action: Action, instance: MatchingInstance) -> str:
    """A recorded move as its seat would write it."""
    content = action.text.strip()
    if action.pairs is not None:
        content = render_proposal(action.pairs, instance.reviewers, papers=instance.papers)
    return texts.move_text(action.kind, content)


def digest(instance: MatchingInstance) -> str:
    """A digest of the table and the cells that each seat sees, independent of the file."""
    return people.digest(instance.table, instance.masks)


def described(instances: Sequence[MatchingInstance], options: Options) -> dict[str, Any]:
    """The sizes of the boards, and whether the seats may send messages."""
    sizes = sorted({instance.size for instance in instances})
    return {"board_sizes": sizes, "messages_allowed": options.messages}


def phrases(
    instances: Sequence[MatchingInstance], options: Options, *, split_lines: bool
) -> Sequence[str]:
    """Tags, cell names and assignment lines of the brief style; () in the full style."""
    if not options.brief:
        return ()
    first = instances[0]
    return texts.brief_phrases(first.reviewers, first.papers, split_lines=split_lines)


def record(game: MatchingGame) -> dict[str, Any]:
    """A finished game in the form of the published human games."""
    return recorded.record_of(game.instance, game.view(0).log)


_PAIRS = (("masks", "mask"), ("scales", "scale"), ("solo", "solo"))
_PLAIN = ("key", "size", "table", "first_seat", "best", "max_value", "reviewers", "papers")
_NAMES = (*_PLAIN, *(f"{column}_{seat}" for _, column in _PAIRS for seat in (0, 1)))


def write(path: str | Path, instances: Sequence[MatchingInstance]) -> None:
    """Write instances to one parquet file (`rows.write_rows`)."""
    rows.write_rows(path, [_to_row(instance) for instance in instances])


def read(path: str | Path) -> list[MatchingInstance]:
    """Read the instances of a .parquet file, or the boards of a .jsonl file of recorded games.

    Raises ValueError and OSError as `rows.read_instances`, and ValueError for a file in which no
    seat sees any cell.
    """
    instances = rows.read_instances(path, _from_row, recorded.instance_from_record)
    visible = (cell for i in instances for mask in i.masks for line in mask for cell in line)
    if instances and not any(visible):
        raise ValueError(f"{path}: no seat sees a cell on any board, so messages are useless")
    return instances


def _to_row(instance: MatchingInstance) -> dict[str, Any]:
    both = ((seat, field, column) for field, column in _PAIRS for seat in (0, 1))
    pairs = {f"{column}_{seat}": getattr(instance, field)[seat] for seat, field, column in both}
    return {name: getattr(instance, name) for name in _PLAIN} | pairs


def _from_row(row: dict[str, Any]) -> MatchingInstance:
    check_fields(row, _NAMES)
    data = {name: row[name] for name in _PLAIN}
    data |= {field: (row[f"{column}_0"], row[f"{column}_1"]) for field, column in _PAIRS}
    # The column holds floats, but tables hold integers, so `best` is an integer too.
    best = data["best"]
    data["best"] = int(best) if isinstance(best, float) and best.is_integer() else best
    instance = parsed(MatchingInstance, data)
    instance.check()
    return instance


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
    """The table of a finished game, and the proposal or statements of each of its last `num`
    moves."""
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
    """A best assignment, and the loss of each pair of a proposal against it.

    A pair's loss is the best assignment's value for the same paper minus the pair's value. The
    losses, in the order of the pairs, sum to the best value minus the proposal's value. Of several
    best assignments, the one that shares the most pairs with the proposal is taken.
    """
    chosen, size = dict(pairs), range(instance.size)
    shared = np.array([[float(chosen.get(r) == p) for p in size] for r in size])
    # Values are integers, so shared pairs, at most `size`, only decide between equal plans.
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
