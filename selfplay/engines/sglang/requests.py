"""Sends one request to a running SGLang engine and checks the answer. Sizes in tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from selfplay.engines.base import EngineFault
from selfplay.engines.sglang.event_loop import EngineLoop


@dataclass(slots=True)
class Served:
    """Running counts since the engine's start; cached tokens are prompt tokens not recomputed."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_new_tokens: int = 0


class Asker:
    """Sends requests on the engine's event loop and counts requests and tokens."""

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
        """SGLang's answer to these prompt ids, with the log-probs of its new tokens.

        With `score` the answer also has the log-probs of the prompt ids; SGLang then bypasses the
        prefix cache and computes all of them.

        Raises ValueError for a request that does not fit the context, EngineFault when the engine
        aborts the request, answers with weights of another version than `version`, or with a reply
        that cannot be read.
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
            with self._loop.pending_answer():
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
        except ValueError:  # the request itself is invalid
            raise
        except Exception as error:
            raise EngineFault(f"the engine failed in a request: {error!r}") from error
        with readable():
            meta = answer["meta_info"]
            if meta["finish_reason"]["type"] not in ("stop", "length"):
                raise EngineFault(f"the engine ended a request with {meta['finish_reason']}")
            if meta["weight_version"] != str(version):
                raise EngineFault(
                    f"the engine's weights have version {meta['weight_version']}, expected "
                    f"{version}"
                )
            self.served.num_prompt_tokens += meta["prompt_tokens"]
            self.served.num_cached_tokens += meta["cached_tokens"]
            self.served.num_new_tokens += len(answer["output_ids"])
        return answer


@contextmanager
def readable() -> Iterator[None]:
    """Turn an error of reading the engine's reply into an EngineFault."""
    try:
        yield
    except (LookupError, TypeError, ValueError) as error:
        raise EngineFault(f"the engine's reply cannot be read: {error!r}") from error
