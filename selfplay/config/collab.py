"""Settings of the collaboration's reward."""

from __future__ import annotations

from dataclasses import dataclass

from selfplay.settings import key


@dataclass(frozen=True, slots=True, kw_only=True)
class CollabConfig:
    """The parts of a conversation's reward, with `reward.kind: collab`."""

    accuracy: float = key(1.0, "weight of the task's grade", low=0.0)
    interactivity: float = key(1.0, "weight of how well the goal was drawn out", low=0.0)
    token_cost: float = key(1e-4, "subtracted for each token that the assistant sampled", low=0.0)
    clamp: float = key(1.0, "no part counts more than this, for or against", low=0.0)
