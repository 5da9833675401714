"""The settings of partners other than the policy itself: sections of the run's settings, read
without torch."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from selfplay.config.player_spec import POOL, parse_shares
from selfplay.config.schema import RULES
from selfplay.config.secrets import check_body


@dataclass(frozen=True, slots=True, config=RULES)
class PolicyPoolConfig:
    """Snapshots of the policy as partners; used only with the partner `pool`."""

    every: int = Field(default=20, ge=1, le=10_000_000)
    """steps between two snapshots of the policy that are added to the pool"""
    size: int = Field(default=8, ge=0, le=10_000)
    """largest number of snapshots in the pool: the initial policy and the newest others; 0
    keeps all"""

    def check(self, config: Any) -> None:
        """Raise ValueError if the weights may be offloaded when a snapshot is due."""
        pool = any(spec.kind == POOL for spec, _ in parse_shares(config.rollout.partners))
        if config.parallel.offload == "all" and pool:
            raise ValueError(
                "parallel.offload must be none or optimizer with the partner pool of "
                "rollout.partners, got all: snapshots need the weights on the device"
            )


@dataclass(frozen=True, slots=True, config=RULES)
class EndpointConfig:
    """Requests to partners of the kind endpoint:MODEL@URL."""

    key_variable: str | None = None
    """environment variable that holds the API key; null sends no key (local servers)"""
    max_new_tokens: int = Field(default=512, ge=1, le=1_000_000)
    """largest number of tokens in a completion"""
    body: dict[str, object] = Field(default_factory=dict)
    """extra fields of the request's JSON, such as temperature: 0.7 or reasoning_effort: low;
    never a key"""
    timeout_s: float = Field(default=60.0, ge=0.01, le=86400.0)
    """seconds for a request and its complete answer, after which it fails"""
    retries: int = Field(default=4, ge=0, le=1_000)
    """retries of a failed request before its game is aborted"""
    concurrency: int = Field(default=16, ge=1, le=4_096)
    """largest number of concurrent requests"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        check_body(self.body)
        return self
