"""Settings of those who sit beside the policy: the run's past policies, endpoints, who is asked
whether it still speaks their language."""

from __future__ import annotations

import json
from dataclasses import dataclass

from selfplay.config.player_spec import CHECKPOINT, SCRIPTED, parse_spec
from selfplay.config.settings import key

WARM_START = "warm_start"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPoolConfig:
    """The pool that the partner pool is drawn from; unused without it."""

    every: int = key(
        20, "steps between two snapshots of the policy that join the pool", low=1, high=10_000_000
    )
    size: int = key(
        8,
        "past policies kept: the run's start and the newest of the others; 0 keeps all",
        low=0,
        high=10_000,
    )
    rating_step: float = key(
        8.0, "largest change of a rating by one game (Elo's K)", low=0.0, high=1000.0
    )
    prefer_weak: float = key(
        0.0,
        "0 draws past policies evenly; at 1 one that is rated 400 lower is drawn ten times as often",
        low=0.0,
        high=1000.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """How partners of the kind endpoint:MODEL@URL are asked."""

    key_variable: str | None = key(
        None, "environment variable that holds the key; null sends none (local servers)"
    )
    max_new_tokens: int = key(512, "tokens of an answer at most", low=1, high=1_000_000)
    temperature: float | None = key(None, "null leaves the server's default", low=0.0, high=100.0)
    body: dict[str, object] = key(
        {}, "more fields of the request's JSON, such as reasoning_effort: low"
    )
    timeout_s: float = key(
        60.0, "longest silence before a try counts as failed", low=0.01, high=86400.0
    )
    retries: int = key(4, "tries after the first one before the game is void", low=0, high=1_000)
    backoff_s: float = key(
        1.0,
        "wait before the first retry, doubled each time, times 0.5 to 1.5",
        low=0.0,
        high=86400.0,
    )
    max_backoff_s: float = key(
        60.0,
        "longest wait before a retry; also how long a dead endpoint is left alone",
        low=0.0,
        high=86400.0,
    )
    concurrency: int = key(16, "requests under way at once", low=1, high=4_096)
    price_in: float = key(
        0.0, "price of a million prompt tokens, for the metric", low=0.0, high=1e6
    )
    price_out: float = key(
        0.0, "price of a million answered tokens, for the metric", low=0.0, high=1e6
    )

    def check(self) -> None:
        try:
            json.dumps(self.body, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"endpoint.body must be what JSON can hold: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftMonitorConfig:
    """A watch for a private language: self-play gets better and play with a fixed partner worse."""

    action: str = key(
        "off",
        "off; warn says it at each evaluation; stop saves a checkpoint and ends the run",
        choices=("off", "warn", "stop"),
    )
    partner: str = key(
        WARM_START,
        "who is played with at each evaluation: warm_start (the policy self-play started from, one "
        "more whole model), scripted:NAME or checkpoint:PATH",
    )
    tolerance: float = key(
        0.03, "how far the score with the partner may lie below its best so far", low=0.0, high=1.0
    )
    patience: int = key(
        3, "evaluations in a row that must be that far below", low=1, high=10_000_000
    )

    def check(self) -> None:
        if self.partner == WARM_START:
            return
        try:
            kind = parse_spec(self.partner).kind
        except ValueError as error:
            raise ValueError(f"eval.drift_monitor.partner: {error}; or warm_start") from None
        if kind not in (SCRIPTED, CHECKPOINT):
            raise ValueError(
                "eval.drift_monitor.partner must be warm_start, scripted:NAME or checkpoint:PATH, which "
                f"stay the same, got {self.partner!r}"
            )
