"""When log-prob differences between engine and trainer are more than noise.

**What is compared.** Both sides score the same sampled turns after their true prefixes. A turn's
gap is the mean of |engine - trainer| over the tokens that the policy sampled, in nats. In bf16 a
token's difference is noise with a heavy tail, larger for improbable tokens, and no bound in nats
fits all models: a healthy run's gap lies anywhere from 1e-6 (fp32) to 0.03 (bf16).

**The floor** is the gaps of the latest `KEPT` turns that were scored with weights known to be
equal. It is first measured after the first push and before any step, and every healthy comparison
refines it.

**The test.** n new turns of one engine are suspicious when at least three quarters of them each lie
above `FACTOR` times the largest gap of the floor. A NaN lies above everything.

**How often that is wrong.** With equal weights, new turns and the floor's are draws from one
distribution, so every order of their gaps is equally likely, whatever the distribution and its
tail. At least m of n new ones above all N of the floor means that the m largest of the N + n are
new: C(n, m) / C(N + n, m). FACTOR only lowers it.

| comparison | n | m | N = 32 | N = 64 |
|---|---|---|---|---|
| first, each step | 4 | 3 | 5.6e-4 | 8.0e-5 |
| second, other turns | 16 | 12 | 2.6e-8 | 2.8e-11 |

The first costs little and decides nothing but whether the second is made. The second alone bounds
the rate at which equal weights are suspected: below 2.6e-8 a step and engine, below 1e-5 a step
with up to 380 engines. A run ends after a third comparison behind a new push only.

**What it does not claim.** The policy moves, so the noise does: the floor follows over KEPT turns,
FACTOR covers a step's change. Noise that grows at once by more than FACTOR is suspected although
weights are equal; then they are compared bit for bit, and the floor begins anew.

Knows no engines, models or text.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

KEPT = 64
FEWEST = 32  # below so many a floor is no floor yet
FIRST, MORE = 4, 16  # turns of each engine in the first comparison, in each later one
FACTOR = 2.0


def turn_gap(engine_T: Sequence[float], trainer_T: Sequence[float]) -> float:
    """Mean |difference| of the sides' log-probs of one turn's tokens; infinite for a NaN.

    Raises ValueError unless both sides scored equally many tokens, at least one.
    """
    if not engine_T or len(engine_T) != len(trainer_T):
        raise ValueError(
            f"a turn's gap needs equally many log-probs, at least 1, got {len(engine_T)} from the "
            f"engine and {len(trainer_T)} from the trainer"
        )
    gap = sum(abs(e - t) for e, t in zip(engine_T, trainer_T, strict=True)) / len(engine_T)
    return math.inf if math.isnan(gap) else gap


class NoiseFloor:
    """Gaps of turns that were scored with equal weights."""

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=KEPT)

    @property
    def known(self) -> bool:
        return len(self._gaps) >= FEWEST

    @property
    def largest(self) -> float:
        return max(self._gaps, default=math.inf)

    def add(self, gaps: Sequence[float]) -> None:
        """These turns were scored with equal weights."""
        self._gaps.extend(gaps)

    def forget(self) -> None:
        """What is known no longer holds."""
        self._gaps.clear()

    def suspects(self, gaps: Mapping[int, Sequence[float]], *, fewest: int) -> bool:
        """Whether the turns of any engine are suspicious; engines by the rank that leads them.
        Never before the floor is known, or of an engine with fewer turns than the rate above
        counts on."""
        return self.known and any(
            len(of_one) >= fewest and 4 * self._num_above(of_one) >= 3 * len(of_one)
            for of_one in gaps.values()
        )

    def _num_above(self, gaps: Sequence[float]) -> int:
        return sum(gap > FACTOR * self.largest for gap in gaps)
