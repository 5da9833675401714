"""The helper through which several processes write to one pipe."""

import json
import os
import subprocess
import sys
from pathlib import Path

import processes

SAY = """
import processes, sys
for n in range(4000):
    processes.say(f"rank {sys.argv[1]}", n=n, more="x" * 30)
"""


def test_lines_of_ranks_that_write_at_once_stay_complete() -> None:
    """Unbuffered, as under torchrun: a line and its end must go out in one write."""
    reading, writing = os.pipe()
    command = [sys.executable, "-u", "-c", SAY]
    folder = Path(processes.__file__).parent
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=writing, cwd=folder) for rank in range(4)
    ]
    os.close(writing)
    with os.fdopen(reading) as pipe:
        output = pipe.read()
    assert [rank.wait() for rank in ranks] == [0] * 4
    lines = output.splitlines()
    assert len(lines) == 16_000
    for line in lines:
        assert json.loads(line.split(" ", 3)[3])["more"] == "x" * 30
    assert processes.marks(output)["rank 1"]["n"] == 3999
