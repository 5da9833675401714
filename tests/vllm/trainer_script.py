"""A trainer that loses its engine, or ends (test_life.py): `trainer_script.py MODEL_FOLDER`."""

from __future__ import annotations

import os
import signal
import sys

from selfplay.engines.base import Generate, Request, Sampling
from selfplay.engines.sglang.processes import Signals
from selfplay.extras.vllm import VLLMEngine
from tests.helpers.engine_runs import broken, train
from tests.helpers.processes import say
from tests.vllm import tiny

REQUEST, SAMPLING = Request(list(range(10, 30)), 4, 0), Sampling(1.0, ())


def asked(engine: VLLMEngine, num: int = 3) -> str:
    """What an engine says that is asked for answers."""
    try:
        engine.generate_batch([REQUEST] * num, SAMPLING)
    except RuntimeError as error:
        return str(error)
    return "none"


def lose(engine: VLLMEngine) -> None:
    """The engine dies in a game and is started again; then it is stopped, and started again."""
    [child] = engine._children

    async def game(generate: Generate) -> None:
        child.kill()
        await generate(Request(list(range(10, 30)), 400, 0))

    try:
        engine.run_games([game, game], SAMPLING)
    except RuntimeError as error:
        say("crash", error=str(error), later=asked(engine), lost=engine.lost)
    engine.restart()
    say("again", error=asked(engine), lost=engine.lost, old=child.is_alive())
    engine._timeout_s = 2.0
    os.kill(engine._children[0].pid, signal.SIGSTOP)
    say("silent", error=asked(engine), later=asked(engine), lost=engine.lost)
    engine.restart()
    say("once more", error=asked(engine), lost=engine.lost)


if __name__ == "__main__":
    signals = Signals()
    signals.take()  # as a run does
    model_folder = sys.argv[1]
    broken(tiny.start, model_folder)
    started = tiny.start(model_folder)
    lose(started)
    train(started._children)
