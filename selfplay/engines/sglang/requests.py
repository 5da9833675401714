"""Sends requests to a running SGLang engine and checks the answers. Sizes in tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from selfplay.engines.sglang.bursts import Bursts
from selfplay.engines.sglang.event_loop import EngineLoop
from selfplay.engines.sglang.scheduler_client import Answer, SchedulerClient
from selfplay.engines.sglang.sessions import GameSessions
from selfplay.errors import EngineFault


@dataclass(slots=True)
class RequestCounters:
    """Running counts since the engine's start; cached tokens are prompt tokens not recomputed."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


class RequestSender:
    """Sends requests to one of the engine's processes; counts requests and tokens in `counters`."""

    def __init__(
        self, loop: EngineLoop, process: int, bursts: Bursts, counters: RequestCounters
    ) -> None:
        self._loop, self._bursts, self.counters = loop, bursts, counters
        self._manager = loop.managers[process]
        self.client = SchedulerClient(self._manager)
        self.context_length = int(self._manager.model_config.context_len)

    async def send(
        self,
        ids: Sequence[int],
        parameters: Mapping[str, Any],
        *,
        version: int,
        score: bool = False,
        sessions: GameSessions | None = None,
    ) -> Answer:
        """The engine's answer to these prompt ids, in one of the game's sessions if they are given.

        With `score` the answer also has the log-probs of the prompt ids; SGLang then bypasses the
        prefix cache and computes all of them.

        Raises ValueError for a request that does not fit the context, EngineFault when the engine
        aborts the request or answers with weights of another version than `version`.
        """
        num_new = parameters["max_new_tokens"]
        if len(ids) + num_new > self.context_length:
            raise ValueError(
                "prompt and max_new_tokens must fit the engine's context of "
                f"{self.context_length} tokens, got {len(ids)} + {num_new}"
            )
        rid = f"turn-{self.counters.num_requests}."  # SGLang aborts by the start of the name
        self.counters.num_requests += 1
        burst = contextlib.nullcontext() if score else self._bursts.admitted()
        async with burst:
            with self._loop.pending_answer():
                try:
                    if sessions is None:
                        answer = await self.client.request(rid, ids, parameters, score=score)
                    else:
                        answer = await sessions.request(rid, ids, parameters)
                except (ValueError, EngineFault):
                    raise
                except Exception as error:
                    raise EngineFault(f"the engine failed in a request: {error!r}") from error
        loaded = self._manager.config_value("weight_version")
        if loaded != str(version):
            raise EngineFault(f"the engine's weights have version {loaded}, expected {version}")
        self.counters.num_prompt_tokens += answer.num_prompt
        self.counters.num_cached_tokens += answer.num_cached
        return answer


class GameRouter:
    """Assigns each game to a process. Games with the same first prompt share one, so the prompt is
    computed once; a new prompt goes to the process with the fewest games."""

    def __init__(self, num_processes: int) -> None:
        self._num_games = [0] * num_processes
        self._by_prompt: dict[tuple[int, ...], int] = {}

    def process_for(self, first_prompt: Sequence[int]) -> int:
        """The process of a new game whose first request has this prompt."""
        emptiest = self._num_games.index(min(self._num_games))
        process = self._by_prompt.setdefault(tuple(first_prompt), emptiest)
        self._num_games[process] += 1
        return process
