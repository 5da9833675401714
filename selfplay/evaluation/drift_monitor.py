"""The drift monitor: detects a policy that drifts to a language only it understands.

At each evaluation during training the policy also plays with a fixed partner: the run's warm start,
a scripted player or another checkpoint. A run whose self-play score rises while its score with that
partner falls is warned or stopped. The monitor's only state is the scores of all evaluations; the
verdict is a function of them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from selfplay.config import DriftMonitorConfig, EvalConfig, GameConfig, RolloutConfig
from selfplay.config.partners import WARM_START
from selfplay.config.player_spec import CHECKPOINT, Spec
from selfplay.errors import RunEnds, SettingsError
from selfplay.evaluation.held_out import EvaluationContext, validation, validation_score
from selfplay.evaluation.word_drift import check_words
from selfplay.partners.partners import Partners, check_spec
from selfplay.rollout.seating import Partner, chosen_seats, read_spec

# Step, self-play score, score with the fixed partner.
Scores = tuple[int, float, float]


class LanguageDrift(RunEnds):
    """The drift monitor stopped the run."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The best evaluation (by score with the partner), the latest one, and the number of latest
    evaluations in a row that show drift."""

    best: Scores
    latest: Scores
    num_apart: int


def drift_verdict(history: Sequence[Scores], *, tolerance: float) -> Verdict:
    """Compare each evaluation with the best one before it.

    The best evaluation has the highest score with the partner; of equals it is the latest. An
    evaluation shows drift if its score with the partner is more than `tolerance` below the best
    one's while its self-play score is above the best one's.

    Raises:
        ValueError: without an evaluation.
    """
    if not history:
        raise ValueError("a verdict needs at least 1 evaluation, got 0")
    best, num_apart = history[0], 0
    for scores in history[1:]:
        falls, rises = best[2] - scores[2] > tolerance, scores[1] > best[1]
        num_apart = num_apart + 1 if falls and rises else 0
        best = scores if scores[2] >= best[2] else best
    return Verdict(best, history[-1], num_apart)


def drift_message(verdict: Verdict, partner: str) -> str:
    """The verdict in one sentence, with both scores at the best and at the latest evaluation."""
    (then, self_then, with_then), (now, self_now, with_now) = verdict.best, verdict.latest
    return (
        f"the policy drifts to a private language: from step {then} to {now} its score by itself "
        f"went from {self_then:.3f} to {self_now:.3f}, with {partner} from {with_then:.3f} to "
        f"{with_now:.3f} (evaluations in a row: {verdict.num_apart})"
    )


class DriftMonitor:
    """The monitor of a run. Without a partner every call does nothing."""

    def __init__(self, settings: DriftMonitorConfig, partner: Partner | None) -> None:
        self._settings, self._partner = settings, partner
        self._context: EvaluationContext | None = None
        self._history: list[Scores] = []

    def start(self, state: Mapping[str, Any], step: int, context: EvaluationContext) -> None:
        """Restore `state()` of a checkpoint. Without it, or if it is of another partner, play the
        first evaluation now. Every rank must call."""
        if self._partner is None:
            return
        self._context = context
        if state.get("partner") == self._settings.partner:
            self._history = [(int(at), alone, paired) for at, alone, paired in state["seen"]]
        else:
            self._history = []
            self.measure(step, validation(context))

    def measure(self, step: int, measured: dict[str, float]) -> dict[str, float]:
        """Play the validation games with the partner after `step` steps.

        `measured` holds the metrics of self-play; returns them with the monitor's own. Rank 0
        prints a warning if the policy drifts.
        """
        if self._partner is None:
            return measured
        assert self._context is not None, "call start first"
        context = replace(self._context, partner=self._partner)
        score = validation_score(context)
        self._history.append((step, measured["eval_score"], score))
        verdict = self._verdict()
        if context.world.rank == 0 and verdict.num_apart >= self._settings.patience:
            message = drift_message(verdict, self._settings.partner)
            print(f"drift monitor: {message}", file=sys.stderr)
        return measured | {
            "eval_drift_score": score,
            "eval_drift_fall": max(paired for _, _, paired in self._history) - score,
            "num_drift_apart": float(verdict.num_apart),
        }

    def check(self) -> None:
        """Raise LanguageDrift, with the scores, if the latest evaluation must end the run."""
        if self._settings.action != "stop" or not self._history:
            return
        verdict = self._verdict()
        if verdict.num_apart >= self._settings.patience:
            message = drift_message(verdict, self._settings.partner)
            raise LanguageDrift(
                f"eval.drift_monitor stopped the run: {message}; with "
                "eval.drift_monitor.action=warn it goes on"
            )

    def state(self) -> dict[str, Any]:
        """The part of the trainer state that `start` takes, as plain values."""
        if self._partner is None:
            return {}
        return {"partner": self._settings.partner, "seen": list(self._history)}

    def _verdict(self) -> Verdict:
        return drift_verdict(self._history, tolerance=self._settings.tolerance)


def make_drift_monitor(
    settings: DriftMonitorConfig,
    game: GameConfig,
    *,
    weights: Path,
    partners: Partners,
    rank: int,
) -> DriftMonitor:
    """The monitor of a run; a frozen partner is loaded here. `weights` is the folder that self-play
    starts from. Rank 0 warns of a partner that is set while the monitor is off."""
    partner = None
    if settings.action == "off":
        if settings.partner != WARM_START and rank == 0:
            print(
                "warning: eval.drift_monitor.partner is not read while eval.drift_monitor.action "
                f"is off, got {settings.partner}",
                file=sys.stderr,
            )
    else:
        spec = Spec(CHECKPOINT, str(weights), WARM_START)
        if settings.partner != WARM_START:
            spec = read_spec(settings.partner, game, what="eval.drift_monitor.partner")
        partner = partners.add(spec)
    return DriftMonitor(settings, partner)


def check_validation(
    eval_settings: EvalConfig, game: GameConfig, rollout: RolloutConfig, *, out: str
) -> None:
    """Raise SettingsError, before anything starts, if evaluations during training cannot work: the
    recorded games or the monitor's partner is missing, or the partner is of another game."""
    check_words(eval_settings, game)
    settings = eval_settings.drift_monitor
    if settings.action == "off":
        return
    if chosen_seats(game, rollout) is not None:
        raise SettingsError(
            f"eval.drift_monitor.action must be off for {game.name} where the policy does not play "
            f"all seats and there is no self-play, got {settings.action}"
        )
    if settings.partner != WARM_START:
        spec = read_spec(settings.partner, game, what="eval.drift_monitor.partner")
        check_spec(spec, game, out=out, what="eval.drift_monitor.partner")
