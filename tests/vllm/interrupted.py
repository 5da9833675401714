"""train.py whose engine's process gets SIGSTOP as the first update begins: `interrupted.py WORDS`.

It says when each update begins.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import train
from selfplay import step as step_verbs
from selfplay.extras.vllm import VLLMEngine
from tests.helpers.processes import say

HANG_S = 5.0  # what the trainer waits for the stopped process; for any other answer 600 s


def stop_in_update() -> None:
    update, play = step_verbs.update_policy, VLLMEngine.run_games
    engines: list[VLLMEngine] = []

    def played(self: VLLMEngine, *words: Any, **named: Any) -> Any:
        engines[:] = [self]
        return play(self, *words, **named)

    def updated(*words: Any, step: int, **named: Any) -> Any:
        if step == 0:
            os.kill(engines[0]._children[0].pid, signal.SIGSTOP)
            engines[0]._timeout_s = HANG_S
        say("update", step=step)
        return update(*words, step=step, **named)

    VLLMEngine.run_games = played  # type: ignore[method-assign]
    step_verbs.update_policy = updated


if __name__ == "__main__":
    stop_in_update()
    sys.exit(train.main(sys.argv[1:]))
