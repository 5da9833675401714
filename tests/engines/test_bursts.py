"""Requests that are held back: when a burst leaves, and that a cancelled one waits no more."""

import asyncio

from selfplay.engines.sglang.requests import Bursts
from tests.helpers.processes import WAIT_S


async def hold(bursts: Bursts, name: str, log: list[str], done: asyncio.Event) -> None:
    async with bursts.admitted():
        log.append(name)
        await done.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_burst_leaves_when_it_is_the_share_of_the_running_ones() -> None:
    async def scene() -> None:
        bursts, log = Bursts(0.5, after_s=60.0), []
        first, later = asyncio.Event(), asyncio.Event()
        # Nothing runs: the first leaves at once. One of one is enough; then two run, one of two.
        running = [asyncio.create_task(hold(bursts, f"r{i}", log, first)) for i in range(3)]
        for _ in range(3):
            await settle()
        assert log == ["r0", "r1", "r2"]
        held = [asyncio.create_task(hold(bursts, "a", log, later))]
        await settle()
        assert log == ["r0", "r1", "r2"]  # 1 < 0.5 * 3
        held.append(asyncio.create_task(hold(bursts, "b", log, later)))
        await settle()
        assert sorted(log[3:]) == ["a", "b"]  # 2 >= 0.5 * 3, together
        held.append(asyncio.create_task(hold(bursts, "c", log, later)))
        held.append(asyncio.create_task(hold(bursts, "d", log, later)))
        await settle()
        assert log[5:] == []  # 2 < 0.5 * 5
        first.set()  # the running ones end: 2 >= 0.5 * 2
        await settle()
        assert sorted(log[5:]) == ["c", "d"]
        later.set()
        await asyncio.gather(*running, *held)

    asyncio.run(scene())


def test_a_request_is_held_back_for_a_bounded_time() -> None:
    async def scene() -> None:
        bursts, log, done = Bursts(1.0, after_s=0.01), [], asyncio.Event()
        tasks = [asyncio.create_task(hold(bursts, f"r{i}", log, done)) for i in range(2)]
        await settle()
        tasks.append(asyncio.create_task(hold(bursts, "w", log, done)))  # 1 < 1.0 * 2
        async with asyncio.timeout(WAIT_S):
            while "w" not in log:
                await asyncio.sleep(0.01)
        done.set()
        await asyncio.gather(*tasks)

    asyncio.run(scene())


def test_a_cancelled_request_holds_no_slot() -> None:
    async def scene() -> None:
        bursts, log, done = Bursts(1.0, after_s=60.0), [], asyncio.Event()
        running = [asyncio.create_task(hold(bursts, f"r{i}", log, done)) for i in range(2)]
        await settle()
        waiting = asyncio.create_task(hold(bursts, "w", log, done))
        await settle()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        done.set()
        await asyncio.gather(*running)
        assert log == ["r0", "r1"]
        last = asyncio.create_task(hold(bursts, "last", log, done))
        await asyncio.wait_for(last, WAIT_S)  # nothing runs any more
        assert log == ["r0", "r1", "last"]

    asyncio.run(scene())
