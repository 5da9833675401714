"""Requests that are held back: when a burst leaves, and that a cancelled one waits no more."""

import asyncio

from selfplay.engines.sglang.requests import Bursts
from tests.helpers.processes import WAIT_S


def test_a_burst_leaves_when_it_is_the_share_of_the_running_ones_or_has_waited() -> None:
    async def scene() -> None:
        bursts, log, ended = Bursts(0.5, after_s=0.01), list[str](), asyncio.Event()

        async def hold(name: str, until: asyncio.Event) -> None:
            async with bursts.admitted():
                log.append(name)
                await until.wait()

        async def ask(*names: str, until: asyncio.Event = ended) -> list[asyncio.Task[None]]:
            asked = [asyncio.create_task(hold(name, until)) for name in names]
            for _ in range(9):  # less than the longest wait
                await asyncio.sleep(0)
            return asked

        # Nothing runs: the first leaves at once. One of one is enough; then two run, one of two.
        first = await ask("r0", "r1", "r2", until=asyncio.Event())
        assert log == ["r0", "r1", "r2"]
        (cancelled,) = await ask("a")
        assert len(log) == 3  # 1 < 0.5 * 3
        cancelled.cancel()
        await ask("b")
        assert sorted(log[3:]) == ["b"]  # 2 >= 0.5 * 3, but one of them is gone
        await ask("c")
        assert len(log) == 4  # 1 < 0.5 * 4
        while "c" not in log:  # after 0.01 s
            await asyncio.sleep(0.01)
        for one in first:
            one.cancel()
        ended.set()

    asyncio.run(asyncio.wait_for(scene(), WAIT_S))
