"""The settings of the methods here, and their checks. Read without torch.

A method is on if `methods` lists it; `check` raises ValueError if other settings do not fit.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from selfplay.config import Config
from selfplay.config.player_spec import CHECKPOINT, ENDPOINT, parse_spec
from selfplay.config.schema import RULES


@dataclass(frozen=True, slots=True, config=RULES)
class RecomputeOptions:
    """The trainer's log-probs instead of the engine's in the ratio, and importance weights."""

    importance: Literal["none", "token", "sequence"] = "none"
    """weight the loss by the importance ratio trainer / engine to correct the log-prob mismatch:
    off, per token, or per sequence"""
    cap: float = Field(default=2.0, ge=0.01, le=1e6)
    """importance ratios are truncated at this value"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Raise ValueError for a cap without importance weights."""
        if self.importance == "none" and self.cap != 2.0:
            raise ValueError(
                "methods.recompute.cap needs methods.recompute.importance token or sequence, got "
                "none"
            )
        return self


@dataclass(frozen=True, slots=True, config=RULES)
class KLReferenceOptions:
    """A reference of algorithm.kl that moves towards the policy in training (docs/kl.md)."""

    every: int = Field(default=1, ge=1, le=10_000_000)
    """steps between two moves"""
    average: float = Field(default=1.0, ge=1e-6, le=1.0)
    """share of the way to the policy that the reference moves; 1 makes it the policy"""

    def check(self, config: Config) -> None:
        """Raise ValueError for a reference that is the policy before each step, and without a KL
        term."""
        if self.every == 1 and self.average == 1.0:
            raise ValueError(
                "methods.kl_reference must have an every above 1 or an average below 1, got every "
                "1 and average 1, which is the policy itself; nearest: every 100"
            )
        moves = config.methods.get("legal_moves")
        if not config.algorithm.kl and not getattr(moves, "kl", 0.0):
            raise ValueError(
                "methods.kl_reference needs algorithm.kl above 0, the weight of the KL to the "
                f"reference, or methods.legal_moves.kl, got {config.algorithm.kl:g}"
            )


@dataclass(frozen=True, slots=True, config=RULES)
class LegalMovesOptions:
    """An entropy bonus, and a KL, over the moves that a game lists (docs/exploitability.md)."""

    kl: float = Field(default=0.0, ge=0.0, le=1000.0)
    """weight of the mean KL of a move to the reference, in nats, over the listed moves"""
    entropy: float = Field(
        default_factory=lambda given: 0.0 if given.get("kl") else 0.1, ge=0.0, le=1000.0
    )
    """weight of the mean entropy of a move, in nats, over the listed moves; if kl is set, 0 by
    default"""
    until: int = Field(default=0, ge=0, le=10_000_000)
    """the step at which the weight of the entropy has fallen linearly to 0; 0 keeps it"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Raise ValueError for a fall of a bonus that is 0."""
        if self.until and not self.entropy:
            raise ValueError(
                "methods.legal_moves.until needs methods.legal_moves.entropy above 0, the weight "
                f"that falls, got entropy 0 with until {self.until}"
            )
        return self


@dataclass(frozen=True, slots=True, config=RULES)
class PPOOptions:
    """PPO's value function, and the advantages computed from it; only with algorithm.advantage
    ppo."""

    lam: float = Field(default=0.95, ge=0.0, le=1.0)
    """GAE's lambda: 0 relies on the critic (one-step TD), 1 on the observed return"""
    clip: float = Field(default=0.2, ge=0.0, le=1e6)
    """value clip range: the largest change of a value within one rollout; 0 turns clipping off"""
    lr: float = Field(default=1e-4, ge=0.0, le=10.0)
    """constant learning rate of the critic's own AdamW"""
    warmup_steps: int = Field(default=0, ge=0, le=10_000_000)
    """first updates of its policy that train only the critic"""

    def check(self, config: Config) -> None:
        """Raise ValueError without `algorithm.advantage` ppo or with tensor parallelism."""
        if config.algorithm.advantage != "ppo":
            raise ValueError(
                f"methods.ppo needs algorithm.advantage ppo, got {config.algorithm.advantage}"
            )
        if config.parallel.tp > 1:
            raise ValueError(
                f"parallel.tp must be 1 with algorithm.advantage ppo, got {config.parallel.tp}: "
                "critics do not support tensor parallelism; use parallel.fsdp"
            )


@dataclass(frozen=True, slots=True, config=RULES)
class AuxiliaryImitationOptions:
    """An imitation loss on new games of `warm_start.teachers` in each self-play update."""

    weight: float = Field(default=0.1, ge=0.0, le=1000.0)
    """weight of the loss"""
    games: int = Field(default=8, ge=1, le=100_000)
    """scripted games per step"""


@dataclass(frozen=True, slots=True, config=RULES)
class BestGamesOptions:
    """An imitation loss on the policy's own best games: the newest rollout.instances games that
    ended in an agreement with their instance's best score, above its mean (rejection sampling)."""

    weight: float = Field(default=0.2, ge=0.0, le=1000.0)
    """weight of the loss"""


@dataclass(frozen=True, slots=True, config=RULES)
class ResampleOptions:
    """Dynamic sampling: a step plays more instances to replace those whose groups have zero
    variance (DAPO)."""

    instances: int = Field(default=16, ge=1, le=100_000)
    """replacement instances that a step may draw"""

    @property
    def more_instances(self) -> int:
        """How many instances a step may play in addition to `rollout.instances`."""
        return self.instances

    def check(self, config: Config) -> None:
        """Raise ValueError if no group of games can be dropped."""
        if config.compares_turns:
            raise ValueError(
                "methods.resample must be left out with rollout.options.turns all, got "
                f"{self.instances}: it replaces groups of games, but these are groups of turns; "
                "nearest: decisions"
            )
        if not config.algorithm.groups:
            raise ValueError(
                f"methods.resample must be left out for {config.algorithm.advantage}, which drops "
                f"no zero-variance groups, got {self.instances}"
            )


@dataclass(frozen=True, slots=True, config=RULES)
class JudgeOptions:
    """A chat model that rates each finished game of training (docs/your_reward.md)."""

    FILES: ClassVar = ("rubric",)
    MEASURES: ClassVar = ("mark",)

    model: str = ""
    """endpoint:MODEL@URL, called with the settings of `endpoint`, or checkpoint:PATH"""
    rubric: str | None = None
    """a text file that instructs the judge how to rate a game of any kind from 0 to 1; null uses
    the game's own rubric, if it has one"""
    weight: float = Field(default=1.0, ge=0.0, le=1000.0)
    """with a rubric, the factor of the judge's mark, which is added to the reward that
    reward.function gives each seat"""

    def check(self, config: Config) -> None:
        """Raise ValueError for an invalid model, a missing rubric, or a place after a method that
        reads rewards."""
        if self.model.strip().partition(":")[0] not in (ENDPOINT, CHECKPOINT):
            raise ValueError(
                "methods.judge.model must be checkpoint:PATH or endpoint:MODEL@URL, such as "
                f"endpoint:small@http://127.0.0.1:8000/v1, got {self.model!r}"
            )
        try:
            parse_spec(self.model)
        except ValueError as error:
            raise ValueError(f"methods.judge.model: {error}") from None
        game, names = config.game, [*config.methods]
        if game.is_imported and self.rubric is None and not game.kit.has("judged"):
            raise ValueError(
                f"methods.judge.rubric must be a text file with game.name {game.name}, which does "
                "not have its own rubric, got null"
            )
        if "resample" in names[: names.index("judge")]:
            raise ValueError("methods.judge must come before methods.resample, got it after")


OPTIONS = {
    "judge": JudgeOptions,
    "recompute": RecomputeOptions,
    "kl_reference": KLReferenceOptions,
    "legal_moves": LegalMovesOptions,
    "ppo": PPOOptions,
    "auxiliary_imitation": AuxiliaryImitationOptions,
    "best_games": BestGamesOptions,
    "resample": ResampleOptions,
}
