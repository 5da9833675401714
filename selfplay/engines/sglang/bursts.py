"""Bursts of requests (`engine.burst_share`). Times in seconds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


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
