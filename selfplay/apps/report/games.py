"""The games of runs as data for the page's viewer: plain, compact, bounded.

A game is a record of `selfplay/metrics/records.py`. Texts that many games share (rules) are kept
once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dialop.kit import Kit
from dialop.shown import on_one_line, printable
from dialop.tags import after_thought, drop_reasoning
from selfplay.apps.report.run_files import STAGES, RunFiles

MAX_BYTES = 12_000_000  # of the viewer's data as JSON
TRAINING = "training"
_POLICY = "policy"  # the player of its seats in a record
TOKEN_NUMBERS = ("advantages", "mismatch")  # of a turn, one for each token
_CREDIT = ("reward", "return", "advantage")  # of a seat, in the games of groups
_KEPT = ("episode", "step", "score_norm", "agreed", "ended", "rewards", "seat_scores")

# The errors of reading a damaged record or one of another version.
UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


class Texts:
    """The distinct long texts of a page. `number` returns a text's index in `all`; `keep` drops all
    but the first ones."""

    def __init__(self) -> None:
        """No texts yet."""
        self.all: list[str] = []
        self._places: dict[str, int] = {}

    def number(self, text: str) -> int:
        """The index of a text, which is added if it is new."""
        if text not in self._places:
            self._places[text] = len(self.all)
            self.all.append(printable(text))
        return self._places[text]

    def keep(self, num: int) -> None:
        """Drop all texts but the first `num`."""
        del self.all[num:]
        self._places = {text: place for text, place in self._places.items() if place < num}


def viewer_data(runs: Sequence[RunFiles], *, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The games of all runs: {"texts", "runs", "games", "num_left_out"}.

    Held-out games come first, then evaluations, then training games. Games beyond `max_bytes` are
    omitted and counted; one that cannot be read is named in its run's problems.
    """
    texts, games, size, num_left_out = Texts(), [], 0, 0
    policies = [policies_by_seat(run) for run in runs]
    for record, source, number in _in_order(runs):
        num_texts = len(texts.all)
        try:
            game = drawn_game(record, source, number, texts, kit=runs[number].kit)
        except UNREADABLE as error:
            name = on_one_line(str(record.get("instance")))
            runs[number].problems.append(f"{source} game {name:.80}: {error!r}")
            texts.keep(num_texts)
            continue
        for seat, policy in zip(game["seats"], policies[number], strict=False):
            if policy and seat["player"] == _POLICY:
                seat["player"] = f"{_POLICY} {policy}"
        own = len(json.dumps([game, texts.all[num_texts:]]))
        if size + own > max_bytes:
            num_left_out += 1
            texts.keep(num_texts)
        else:
            size += own
            games.append(game)
    _pair_up(games)
    return {
        "texts": texts.all,
        "runs": [run.name for run in runs],
        "games": games,
        "num_left_out": num_left_out,
    }


def _in_order(runs: Sequence[RunFiles]) -> Iterator[tuple[dict[str, Any], str, int]]:
    """Each record with its source and the number of its run."""
    for number, run in enumerate(runs):
        # Games after self-play come first: they interest a reader most.
        for row in sorted(run.rows, key=lambda row: row.source == "before"):
            held_out = row.source in STAGES
            if row.kind == "policy" and (row.name == "sampled" or not held_out):
                source = row.source if held_out else f"{row.source}: {row.name}"
                yield from ((record, source, number) for record in row.all_games)
    for number, run in enumerate(runs):
        yield from ((record, TRAINING, number) for record in run.games)


def drawn_game(
    record: Mapping[str, Any], source: str, run: int, texts: Texts, *, kit: Kit | None
) -> dict[str, Any]:
    """One record of a game for the viewer. Private thoughts are split from the move's text.

    `kit` is the game's; with None, or if it cannot read the record, only texts are shown.
    """
    state = record.get("state") or {}
    roles, called_facts = ((), {}) if kit is None else (kit.ROLES, kit.FACTS)
    board: dict[str, Any] = {}
    extras: list[dict[str, Any]] = [{} for _ in record["turns"]]
    if kit is not None:
        with suppress(*UNREADABLE):  # of another version
            board, extras = kit.picture(state, record["turns"])
    has_roles = len(set(roles)) > 1 and len(roles) == len(record["seats"])
    called = seat_names(roles) if has_roles else [None] * len(record["seats"])
    reasons = bool(state.get("options", {}).get("private_reasoning"))
    actions = {turn["action"] for turn in record["turns"] if turn.get("action")}
    tags = tuple(sorted(actions)) if reasons else ()
    branches = {
        point["turn"]: {
            "siblings": [{**one, "text": printable(one["text"])} for one in point["siblings"]]
        }
        for point in record.get("branches", ())
    }
    turns = [
        _turn(turn, tags, {**extra, **({"branch": branches[i]} if i in branches else {})})
        for i, (turn, extra) in enumerate(zip(record["turns"], extras, strict=True))
    ]
    pieces = [piece for extra in extras for note in extra.get("notes", ()) for piece in note]
    return {
        "run": run,
        "source": source,
        "instance": on_one_line(str(record["instance"])),
        **{name: record[name] for name in _KEPT if name in record},
        "facts": {
            called_facts.get(name) or on_one_line(name).replace("_", " "): value
            for name, value in (record.get("facts") or {}).items()
        },
        "measures": {
            on_one_line(name): value
            for name, value in (record.get("measures") or {}).items()
            if isinstance(value, int | float)
        },
        **({"judge": on_one_line(str(record["judge"]))} if "judge" in record else {}),
        "seats": [
            {
                "player": on_one_line(str(seat["player"])),
                **({"role": role} if role else {}),
                **{n: seat[n] for n in _CREDIT if isinstance(seat.get(n), int | float)},
                "system": texts.number(seat["system"]),
                "user": texts.number(seat["user"]),
            }
            for seat, role in zip(record["seats"], called, strict=True)
        ],
        "turns": turns,
        "num_errors": sum(bool(turn["error"]) for turn in record["turns"]),
        "num_false": sum(isinstance(piece, dict) for piece in pieces),
        **({"board": board} if board else {}),
    }


def seat_names(roles: Sequence[str]) -> list[str]:
    """The name of each seat: its role, with its number if others have the same."""
    num = Counter(roles)
    return [f"{role} {seat}" if num[role] > 1 else role for seat, role in enumerate(roles)]


def seats_of(run: RunFiles) -> list[str]:
    """What a page calls each seat of a run: its role, or its number if all have the same; with the
    name of its policy if that is another.

    So "seller" if its policy has the role's name, else "seller (NAME)"; "seat 0 (NAME)" among equal
    roles. [] for a game that is not imported.
    """
    roles = run.kit.ROLES if run.kit else ()
    names = seat_names(roles) if len(set(roles)) > 1 else [f"seat {i}" for i in range(len(roles))]
    return [
        name if policy in ("", role) else f"{name} ({policy})"
        for name, role, policy in zip(names, roles, policies_by_seat(run), strict=True)
    ]


def policies_by_seat(run: RunFiles) -> tuple[str, ...]:
    """The name of each seat's policy, "" for a single one; none for a game that is not imported."""
    return run.config.policy_of_seat if run.config and run.kit else ()


def _turn(
    turn: Mapping[str, Any], tags: tuple[str, ...], extra: Mapping[str, Any]
) -> dict[str, Any]:
    """`tags` are a game's, if it allows private text before a move's tag, else ()."""
    whole = printable(turn["text"])
    text = drop_reasoning(whole, tags) if tags else after_thought(whole)
    thought = whole[: len(whole) - len(text)].strip()
    tokens = [[printable(piece), nats] for piece, nats in turn.get("tokens", ())]
    seen = {name: turn[name] for name in TOKEN_NUMBERS if turn.get(name)}
    named = {name: on_one_line(turn[name]) for name in ("action", "error_kind") if turn.get(name)}
    return {
        "seat": turn["seat"],
        **named,
        "text": text.strip(),
        **({"thought": thought} if thought else {}),
        **({"error": printable(turn["error"])} if turn["error"] else {}),
        **({"tokens": tokens, **seen} if tokens else {}),
        "read": [printable(text) for text in turn["observations"]],
        **extra,
    }


def _pair_up(games: Sequence[dict[str, Any]]) -> None:
    """Give each held-out game after self-play the index of its twin before, and the change of its
    score; and each twin the index of its game."""
    before = {(g["run"], g["instance"]): i for i, g in enumerate(games) if g["source"] == "before"}
    for place, game in enumerate(games):
        twin = before.get((game["run"], game["instance"]))
        if game["source"] == "after" and twin is not None:
            game["twin"], games[twin]["twin"] = twin, place
            with suppress(KeyError, TypeError):  # a score that is not finite is absent
                game["change"] = game["score_norm"] - games[twin]["score_norm"]


def safe_json(value: Any) -> str:
    """JSON that is safe inside a script element: no `<`, `>`, `&` and no line separators of
    JavaScript, whatever the texts contain."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text
