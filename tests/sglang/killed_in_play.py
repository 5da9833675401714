"""train.py, whose scheduler gets a SIGKILL in the second step's games, once some have ended."""

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

STEP, NUM_ENDED = 1, 3  # the version of the weights, and how many of that step's games have ended


def kill_in_play(number: signal.Signals = signal.SIGKILL) -> None:
    ask, play = Asker.ask, train.play_games
    games: list[driver.Kept] = []  # of each rollout

    async def asked(self: Asker, *words: Any, version: int, **named: Any) -> Any:
        if version == STEP and len(games) == STEP + 1 and len(games[-1].games) >= NUM_ENDED:
            games.append(driver.Kept())
            pid, *_ = (p.pid for p in self._loop.processes if "scheduler" in title(p.pid))
            os.kill(pid, number)
            say("killed", pid=pid)
        return await ask(self, *words, version=version, **named)

    def played(setups: Any, engine: Any, *, kept: driver.Kept, **named: Any) -> Any:
        if kept.games or kept.total_s:
            say("played again", games=len(setups) - len(kept.games))
        else:
            games.append(kept)
        return play(setups, engine, kept=kept, **named)

    Asker.ask = asked  # type: ignore[method-assign]
    train.play_games = played


def title(pid: int) -> str:
    return pathlib.Path(f"/proc/{pid}/cmdline").read_text()


if __name__ == "__main__":
    kill_in_play()
    sys.exit(train.main(sys.argv[1:]))
