"""The rules of the setting `monitors`: which numbers of metrics.jsonl warn or stop the run.

stop if entropy < 0.05 over 5
warn if score/scripted:* falls 0.2 over 10
warn if messages loses 75% over 10
stop if eval_score/* falls 0.03 over 3 while eval_score rises
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

DEFAULT_MONITORS = (
    "stop if num_skipped_steps > 0",
    "stop if num_games < 1",
    "stop if void_share > 0.5 over 3",
    "warn if void_share > 0.1",
    "warn if entropy < 0.001 over 10",
    "warn if entropy/* < 0.001 over 10",
    "warn if ratio_mean < 0.5 over 10",
    "warn if ratio_mean > 1.5 over 10",
    "warn if ratio_mean/* < 0.5 over 10",
    "warn if ratio_mean/* > 1.5 over 10",
    "warn if score < 0.001 over 10",
    "warn if messages loses 75% over 10",
    "warn if agreement loses 50% over 10",
    "warn if honesty falls 0.2 over 10",
    "warn if score/scripted:* falls 0.2 over 10",
    "warn if score/checkpoint:* falls 0.2 over 10",
    "warn if score/endpoint:* falls 0.2 over 10",
    "warn if observed/exploitability_share > 0.5 over 50",
    "warn if observed/view_distance < 0.01 over 20",
    "warn if eval_score/* falls 0.03 over 3 while eval_score rises",
)
_NUMBER = r"(\d+\.?\d*|\.\d+)(e[-+]?\d+)?"
_SHAPE = re.compile(
    rf"(?P<action>warn|stop) if (?P<metric>\S+) ((?P<relation><|>) (?P<bound>-?{_NUMBER})|"
    rf"loses (?P<loss>\d{{1,2}})%|falls (?P<fall>{_NUMBER}))( over (?P<window>[1-9]\d{{0,5}}))?"
    r"(?(fall)( while (?P<rising>\S+) rises)?)"
)


@dataclass(frozen=True, slots=True)
class Rule:
    """`action` if the mean of `metric` over its last `window` values is `<` or `>` than `bound`,
    `loses` more than the fraction `bound` of its first such mean, or `falls` more than `bound`
    below the largest such mean so far.

    `metric` may contain `*`: each metric that matches has its own mean. With `rising` the rule also
    requires this second metric's mean to be above its value at the first one's largest mean.
    """

    text: str
    action: str
    metric: str
    relation: str
    bound: float
    window: int
    rising: str | None


def parse_rule(text: str) -> Rule:
    """Raises ValueError for an invalid rule."""
    words = " ".join(text.split())
    found = _SHAPE.fullmatch(words)
    if found is None:
        raise ValueError(
            "monitors: a rule must be 'warn|stop if METRIC <|> NUMBER [over STEPS]', 'warn|stop if "
            "METRIC loses PERCENT% [over STEPS]' or 'warn|stop if METRIC falls NUMBER [over STEPS] "
            f"[while METRIC rises]', as in 'stop if entropy < 0.05 over 5', got {text!r}"
        )
    loss = found["loss"]
    bound = float(loss) / 100 if loss else float(found["bound"] or found["fall"])
    if not math.isfinite(bound):
        raise ValueError(f"monitors: a rule's bound must be a finite number, got {text!r}")
    return Rule(
        words,
        found["action"],
        found["metric"],
        found["relation"] or ("loses" if loss else "falls"),
        bound,
        int(found["window"] or 1),
        found["rising"],
    )
