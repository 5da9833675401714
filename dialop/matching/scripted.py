"""Scripted players of the matching game, for imitation, evaluation and tests. They use only a view.

The first part estimates the table from the player's own cells and the cells that the partner
stated, whose values have another hidden scale: they are first converted to own units by an
estimated ratio. Random draws are seeded by (seed, moves made, errors this turn).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from dialop.game import Lesson
from dialop.kit import option
from dialop.matching import wording
from dialop.matching.board import MatchingView, best_pairs
from dialop.matching.proposal import Pairs
from dialop.matching.statements import stated_cells
from dialop.specs import ScriptedBase, made, unknown

Cells = dict[tuple[int, int], int]

# Displayed values are truncated, which lowers each by half a unit on average.
_TRUNCATED = 0.5


def own_cells(view: MatchingView) -> Cells:
    """The cells that a seat sees, {(reviewer, paper): displayed value}, in table order."""
    return {
        (r, p): value
        for r, row in enumerate(view.displayed)
        for p, value in enumerate(row)
        if value is not None
    }


def stated_by(view: MatchingView, *, seat: int) -> Cells:
    """The cells stated in a seat's messages, in that seat's units. The last statement counts."""
    said = [a.text for a in view.log if a.kind == "message" and a.seat == seat]
    return {(r, p): value for text in said for r, p, value in stated_cells(text, view)}


def estimate_top(cells: Mapping[tuple[int, int], int], *, num_cells: int) -> float:
    """Estimate the upper end of the range of n = `num_cells` uniform values: max (n + 1) / n.

    This is the usual unbiased estimator of the bound of a uniform distribution, far less noisy than
    twice the mean. Returns 1 without any cell.
    """
    if not cells:
        return 1.0
    return (max(cells.values()) + _TRUNCATED) * (num_cells + 1) / num_cells


def estimate_ratio(own: Cells, stated: Cells) -> float:
    """The number of own units per unit of the partner.

    Estimated from the cells that both seats know, or from the two value ranges without such cells.
    """
    shared = [cell for cell in stated if cell in own]
    total_stated = sum(stated[cell] + _TRUNCATED for cell in shared)
    total_own = sum(own[cell] + _TRUNCATED for cell in shared)
    if total_stated > 0 and total_own > 0:
        return total_own / total_stated
    if not own or not stated:
        return 1.0
    # A partner may state only its best cells; it sees about as many cells as this seat.
    top_stated = estimate_top(stated, num_cells=max(len(stated), len(own)))
    return estimate_top(own, num_cells=len(own)) / top_stated if top_stated > 0 else 1.0


def value_range(view: MatchingView, stated: Cells) -> float:
    """The width of the value range in own units, estimated if the scales are hidden."""
    if view.public_unknown is not None:
        return 2.0 * view.public_unknown
    cells = own_cells(view) or stated
    return estimate_top(cells, num_cells=len(cells))


def pooled_table(view: MatchingView, stated: Cells) -> NDArray[np.float64]:
    """The estimated table [reviewer, paper] in own units.

    A cell has the own value if seen, else the stated value, else the middle of the range.
    """
    own = own_cells(view)
    ratio = 1.0 if view.public_unknown is not None else estimate_ratio(own, stated)
    scaled = {cell: value * ratio for cell, value in stated.items()}
    table = np.full((view.size, view.size), value_range(view, stated) / 2)
    for known in (scaled, own):
        for (reviewer, paper), value in known.items():
            table[reviewer, paper] = value
    return table


def partner_top(view: MatchingView, stated: Cells) -> float:
    """The upper end of the partner's values in the partner's units."""
    ratio = 1.0 if view.public_unknown is not None else estimate_ratio(own_cells(view), stated)
    return value_range(view, stated) / ratio


def levels(table: NDArray[np.float64], top: float) -> NDArray[np.int_]:
    """The table rounded down to tenths of its range [0, top), as integers 0 to 9.

    At 8x8 the best plan of such a rounded table has 0.996 of the best value.
    """
    return np.clip(10 * (table / top), 0, 9).astype(int)


def best_plan(table: NDArray[np.float64]) -> Pairs:
    """The best matching of an estimated table, ordered by paper."""
    return tuple(sorted(best_pairs(table), key=lambda pair: pair[1]))


def straying_plan(
    table: NDArray[np.float64], *, stray: float, rng: np.random.Generator
) -> tuple[Pairs, tuple[bool, ...]]:
    """A matching chosen paper by paper, and a flag for each pair that was drawn at random.

    With probability `stray` a paper gets a random free reviewer. Otherwise its pair comes from the
    best plan that is still possible after the earlier pairs.
    """
    size, pairs, strays = len(table), list[tuple[int, int]](), list[bool]()
    free, plan = list(range(size)), dict(pair[::-1] for pair in best_plan(table))
    for paper in range(size):
        strays.append(bool(rng.random() < stray))
        reviewer = int(rng.choice(free)) if strays[-1] else plan[paper]
        pairs.append((reviewer, paper))
        free.remove(reviewer)
        if reviewer != plan[paper]:
            rest = best_pairs(table[np.ix_(free, range(paper + 1, size))])
            plan = {paper + 1 + column: free[row] for row, column in rest}
    return tuple(pairs), tuple(strays)


def highest_first(
    table: NDArray[np.int_], *, stray: float, rng: np.random.Generator
) -> tuple[Pairs, tuple[bool, ...]]:
    """A matching in order of choice, and a flag for each pair drawn at random.

    The next pair is the highest cell with a free reviewer and a free paper (ties: the first in
    table order), or with probability `stray` a random such cell.
    """
    open_cells, pairs, strays = list(np.ndindex(table.shape)), list[tuple[int, int]](), list[bool]()
    while open_cells:
        strays.append(bool(rng.random() < stray))
        index = rng.integers(len(open_cells)) if strays[-1] else 0
        best = open_cells[index] if strays[-1] else max(open_cells, key=lambda cell: table[cell])
        pairs.append(best)
        open_cells = [(r, p) for r, p in open_cells if r != best[0] and p != best[1]]
    return tuple(pairs), tuple(strays)


def swaps(table: NDArray[np.int_], pairs: Pairs) -> list[Pairs]:
    """The swaps of two papers' reviewers that improve a matching, the best first, until no swap
    improves it. Each swap is its two new pairs, ordered by paper.

    At 8x8 a matching chosen highest first has 0.954 of the best value, and 0.988 after the swaps.
    """
    chosen, made = {paper: reviewer for reviewer, paper in pairs}, list[Pairs]()

    def gain(p: int, q: int) -> int:
        a, b = chosen[p], chosen[q]
        return int(table[b, p] + table[a, q] - table[a, p] - table[b, q])

    while True:
        p, q = max(combinations(sorted(chosen), 2), key=lambda papers: gain(*papers))
        if gain(p, q) <= 0:
            return made
        chosen[p], chosen[q] = chosen[q], chosen[p]
        made.append(((chosen[p], p), (chosen[q], q)))


def plan_value(table: NDArray[np.float64], pairs: Pairs) -> float:
    """A matching's value in an estimated table."""
    return float(sum(table[reviewer, paper] for reviewer, paper in pairs))


MOST_TRIALS = 8

_MAX_REJECTIONS = 2
# A proposal at most this share worse than the player's own plan counts as equally good, because
# both values are noisy estimates.
_CLOSE = 0.03
# A partner's proposal gets a bonus of this many standard deviations of its unknown cells.
_NUM_DEVIATIONS = 2.0


@dataclass(frozen=True, slots=True)
class ScriptedPlayer(ScriptedBase):
    """One scripted player.

    - `tell`: the cells that an honest player states: all that it sees ("all"), its best few
      ("top"), or each reviewer's best paper ("rows").
    - `reply`: the answer to a partner that states cells first: propose at once ("propose") or also
      state its own cells ("tell").
    - `plan`: the cells that its plans use: all known cells ("pooled"), its own ("own"), its own
      with new random guesses in the middle half of the range for all others ("guess"), or none, so
      that all plans are equally likely ("random"). Players of the last three kinds know only the
      protocol of the game: they state cells and write down the partner's cells, but do not use them
      in plans, and accept any proposal.
    - `think`: its private text before a proposal: none ("no"), its estimate of the table in levels
      0 to 9 ("levels"), that table and trial plans ("trial"), or small steps ("swaps"): each level
      next to its source value, a plan that takes the highest levels first, and the swaps of two
      papers that improve it. A random player has no estimate and writes only random trial plans.
    - `trials`: the number of trial plans, separated by empty lines.
    - `stray`: the probability of a random free reviewer in a line of a trial plan. The next lines
      continue with the best remaining plan; with "swaps", swaps repair the plan.
    - `slip`: the probability of an injected error: a malformed move first, which it then repairs.
    """

    OPTIONS: ClassVar = {
        "random": ("think", "trials", "slip"),
        "solo": ("think", "trials", "stray", "slip"),
        "honest": ("tell", "reply", "plan", "think", "trials", "stray", "slip"),
    }

    tell: Literal["all", "top", "rows"] = option("all")
    reply: Literal["propose", "tell"] = option("propose")
    slip: float = option(0.0, low=0, high=1)
    think: Literal["no", "levels", "trial", "swaps"] = option("no")
    stray: float = option(0.0, low=0, high=1)
    trials: int = option(1, low=1, high=MOST_TRIALS)
    plan: Literal["pooled", "own", "guess", "random"] = option("pooled")

    def __post_init__(self) -> None:
        think = self.think
        if self.name == "random" and think in ("levels", "swaps"):
            raise ValueError(unknown("think", think, ("no", "trial")))
        if self.trials > 1 and think != "trial":
            raise ValueError(f"trials needs think=trial, got think={think}")
        if self.stray and think not in ("trial", "swaps"):
            raise ValueError(f"stray needs think=trial or think=swaps, got think={think}")
        if self.plan != "pooled" and think == "swaps":
            raise ValueError(f"plan={self.plan} needs think=no, levels or trial, got think=swaps")

    def lesson(self, view: MatchingView) -> Lesson:
        """The next move as an example to imitate. The reviewers of stray lines are detours."""
        self.check_turn(view)
        rng = np.random.default_rng((self.seed, len(view.log)))
        lesson = _POLICIES[self.name](self, view, rng)
        if self.slip and not view.num_errors_this_turn:
            slips = np.random.default_rng((self.seed, len(view.log), view.num_errors_this_turn, 1))
            if slips.random() < self.slip:
                private, _, move = lesson.text.partition("[")  # private text is never malformed
                text = private + wording.malformed(f"[{move}", rng=slips)
                return replace(lesson, text=text)
        return lesson


make_scripted = partial(made, ScriptedPlayer)


def _act_random(player: ScriptedPlayer, view: MatchingView, rng: np.random.Generator) -> Lesson:
    if view.pending is not None:
        return Lesson("[accept]")
    num_tried = player.trials if player.think == "trial" else 0
    plans = [enumerate(map(int, rng.permutation(view.size))) for _ in range(num_tried + 1)]
    *tried, pairs = (tuple(sorted(plan, key=lambda pair: pair[1])) for plan in plans)
    thought = "\n".join(wording.trial(plan, view) for plan in tried)
    return Lesson(thought + wording.proposal(pairs, view))


def _act_solo(player: ScriptedPlayer, view: MatchingView, rng: np.random.Generator) -> Lesson:
    if view.pending is not None:
        return Lesson("[accept]")
    return _proposal(player, view, {}, rng=rng)


def _act_honest(player: ScriptedPlayer, view: MatchingView, rng: np.random.Generator) -> Lesson:
    if not view.options.messages:
        return _act_solo(player, view, rng)
    stated = stated_by(view, seat=1 - view.seat)
    if view.pending is not None:
        accepts = player.plan != "pooled" or _accepts(view, stated)
        return Lesson("[accept]" if accepts else "[reject]")
    has_stated = any(a.kind == "message" and a.seat == view.seat for a in view.log)
    has_proposed = any(a.kind == "propose" and a.seat == view.seat for a in view.log)
    if not has_stated and (not stated or player.reply == "tell" or has_proposed):
        return Lesson(wording.message(_cells_to_state(player, view), view, rng=rng))
    return _proposal(player, view, stated, rng=rng)


def _proposal(
    player: ScriptedPlayer, view: MatchingView, stated: Cells, *, rng: np.random.Generator
) -> Lesson:
    """Propose the best plan of the estimated table, after the private text selected by
    `player.think`."""
    table_RP, top = pooled_table(view, stated), value_range(view, stated)
    levels_RP = levels(table_RP, top)
    if player.plan in ("own", "guess"):
        table_RP = pooled_table(view, {})
    if player.plan == "guess":
        seen_RP = np.array([[value is not None for value in row] for row in view.displayed])
        table_RP = np.where(seen_RP, table_RP, table_RP * rng.uniform(0.5, 1.5, table_RP.shape))
    elif player.plan == "random":
        table_RP = rng.random(table_RP.shape)
    if player.think == "no":
        return Lesson(wording.proposal(best_plan(table_RP), view))
    if player.think == "swaps":
        return _small_steps(player, view, stated, levels_RP, rng=rng)
    move = wording.proposal(best_plan(table_RP), view)
    thought, detours = wording.thoughts(levels_RP, view), []
    for number_tried in range(player.trials if player.think == "trial" else 0):
        thought += "\n" if number_tried else ""
        pairs, strays = straying_plan(table_RP, stray=player.stray, rng=rng)
        lines = wording.trial(pairs, view).splitlines(keepends=True)
        for line, strayed in zip(lines, strays, strict=True):
            if strayed:
                start = len(thought) + line.rindex(" ") + 1
                detours.append((start, len(thought) + len(line) - 1))
            thought += line
    return Lesson(thought + move, tuple(detours))


def _small_steps(
    player: ScriptedPlayer,
    view: MatchingView,
    stated: Cells,
    levels_RP: NDArray[np.int_],
    *,
    rng: np.random.Generator,
) -> Lesson:
    """Choose a plan by highest level first, improve it by swaps and propose it. The private text
    has all these steps."""
    tops = value_range(view, stated), partner_top(view, stated)
    thought = wording.estimate(levels_RP, view, stated, tops=tops) + "Highest first:\n"
    pairs, strays = highest_first(levels_RP, stray=player.stray, rng=rng)
    detours = []
    for line, strayed in zip(wording.choices(pairs, levels_RP, view), strays, strict=True):
        if strayed:
            detours.append((len(thought), len(thought) + len(line)))
        thought += f"{line}\n"
    plan = {paper: reviewer for reviewer, paper in pairs}
    for swap in swaps(levels_RP, pairs):
        thought += "\n".join(["Better:", *wording.choices(swap, levels_RP, view)]) + "\n"
        plan |= {paper: reviewer for reviewer, paper in swap}
    final = tuple((plan[paper], paper) for paper in sorted(plan))
    return Lesson(thought + wording.proposal(final, view), tuple(detours))


def _accepts(view: MatchingView, stated: Cells) -> bool:
    """Whether to accept the pending proposal: yes if it is not clearly worse than the player's own
    plan, or after `_MAX_REJECTIONS` rejections."""
    rejections = sum(a.kind == "reject" and a.seat == view.seat for a in view.log)
    if rejections >= _MAX_REJECTIONS or view.pending is None:
        return True
    table = pooled_table(view, stated)
    own_plan = best_plan(table)
    difference = plan_value(table, view.pending) - plan_value(table, own_plan)
    # The partner may know cells that this seat does not. Only unknown cells in exactly one of the
    # two plans matter. A uniform cell has the standard deviation range / sqrt(12), and variances of
    # independent cells add up.
    known = own_cells(view).keys() | stated.keys()
    num_unsure = len((set(view.pending) ^ set(own_plan)) - known)
    doubt = value_range(view, stated) * math.sqrt(num_unsure / 12)
    return difference + _NUM_DEVIATIONS * doubt >= -_CLOSE * plan_value(table, own_plan)


def _cells_to_state(player: ScriptedPlayer, view: MatchingView) -> Cells:
    """The cells that the player states, in table order."""
    cells = own_cells(view)
    if player.tell == "all":
        return cells
    ranked = sorted(cells, key=lambda cell: -cells[cell])
    if player.tell == "top":
        chosen = set(ranked[: max(1, view.size * view.size // 5)])
    else:
        best_of_row = {reviewer: (reviewer, paper) for reviewer, paper in reversed(ranked)}
        chosen = set(best_of_row.values())
    return {cell: value for cell, value in cells.items() if cell in chosen}


_POLICIES: dict[str, Callable[[ScriptedPlayer, MatchingView, np.random.Generator], Lesson]] = {
    "random": _act_random,
    "solo": _act_solo,
    "honest": _act_honest,
}
