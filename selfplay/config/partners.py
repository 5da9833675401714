"""Settings of partners: the policy pool and endpoints."""

from __future__ import annotations

import json
from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from selfplay.config.schema import RULES, key
from selfplay.config.secrets import check_body

Price = Annotated[float, Field(ge=0.0, le=1e6)]


@dataclass(frozen=True, slots=True, kw_only=True, config=RULES)
class PolicyPoolConfig:
    """Rated snapshots of the policy as partners; used only with the partner `pool`."""

    every: int = key(
        20,
        "steps between two snapshots of the policy that are added to the pool",
        within=(1, 10_000_000),
    )
    size: int = key(
        8,
        "largest number of snapshots in the pool: the initial policy and the newest others; 0 "
        "keeps all",
        within=(0, 10_000),
    )


@dataclass(frozen=True, slots=True, kw_only=True, config=RULES)
class EndpointConfig:
    """How requests are sent to partners of the kind endpoint:MODEL@URL."""

    key_variable: str | None = key(
        None, "environment variable that holds the API key; null sends no key (local servers)"
    )
    max_new_tokens: int = key(
        512, "largest number of tokens in a completion", within=(1, 1_000_000)
    )
    body: dict[str, object] = key(
        {},
        "extra fields of the request's JSON, such as temperature: 0.7 or reasoning_effort: low; "
        "never a key",
    )
    timeout_s: float = key(
        60.0, "seconds without data from the server before a request fails", within=(0.01, 86400.0)
    )
    retries: int = key(
        4, "retries of a failed request before its game is discarded", within=(0, 1_000)
    )
    concurrency: int = key(16, "largest number of concurrent requests", within=(1, 4_096))
    price: tuple[Price, Price] = key(
        (0.0, 0.0), "prices of a million prompt and of a million completion tokens, for the cost"
    )

    @model_validator(mode="after")
    def check(self) -> Self:
        try:
            json.dumps(self.body, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"endpoint.body must be valid JSON: {error}") from None
        check_body(self.body)
        return self
