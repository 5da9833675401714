"""Settings of the collaboration's reward."""

from __future__ import annotations

from dataclasses import dataclass

from selfplay.config.player_spec import ENDPOINT, parse_spec
from selfplay.config.settings import key


@dataclass(frozen=True, slots=True, kw_only=True)
class CollabConfig:
    """The parts of a conversation's reward, with `reward.kind: collab`."""

    accuracy: float = key(1.0, "weight of the task's grade", low=0.0, high=1000.0)
    interactivity: float = key(
        1.0, "weight of how well the goal was drawn out", low=0.0, high=1000.0
    )
    token_cost: float = key(
        1e-4, "subtracted for each token that the assistant sampled", low=0.0, high=1000.0
    )
    clamp: float = key(1.0, "no part counts more than this, for or against", low=0.0, high=1000.0)
    judge: str = key(
        "rubric",
        "who marks interactivity: rubric, or endpoint:MODEL@URL (asked as `endpoint` says)",
    )

    def check(self) -> None:
        if self.judge == "rubric":
            return
        try:
            kind = parse_spec(self.judge).kind
        except ValueError as error:
            raise ValueError(f"reward.collab.judge: {error}") from None
        if kind != ENDPOINT:
            raise ValueError(
                "reward.collab.judge must be rubric or endpoint:MODEL@URL, as in "
                f"endpoint:small@http://127.0.0.1:8000/v1, got {self.judge!r}"
            )
