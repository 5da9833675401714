"""Requests that are held back: when a burst leaves, and that a cancelled one waits no more."""

import asyncio
from collections.abc import Coroutine

from selfplay.engines.sglang.requests import Bursts
from tests.helpers.processes import WAIT_S


class Scene:
    """Requests by name; each runs from its admission until `ended` is set."""

    def __init__(self, share: float, after_s: float = 60.0) -> None:
        self.bursts, self.log, self.ended = Bursts(share, after_s=after_s), [], asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []

    async def _hold(self, name: str) -> None:
        async with self.bursts.admitted():
            self.log.append(name)
            await self.ended.wait()

    async def ask(self, *names: str) -> list[str]:
        """The names admitted so far, after these have asked."""
        self.tasks += [asyncio.create_task(self._hold(name)) for name in names]
        for _ in range(15):
            await asyncio.sleep(0)
        return self.log

    async def end(self) -> None:
        self.ended.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def play(scene: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(scene, WAIT_S))


def test_a_burst_leaves_when_it_is_the_share_of_the_running_ones() -> None:
    async def scene() -> None:
        # Nothing runs: the first leaves at once. One of one is enough; then two run, one of two.
        one = Scene(0.5)
        assert await one.ask("r0", "r1", "r2") == ["r0", "r1", "r2"]
        running, one.ended = one.ended, asyncio.Event()
        assert len(await one.ask("a")) == 3  # 1 < 0.5 * 3
        assert sorted((await one.ask("b"))[3:]) == ["a", "b"]  # 2 >= 0.5 * 3, together
        assert len(await one.ask("c", "d")) == 5  # 2 < 0.5 * 5
        running.set()  # the running ones end: 2 >= 0.5 * 2
        assert sorted((await one.ask())[5:]) == ["c", "d"]
        await one.end()

    play(scene())


def test_a_request_is_held_back_for_a_bounded_time() -> None:
    async def scene() -> None:
        one = Scene(1.0, after_s=0.01)
        await one.ask("r0", "r1")
        while "w" not in await one.ask(*["w"] * (len(one.tasks) == 2)):  # 1 < 1.0 * 2
            await asyncio.sleep(0.01)
        await one.end()

    play(scene())


def test_a_cancelled_request_holds_no_slot() -> None:
    async def scene() -> None:
        one = Scene(1.0)
        assert await one.ask("r0", "r1", "w") == ["r0", "r1"]
        one.tasks[-1].cancel()
        await one.end()
        assert await one.ask("last") == ["r0", "r1", "last"]  # nothing runs any more

    play(scene())
