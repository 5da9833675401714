"""Settings of the reward of the collab game."""

from __future__ import annotations

from dataclasses import dataclass

from selfplay.config.player_spec import ENDPOINT, parse_spec
from selfplay.config.settings import key


@dataclass(frozen=True, slots=True, kw_only=True)
class CollabConfig:
    """Weights of a conversation's reward; used with `reward.kind: collab`."""

    accuracy: float = key(1.0, "weight of the task's grade", within=(0.0, 1000.0))
    interactivity: float = key(
        1.0,
        "weight of the interactivity score, which measures how well the assistant drew out "
        "the user's goal",
        within=(0.0, 1000.0),
    )
    token_cost: float = key(
        1e-4, "penalty for each token that the assistant sampled", within=(0.0, 1000.0)
    )
    clamp: float = key(
        1.0, "each part of the reward is clamped to [-clamp, clamp]", within=(0.0, 1000.0)
    )
    judge: str = key(
        "rubric",
        "who scores interactivity: rubric (a fixed rule) or endpoint:MODEL@URL, a model that "
        "is called with the settings of `endpoint`",
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
