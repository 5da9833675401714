"""Sends requests to a running SGLang engine, in bursts, and checks the answers.

Sizes in tokens, times in seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from selfplay.engines.sglang.event_loop import EngineLoop
from selfplay.errors import EngineFault

if TYPE_CHECKING:
    from selfplay.engines.sglang.fast.client import SchedulerClient
    from selfplay.engines.sglang.fast.sessions import GameSessions
    from selfplay.engines.sglang.plain import PlainClient


@dataclass(slots=True)
class Answer:
    """New ids with their log-probs in nats, the prompt's log-probs if requested (the first is
    None), why the answer ended, and how many prompt tokens were cached."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    finish: str = ""
    num_prompt: int = 0
    num_cached: int = 0


@dataclass(slots=True)
class RequestCounters:
    """Running counts since the engine's start; cached tokens are prompt tokens not recomputed.
    Turns are requests that sample; they and their tokens are counted since the share of the bursts
    was last set (`SGLangEngine.adapt`)."""

    num_requests: int = 0
    num_turns: int = 0
    num_sampled_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


class Bursts:
    """Delays requests and sends them in bursts (`engine.burst_share`).

    Turns end one by one. If each next request were sent at once, its prefill would stop the
    decoding of all other games (sglang #23189). Instead requests wait until their number is the
    fraction `share` of the requests in the engine, at most `after_s` seconds. Batching does not
    change the sampling distribution.
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


class RequestSender:
    """Sends requests to one of the engine's processes; counts requests and tokens in `counters`."""

    def __init__(
        self,
        loop: EngineLoop,
        client: SchedulerClient | PlainClient,
        bursts: Bursts,
        counters: RequestCounters,
    ) -> None:
        """`client` talks to the process."""
        self._loop, self._bursts, self.counters, self.client = loop, bursts, counters, client
        self.context_length = client.context_length

    async def send(
        self,
        ids: Sequence[int],
        parameters: Mapping[str, Any],
        *,
        score: bool = False,
        sessions: GameSessions | None = None,
    ) -> Answer:
        """The engine's answer to these prompt ids, in one of the game's `sessions` if given.

        With `score` the answer also has the log-probs of the prompt ids; SGLang then bypasses the
        prefix cache and computes all of them.

        Raises ValueError for a request that does not fit the context, EngineFault if the engine
        aborts the request.
        """
        num_new = parameters["max_new_tokens"]
        if len(ids) + num_new > self.context_length:
            raise ValueError(
                "prompt and max_new_tokens must fit the engine's context of "
                f"{self.context_length} tokens, got {len(ids)} + {num_new}"
            )
        # Ids that are already in the session are not sent again.
        turn = contextlib.nullcontext() if sessions is None else sessions.turn(ids, num_new)
        rid = f"turn-{self.counters.num_requests}."  # the dot: SGLang aborts by a name's prefix
        self.counters.num_requests += 1
        burst = contextlib.nullcontext() if score else self._bursts.admitted()
        async with burst:
            with self._loop.pending_answer(), _failures_as_faults(), turn as session:
                known, name = (len(session.ids), session.name) if session else (0, "")
                answer = await self.client.request(
                    rid, ids[known:], parameters, score=score, session=name
                )
                if answer.finish not in ("stop", "length"):
                    raise EngineFault(f"the engine ended a request with {answer.finish}")
                if sessions is not None and session is not None:
                    sessions.pool.end_turn(session, ids, answer)
        self.counters.num_prompt_tokens += answer.num_prompt
        self.counters.num_cached_tokens += answer.num_cached
        if not score:
            self.counters.num_turns += 1
            self.counters.num_sampled_tokens += len(answer.ids)
        return answer


@contextlib.contextmanager
def _failures_as_faults() -> Iterator[None]:
    """Turn an error that SGLang raises in a request into an EngineFault."""
    try:
        yield
    except (ValueError, EngineFault):
        raise
    except Exception as error:
        raise EngineFault(f"the engine failed in a request: {error!r}") from error


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
