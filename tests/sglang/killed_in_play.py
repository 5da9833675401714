"""Run by test_train.py: train.py, whose scheduler gets a SIGKILL in the second step's games."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
from typing import Any

from processes import say

import train
from selfplay.engines.sglang.requests import Asker
from selfplay.rollout import driver

STEP, TURN = 1, 40  # the version of the weights, and the number of the request in that step


def kill_in_play() -> None:
    ask, play, num = Asker.ask, train.play_games, [0]

    async def asked(self: Asker, *words: Any, version: int, **named: Any) -> Any:
        num[0] += version == STEP
        if num[0] == TURN and version == STEP:
            num[0] += 1
            (pid,) = (p.pid for p in self._loop.processes if "scheduler" in title(p.pid))
            os.kill(pid, signal.SIGKILL)
            say("killed", pid=pid)
        return await ask(self, *words, version=version, **named)

    def played(setups: Any, engine: Any, *, kept: driver.Kept, **named: Any) -> Any:
        if kept.games or kept.total_s:
            say("played again", games=len(setups) - len(kept.games))
        return play(setups, engine, kept=kept, **named)

    Asker.ask = asked  # type: ignore[method-assign]
    train.play_games = played


def title(pid: int) -> str:
    return pathlib.Path(f"/proc/{pid}/cmdline").read_text()


if __name__ == "__main__":
    kill_in_play()
    sys.exit(train.main(sys.argv[1:]))
