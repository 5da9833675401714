"""Run by the tests of several ranks: train.py, in which one rank may fail.

Usage: tests/helpers/train_ranks.py none|engine|raises|killed WORDS OF train.py …, on each rank.
"""

import os
import signal
import sys
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import record

import train
from selfplay import step as step_verbs
from tests.helpers.faulty_engine import Faults, FaultyHF
from tests.helpers.processes import say


def engine_fails() -> None:
    """Rank 0's engine dies in the start check and gives garbage once; rank 1's dies as it goes to
    sleep for the first time, in a wave of the first step's games and in a push, and is silent in a
    wave of the second step's."""
    plans: dict[int, dict[tuple[str, int], str]] = {
        0: {("generate", 1): "dies", ("generate", 17): "nan"},
        1: {
            ("sleep", 1): "dies",
            ("generate", 11): "dies",
            ("generate", 22): "hangs",
            ("push", 3): "dies",
        },
    }
    FaultyHF.faults = Faults(plans[int(os.environ["RANK"])])
    from selfplay.config.plugins import PLUGINS

    PLUGINS["engine.kind"].built_in["hf"] = "tests.helpers.faulty_engine:FaultyHF"  # type: ignore[index]


def fails_in_play(how: str) -> None:
    """Rank 1 raises, or is killed, in the second step's games; rank 0 waits for it."""
    play = step_verbs.play_games

    def played(*words: Any, versions: dict[str, int], **named: Any) -> Any:
        if os.environ["RANK"] == "1" and versions == {"": 1}:
            print("the last line of rank 1", file=sys.stderr, flush=True)
            say("failing", pid=os.getpid())
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("a bug in rank 1")
        return play(*words, versions=versions, **named)

    step_verbs.play_games = played


if __name__ == "__main__":
    case, *words = sys.argv[1:]
    if case == "engine":
        engine_fails()
    elif case != "none":
        fails_in_play(case)
    sys.exit(record(train.main)(words))
