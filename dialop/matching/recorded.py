"""Reads recorded human games of DialOp: boards as instances, logs as moves, and rescored results.

A record is one JSON object of the published file: `table`, `mask1`, `mask2`, `scale1`, `scale2`,
`action_log`, `proposal_reward`, `best_assignment_reward`. Values are in the table's units. A game
played here may add `max_value`, `reviewers` and `papers`, whose defaults are the published games'
values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from reprlib import repr as short
from typing import Any

from dialop.game import PlayerError
from dialop.matching.board import Action, MatchingInstance, referenced
from dialop.matching.proposal import parse_proposal, render_proposal
from dialop.matching.roster import REVIEWERS
from dialop.starts import Rescored, answer_of, message_of, read_log
from dialop.values import check_fields, checked_int, checked_list, checked_string, field, parsed

FIELDS = ("table", "mask1", "mask2", "scale1", "scale2", "action_log", "best_assignment_reward")


def instance_from_record(record: Mapping[str, Any], *, key: str) -> MatchingInstance:
    """The record's board, checked. The seat of the first log entry moves first.

    `best` is recomputed and must equal the recorded value.

    Raises:
        ValueError: for an invalid record; names the field or the log entry (from 0).
    """
    check_fields(record, FIELDS, "a recorded game needs the fields")
    moves_of_any_roster(record)
    size = len(checked_list(record["table"], "table"))
    log = record["action_log"]
    names = {name: record[name] for name in ("max_value", "reviewers", "papers") if name in record}
    board = parsed(
        MatchingInstance,
        {
            "key": key,
            "size": size,
            "table": record["table"],
            "masks": (record["mask1"], record["mask2"]),
            "scales": (record["scale1"], record["scale2"]),
            "first_seat": log[0]["player"] if log else 0,
            **names,
        },
    )
    board.check_board()
    instance = referenced(board)
    if record["best_assignment_reward"] != instance.best:
        given = short(record["best_assignment_reward"])
        rule = f"must be {instance.best}, computed from its table"
        raise ValueError(f"best_assignment_reward {rule}, got {given}")
    if agreed(record):
        reward = record.get("proposal_reward")
        checked_int(reward, "proposal_reward", low=0, high=int(instance.best))
    return instance


def agreed(record: Mapping[str, Any]) -> bool:
    """Whether a record ends with an accepted proposal."""
    log = record["action_log"]
    return bool(log) and log[-1]["type"] == "proposal_response" and log[-1]["response"]["accept"]


def moves_of_any_roster(record: Mapping[str, Any]) -> list[Action]:
    """The log's entries as actions; the text of a proposal is unchecked."""
    return read_log(record["action_log"], _entry)


def _entry(entry: Any) -> Action:
    """One log entry as an action, a proposal with its recorded pairs."""
    seat = checked_int(field(entry, "player"), "player", low=0, high=1)
    if (kind := field(entry, "type")) == "message":
        return Action(seat, "message", message_of(entry))
    if kind != "proposal":
        return Action(seat, answer_of(entry), "")
    text, pairs = checked_string(field(entry, "proposal"), "proposal"), []
    for pair in checked_list(field(entry, "proposal_ids"), "proposal_ids"):
        r, p = checked_list(pair, "a pair of proposal_ids", low=2, high=2)
        for index in (r, p):
            checked_int(index, "proposal_ids", low=0, high=len(REVIEWERS) - 1)
        pairs.append((r, p))
    return Action(seat, "propose", text, tuple(sorted(pairs)))


def moves_from_record(record: Mapping[str, Any], instance: MatchingInstance) -> list[Action]:
    """The log's entries as actions. Proposals are parsed from their text.

    Raises:
        ValueError: for an entry that is not a move, or a proposal that cannot be parsed with the
            roster or differs from its recorded pairs. Names the entry (from 0).
    """
    return read_log(record["action_log"], lambda entry: _move(entry, instance))


def record_of(instance: MatchingInstance, log: Sequence[Action]) -> dict[str, Any]:
    """A played game as a record, from which `instance_from_record` and `moves_from_record` restore
    its board and moves. `proposal_reward` is 0 without an agreement."""
    kinds = {"message": "message", "propose": "proposal"}
    entries: list[dict[str, Any]] = []
    for action in log:
        entry = {"player": action.seat, "type": kinds.get(action.kind, "proposal_response")}
        if action.kind == "message":
            entry["message"] = {"data": action.text}
        elif action.pairs is not None:
            entry["proposal"] = render_proposal(
                action.pairs, instance.reviewers, papers=instance.papers
            )
            entry["proposal_ids"] = [list(pair) for pair in action.pairs]
        else:
            entry["response"] = {"accept": action.kind == "accept"}
        entries.append(entry)
    proposed = [action.pairs for action in log if action.pairs is not None]
    accepted = bool(log) and log[-1].kind == "accept"
    return {
        "table": [list(row) for row in instance.table],
        "mask1": [list(row) for row in instance.masks[0]],
        "mask2": [list(row) for row in instance.masks[1]],
        "scale1": instance.scales[0],
        "scale2": instance.scales[1],
        "max_value": instance.max_value,
        "reviewers": list(instance.reviewers),
        "papers": list(instance.papers),
        "action_log": entries,
        "proposal_reward": instance.value(proposed[-1]) if accepted else 0,
        "best_assignment_reward": instance.best,
    }


def _move(entry: Any, instance: MatchingInstance) -> Action:
    """One log entry as an action. Raises PlayerError for a proposal with another roster."""
    action = _entry(entry)
    if action.pairs is not None:
        pairs = parse_proposal(action.text, instance.reviewers, papers=instance.papers)
        if pairs != action.pairs:
            raise PlayerError("pairs", f"its text says {pairs}, its pairs are {action.pairs}")
    return action


def rescore(record: Mapping[str, Any], *, key: str) -> Rescored:
    """Rescore a record from the text of its accepted proposal. Raises ValueError for a game that
    cannot be scored."""
    instance = instance_from_record(record, key=key)
    moves = moves_from_record(record, instance)
    if not agreed(record):
        raise ValueError("no accepted proposal at the end of the log")
    pairs = next((move.pairs for move in reversed(moves) if move.pairs is not None), None)
    if pairs is None:
        raise ValueError("the log has an answer but no proposal")
    score = instance.value(pairs)
    return Rescored(
        {"score": score, "best": instance.best, "norm": instance.norm(score)},
        {"score": record["proposal_reward"], "best": record["best_assignment_reward"]},
    )
