"""Sends requests to a running SGLang engine, alone or in bursts, and checks the answers.

Sizes in tokens, times in seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from selfplay.engines.sglang.event_loop import EngineLoop
from selfplay.engines.sglang.fast import Answer, GameSessions, SchedulerClient, SessionPool
from selfplay.errors import EngineFault


@dataclass(slots=True)
class RequestCounters:
    """Running counts since the engine's start; cached tokens are prompt tokens not recomputed."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


class Bursts:
    """Delays requests and sends them in bursts.

    Turns end one by one. If each next request were sent at once, its prefill would stop the
    decoding of all other games (sglang #23189). Here requests wait until they are the fraction
    `share` of those in the engine, at most `after_s` seconds. Batching does not change the sampling
    distribution.
    """

    def __init__(self, share: float, *, after_s: float) -> None:
        self.share, self.after_s = share, after_s
        self._delayed: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._num_running = 0

    @contextlib.asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Wait for the next burst; inside the block the request is in the engine."""
        if self.share:
            loop = asyncio.get_running_loop()
            admission = loop.create_future()
            self._delayed.append(admission)
            if self._timer is None:
                self._timer = loop.call_later(self.after_s, self._send)
            self._send_if_enough()
            await admission
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            self._send_if_enough()

    def _send_if_enough(self) -> None:
        if self._delayed and len(self._delayed) >= self.share * self._num_running:
            self._send()

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        delayed, self._delayed = self._delayed, []
        for admission in delayed:
            if not admission.done():  # its game may have been cancelled
                admission.set_result(None)


def max_session_tokens(cache_tokens: int, context_length: int) -> int:
    """The tokens that all sessions of a process may hold: at most 0.8 of the cache. A request
    without a session must always fit beside them, since SGLang cannot evict a session."""
    return max(0, min(cache_tokens * 4 // 5, cache_tokens - context_length - 1))


class RequestSender:
    """Sends requests to one of the engine's processes; counts requests and tokens in `counters`."""

    def __init__(
        self,
        loop: EngineLoop,
        process: int,
        bursts: Bursts,
        counters: RequestCounters,
        *,
        session_slots: int,
        cache_tokens: int,
    ) -> None:
        self._loop, self._bursts, self.counters = loop, bursts, counters
        self._manager = loop.managers[process]
        self._client = SchedulerClient(self._manager)
        self._context_length = int(self._manager.model_config.context_len)
        self._pool = SessionPool(
            self._client,
            slots=session_slots,
            max_tokens=max_session_tokens(cache_tokens, self._context_length),
        )

    def new_sessions(self) -> GameSessions:
        """The sessions of a new game."""
        return GameSessions(self._pool)

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
        if len(ids) + num_new > self._context_length:
            raise ValueError(
                "prompt and max_new_tokens must fit the engine's context of "
                f"{self._context_length} tokens, got {len(ids)} + {num_new}"
            )
        rid = f"turn-{self.counters.num_requests}."  # SGLang aborts by the start of the name
        self.counters.num_requests += 1
        burst = contextlib.nullcontext() if score else self._bursts.admitted()
        turn = contextlib.nullcontext() if sessions is None else sessions.turn(ids, num_new)
        async with burst:
            with self._loop.pending_answer(), engine_errors(), turn as session:
                name, num_known = ("", 0) if session is None else (session.name, len(session.ids))
                answer = await self._client.request(
                    rid, ids[num_known:], parameters, score=score, session=name
                )
                if answer.finish not in ("stop", "length"):
                    raise EngineFault(f"the engine ended a request with {answer.finish}")
                if session is not None:
                    if answer.num_prompt != len(ids):
                        raise EngineFault(
                            f"the engine's session has {answer.num_prompt} prompt tokens, "
                            f"expected {len(ids)}"
                        )
                    self._pool.end_turn(session, (*ids, *answer.ids))
        loaded = self._manager.config_value("weight_version")
        if loaded != str(version):
            raise EngineFault(f"the engine's weights have version {loaded}, expected {version}")
        self.counters.num_prompt_tokens += answer.num_prompt
        self.counters.num_cached_tokens += answer.num_cached
        return answer


class GameRouter:
    """Assigns each game to a process. Games with the same first prompt share one, so the prompt is
    computed once; a new prompt goes to the process with the fewest games."""

    def __init__(self, senders: Sequence[RequestSender]) -> None:
        self._senders, self._num_games = senders, [0] * len(senders)
        self._by_prompt: dict[tuple[int, ...], int] = {}

    def sender_for(self, first_prompt: Sequence[int]) -> RequestSender:
        """The process of a new game whose first request has this prompt."""
        emptiest = self._num_games.index(min(self._num_games))
        process = self._by_prompt.setdefault(tuple(first_prompt), emptiest)
        self._num_games[process] += 1
        return self._senders[process]


@contextlib.contextmanager
def engine_errors() -> Iterator[None]:
    """Turn an error of the engine's front into an EngineFault, except one of an invalid request."""
    try:
        yield
    except (ValueError, EngineFault):
        raise
    except Exception as error:
        raise EngineFault(f"the engine failed in a request: {error!r}") from error
