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
from selfplay.config.player_spec import CHECKPOINT, Spec
from selfplay.config.settings import SettingsError
from selfplay.evaluation.drawings import drift_svg
from selfplay.evaluation.held_out import EvaluationContext, validation, validation_score
from selfplay.evaluation.word_drift import check_words
from selfplay.games import kit_of
from selfplay.metrics.run_folder import write_atomically
from selfplay.partners.partners import Partners, check_spec
from selfplay.rollout.seating import Partner, read_spec

Seen = tuple[int, float, float]  # step, score of self-play, score with the guard's partner


class LanguageDrift(RuntimeError):
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


class DriftMonitor:
    """A run's guard; with `eval.drift_monitor.action: off` every call does nothing."""

    def __init__(self, config: Config, partner: Partner | None) -> None:
        self._config, self._settings, self._partner = config, config.eval.drift_monitor, partner
        self._context: EvaluationContext | None = None
        self._history: list[Seen] = []

    def begin(self, state: Mapping[str, Any], step: int, context: EvaluationContext) -> None:
        """Go on with what a checkpoint carried; without it, or with another partner, the scores
        before the next step are the first that are compared. Every rank calls."""
        if self._partner is None:
            return
        self._context = context
        if state.get("partner") == self._settings.partner:
            self._history = [(int(at), alone, beside) for at, alone, beside in state["seen"]]
        else:
            self._history = []
            self.watch(step, validation(self._config, context))

    def watch(self, step: int, measured: dict[str, float]) -> dict[str, float]:
        """Play the validation games with the partner after `step` steps; returns `measured` with
        the guard's metrics. Warns where there is cause."""
        if self._partner is None:
            return measured
        assert self._context is not None, "begin comes first"
        context = replace(self._context, partner=self._partner)
        score = validation_score(self._config, context)
        self._history.append((step, measured["eval_score"], score))
        verdict = judged(self._history, tolerance=self._settings.tolerance)
        if context.world.rank == 0:
            drawing = drift_svg(self._history, partner=self._settings.partner)
            write_atomically(Path(self._config.out) / "drift_monitor.svg", drawing)
            if verdict.num_apart >= self._settings.patience:
                print(f"guard: {told(verdict, self._settings.partner)}", file=sys.stderr)
        return measured | {
            "eval_drift_score": score,
            "eval_drift_fall": max(seen[2] for seen in self._history) - score,
            "num_drift_apart": float(verdict.num_apart),
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
            raise LanguageDrift(
                f"eval.drift_monitor stopped the run after step {step}, whose checkpoint is saved: "
                f"{told(verdict, self._settings.partner)}; eval.drift_monitor.action=warn goes on"
            )

    def state(self) -> dict[str, Any]:
        """What a checkpoint must carry so that a resumed run judges as if it had not stopped."""
        if self._partner is None:
            return {}
        return {"partner": self._settings.partner, "seen": list(self._history)}


def make_drift_monitor(config: Config, weights: Path, partners: Partners) -> DriftMonitor:
    """The run's guard; its frozen partner is loaded here. `weights` is where self-play starts
    from."""
    settings = config.eval.drift_monitor
    if settings.action == "off":
        return DriftMonitor(config, None)
    if settings.partner == WARM_START:
        spec = Spec(CHECKPOINT, str(weights), WARM_START)
    else:
        spec = read_spec(settings.partner, config.game, what="eval.drift_monitor.partner")
    return DriftMonitor(config, partners.invite(spec))


def check_watch(config: Config) -> None:
    """Raise SettingsError, before anything starts, for what evaluations during training could not
    do: a guard's partner or recorded games that are not there, a partner of another game."""
    check_words(config)
    settings = config.eval.drift_monitor
    if settings.action == "off":
        return
    if kit_of(config.game).LEARNER_SEAT is not None:
        raise SettingsError(
            f"eval.drift_monitor.action must be off for {config.game.name}, where nobody plays with "
            f"himself, got {settings.action}"
        )
    if settings.partner != WARM_START:
        check_spec(
            read_spec(settings.partner, config.game, what="eval.drift_monitor.partner"), config
        )
