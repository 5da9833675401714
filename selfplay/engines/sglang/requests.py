"""One request to a running SGLang engine, and its answer, checked. Sizes in tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from selfplay.engines.sglang.event_loop import EngineLoop


@dataclass(slots=True)
class Served:
    """Running counts over the engine's life; cached tokens are prompt tokens not computed again."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_new_tokens: int = 0


class Asker:
    """Sends requests from the engine's loop and counts what they took."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._context_length = int(loop.manager.model_config.context_len)
        self.served = Served()

    async def ask(
        self,
        ids: Sequence[int],
        parameters: Mapping[str, Any],
        *,
        version: int,
        score: bool = False,
    ) -> Mapping[str, Any]:
        """SGLang's answer to these ids, log-probs of its new tokens included. With `score` those of
        the ids come, too, and all of them are computed, whatever the prefix cache holds.

        Raises ValueError for what cannot fit the context, RuntimeError when the engine aborts it or
        answers with other weights than `version`.
        """
        num_new = parameters["max_new_tokens"]
        if len(ids) + num_new > self._context_length:
            raise ValueError(
                "prompt and max_new_tokens must fit the engine's context of "
                f"{self._context_length} tokens, got {len(ids)} + {num_new}"
            )
        rid = f"turn-{self.served.num_requests}"
        self.served.num_requests += 1
        try:
            with self._loop.owing():
                answer: Mapping[str, Any] = await self._loop.engine.async_generate(
                    input_ids=list(ids),
                    sampling_params=dict(parameters),
                    return_logprob=True,
                    logprob_start_len=0 if score else -1,
                    rid=rid,
                )
        except asyncio.CancelledError:
            self._loop.manager.abort_request(rid)
            raise
        meta = answer["meta_info"]
        if meta["finish_reason"]["type"] not in ("stop", "length"):
            raise RuntimeError(f"the engine ended a request with {meta['finish_reason']}")
        if meta["weight_version"] != str(version):
            raise RuntimeError(
                f"the engine speaks with version {meta['weight_version']}, expected {version}"
            )
        self.served.num_prompt_tokens += meta["prompt_tokens"]
        self.served.num_cached_tokens += meta["cached_tokens"]
        self.served.num_new_tokens += len(answer["output_ids"])
        return answer
