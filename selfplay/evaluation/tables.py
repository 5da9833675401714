"""Results as text and Markdown: tables of means with intervals."""

from __future__ import annotations

import math
import re
import shutil
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from tabulate import tabulate

from selfplay.data.seeds import named_seed
from selfplay.evaluation.rows import OTHERS_SENT, SCRIPT, Row, TalkEffect, ViewEffect, paired

# Measure, heading, meaning. A table shows the columns that at least one of its rows has.
COLUMNS = (
    ("agreement", "agreement", "share of games that end with an accepted proposal or an answer"),
    ("score_if_agreed", "if agreed", "score of the games that end with an agreement"),
    ("optimal", "optimal", "share of games that end with a best possible plan"),
    ("score_norm", "score norm", "the game's own `score_norm`, over all seats"),
    ("turns", "turns", "tries at a move, including invalid ones"),
    ("messages", "messages", "legal messages of the row's player, in its seats"),
    ("words", "words", "words in messages"),
    ("statements", "statements", "facts stated in a wording that scripted players can parse"),
    ("searches", "searches", "answered tool calls"),
    ("errors", "errors", "invalid moves"),
    ("honesty", "honesty", "share of the checkable statements in messages that are true"),
    ("questions", "questions", "messages that ask something"),
    ("interactivity", "interact.", "share of messages that got something out of the user"),
    ("tokens", "tokens", "tokens that the policy sampled"),
    ("user_words", "user words", "words of the user"),
    ("void_share", "void", "share of aborted games, which no other number counts"),
)


# Measures without a column here: the score has its own, kinds of errors have a list, and the rest
# is in metrics.jsonl.
_NO_COLUMN = re.compile("score|proposals|rejections|errors_.*|score/self|num_.*")
_IN_A_SEAT = re.compile(r"^score/.*/([\d+]+)$")  # the score with a partner and the policy in a seat
TALK_EFFECT = (
    "the score lost when the policy hears messages of other games: the gain from right messages "
    "and the harm of wrong ones together"
)
VIEW_EFFECT = "the score a seat loses when it reads another private view"
FEW_STATEMENTS = 100  # with fewer, the interval of the share of true ones can be 0.2 wide or more
_DRAWS = 10_000  # of weights, for an interval
_MAX_WEIGHTS = 4_000_000  # drawn at a time, 32 MB
_ROUNDING = 1e-9  # a value may exceed its limits by this much
_REACH = 3.0  # standard deviations from the mean to the further points of paired differences
_ENOUGH = 20  # differences for a standard deviation


def columns_of(rows: Iterable[Collection[str]]) -> list[tuple[str, str, str]]:
    """The columns that at least one of the rows has, a game's own measures last; a row is given by
    the names of its measures."""
    present: dict[str, None] = {}
    for row in rows:
        names = dict.fromkeys(map(_column_name, row))
        seats = {name for name in names if name.startswith("score/")} - {"score/self"}
        # In rows with only one seat it equals the score.
        present |= {name: None for name in names if name not in seats or len(seats) > 1}
    known = [column for column in COLUMNS if column[0] in present]
    own = present.keys() - {name for name, _, _ in COLUMNS}
    return known + [
        (name, heading, meaning)
        for name in present
        if name in own and not _NO_COLUMN.fullmatch(name)
        for heading, meaning in [_own_column(name)]
    ]


def score_meaning(columns: Iterable[tuple[str, str, str]]) -> str:
    """The definition of the score in a table with these columns: a game that scores each seat also
    has the measure `score_norm`."""
    if any(name == "score_norm" for name, _, _ in columns):
        return "mean of the scores of the row's player's seats, from 0 to 1"
    return "mean share of the best possible value, 0 without an agreement"


def _column_name(name: str) -> str:
    """A measure's name in tables, where the row already names the partner."""
    return _IN_A_SEAT.sub(r"score/\1", name)


def _own_column(name: str) -> tuple[str, str]:
    """The heading and meaning of a measure specific to some games."""
    kind, _, seat = name.partition("/")
    if seat and kind == "reward":
        return f"reward of seat {seat}", f"what the game pays seat {seat}"
    if seat and kind == "score":
        return f"score in seat {seat}", f"score of the games with the row's player in seat {seat}"
    return name.replace("_", " "), "the game's own measure"


def mean_interval(
    values: Sequence[float] | NDArray[np.float64], *, lowest: float = 0.0
) -> tuple[float, float, float]:
    """The mean of `values`, which lie between `lowest` and 1, with a 95 % confidence interval:
    (mean, low, high).

    Each end is Gaffke's bound at 97.5 % (N. Gaffke 2005, "Three test statistics for a nonparametric
    one-sided hypothesis on the mean of a nonnegative variable", Mathematical Methods of Statistics
    14; E. Learned-Miller and P. Thomas 2020, "A new confidence interval for the mean of a bounded
    random variable", arXiv 1905.06208): a quantile of the mean of the n values and one further
    point, the lowest or the highest possible value, under uniform Dirichlet weights. For values of
    0 and 1 it is the Clopper-Pearson interval. Coverage of at least 95 % at every sample size is
    not proven in general; no counterexample is known. A bootstrap near the upper limit covers far
    less: after 16 games without a failure its interval has zero width.

    The further point has weight 1 - U^(1/n) for a uniform U, here in 10,000 equal steps; the other
    weights are drawn with a fixed seed. Values must be independent: pass one value per game, or one
    mean per instance if an instance was played several times.

    Raises:
        ValueError: if there are no values or one is NaN, infinite or outside the limits.
    """
    return _gaffke(_within(values, lowest), lowest, 1.0)


def paired_interval(
    differences: Sequence[float] | NDArray[np.float64],
) -> tuple[float, float, float]:
    """The mean of paired differences, which lie between -1 and 1, with a 95 % confidence interval:
    (mean, low, high).

    It is `mean_interval` with the further points of `further_points`: from 57 games on it is at
    most 1.5 times as wide as a bootstrap if at least 20 differences are not the commonest one.

    Raises:
        ValueError: as `mean_interval`.
    """
    sample = _within(differences, -1.0)
    return _gaffke(sample, *further_points(sample))


def further_points(differences: NDArray[np.float64]) -> tuple[float, float]:
    """The further points of Gaffke's bounds for paired differences [n]: 3 standard deviations from
    their mean, clipped to -1 and 1.

    Most differences are far smaller than 1. With the limits themselves as the points, intervals are
    up to 7 times as wide as a bootstrap's at 57 games. These points ignore a difference far larger
    than all others that is too rare to be in the sample (`python -m bench.paired_intervals`). A few
    differences say little about the size of others: if only m < 20 of them are not the commonest
    one, usually 0, the points are (20 / m)^2 times as far.
    """
    num_commonest = np.unique(differences.round(9), return_counts=True)[1].max()
    if not (num_other := differences.size - num_commonest):
        return -1.0, 1.0
    mean = float(differences.mean())
    reach = _REACH * float(differences.std(ddof=1)) * max(1.0, _ENOUGH / num_other) ** 2
    return max(-1.0, mean - reach), min(1.0, mean + reach)


def _within(values: Sequence[float] | NDArray[np.float64], lowest: float) -> NDArray[np.float64]:
    """The values as an array, clipped to their limits; ValueError if one is outside by more than
    `_ROUNDING`."""
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or sample.size == 0:
        raise ValueError(f"an interval needs at least 1 value in 1 dimension, got {sample.shape}")
    outside = sample[~((sample >= lowest - _ROUNDING) & (sample <= 1 + _ROUNDING))]
    if outside.size:
        raise ValueError(f"an interval needs values from {lowest:g} to 1, got {outside[0]:g}")
    return sample.clip(lowest, 1.0)


def _gaffke(
    sample: NDArray[np.float64], lowest: float, highest: float
) -> tuple[float, float, float]:
    """The mean of a sample and Gaffke's bounds with these two further points."""
    levels, counts = np.unique(sample, return_counts=True)
    rng = np.random.default_rng(named_seed("interval"))
    size = max(1, _MAX_WEIGHTS // len(levels))
    sizes = (min(size, _DRAWS - start) for start in range(0, _DRAWS, size))
    # The weights of equal values add up, so one per level is enough.
    means = np.concatenate([rng.dirichlet(counts, size=num) @ levels for num in sizes])
    others = ((np.arange(_DRAWS) + 0.5) / _DRAWS) ** (1 / sample.size)
    low = np.quantile(lowest + others * (means - lowest), 0.025)
    high = np.quantile(highest - others * (highest - means), 0.975)
    return float(sample.mean()), float(low), float(high)


def paired_change(before: Row, after: Row) -> tuple[float, float, float] | None:
    """The change of the score on the same instances, (mean, low, high), from one score per instance
    before and after. None if a game was aborted, or if the game or the number of scores differs."""
    if not paired([before, after]):
        return None
    return paired_interval([b - a for a, b in zip(before.scores, after.scores, strict=True)])


def show_interval(interval: tuple[float, float, float]) -> str:
    """`0.912 [0.903, 0.921]`"""
    mean, low, high = interval
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def show_change(interval: tuple[float, float, float]) -> str:
    """`+0.194 [+0.150, +0.238]`"""
    mean, low, high = interval
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def effect_cell(found: TalkEffect | ViewEffect | None) -> str:
    """A talk effect or view effect of a row in a table; a dash if it was not measured."""
    return show_change(found.effect) if found else "-"


def measure_cells(
    measures: Mapping[str, float], names: Iterable[str], *, num_games: int = 0
) -> list[str]:
    """These measures of `num_games` games in a table: a dash for one that was not measured, and the
    number of statements next to an honesty that rests on few."""
    values = {_column_name(name): value for name, value in measures.items()}
    cells = {name: f"{value:.3f}" for name, value in values.items()}
    num = round(measures.get("statements", 0.0) * num_games)
    if "honesty" in cells and 0 < num < FEW_STATEMENTS:
        cells["honesty"] += f" of {num}"
    return [cells.get(name, "-") for name in names]


def score_table(
    rows: Mapping[str, Row], columns: Mapping[str, str]
) -> tuple[list[str], list[list[str]]]:
    """The header and the lines of a table of rows by name. `columns` are the headings of measures.
    The talk effect and the view effect have a column if they were measured in any row."""
    talk, view = (any(getattr(row, of) for row in rows.values()) for of in ("talk", "view"))
    head = ["", "score [95 %]", *(["talk effect [95 %]"] if talk else [])]
    head += ["view effect [95 %]"] if view else []
    lines = [
        [
            name,
            show_interval(row.interval),
            *([effect_cell(row.talk)] if talk else []),
            *([effect_cell(row.view)] if view else []),
            *measure_cells(row.measures, columns, num_games=len(row.scores)),
        ]
        for name, row in rows.items()
    ]
    return [*head, *columns.values()], lines


def talk_text(talk: TalkEffect, rows: Mapping[str, Row]) -> str:
    """A row's `talk` in words: the talk effect, its number of games and its share of agreement, the
    effect of empty messages (dashes before 2026-11-29), and `silent_text` of the `rows`."""
    text = f"talk effect {show_change(talk.effect)} in {talk.num_games} games: {TALK_EFFECT}"
    if talk.agreement:
        text += f" (agreement {show_change(talk.agreement)})"
    empty = f"with empty ones {show_change(talk.blank)}" if talk.blank else ""
    return "; ".join(filter(None, (text, empty, silent_text(rows, talk))))


def silent_text(rows: Mapping[str, Row], talk: TalkEffect | None) -> str:
    """A lower bound on the score without talk, which the talk effect does not give: the score on
    its games of the best script among these rows in whose games nobody sends a message; "" without
    such a script."""
    if not talk:
        return ""
    silent = {
        name: statistics.fmean(row.scores[: talk.num_games])
        for name, row in rows.items()
        if name.startswith(SCRIPT) and _is_silent(row)
    }
    best = max(silent, key=silent.__getitem__, default="")
    return best and f"without messages at least {silent[best]:.3f} there ({best})"


def _is_silent(row: Row) -> bool:
    """Whether no seat sends a message in a row's games. The measure `messages` counts the seats of
    the row's player, `OTHERS_SENT` the others; files before 2026-11-30 lack it and have their first
    games."""
    if row.measures.get("messages") != 0 or row.measures.get(OTHERS_SENT):
        return False
    turns = (turn for game in row.games for turn in game.get("turns", ()))
    return all(turn.get("action") != "message" for turn in turns)


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, style: str = "pipe", num_names: int = 1
) -> str:
    """A table: the style "pipe" is Markdown; "plain" is for this terminal (80 columns if there is
    none), where columns that do not fit continue below, under the same names. The first `num_names`
    columns are names, the others numbers; only the first is left-aligned."""

    def cut(columns: Sequence[int]) -> str:
        names = range(num_names)
        lines = [[line[i] for i in (*names, *columns)] for line in (head, *rows)]
        sides = ("left", *["right"] * (len(lines[0]) - 1))
        heads = "firstrow" if style == "pipe" else ()  # which pads columns
        return tabulate(lines, heads, tablefmt=style, disable_numparse=True, colalign=sides)

    width = math.inf if style == "pipe" else shutil.get_terminal_size().columns
    blocks: list[list[int]] = [[]]
    for column in range(num_names, len(head)):
        if blocks[-1] and cut([*blocks[-1], column]).find("\n") > width:
            blocks.append([])
        blocks[-1].append(column)
    return "\n\n".join(map(cut, blocks))
