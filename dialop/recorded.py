"""Recorded human games of DialOp: their boards as instances, their logs as moves, their scores from
their own text.

A record is one JSON object of the published file: `table`, `mask1`, `mask2`, `scale1`, `scale2`,
`action_log`, `proposal_reward`, `best_assignment_reward`. Values in the table's units. Never plays
a game.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dialop.board import MAX_VALUE, Action, MatchingInstance, unknown_value
from dialop.game import PlayerError
from dialop.proposal import parse_proposal
from dialop.roster import PAPERS, REVIEWERS
from dialop.solve import best_value, solo_value

FIELDS = ("table", "mask1", "mask2", "scale1", "scale2", "action_log", "best_assignment_reward")


def instance_from_record(record: dict[str, Any], *, key: str) -> MatchingInstance:
    """The record's board; whoever spoke first in it moves first. `best` is solved afresh, not
    copied.

    Raises:
        ValueError: for a missing field or a board that is not square.
    """
    missing = [name for name in FIELDS if name not in record]
    if missing:
        raise ValueError(f"a recorded game needs the fields {', '.join(missing)}")
    try:
        table = _rows(record["table"])
        masks = _rows(record["mask1"]), _rows(record["mask2"])
        scales = float(record["scale1"]), float(record["scale2"])
        first_seat = int(record["action_log"][0]["player"]) if record["action_log"] else 0
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a recorded game: {error!r}") from error
    if any(len(row) != len(table) for rows in (table, *masks) for row in (rows, *rows)):
        raise ValueError("table and masks must be squares of one size")
    unknown = unknown_value(MAX_VALUE)
    solo = [float(solo_value(table, mask, unknown=unknown)) for mask in masks]
    return MatchingInstance(
        key=key,
        size=len(table),
        table=table,
        masks=masks,
        scales=scales,
        first_seat=first_seat,
        best=best_value(table),
        solo=(solo[0], solo[1]),
    )


def moves_from_record(record: dict[str, Any]) -> list[Action]:
    """The log's entries as actions, proposals read from their text.

    Raises:
        ValueError: names the entry (from 0) that is no move, or whose proposal cannot be read with
            the roster or differs from its recorded pairs.
    """
    size = len(record["table"])
    moves = []
    for number, entry in enumerate(record["action_log"]):
        try:
            moves.append(_move(entry, size=size))
        except PlayerError as error:
            raise ValueError(f"log entry {number} does not fit the roster: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"log entry {number} is no move: {error}") from error
    return moves


def said_in(record: Mapping[str, Any]) -> list[str]:
    """The messages of a record, in order, as people wrote them.

    Raises:
        ValueError: for a record whose log is none.
    """
    try:
        return [
            str(entry["message"]["data"])
            for entry in record["action_log"]
            if entry["type"] == "message"
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a recorded game: {error!r}") from error


def begun(record: dict[str, Any], num_entries: int, *, key: str) -> MatchingInstance:
    """The record's board with its first `num_entries` entries as the opening, and nothing of what
    came after them: whoever plays on from it cannot know how the people ended.

    Raises:
        ValueError: for a cut outside the log, or a log that `moves_from_record` cannot read.
    """
    num_all = len(record["action_log"])
    if not 0 <= num_entries <= num_all:
        raise ValueError(f"num_entries must be 0 to {num_all}, got {num_entries}")
    opening = tuple(moves_from_record(record)[:num_entries])
    return replace(instance_from_record(record, key=key), opening=opening)


def _move(entry: dict[str, Any], *, size: int) -> Action:
    """One log entry as an action; raises PlayerError for a proposal that cannot be read."""
    seat, kind = int(entry["player"]), entry["type"]
    if seat not in (0, 1):
        raise ValueError(f"player must be 0 or 1, got {seat}")
    if kind == "message":
        return Action(seat, "message", str(entry["message"]["data"]))
    if kind == "proposal_response":
        return Action(seat, "accept" if entry["response"]["accept"] else "reject", "")
    if kind != "proposal":
        raise ValueError(f"type must be message, proposal or proposal_response, got {kind!r}")
    text = entry["proposal"]
    pairs = parse_proposal(text, REVIEWERS[:size], papers=PAPERS[:size])
    recorded = tuple(sorted((int(r), int(p)) for r, p in entry["proposal_ids"]))
    if pairs != recorded:
        raise ValueError(f"its text says {pairs}, its pairs are {recorded}")
    return Action(seat, "propose", text, pairs)


def replay(record: dict[str, Any], *, index: int) -> dict[str, Any]:
    """Score a record from the text of its accepted proposal and compare with what was recorded.

    Returns `{"index", "score", "best", "norm", "recorded_score", "recorded_best", "agrees"}`; a
    game that cannot be scored has None for score and norm, False for agrees, and says why in
    "error".
    """
    line: dict[str, Any] = {"index": index, "score": None, "best": None, "norm": None}
    line["recorded_score"] = record.get("proposal_reward")
    line["recorded_best"] = record.get("best_assignment_reward")
    line["agrees"] = False
    try:
        instance = instance_from_record(record, key=f"recorded/{index}")
        line["best"] = instance.best
        moves = moves_from_record(record)
    except ValueError as error:
        return {**line, "error": str(error)}
    if not moves or moves[-1].kind != "accept":
        return {**line, "error": "no accepted proposal at the end of the log"}
    pairs = next((move.pairs for move in reversed(moves) if move.pairs is not None), None)
    if pairs is None:
        return {**line, "error": "an answer without a proposal"}
    score = instance.value(pairs)
    line.update(score=score, norm=instance.norm(score))
    line["agrees"] = score == line["recorded_score"] and instance.best == line["recorded_best"]
    return line


def _rows(rows: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(cell) for cell in row) for row in rows)
