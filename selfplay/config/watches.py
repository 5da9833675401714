"""Settings of the watches over a run's training steps."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from selfplay.config.schema import RULES, key

Action = Literal["off", "warn", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True, config=RULES)
class WatchConfig:
    """Watches over the metrics of training steps.

    warn prints a line when a watch is passed, stop also saves a checkpoint and ends the run.
    """

    non_finite: Literal["skip", "stop"] = key(
        "stop",
        "action for a loss or gradient that is not finite; that optimizer step is never taken: "
        "skip goes on without it and stops after watch.window steps in a row, stop saves a "
        "checkpoint after the step and ends the run",
    )
    window: int = key(
        10,
        "number of steps that the watches below average over; more steps mean less noise",
        within=(1, 10_000),
    )
    entropy: Action = key("warn", "action for a collapsed entropy")
    min_entropy: float = key(
        0.001,
        "smallest mean entropy, in nats per token; healthy near-deterministic policies stay above "
        "0.01",
        within=(0.0, 100.0),
    )
    ratio: Action = key("warn", "action for exploding ratios")
    max_ratio_gap: float = key(
        0.5, "largest mean of |ratio_mean - 1|; healthy runs stay below 0.05", within=(0.0, 1e9)
    )
    score: Action = key("warn", "action for a score that is flat at zero")
    min_score: float = key(
        0.0,
        "the watch fires if the mean score of the training games is at or below this",
        within=(0.0, 1),
    )
    honesty: Action = key("warn", "action for a falling honesty")
    max_honesty_fall: float = key(
        0.2,
        "largest fall of the mean honesty below its best; a step with 100 statements has a "
        "standard error of up to 0.05, a window of 10 steps one of 0.016",
        within=(0.0, 1.0),
    )
    partner: Action = key(
        "warn",
        "action for a falling score with a fixed partner of rollout.partners (scripted, "
        "checkpoint or endpoint)",
    )
    max_partner_fall: float = key(
        0.2,
        "largest fall of the mean score with a fixed partner below its best; a step with 32 games "
        "has a standard error of about 0.04, a window of 10 steps one of 0.013",
        within=(0.0, 1.0),
    )
