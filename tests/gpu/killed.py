"""train.py, killed on a GPU: `killed.py play|stop|push WORDS`.

"play" and "stop" send SIGKILL or SIGSTOP to the engine's scheduler in the second step's games, with
a fifth of the GPU held by the trainer, which the first start of the engine did not see. "push" ends
the trainer itself with SIGKILL while the engine reads the second step's weights.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch

import train
from selfplay import step as step_verbs
from selfplay.engines.sglang.fast.engine import FastEngine
from tests.helpers.processes import say
from tests.sglang import interrupted


def hold_memory() -> None:
    play, held = step_verbs.play_games, []

    def played(*words: Any, versions: Any = None, **named: Any) -> Any:
        if versions is not None and not held:
            num_bytes = torch.cuda.mem_get_info()[1] // 5
            held.append(torch.empty(num_bytes, dtype=torch.uint8, device="cuda"))
            say("held", bytes=num_bytes)
        return play(*words, versions=versions, **named)

    step_verbs.play_games = played


def kill_in_push() -> None:
    begin = FastEngine._begin

    def begun(self: FastEngine, bucket: Any, folder: str) -> Any:
        wait = begin(self, bucket, folder)
        if self.version == 1 and not folder:
            say("killed", version=2)
            os.kill(os.getpid(), signal.SIGKILL)
        return wait

    FastEngine._begin = begun  # type: ignore[method-assign]


if __name__ == "__main__":
    how, *words = sys.argv[1:]
    if how == "push":
        kill_in_push()
    else:
        interrupted.kill_in_play(signal.SIGSTOP if how == "stop" else signal.SIGKILL)
        hold_memory()
    sys.exit(train.main(words))
