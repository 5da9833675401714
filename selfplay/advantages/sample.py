"""A transcript with a return and an advantage per token, which credit assignment hands to the
learner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Sample:
    """One seat's transcript, ready for the update. A sequence has one entry per token, or is empty
    if nothing is known; it is a list, or an `array` or bytes, which are packed faster.

    - `name` is unique within a step.
    - `old_logprobs` are the engine's log-probs at the sampling temperature.
    - `advantages` are 0 where the mask is 0.
    - `returns` are the seat's undiscounted returns from each token on: the final reward, plus a
      single move's reward up to the last token that the seat sampled before the move took effect.
    - `group` is the key of the samples it is compared with; `seating` is the key of its moving
      average: the seat and its partner, if any ("seat 0 beside NAME"). Imitation samples have no
      group, no seating and no returns.
    - `starts` are the positions after 0 where a separate sequence starts (`Transcript.starts`).
      Each sequence has its own context; credit assignment and loss treat the sample as one.
    - `policy` names the policy that sampled it; "" is the only one.
    - `columns` are per-token values that methods add, by name; a micro-batch has them as tensors.
    """

    name: str
    ids: Sequence[int]
    mask: Sequence[int]
    old_logprobs: Sequence[float]
    advantages: Sequence[float]
    returns: list[float] = field(default_factory=list)
    group: str = ""
    seating: str = ""
    starts: tuple[int, ...] = ()
    policy: str = ""
    columns: dict[str, list[float]] = field(default_factory=dict)

    def __repr__(self) -> str:
        mean = sum(self.advantages) / max(1, sum(self.mask))
        return (
            f"Sample {self.name}: {len(self.ids)} tokens, {sum(self.mask)} of them trained, reward "
            f"{self.total_reward:.3g}, mean advantage {mean:.3g}"
        )

    def sequences(self) -> list[tuple[int, int]]:
        """The ranges [start, end) of the sequences with a trained token, each up to its last one,
        since nothing depends on later tokens. A single sequence without any is whole."""
        flags = bytes(self.mask)
        bounds = pairwise((0, *self.starts, len(flags)))
        ranges = [(start, flags.rfind(1, start, end) + 1) for start, end in bounds]
        trained = [(start, end) for start, end in ranges if end > start]
        return trained or [(0, len(self.ids))] * (not self.starts)

    @property
    def num_read(self) -> int:
        """The total number of tokens of `sequences`."""
        return sum(end - start for start, end in self.sequences())

    @property
    def longest(self) -> int:
        """The number of tokens of the longest sequence."""
        return max((end - start for start, end in self.sequences()), default=0)

    @property
    def total_reward(self) -> float:
        """The seat's reward for the game: the final reward plus those of single moves."""
        return self.returns[0] if self.returns else 0.0


def trained_stretches(mask: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The ranges [start, end) of trained tokens, in order."""
    flags, end = bytes(mask), 0
    while (start := flags.find(1, end)) >= 0:
        end = flags.find(0, start)
        end = len(flags) if end < 0 else end
        yield start, end
