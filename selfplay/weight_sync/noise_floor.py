"""Decides when log-prob differences between engine and trainer are more than noise.

**What is compared.** Engine and trainer score the same sampled turns after their true prefixes. A
turn's mismatch is the mean of |engine - trainer| over the tokens that the policy sampled, in nats.
In bf16 the difference of a token is noise with a heavy tail, larger for improbable tokens. No bound
in nats fits all models: a healthy run's mismatch lies anywhere from 1e-6 (fp32) to 0.03 (bf16).

**The noise floor** is the mismatches of the latest `KEPT` turns that were scored with equal
weights. It is first measured after the first push and before any step, and every healthy comparison
refines it. Checkpoints hold it, so a resumed run has the bounds of an uninterrupted one.

**The test.** n new turns of one engine are suspicious if at least three quarters of them each lie
above `FACTOR` times the largest mismatch of the floor. A NaN lies above everything.

**How often the test is wrong.** With equal weights, new turns and the floor's are draws from one
distribution, so every order of their mismatches is equally likely, whatever the distribution and
its tail. If at least m of n new turns lie above all N of the floor, then the m largest of the N + n
are new, which has a probability of at most C(n, m) / C(N + n, m). FACTOR only lowers it.

| comparison | n | m | N = 32 | N = 64 |
|---|---|---|---|---|
| first, each step | 4 | 3 | 5.6e-4 | 8.0e-5 |
| second, other turns | 16 | 12 | 2.6e-8 | 2.8e-11 |

The first comparison costs little and only decides whether the second is made. The second alone
bounds the rate at which equal weights are suspected: below 2.6e-8 a step and engine, below 1e-5 a
step with up to 380 engines. A run ends only after a third comparison, which follows a new push.

**Limits.** The noise changes with the policy. The floor adapts over KEPT turns, and FACTOR covers
the change of a step. Noise that grows by more than FACTOR in one step is suspected although the
weights are equal. The weights are then compared bit for bit, and the floor is measured again.

Knows no engines, models or text.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

KEPT = 64
FEWEST = 32  # turns that the noise floor needs before use
FIRST, MORE = 4, 16  # turns of each engine in the first comparison, in each later one
FACTOR = 2.0


def turn_mismatch(engine_T: Sequence[float], trainer_T: Sequence[float]) -> float:
    """Mean |difference| of the two log-probs of a turn's tokens, in nats; infinite for a NaN.

    Raises ValueError unless both have equally many log-probs, at least one.
    """
    if not engine_T or len(engine_T) != len(trainer_T):
        raise ValueError(
            f"a turn's mismatch needs equally many log-probs, at least 1, got {len(engine_T)} "
            f"from the engine and {len(trainer_T)} from the trainer"
        )
    mean = sum(abs(e - t) for e, t in zip(engine_T, trainer_T, strict=True)) / len(engine_T)
    return math.inf if math.isnan(mean) else mean


class NoiseFloor:
    """Mismatches, in nats, of turns that engine and trainer scored with equal weights."""

    def __init__(self) -> None:
        self._mismatches: deque[float] = deque(maxlen=KEPT)

    @property
    def mismatches(self) -> list[float]:
        """The mismatches of the latest turns, oldest first."""
        return list(self._mismatches)

    @property
    def known(self) -> bool:
        return len(self._mismatches) >= FEWEST

    @property
    def largest(self) -> float:
        return max(self._mismatches, default=math.inf)

    @property
    def bound(self) -> float:
        """An upper bound for the mean over many turns with equal weights; 0 before enough turns."""
        return FACTOR * self.largest if self.known else 0.0

    def add(self, mismatches: Sequence[float]) -> None:
        """Add mismatches of turns scored with equal weights; infinite ones are left out."""
        self._mismatches.extend(filter(math.isfinite, mismatches))

    def forget(self) -> None:
        """Drop all turns, after the noise has changed."""
        self._mismatches.clear()

    def suspects(self, mismatches: Mapping[int, Sequence[float]], *, fewest: int) -> bool:
        """Whether the turns of any engine are suspicious.

        `mismatches` has each engine's by the rank that leads it. An engine with fewer than `fewest`
        turns is never suspicious, and no engine is before the floor has enough turns.
        """
        return self.known and any(
            len(of_engine) >= fewest and 4 * self._num_above(of_engine) >= 3 * len(of_engine)
            for of_engine in mismatches.values()
        )

    def _num_above(self, mismatches: Sequence[float]) -> int:
        return sum(mismatch > FACTOR * self.largest for mismatch in mismatches)
