"""Run a script as ranks: `forked_ranks.py NUM SCRIPT WORDS …`.

The ranks are forks of one process, which has imported the trainer: under torchrun each rank takes
seconds for that. One that fails ends the others.
"""

import faulthandler
import os
import runpy
import signal
import sys

import selfplay.setup  # noqa: F401  before the fork
from tests.helpers.processes import free_port


def main() -> int:
    faulthandler.enable()  # a crash in native code tells where each thread was
    num, sys.argv[:] = int(sys.argv[1]), sys.argv[2:]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(num), "LOCAL_WORLD_SIZE": str(num)}
    ranks = set()
    with free_port() as port:
        for rank in range(num):
            child = os.fork()
            if child == 0:
                os.environ |= {"MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
                runpy.run_path(sys.argv[0], run_name="__main__")
                sys.exit()
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
    sys.exit(main())
