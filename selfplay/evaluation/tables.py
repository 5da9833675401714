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
from selfplay.evaluation.rows import SCRIPT, Row, TalkEffect

# Measure, heading, meaning. A table has the columns that at least one of its rows has.
COLUMNS = (
    ("agreement", "agreement", "share of games that end with an accepted proposal or an answer"),
    ("score_if_agreed", "if agreed", "score of the games that end with one alone"),
    ("optimal", "optimal", "share of games that end with a best possible plan"),
    ("score_norm", "score norm", "the game's own `score_norm`, of all seats together"),
    ("turns", "turns", "tries at a move, including refused ones"),
    ("messages", "messages", "legal messages; in a row of two players those of the first alone"),
    ("words", "words", "words in messages"),
    ("statements", "statements", "facts stated in a wording that scripted players can parse"),
    ("searches", "searches", "answered tool calls"),
    ("errors", "errors", "refused moves"),
    ("honesty", "honesty", "share of the checkable statements in messages that are true"),
    ("questions", "questions", "messages that ask something"),
    ("interactivity", "interact.", "share of messages that got something out of the user"),
    ("tokens", "tokens", "tokens that the policy sampled"),
    ("user_words", "user words", "words of the user"),
    ("void_share", "void", "share of games without a result, which count nowhere else"),
)


# Measures without a column: the score has one of its own, kinds of errors have a list, and the rest
# stands in metrics.jsonl.
_NO_COLUMN = re.compile("score|proposals|rejections|errors_.*|score/self|num_.*")
_IN_A_SEAT = re.compile(r"^score/.*/([\d+]+)$")  # the score with a partner and the policy in a seat
TALK_EFFECT = (
    "what right messages give and wrong ones spoil, together: the score that is lost when the "
    "policy hears messages of other games"
)
FEW_STATEMENTS = 100  # whose share of true ones can have an interval of 0.2 or more
_DRAWS = 10_000  # of weights, for an interval
_MAX_WEIGHTS = 4_000_000  # drawn at a time, 32 MB
_ROUNDING = 1e-9  # by which a value may miss its limits
_REACH = 3.0  # standard deviations from the mean to the further points of paired differences
_ENOUGH = 20  # differences for a standard deviation


def columns_of(rows: Iterable[Collection[str]]) -> list[tuple[str, str, str]]:
    """The columns that at least one of the rows has, those of a game's own measures last; a row is
    given by its measures' names."""
    present: dict[str, None] = {}
    for row in rows:
        names = dict.fromkeys(map(_column_name, row))
        seats = {name for name in names if name.startswith("score/")} - {"score/self"}
        # In rows with one seat alone it is the score.
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
    """What the score is in a table with these columns: a game whose seats have scores of their own
    has the measure `score_norm` beside it."""
    if any(name == "score_norm" for name, _, _ in columns):
        return "mean of the own scores of the row's player, from 0 to 1"
    return "mean share of the best possible value, 0 without an agreement"


def _column_name(name: str) -> str:
    """The name that a measure has in tables, where the row names the partner."""
    return _IN_A_SEAT.sub(r"score/\1", name)


def _own_column(name: str) -> tuple[str, str]:
    """The heading and meaning of a measure that only some games have."""
    kind, _, seat = name.partition("/")
    if seat and kind == "reward":
        return f"reward of seat {seat}", f"what the game pays seat {seat}"
    if seat and kind == "score":
        return f"score in seat {seat}", f"score of the games with the row's player in seat {seat}"
    return name.replace("_", " "), "the game's own measure"


def mean_interval(
    values: Sequence[float] | NDArray[np.float64], *, lowest: float = 0.0
) -> tuple[float, float, float]:
    """The mean of `values`, which lie between `lowest` and 1, and its 95 % confidence
    interval: (mean, low, high).

    Each end is Gaffke's bound at 97.5 % (N. Gaffke 2005, "Three test statistics for a nonparametric
    one-sided hypothesis on the mean of a nonnegative variable", Mathematical Methods of Statistics
    14; E. Learned-Miller and P. Thomas 2020, "A new confidence interval for the mean of a bounded
    random variable", arXiv 1905.06208): a quantile of the mean of the n values and one further
    point, the lowest or the highest possible value, under uniform Dirichlet weights. For values of
    0 and 1 it is the interval of Clopper and Pearson. That it covers the true mean in at least 95 %
    of samples of any size is not proven in general; no exception is known. A bootstrap near the
    upper limit covers far less: 16 games without a failure give it no width.

    The further point has weight 1 - U^(1/n) for a uniform U, here in 10,000 equal steps; the other
    weights are drawn with a fixed seed. Values must be independent: pass one value per game, or one
    mean per instance if an instance was played several times.

    Raises:
        ValueError: for no values, NaN, infinity, or a value outside the limits.
    """
    return _gaffke(_within(values, lowest), lowest, 1.0)


def paired_interval(
    differences: Sequence[float] | NDArray[np.float64],
) -> tuple[float, float, float]:
    """The mean of paired differences, which lie between -1 and 1, and its 95 % confidence
    interval: (mean, low, high).

    It is `mean_interval` with the further points of `further_points`: from 57 games on at most 1.5
    times as wide as a bootstrap where at least 20 differences are apart from the commonest one.

    Raises:
        ValueError: as `mean_interval`.
    """
    sample = _within(differences, -1.0)
    return _gaffke(sample, *further_points(sample))


def further_points(differences: NDArray[np.float64]) -> tuple[float, float]:
    """The further points of Gaffke's bounds of paired differences [n]: 3 standard deviations from
    their mean, where that is inside -1 and 1.

    Most differences are far smaller than 1, and with the limits themselves as the points the
    intervals have up to 7 times a bootstrap's width at 57 games. With these points a difference
    that is far larger than all others, and so rare that the sample has none, is not counted
    (`python -m bench.paired_intervals`). Few differences tell little of the others' size: if m < 20
    of them are apart from the commonest one, usually 0, the points are (20 / m)^2 times as far.
    """
    commonest = np.unique(differences.round(9), return_counts=True)[1].max()
    if not (num_apart := differences.size - commonest):
        return -1.0, 1.0
    mean = float(differences.mean())
    reach = _REACH * float(differences.std(ddof=1)) * max(1.0, _ENOUGH / num_apart) ** 2
    return max(-1.0, mean - reach), min(1.0, mean + reach)


def _within(values: Sequence[float] | NDArray[np.float64], lowest: float) -> NDArray[np.float64]:
    """The values of an interval, clipped to its limits; ValueError if they miss them by more than
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
    # The weights of equal values add up, so there is one for each level.
    means = np.concatenate([rng.dirichlet(counts, size=num) @ levels for num in sizes])
    others = ((np.arange(_DRAWS) + 0.5) / _DRAWS) ** (1 / sample.size)
    low = np.quantile(lowest + others * (means - lowest), 0.025)
    high = np.quantile(highest - others * (highest - means), 0.975)
    return float(sample.mean()), float(low), float(high)


def paired_change(
    before: Sequence[float], after: Sequence[float]
) -> tuple[float, float, float] | None:
    """The change of the score on the same instances, (mean, low, high), each with one score before
    and one after. None if the numbers of scores differ, as they do after a void game."""
    if len(before) != len(after):
        return None
    return paired_interval([b - a for a, b in zip(before, after, strict=True)])


def show_interval(interval: tuple[float, float, float]) -> str:
    """`0.912 [0.903, 0.921]`"""
    mean, low, high = interval
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def show_change(interval: tuple[float, float, float]) -> str:
    """`+0.194 [+0.150, +0.238]`"""
    mean, low, high = interval
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def talk_cell(talk: TalkEffect | None) -> str:
    """A row's talk effect in a table; a dash where it was not measured."""
    return show_change(talk.effect) if talk else "-"


def measure_cells(
    measures: Mapping[str, float], names: Iterable[str], *, num_games: int = 0
) -> list[str]:
    """These measures of `num_games` games in a table; a dash for what was not measured, and the
    number of statements behind an honesty of few."""
    values = {_column_name(name): value for name, value in measures.items()}
    cells = {name: f"{value:.3f}" for name, value in values.items()}
    num = round(measures.get("statements", 0.0) * num_games)
    if "honesty" in cells and 0 < num < FEW_STATEMENTS:
        cells["honesty"] += f" of {num}"
    return [cells.get(name, "-") for name in names]


def score_table(
    rows: Mapping[str, Row], columns: Mapping[str, str]
) -> tuple[list[str], list[list[str]]]:
    """The head and the lines of a table of rows by name. `columns` are the headings of measures.
    The talk effect has a column if it was measured in any row."""
    talk = any(row.talk for row in rows.values())
    head = ["", "score [95 %]", *(["talk effect [95 %]"] if talk else [])]
    lines = [
        [
            name,
            show_interval(row.interval),
            *([talk_cell(row.talk)] if talk else []),
            *measure_cells(row.measures, columns, num_games=len(row.scores)),
        ]
        for name, row in rows.items()
    ]
    return [*head, *columns.values()], lines


def talk_text(talk: TalkEffect, rows: Mapping[str, Row]) -> str:
    """A row's `talk` in words: the talk effect and its games, how much of it is agreement, that of
    empty messages (dashes before 2026-11-29), and `silent_text` of the `rows` on these games."""
    text = f"talk effect {show_change(talk.effect)} in {talk.num_games} games: {TALK_EFFECT}"
    if talk.agreement:
        text += f" (agreement {show_change(talk.agreement)})"
    empty = f"with empty ones {show_change(talk.blank)}" if talk.blank else ""
    return "; ".join(filter(None, (text, empty, silent_text(rows, talk))))


def silent_text(rows: Mapping[str, Row], talk: TalkEffect | None) -> str:
    """What can at least be had without talk on the games of a talk effect, which does not say it:
    the score of the best script of these rows that sends no message; "" without such a script."""
    if not talk:
        return ""
    silent = {
        name: statistics.fmean(row.scores[: talk.num_games])
        for name, row in rows.items()
        if name.startswith(SCRIPT) and row.measures.get("messages") == 0
    }
    best = max(silent, key=silent.__getitem__, default="")
    return best and f"without messages at least {silent[best]:.3f} there ({best})"


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, style: str = "pipe", num_names: int = 1
) -> str:
    """Cells as a table: "pipe" is Markdown's. "plain" is for this terminal (80 columns where there
    is none), and continued below, under the same names, where it is wider. The first `num_names`
    columns are names, the others numbers; the first is text."""

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
