"""The helpers through which processes write to one pipe, and through which tests read them."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.helpers import processes

SAY = """
import sys
from tests.helpers import processes
for n in range(4000):
    processes.say(f"rank {sys.argv[1]}", n=n, more="x" * 30)
"""


def test_lines_of_ranks_that_write_at_once_stay_complete() -> None:
    """Unbuffered, as under torchrun: a line and its end must go out in one write."""
    reading, writing = os.pipe()
    command = [sys.executable, "-u", "-c", SAY]
    folder = Path(processes.__file__).parents[2]
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


def test_warnings_of_installed_packages_are_left_out_and_ours_are_not(tmp_path: Path) -> None:
    """`1 is 1` warns in every version of Python, as "\\d" does from 3.12 on."""
    installed = tmp_path / "site-packages"
    (installed / "foreign").mkdir(parents=True)
    (installed / "foreign" / "__init__.py").write_text("1 is 1\n")
    (tmp_path / "ours.py").write_text("import foreign\n2 is 2\nraise SystemExit('train.py: no')\n")
    environment = os.environ | {"PYTHONPATH": f"{installed}:{tmp_path}", "PYTHONWARNINGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", "import ours"], env=environment, capture_output=True, text=True
    )
    assert "foreign/__init__.py:1: SyntaxWarning" in done.stderr
    own = processes.own_output(done.stderr)
    assert "foreign" not in own and own.endswith("\ntrain.py: no\n")
    assert own.count("SyntaxWarning") == 1 and "ours.py:2: SyntaxWarning" in own
