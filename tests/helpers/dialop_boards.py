"""Hand-sized boards and helpers that the dialop tests share."""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

from dialop.game import Game
from dialop.kit import load_kit
from dialop.logged import Rules
from dialop.matching.board import best_pairs
from dialop.matching.game import MatchingInstance
from dialop.matching.generate import MatchingRecipe
from dialop.matching.roster import short_title

# Seat 0 sees the diagonal (3 + 9 = 12), seat 1 the other one (7 + 1 = 8). The best is 12.
SMALL = MatchingInstance(
    key="hand/0",
    size=2,
    table=((3, 7), (1, 9)),
    masks=(((1, 0), (0, 1)), ((0, 1), (1, 0))),
    scales=(1.0, 1.0),
    first_seat=0,
    best=12,
    solo=(12.0, 8.0),
    max_value=10,
)
# The same board with hidden scales; seat 1 moves first. 3 x 2.5 = 7.5 is shown as 7.
SCALED = MatchingInstance(
    key="hand/1",
    size=2,
    table=((3, 7), (1, 9)),
    masks=(((1, 0), (0, 1)), ((0, 1), (1, 0))),
    scales=(2.5, 4.0),
    first_seat=1,
    best=12,
    solo=(12.0, 8.0),
    max_value=10,
)
G = TypeVar("G", bound=Game)
FULL = Rules()
BRIEF = Rules(brief=True)
SILENT = Rules(messages=False)
BEST = "[propose]\nBLEU: Ava\nElectra: Daniel"
WORST = "[propose]\nBLEU: Daniel\nElectra: Ava"


def play(game: G, *moves: tuple[int, str]) -> G:
    """Make legal moves and return the game."""
    for seat, text in moves:
        step = game.step(seat, text)
        assert step.error is None, step.error
    return game


@cache
def full_boards() -> list[MatchingInstance]:
    """Forty boards of the full game, which take seconds. Only to read."""
    return load_kit("matching").generate(MatchingRecipe(), seed=11, num=40)


def human_games(game: str = "matching") -> Path:
    """The file of a game's recorded plays; skips the calling test where it is absent."""
    default = Path(__file__).resolve().parents[3] / "shared" / "human-games"
    path = Path(os.environ.get("SELFPLAY_HUMAN_GAMES", default)) / f"{game}.jsonl"
    if not path.exists():
        pytest.skip(f"no recorded human games at {path} (set SELFPLAY_HUMAN_GAMES)")
    return path


def record_of(board: MatchingInstance, *entries: tuple[int, str, str]) -> dict[str, Any]:
    """A recorded game on this board, from entries (seat, message or propose or accept or reject,
    text of a message or each reviewer's paper); without papers a proposal is the best plan."""
    log: list[dict[str, Any]] = []
    for seat, kind, said in entries:
        entry: dict[str, Any] = {"player": seat}
        if kind == "message":
            entry |= {"type": "message", "message": {"data": said}}
        elif kind == "propose":
            pairs = [*enumerate(map(int, said.split()))] or best_pairs(board.table)
            lines = [f"{short_title(board.papers[p])}: {board.reviewers[r]}" for r, p in pairs]
            text = "<br/>&emsp; - ".join(["Proposal:", *lines])
            entry |= {"type": "proposal", "proposal": text, "proposal_ids": [*map(list, pairs)]}
        else:
            entry |= {"type": "proposal_response", "response": {"accept": kind == "accept"}}
        log.append(entry)
    return {
        "table": [list(row) for row in board.table],
        "mask1": [list(row) for row in board.masks[0]],
        "mask2": [list(row) for row in board.masks[1]],
        "scale1": board.scales[0],
        "scale2": board.scales[1],
        "action_log": log,
        "proposal_reward": int(board.best),
        "best_assignment_reward": int(board.best),
    }


def write_records(path: Path, *records: dict[str, Any]) -> Path:
    """A .jsonl file of recorded games."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


# Seat 1 begins. A rejected proposal, a message while one is pending, an accepted proposal.
# Words: 3 + 4 + 2.
RECORD = record_of(
    SMALL, (1, "message", "I see 7"), (0, "message", "my 9 is large"), (0, "propose", "1 0"),
    (1, "reject", ""), (1, "propose", "0 1"), (1, "message", "final offer"), (0, "accept", ""),
)  # fmt: skip
