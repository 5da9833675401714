"""No print ends a program: streams that are gone, full, closed or of another encoding; Ctrl-C."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dialop.terminal import ENDING
from tests.helpers.processes import HANG_S

ROOT = Path(__file__).resolve().parents[2]

# It prints a line, then what no buffer holds, writes its result, and prints its name.
PROGRAM = """
import sys
from pathlib import Path
from dialop.terminal import open_terminal

open_terminal("a program", stopped="it goes on")
print("begun", flush=True)
for _ in range(20):
    print("é → \\udcff " * 1000, flush=True)
    print("é → \\udcff " * 1000, file=sys.stderr, flush=True)
Path(sys.argv[1]).write_text("result")
print(f"wrote {sys.argv[1]}")
"""


def run(
    result: Path, *, set_up: Any = None, text: str = PROGRAM, **streams: Any
) -> tuple[int, Any]:
    """The program's exit status and what it wrote to standard error."""
    done = subprocess.run(
        [sys.executable, "-c", text, str(result)],
        cwd=ROOT,
        preexec_fn=set_up,
        timeout=HANG_S,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
    )
    return done.returncode, done.stderr


def closed_pipe() -> int:
    """The writing end of a pipe that nobody reads, as after `| head`."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def lost_terminal() -> int:
    """A terminal whose window was closed: every write is an input/output error."""
    master, terminal = os.openpty()
    os.close(master)
    return terminal


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("opened", [closed_pipe, lost_terminal, full_disk])
def test_a_stream_that_takes_no_more_ends_no_program(
    opened: Any, number: int, tmp_path: Path
) -> None:
    stream = opened()
    status, errors = run(tmp_path / "out", **{("stdout", "stderr")[number - 1]: stream})
    os.close(stream)
    assert status == 0 and (tmp_path / "out").read_text() == "result"
    if number == 1 and opened is not closed_pipe:
        assert b"standard output is lost: " in errors and errors.count(b"lost") == 1


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_program_started_without_a_stream_runs(number: int, tmp_path: Path) -> None:
    assert run(tmp_path / "out", set_up=lambda: os.close(number))[0] == 0
    assert (tmp_path / "out").read_text() == "result"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8", "cp437"])
def test_what_an_encoding_lacks_is_printed_as_an_escape(encoding: str, tmp_path: Path) -> None:
    result = tmp_path / "é"
    status, errors = run(result, env={**os.environ, "PYTHONIOENCODING": f"{encoding}:strict"})
    assert status == 0 and result.read_text() == "result"
    assert "é → ".encode(encoding, "backslashreplace") + b"\\udcff" in errors


def test_a_pipe_that_does_not_block_loses_nothing(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "out")],
        cwd=ROOT,
        stdout=writer,
        stderr=subprocess.DEVNULL,
    ) as program:
        os.close(writer)
        with os.fdopen(reader, "rb") as file:
            lines = file.read().splitlines()
    assert program.returncode == 0 and len(lines) == 22 and lines[-1].startswith(b"wrote ")


def test_a_byte_that_is_no_text_is_read_as_an_escape(tmp_path: Path) -> None:
    text = """
import sys
from dialop.terminal import open_terminal
open_terminal("a program")
open(sys.argv[1], "w").write(sys.stdin.readline())
"""
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    assert run(tmp_path / "out", text=text, input=b"[message] \xff hi\n", env=strict)[0] == 0
    assert (tmp_path / "out").read_text() == "[message] \\xff hi\n"


def test_ctrl_c_is_one_line_and_the_end_of_a_signal(tmp_path: Path) -> None:
    """A shell sees that the signal ended the program, as it must to end a script."""
    stop = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    default = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    status, errors = run(tmp_path / "out", set_up=default, text=f"{PROGRAM}\n{stop}")
    assert status == -signal.SIGINT
    assert errors.endswith(b"\na program: stopped by Ctrl-C; it goes on\n")
    assert b"Traceback" not in errors
    failed, errors = run(tmp_path / "out", text=f"{PROGRAM}\nraise ValueError('a fault')\n")
    assert failed == 1 and errors.endswith(b"ValueError: a fault\n") and b"Traceback" in errors


def test_an_error_of_ones_own_code_is_one_line_and_its_traceback_is_kept(tmp_path: Path) -> None:
    (tmp_path / "my_game.py").write_text("{}['day']")
    text = f"""
import sys
from dialop.terminal import open_terminal
sys.path.append({str(tmp_path)!r})
open_terminal("a program")
import my_game
"""
    status, errors = run(tmp_path / "out", text=text, env={**os.environ, "TMPDIR": str(tmp_path)})
    (kept,) = tmp_path.glob("*/error.txt")
    line = f"a program: my_game.py:1 <module>: KeyError: 'day'; the traceback is in {kept}\n"
    assert status == 1 and errors.decode() == line and "Traceback" in kept.read_text()


# Another program runs it.
NO_PROGRAMS = {"selfplay/extras/sandbox_child.py"}
PROGRAMS = [
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.py"), *ROOT.glob("selfplay/**/*.py"), *ROOT.glob("dialop/**/*.py")]
    if '\nif __name__ == "__main__":' in path.read_text()
]


@pytest.mark.parametrize("program", sorted({*PROGRAMS} - NO_PROGRAMS))
def test_without_its_packages_a_program_says_which_one_is_missing(program: str) -> None:
    module = program.removesuffix(".py").removesuffix("/__main__").replace("/", ".")
    words = [program] if module in ("train", "eval") else ["-m", module]
    done = subprocess.run(
        [sys.executable, "-S", *words], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S
    )  # -S: without installed packages
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert " has no package " in line and "pip install -r requirements.txt" in line


SIGNALLED = """
import os, sys
from dialop.terminal import open_terminal

open_terminal("a program", stopped="it goes on")
try:
    os.kill(os.getpid(), int(sys.argv[1]))
finally:
    print("closed")
"""


@pytest.mark.parametrize("number", ENDING, ids=lambda number: number.name)
def test_a_signal_ends_a_program_in_one_line(number: signal.Signals) -> None:
    """What it holds is closed; under nohup it goes on."""
    words = [sys.executable, "-c", SIGNALLED, str(int(number))]
    default = lambda: signal.signal(number, signal.SIG_DFL)  # noqa: E731  also in a test under nohup
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, preexec_fn=default
    )
    line = f"a program: ended by {number.name}; it goes on\n"
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "closed\n", line)
    ignored = lambda: signal.signal(number, signal.SIG_IGN)  # noqa: E731
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, preexec_fn=ignored
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")
