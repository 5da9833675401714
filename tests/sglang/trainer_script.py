"""Run by test_life.py: a trainer that is killed or loses its engine.

Usage: `trainer_script.py CASE … MODEL_FOLDER`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial

import torch

from selfplay.engines.base import Generate, Request, Sampling
from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.engines.sglang.fast import early
from tests.helpers.engine_runs import broken, train
from tests.helpers.processes import say
from tests.sglang import tiny
from tests.sglang.tiny import scheduler

REQUEST, SAMPLING = Request(list(range(10, 30)), 4, 0), Sampling(1.0, (tiny.STOP,))


def refused(engine: SGLangEngine) -> dict[str, object]:
    """Send requests and expect a RuntimeError; its text and the seconds until it came."""
    began_s = time.perf_counter()
    try:
        engine.generate_batch([REQUEST] * 3, SAMPLING)
    except RuntimeError as error:
        return {"error": str(error), "after_s": time.perf_counter() - began_s}
    return {"error": "none", "after_s": time.perf_counter() - began_s}


def crash(folder: str) -> None:
    """The engine dies while requests are pending. Then the trainer computes, asks again and waits
    inside a library call, where Python runs no signal handlers, as in a collective."""
    engine = tiny.start(folder)

    async def game(generate: Generate) -> None:
        if not engine._loop.managers[0].rid_to_state:
            os.kill(scheduler(engine), signal.SIGKILL)
        await generate(REQUEST)

    try:
        engine.run_games([game, game], SAMPLING)
    except RuntimeError as error:
        say("crash", error=str(error))
    until_s = time.perf_counter() + 3.0
    while time.perf_counter() < until_s:  # SGLang's watchdog polls once a second
        torch.randn(64, 64) @ torch.randn(64, 64)
    say("asked", **refused(engine))
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    say("training")
    store.get("a key that is never set")


def plain(folder: str) -> None:
    """Three schedulers wait for the engine, of which one has died; the last is stopped meanwhile,
    as it would only import."""
    early.start(3, gpu=False, tp_size=1)
    dead, taken, left = early.waiting()
    os.kill(left.pid, signal.SIGSTOP)
    dead.kill()
    dead.join()
    engine = tiny.start(folder)
    say("started", early=taken.pid, scheduler=scheduler(engine), left=left.exitcode)
    engine.generate_batch([REQUEST], SAMPLING)
    train(engine._loop.children)


def public(folder: str) -> None:
    """An engine by SGLang's public calls dies, is started again, and answers no control call."""
    engine = tiny.start(folder, fast=False)
    lost = engine._loop.children
    os.kill(scheduler(engine), signal.SIGKILL)
    say("killed", lost=engine.lost, **refused(engine))
    engine.restart()
    say("again", alive=[p.is_alive() for p in lost], lost=engine.lost, **refused(engine))
    engine._loop.timeout_s = 1.0
    os.kill(scheduler(engine), signal.SIGSTOP)
    try:
        engine.flush_cache("a test")
    except RuntimeError as error:
        say("stopped", error=str(error), lost=engine.lost)
    engine.close()


if __name__ == "__main__":
    *cases, model_folder = sys.argv[1:]
    for case in cases:
        kinds = {
            "plain": plain,
            "crash": crash,
            "broken": partial(broken, tiny.start),
            "public": public,
        }
        kinds[case](model_folder)
