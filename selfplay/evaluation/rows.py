"""The rows of evaluations, each with the results of one pair of players on a set of instances, and
the reader of result files of any version.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, Strict, TypeAdapter, ValidationError

from selfplay.config.player_spec import SCRIPTED

SCRIPT = f"{SCRIPTED}:"  # prefix of the names of scripts' rows only
ALL_BEFORE = "held_out_before_games.jsonl"  # of the policy as sampled, in a run's folder
OTHERS_SENT = "num_messages_of_others"  # a measure of a script's row: in the seats that don't count
OTHER = " (the other player)"  # suffix of the name of a partner's row

R = TypeVar("R", bound="Row")
_adapter = cache(TypeAdapter)  # 25 ms to make
Number = Annotated[float, Strict()]


def _ordered(interval: tuple[float, float, float]) -> tuple[float, float, float]:
    """The interval. Raises ValueError unless its low end is at most its high one."""
    if not interval[1] <= interval[2]:
        raise ValueError("must be a mean, a low and a high number")
    return interval


def _of_any_version(talk: Any) -> Any:
    """Files before 2026-11-27 lack the agreement's difference; early ones have {} for None."""
    return {"agreement": None, "blank": None, **talk} if isinstance(talk, dict) and talk else None


Interval = Annotated[tuple[Number, Number, Number], AfterValidator(_ordered)]  # mean, low, high


@dataclass(frozen=True, slots=True)
class TalkEffect:
    """Differences paired by game, as (mean, low, high): the score minus the score with messages of
    other games (`effect`), the same for agreement (`agreement`; None in old files), and the score
    minus the score with empty messages (`blank`; None if the game refuses other words)."""

    effect: Interval
    agreement: Interval | None
    blank: Interval | None
    num_games: int


@dataclass(frozen=True, slots=True)
class ViewEffect:
    """A seat's score minus its score if it reads another private view, as (mean, low, high)."""

    effect: Interval
    num_games: int


@dataclass(frozen=True, slots=True)
class Row:
    """The games of one pair of players on a set of instances.

    `scores` has one score per game. `interval` is (mean, low, high) of the score, a 95 %
    interval over games. `measures` are means over games. `games` holds the first games in full,
    `examples` the "best", "typical" and "worst" game by score. `talk` is None if it was not
    measured or the policy heard nothing; `view` is None if it was not measured or no seat of the
    policy has a private view. `partner` is the row of the player in the other seats of
    the same games, without games; None if one player has all seats. `game_code` is the
    `game_digest` of a run's game when it was played; "" for a package's game, in other files and
    before 2026-11-30.
    """

    name: str
    scores: Annotated[tuple[Annotated[Number, Field(ge=0, le=1)], ...], Field(min_length=1)]
    interval: Interval
    measures: dict[str, Number]
    games: tuple[dict[str, Any], ...] = ()
    examples: dict[str, dict[str, Any]] = field(default_factory=dict)
    talk: Annotated[TalkEffect | None, BeforeValidator(_of_any_version)] = None
    view: ViewEffect | None = None
    partner: Row | None = None
    game_code: str = ""


def with_partners(rows: Mapping[str, Row], *, all_of_them: bool = False) -> dict[str, Row]:
    """The rows, each followed by its partner's row if their scores differ; with `all_of_them`, by
    every partner's row if any pair's scores differ."""
    differ = {n for n, row in rows.items() if row.partner and row.partner.scores != row.scores}
    shown: dict[str, Row] = {}
    for name, row in rows.items():
        shown[name] = row
        if row.partner is not None and (differ if all_of_them else name in differ):
            shown[f"{name}{OTHER}"] = row.partner
    return shown


def paired(rows: Collection[Row]) -> bool:
    """Whether the rows' scores are those of the same instances of one game. An aborted game has no
    score, so those after it are of later instances, also in rows that lack as many."""
    complete = not any(row.measures.get("num_void") for row in rows)
    return complete and one_game(rows) and len({len(row.scores) for row in rows}) == 1


def one_game(rows: Iterable[Row]) -> bool:
    """Whether no two rows are known to be of different code of the game."""
    return len({row.game_code for row in rows} - {""}) < 2


# --- files ----------------------------------------------------------------------------------------


def read_row(row: Any, name: str, cls: type[R], **more: Any) -> R:
    """Parse a row from a result file of any version and name it; `more` are further fields of
    `cls`. Raises ValueError or TypeError for an invalid row."""
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
    """The rows of a result file by their current names. Raises ValueError or TypeError for another
    kind of file."""
    return {name: read_row(row, name, Row) for name, row in named_rows(rows).items()}


def named_rows(rows: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of a held-out file or an evaluation, by their current names.

    Names of scripts' rows start with "scripted:". Files before 2026-11-29 use the script's bare
    name, which may have overwritten a row of the policy or of people with the same name. Such a row
    is a script's: its key equals its own `name`, unlike the policy's rows in held-out files, and
    only scripts play its games.
    """
    named: dict[str, Any] = {}
    for name, row in rows.items():
        old = not name.startswith(SCRIPT) and isinstance(row, dict) and row.get("name") == name
        named.setdefault(f"{SCRIPT}{name}" if old and _by_scripts(row) else name, row)
    return named


def _by_scripts(row: Mapping[str, Any]) -> bool:
    """Whether a row has example games that only scripts play."""
    examples = row.get("examples")
    games = [*examples.values()] if isinstance(examples, dict) else []
    try:
        players = [str(seat["player"]) for game in games for seat in game["seats"]]
    except (LookupError, TypeError):  # `read_row` reports it
        return False
    return bool(players) and all(player.startswith(SCRIPT) for player in players)
