"""The rows of evaluations: what is written of one pair of players on a set of instances, and how
files of any version are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, Strict, TypeAdapter, ValidationError

from selfplay.config.player_spec import SCRIPTED

SCRIPT = f"{SCRIPTED}:"  # begins the names of scripts' rows, and of no other
OTHER = " (the other player)"  # ends the name of a row for the partner

R = TypeVar("R", bound="Row")
_adapter = cache(TypeAdapter)  # 25 ms to make
Number = Annotated[float, Strict()]


def _ordered(interval: tuple[float, float, float]) -> tuple[float, float, float]:
    """The interval. Raises ValueError unless its low end is at most its high one."""
    if not interval[1] <= interval[2]:
        raise ValueError("must be a mean, a low and a high number")
    return interval


def _of_any_version(talk: Any) -> Any:
    """No file before 2026-11-27 has the agreement's difference; an early one says {} for None."""
    return {"agreement": None, "blank": None, **talk} if isinstance(talk, dict) and talk else None


Interval = Annotated[tuple[Number, Number, Number], AfterValidator(_ordered)]  # mean, low, high


@dataclass(frozen=True, slots=True)
class TalkEffect:
    """Differences paired by game, as (mean, low, high): the score minus that with messages of
    other games (`effect`), agreement likewise (`agreement`; None in old files), and the score minus
    that with empty messages (`blank`; None if the game refuses other words)."""

    effect: Interval
    agreement: Interval | None
    blank: Interval | None
    num_games: int


@dataclass(frozen=True, slots=True)
class Row:
    """The games of one pair of players on a set of instances.

    `scores` has one score per game. `interval` is (mean, low, high) of the score, a 95 %
    interval over games. `measures` are means over games. `games` holds the first games in full,
    `examples` the "best", "typical" and "worst" game by score. `talk` is None where it was not
    measured or the policy heard nothing. `partner` is what the same games are for the player in the
    other seats, without games; None where one player has all of them.
    """

    name: str
    scores: Annotated[tuple[Annotated[Number, Field(ge=0, le=1)], ...], Field(min_length=1)]
    interval: Interval
    measures: dict[str, Number]
    games: tuple[dict[str, Any], ...] = ()
    examples: dict[str, dict[str, Any]] = field(default_factory=dict)
    talk: Annotated[TalkEffect | None, BeforeValidator(_of_any_version)] = None
    partner: Row | None = None


def with_partners(rows: Mapping[str, Row], *, all_of_them: bool = False) -> dict[str, Row]:
    """The rows, each with one for the other player below it if that one's scores differ; with
    `all_of_them` if those of any do."""
    differ = {n for n, row in rows.items() if row.partner and row.partner.scores != row.scores}
    shown: dict[str, Row] = {}
    for name, row in rows.items():
        shown[name] = row
        if row.partner is not None and (differ if all_of_them else name in differ):
            shown[f"{name}{OTHER}"] = row.partner
    return shown


# --- files ----------------------------------------------------------------------------------------


def read_row(row: Any, name: str, cls: type[R], **more: Any) -> R:
    """A row as a result file of any version has it, with this name; `more` are fields that `cls`
    has beside. Raises ValueError or TypeError for another value."""
    values = {**row, "name": name, **more}
    try:
        value: R = _adapter(cls).validate_python(values)  # type: ignore[arg-type]
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where, rule = ".".join(map(str, fault["loc"])), fault["msg"]
        rule = re.sub("^([A-Z][a-z]+ should|Value error, must)", "must", rule)
        raise ValueError(f"{where} {rule}, got {fault['input']!r:.80}") from None
    return value


def read_rows(rows: Mapping[str, Any]) -> dict[str, Row]:
    """The rows of a result file by their names of today. Raises ValueError or TypeError for a file
    of something else."""
    return {name: read_row(row, name, Row) for name, row in named_rows(rows).items()}


def named_rows(rows: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of a held-out file or of an evaluation, by their names of today.

    A script's begin with "scripted:". Files before 2026-11-29 have its bare name, which may stand
    in place of the policy's row, or of people's, of that name: such a row is the script's and the
    other one is lost. It has its key as its own `name`, as no row of the policy in held-out games
    has, and only scripts in its games.
    """
    named: dict[str, Any] = {}
    for name, row in rows.items():
        old = not name.startswith(SCRIPT) and isinstance(row, dict) and row.get("name") == name
        named.setdefault(f"{SCRIPT}{name}" if old and _by_scripts(row) else name, row)
    return named


def _by_scripts(row: Mapping[str, Any]) -> bool:
    """Whether a row has example games, and only scripts play them."""
    examples = row.get("examples")
    games = [*examples.values()] if isinstance(examples, dict) else []
    try:
        players = [str(seat["player"]) for game in games for seat in game["seats"]]
    except (LookupError, TypeError):  # which the row's reader names
        return False
    return bool(players) and all(player.startswith(SCRIPT) for player in players)
