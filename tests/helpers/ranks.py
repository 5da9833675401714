"""Run as ranks: `ranks.py NUM SCRIPT WORDS …`, or `ranks.py NUM MODULE:CASE WORDS … FOLDER`.

A case is a function of `tests.helpers.MODULE`; what it returns on rank 0 is FOLDER/report.json. The
ranks are forks of one process, which has imported the trainer: under torchrun, which is known by
its RANK, each takes seconds for that. One that fails ends the others.
"""

import faulthandler
import json
import os
import runpy
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import selfplay.setup  # noqa: F401  before the fork
from tests.helpers.processes import free_port


def run(place: str, *words: str) -> None:
    """One rank."""
    module, is_case, case = place.partition(":")
    if not is_case:
        sys.argv[:] = [place, *words]
        runpy.run_path(place, run_name="__main__")
        return
    *words, folder = words
    report = getattr(import_module(f"tests.helpers.{module}"), case)(*words, folder=Path(folder))
    if os.environ["RANK"] == "0":
        (Path(folder) / "report.json").write_text(json.dumps(report, indent=1))


def main(num: int, body: Callable[[], object]) -> int:
    """Run `body` on that many ranks; 0, or 1 after one that failed."""
    faulthandler.enable()  # a crash in native code tells where each thread was
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(num), "LOCAL_WORLD_SIZE": str(num)}
    ranks = set()
    with free_port() as port:
        for rank in range(num):
            child = os.fork()
            if child == 0:
                os.environ |= {"MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
                sys.exit(body())  # type: ignore[call-overload]
            ranks.add(child)
        while ranks:
            child, status = os.wait()
            ranks.discard(child)
            if status:
                for other in ranks:
                    os.kill(other, signal.SIGKILL)
                return 1
    return 0


if __name__ == "__main__":
    if "RANK" in os.environ:
        run(*sys.argv[2:])
    else:
        sys.exit(main(int(sys.argv[1]), lambda: run(*sys.argv[2:])))
