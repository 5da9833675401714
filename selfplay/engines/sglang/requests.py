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
from selfplay.engines.sglang.line import Answer, Line
from selfplay.engines.sglang.sessions import Room, Sessions
from selfplay.errors import EngineFault


@dataclass(slots=True)
class Served:
    """Running counts since the engine's start; cached tokens are prompt tokens not recomputed."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_new_tokens: int = 0


class Bursts:
    """Delays requests and sends them in bursts.

    Turns end one by one. If each next request were sent at once, its prefill would stop the
    decoding of all other games (sglang #23189). Here requests wait until they are `share` of those
    in the engine, at most `after_s` seconds. Batching does not change the sampling distribution.
    """

    def __init__(self, share: float, *, after_s: float) -> None:
        self.share, self.after_s = share, after_s
        self._held: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._num_running = 0

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for the next burst; inside the block the request is in the engine."""
        if self.share:
            loop = asyncio.get_running_loop()
            held = loop.create_future()
            self._held.append(held)
            if self._timer is None:
                self._timer = loop.call_later(self.after_s, self._send)
            self._send_if_enough()
            await held
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            self._send_if_enough()

    def _send_if_enough(self) -> None:
        if self._held and len(self._held) >= self.share * self._num_running:
            self._send()

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held, self._held = self._held, []
        for future in held:
            if not future.done():  # its game may have been cancelled
                future.set_result(None)


class Places:
    """Assigns each game to a process. Games with the same first prompt share one, so the prompt is
    computed once; a new prompt goes to the process with the fewest games."""

    def __init__(self, num: int) -> None:
        self._num_games = [0] * num
        self._by_prompt: dict[tuple[int, ...], int] = {}

    def of(self, prompt_ids: Sequence[int]) -> int:
        """The process of a game whose first request has this prompt."""
        fewest = self._num_games.index(min(self._num_games))
        place = self._by_prompt.setdefault(tuple(prompt_ids), fewest)
        self._num_games[place] += 1
        return place


def sessions_room(cache_tokens: int, context_length: int) -> int:
    """The tokens that all sessions of a process may hold: at most 0.8 of the cache. A request
    without a session must always fit beside them, since SGLang cannot evict a session."""
    return max(0, min(cache_tokens * 4 // 5, cache_tokens - context_length - 1))


class Asker:
    """Sends requests to one of the engine's processes; counts requests and tokens in `served`."""

    def __init__(
        self,
        loop: EngineLoop,
        process: int,
        bursts: Bursts,
        served: Served,
        *,
        session_slots: int,
        cache_tokens: int,
    ) -> None:
        self._loop, self._bursts, self.served = loop, bursts, served
        self._manager = loop.managers[process]
        self._line = Line(self._manager)
        self._context_length = int(self._manager.model_config.context_len)
        self._room = Room(
            self._line, session_slots, sessions_room(cache_tokens, self._context_length)
        )

    def sessions(self) -> Sessions:
        """The sessions of a new game."""
        return Sessions(self._room)

    async def ask(
        self,
        ids: Sequence[int],
        parameters: Mapping[str, Any],
        *,
        version: int,
        score: bool = False,
        sessions: Sessions | None = None,
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
        rid = f"turn-{self.served.num_requests}."  # SGLang aborts by the start of the name
        self.served.num_requests += 1
        slot = contextlib.nullcontext() if score else self._bursts.slot()
        turn = contextlib.nullcontext() if sessions is None else sessions.turn(ids, num_new)
        async with slot:
            with self._loop.pending_answer(), failures(), turn as session:
                name, known = ("", 0) if session is None else (session.name, len(session.ids))
                answer = await self._line.ask(
                    rid, ids[known:], parameters, score=score, session=name
                )
                if answer.finish not in ("stop", "length"):
                    raise EngineFault(f"the engine ended a request with {answer.finish}")
                if session is not None:
                    if answer.num_prompt != len(ids):
                        raise EngineFault(
                            f"the engine's session has {answer.num_prompt} prompt tokens, "
                            f"expected {len(ids)}"
                        )
                    self._room.end(session, (*ids, *answer.ids))
        held = self._manager.config_value("weight_version")
        if held != str(version):
            raise EngineFault(f"the engine's weights have version {held}, expected {version}")
        self.served.num_prompt_tokens += answer.num_prompt
        self.served.num_cached_tokens += answer.num_cached
        self.served.num_new_tokens += len(answer.ids)
        return answer


@contextlib.contextmanager
def failures() -> Iterator[None]:
    """Turn an error of the engine's front into an EngineFault, except one of an invalid request."""
    try:
        yield
    except (ValueError, EngineFault):
        raise
    except Exception as error:
        raise EngineFault(f"the engine failed in a request: {error!r}") from error
