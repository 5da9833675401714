"""train.py with an engine that is interrupted: `interrupted.py WORDS`.

SIGSTOP goes to a scheduler as the first update begins. It says when each update begins.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
from typing import Any

import psutil

import train
from selfplay import step as step_verbs
from selfplay.engines.sglang.event_loop import EngineLoop
from selfplay.engines.sglang.requests import RequestSender
from selfplay.rollout import driver
from selfplay.weight_sync.supervised import Supervised
from tests.helpers.processes import say

HANG_S = 5.0  # what the trainer waits for the stopped scheduler; for any other answer 600 s
STEP, NUM_ENDED = 1, 3  # the version of the weights, and how many of that step's games have ended


def kill_in_play(number: signal.Signals) -> None:
    """A signal goes to a scheduler of the last policy in the second step's games, once some have
    ended."""
    send, play = RequestSender.send, step_verbs.play_games
    restart = Supervised._restart
    games: list[driver.FinishedGames] = []  # of each rollout, and one more at the kill
    num_games: list[int] = []

    async def sent(self: RequestSender, *words: Any, **named: Any) -> Any:
        last = self._loop is EngineLoop.of_policies[-1]
        if last and len(games) == STEP + 1 and len(games[-1].games) >= NUM_ENDED:
            games.append(driver.FinishedGames())
            pid, *_ = (p.pid for p in self._loop.children if "scheduler" in title(p.pid))
            os.kill(pid, number)
            say("killed", pid=pid)
        return await send(self, *words, **named)

    def played(setups: Any, engine: Any, **named: Any) -> Any:
        games.append(driver.FinishedGames())
        num_games.append(len(setups))
        return play(setups, engine, finished=games[-1], **named)

    def restarted(engine: Supervised, *words: Any) -> None:
        restart(engine, *words)
        if len(games) == STEP + 2:  # after the kill in play; there may be one in a push before
            say("played again", games=num_games[STEP] - len(games[STEP].games))

    RequestSender.send = sent  # type: ignore[method-assign]
    Supervised._restart = restarted  # type: ignore[method-assign]
    step_verbs.play_games = played


def stop_in_update() -> None:
    """Say when an update begins; in the first one SIGSTOP goes to the scheduler."""
    update, send = step_verbs.update_policy, RequestSender.send
    loops: list[EngineLoop] = []  # of the engine that plays

    async def sent(self: RequestSender, *words: Any, **named: Any) -> Any:
        loops[:] = [self._loop]
        return await send(self, *words, **named)

    def updated(*words: Any, step: int, **named: Any) -> Any:
        if step == 0:
            everyone = psutil.Process().children(recursive=True)
            next(p for p in everyone if p.name().startswith("sglang::sche")).suspend()
            loops[0].timeout_s = HANG_S
        say("update", step=step)
        return update(*words, step=step, **named)

    RequestSender.send = sent  # type: ignore[method-assign]
    step_verbs.update_policy = updated


def title(pid: int) -> str:
    return pathlib.Path(f"/proc/{pid}/cmdline").read_text()


if __name__ == "__main__":
    stop_in_update()
    sys.exit(train.main(sys.argv[1:]))
