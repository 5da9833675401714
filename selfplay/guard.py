"""The guard against a private language: at each evaluation the policy also plays with a partner
that stays as it is; a run whose self-play gets better while that gets worse is warned or stopped.

The partner is the run's warm start, a scripted player or another checkpoint. What the guard knows
is the scores of all evaluations; the verdict is a function of them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from selfplay.config import Config
from selfplay.config.partners import WARM_START
from selfplay.evaluation_report import write_whole
from selfplay.games import kit_of
from selfplay.held_out import Venue, validation, validation_score
from selfplay.partner_specs import CHECKPOINT, Spec
from selfplay.partners import Partners, check_spec
from selfplay.report import guard_svg
from selfplay.settings import SettingsError
from selfplay.tables import Guest, read_spec
from selfplay.word_drift import check_words

Seen = tuple[int, float, float]  # step, score of self-play, score with the guard's partner


class PrivateLanguage(RuntimeError):
    """A run that its guard stopped."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the scores say: the evaluation at which play with the partner was best, the latest one,
    and how many in a row up to it were apart."""

    best: Seen
    latest: Seen
    num_apart: int


def judged(history: Sequence[Seen], *, tolerance: float) -> Verdict:
    """Whether self-play and play with the partner part ways.

    An evaluation is apart when its score with the partner lies more than `tolerance` below the best
    of those before it while its self-play score lies above that of the same best evaluation (of
    equal ones the latest).

    Raises:
        ValueError: without an evaluation.
    """
    if not history:
        raise ValueError("a verdict needs at least 1 evaluation, got 0")
    best, num_apart = history[0], 0
    for seen in history[1:]:
        falls, rises = best[2] - seen[2] > tolerance, seen[1] > best[1]
        num_apart = num_apart + 1 if falls and rises else 0
        best = seen if seen[2] >= best[2] else best
    return Verdict(best, history[-1], num_apart)


def told(verdict: Verdict, partner: str) -> str:
    """The verdict in one sentence, with both numbers then and now."""
    (then, self_then, with_then), (now, self_now, with_now) = verdict.best, verdict.latest
    return (
        f"the policy drifts to a private language: from step {then} to {now} its score by itself "
        f"went from {self_then:.3f} to {self_now:.3f}, with {partner} from {with_then:.3f} to "
        f"{with_now:.3f} (evaluations in a row: {verdict.num_apart})"
    )


class Guard:
    """A run's guard; with `eval.guard.action: off` every call does nothing."""

    def __init__(self, config: Config, guest: Guest | None) -> None:
        self._config, self._settings, self._guest = config, config.eval.guard, guest
        self._venue: Venue | None = None
        self._history: list[Seen] = []

    def begin(self, carried: Mapping[str, Any], step: int, venue: Venue) -> None:
        """Go on with what a checkpoint carried; without it, or with another partner, the scores
        before the next step are the first that are compared. Every rank calls."""
        if self._guest is None:
            return
        self._venue = venue
        if carried.get("partner") == self._settings.partner:
            self._history = [(int(at), alone, beside) for at, alone, beside in carried["seen"]]
        else:
            self._history = []
            self.watch(step, validation(self._config, venue))

    def watch(self, step: int, measured: dict[str, float]) -> dict[str, float]:
        """Play the validation games with the partner after `step` steps; returns `measured` with
        the guard's metrics. Warns where there is cause."""
        if self._guest is None:
            return measured
        assert self._venue is not None, "begin comes first"
        venue = replace(self._venue, guest=self._guest)
        score = validation_score(self._config, venue)
        self._history.append((step, measured["eval_score"], score))
        verdict = judged(self._history, tolerance=self._settings.tolerance)
        if venue.world.rank == 0:
            drawing = guard_svg(self._history, partner=self._settings.partner)
            write_whole(Path(self._config.out) / "guard.svg", drawing)
            if verdict.num_apart >= self._settings.patience:
                print(f"guard: {told(verdict, self._settings.partner)}", file=sys.stderr)
        return measured | {
            "eval_guard_score": score,
            "eval_guard_fall": max(seen[2] for seen in self._history) - score,
            "num_guard_apart": float(verdict.num_apart),
        }

    def stops(self, step: int) -> bool:
        """Whether the run must end after this many steps: the evaluation just made says so."""
        if self._settings.action != "stop" or not self._history:
            return False
        verdict = judged(self._history, tolerance=self._settings.tolerance)
        return verdict.latest[0] == step and verdict.num_apart >= self._settings.patience

    def hold(self, step: int) -> None:
        """End the run where it must. Raises PrivateLanguage with both numbers."""
        if self.stops(step):
            verdict = judged(self._history, tolerance=self._settings.tolerance)
            raise PrivateLanguage(
                f"eval.guard stopped the run after step {step}, whose checkpoint is saved: "
                f"{told(verdict, self._settings.partner)}; eval.guard.action=warn goes on"
            )

    def carried(self) -> dict[str, Any]:
        """What a checkpoint must carry so that a resumed run judges as if it had not stopped."""
        if self._guest is None:
            return {}
        return {"partner": self._settings.partner, "seen": list(self._history)}


def make_guard(config: Config, weights: Path, partners: Partners) -> Guard:
    """The run's guard; its frozen partner is loaded here. `weights` is where self-play starts
    from."""
    settings = config.eval.guard
    if settings.action == "off":
        return Guard(config, None)
    if settings.partner == WARM_START:
        spec = Spec(CHECKPOINT, str(weights), WARM_START)
    else:
        spec = read_spec(settings.partner, config, what="eval.guard.partner")
    return Guard(config, partners.invite(spec))


def check_watch(config: Config) -> None:
    """Raise SettingsError, before anything starts, for what evaluations during training could not
    do: a guard's partner or recorded games that are not there, a partner of another game."""
    check_words(config)
    settings = config.eval.guard
    if settings.action == "off":
        return
    if kit_of(config.game).LEARNER_SEAT is not None:
        raise SettingsError(
            f"eval.guard.action must be off for {config.game.name}, where nobody plays with "
            f"himself, got {settings.action}"
        )
    if settings.partner != WARM_START:
        check_spec(read_spec(settings.partner, config, what="eval.guard.partner"), config)
