"""One seat's exact tokens: ids, loss mask and engine log-probs, one entry per token.

Units: tokens and nats. Only the methods write, so the three lists always have the same length. A 1
in the mask marks a trained token: sampled by the policy or, in the warm start, written by a
teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """One turn at token positions [start, end), including anything that the player read between two
    texts of the turn."""

    start: int
    end: int


class Transcript:
    """The growing token record of one seat in one game.

    Callers may read the lists but write only through the methods. `starts` are the positions after
    0 where a separate sequence starts; earlier tokens are not its context. `policy` names the
    policy that sampled it; "" is the only one.
    """

    __slots__ = ("ids", "logprobs", "mask", "policy", "spans", "starts")

    def __init__(self, policy: str = "") -> None:
        self.policy = policy
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[Span] = []
        self.starts: list[int] = []

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.ids)

    def begin(self) -> None:
        """Start a separate sequence, whose context excludes the tokens so far."""
        if self.ids:
            self.starts.append(len(self.ids))

    def context(self) -> list[int]:
        """The ids of the last sequence, on which the next sampled token is conditioned."""
        return self.ids[self.starts[-1] :] if self.starts else list(self.ids)

    def observe(self, ids: Sequence[int]) -> None:
        """Append context that the policy reads but did not sample: mask 0, log-prob 0.0."""
        self._check()
        self.ids.extend(ids)
        self.mask.extend([0] * len(ids))
        self.logprobs.extend([0.0] * len(ids))

    def act(
        self,
        ids: Sequence[int],
        *,
        logprobs: Sequence[float],
        untrained: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Append exactly the sampled ids, including the end-of-turn token, and their log-probs.

        `untrained` are ranges [start, end) of `ids` that the loss leaves out. Raises ValueError,
        before anything is written, unless `ids` has at least one id and one log-prob for each.
        """
        self._check()
        if not ids:
            raise ValueError("transcript.act needs at least one sampled token, got 0")
        if len(logprobs) != len(ids):
            raise ValueError(
                f"transcript.act needs one log-prob per id, got {len(logprobs)} for {len(ids)} ids"
            )
        start = len(self.ids)
        self.spans.append(Span(start, start + len(ids)))
        self.ids.extend(ids)
        self.mask.extend([1] * len(ids))
        self.logprobs.extend(logprobs)
        for first, last in untrained:
            self.mask[start + first : start + last] = [0] * (last - first)

    def join(self, number: int) -> int:
        """Join the spans from `number` on, which a player sampled for one turn, into one. Returns
        the number of sampled tokens."""
        parts = self.spans[number:]
        if len(parts) > 1:
            self.spans[number:] = [Span(parts[0].start, parts[-1].end)]
        return sum(part.end - part.start for part in parts)

    def mark_untrained(self, span_index: int) -> None:
        """Remove one turn from the loss, such as a scripted player's illegal move."""
        span = self.spans[span_index]
        self.mask[span.start : span.end] = [0] * (span.end - span.start)

    def fork(self) -> Transcript:
        """An independent copy: writes to one do not change the other."""
        self._check()
        copy = Transcript(self.policy)
        copy.ids = list(self.ids)
        copy.mask = list(self.mask)
        copy.logprobs = list(self.logprobs)
        copy.spans = list(self.spans)
        copy.starts = list(self.starts)
        return copy

    def _check(self) -> None:
        """Raise RuntimeError if a list was changed from outside, which would shift the mask."""
        if not len(self.ids) == len(self.mask) == len(self.logprobs):
            raise RuntimeError(
                "transcript lists must keep one length, got "
                f"{len(self.ids)} ids, {len(self.mask)} mask, {len(self.logprobs)} logprobs"
            )
