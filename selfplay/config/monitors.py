"""The rules of the setting `monitors`: which numbers of metrics.jsonl warn, stop the run or send it
back to its best checkpoint.

stop if entropy < 0.05 over 5
warn if score/scripted:* falls 0.2 over 10
warn if messages loses 75% over 10
stop if eval_score/* falls 0.03 over 3 while eval_score rises
back to best if observed/exploitability rises 0.1 over 3
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
    "warn if eval_view_effect_low < 0 over 3",
    "warn if eval_score/* falls 0.03 over 3 while eval_score rises",
)
BACK = "back to best"  # the action that returns to a checkpoint
_NUMBER = r"(\d+\.?\d*|\.\d+)(e[-+]?\d+)?"
_SHAPE = re.compile(
    rf"(?P<action>warn|stop|{BACK}) if (?P<metric>\S+) ((?P<relation><|>) (?P<bound>-?{_NUMBER})|"
    rf"loses (?P<loss>\d{{1,2}})%|rises (?P<rise>{_NUMBER})|falls (?P<fall>{_NUMBER}))"
    r"( over (?P<window>[1-9]\d{0,5}))?(?(fall)( while (?P<rising>\S+) rises)?)"
)


@dataclass(frozen=True, slots=True)
class Rule:
    """`action` if the mean of `metric` over its last `window` values is `<` or `>` than `bound`,
    `loses` more than the fraction `bound` of its first such mean, or `falls` or `rises` more than
    `bound` from the best such mean so far: the smallest for `>` and `rises`, else the largest.

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

    better: int
    """1 if a larger mean is better, -1 if a smaller one is"""


def parse_rule(text: str) -> Rule:
    """Raises ValueError for an invalid rule."""
    words = " ".join(text.split())
    found = _SHAPE.fullmatch(words)
    if found is None:
        raise ValueError(
            "monitors: a rule must be warn, stop or back to best, then 'if METRIC <|> NUMBER [over "
            "STEPS]', 'if METRIC loses PERCENT% [over STEPS]', 'if METRIC rises NUMBER [over "
            "STEPS]' or 'if METRIC falls NUMBER [over STEPS] [while METRIC rises]', as in 'stop if "
            f"entropy < 0.05 over 5', got {text!r}"
        )
    loss = found["loss"]
    moved = "falls" if found["fall"] else "rises"
    relation = found["relation"] or ("loses" if loss else moved)
    bound = float(loss) / 100 if loss else float(found["bound"] or found["fall"] or found["rise"])
    if not math.isfinite(bound):
        raise ValueError(f"monitors: a rule's bound must be a finite number, got {text!r}")
    return Rule(
        words,
        found["action"],
        found["metric"],
        relation,
        bound,
        int(found["window"] or 1),
        found["rising"],
        better=-1 if relation in (">", "rises") else 1,
    )
