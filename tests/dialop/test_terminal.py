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
OPENED = """
import os, sys
from pathlib import Path
from dialop.terminal import open_terminal
open_terminal("a program", stopped=lambda: "it goes on")
"""
# It prints a line, then what no buffer holds, writes its result, and prints its name.
PROGRAM = f"""{OPENED}
print("begun", flush=True)
for _ in range(20):
    print("é → \\udcff " * 1000, flush=True)
    print("é → \\udcff " * 1000, file=sys.stderr, flush=True)
Path(sys.argv[1]).write_text("result")
print(f"wrote {{sys.argv[1]}}")
"""


def run(program: str, *words: object, **how: Any) -> subprocess.CompletedProcess[Any]:
    """The program, with what it printed."""
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
    command = [sys.executable, "-c", program, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, timeout=HANG_S, **how)


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


STREAMS = [(each, num) for each in (closed_pipe, lost_terminal, full_disk) for num in (1, 2)]


@pytest.mark.parametrize(("opened", "number"), [*STREAMS, (None, 0), (None, 1), (None, 2)])
def test_a_stream_that_takes_no_more_or_is_not_there_ends_no_program(
    opened: Any, number: int, tmp_path: Path
) -> None:
    if opened is None:
        done = run(PROGRAM, tmp_path / "out", preexec_fn=lambda: os.close(number))
    else:
        stream = opened()
        done = run(PROGRAM, tmp_path / "out", **{("stdout", "stderr")[number - 1]: stream})
        os.close(stream)
    assert done.returncode == 0 and (tmp_path / "out").read_text() == "result"
    if number == 1 and opened in (lost_terminal, full_disk):
        said = done.stderr
        assert b"standard output is lost: " in said and said.count(b"lost") == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8", "cp437"])
def test_what_an_encoding_lacks_is_printed_as_an_escape_and_read_as_one(
    encoding: str, tmp_path: Path
) -> None:
    program = PROGRAM.replace('write_text("result")', "write_text(sys.stdin.readline())")
    done = run(
        program,
        result := tmp_path / "é",
        input=b"[message] \xff hi\n",
        env={**os.environ, "PYTHONIOENCODING": f"{encoding}:strict"},
    )
    byte = b"\xff".decode(encoding, "backslashreplace")
    assert done.returncode == 0 and result.read_text() == f"[message] {byte} hi\n"
    assert "é → ".encode(encoding, "backslashreplace") + b"\\udcff" in done.stderr


def test_a_pipe_that_does_not_block_loses_nothing(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "out")]
    with subprocess.Popen(command, cwd=ROOT, stdout=writer, stderr=subprocess.DEVNULL) as program:
        os.close(writer)
        with os.fdopen(reader, "rb") as file:
            lines = file.read().splitlines()
    assert program.returncode == 0 and len(lines) == 22 and lines[-1].startswith(b"wrote ")


def test_ctrl_c_is_one_line_and_the_end_of_a_signal(tmp_path: Path) -> None:
    """A shell sees that the signal ended the program, as it must to end a script."""
    default = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    done = run(f"{PROGRAM}\nos.kill(os.getpid(), 2)\n", tmp_path / "out", preexec_fn=default)
    assert done.returncode == -signal.SIGINT and b"Traceback" not in done.stderr
    assert done.stderr.endswith(b"\na program: stopped by Ctrl-C; it goes on\n")


def test_an_error_of_ones_own_code_is_one_line_and_its_traceback_is_kept(tmp_path: Path) -> None:
    """One of the program itself stays a traceback."""
    failed = run(f"{OPENED}\nraise ValueError('a fault')\n")
    assert failed.returncode == 1 and b"Traceback" in failed.stderr
    assert failed.stderr.endswith(b"ValueError: a fault\n")
    (tmp_path / "my_game.py").write_text("{}['day']")
    own = f"{OPENED}\nsys.path.append({str(tmp_path)!r})\nimport my_game\n"
    done = run(own, env={**os.environ, "TMPDIR": str(tmp_path)}, text=True)
    (kept,) = tmp_path.glob("*/error.txt")
    line = f"a program: my_game.py:1 <module>: KeyError: 'day'; the traceback is in {kept}\n"
    assert (done.returncode, done.stderr) == (1, line) and "Traceback" in kept.read_text()


# Other programs run these.
NO_PROGRAMS = {"selfplay/extras/sandbox_child.py", "selfplay/apps/gpu_host.py"}
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


@pytest.mark.parametrize("number", ENDING, ids=lambda number: number.name)
def test_a_signal_ends_a_program_in_one_line(number: signal.Signals) -> None:
    """What it holds is closed; under nohup it goes on."""
    program = OPENED + "try: os.kill(os.getpid(), int(sys.argv[1]))\nfinally: print('closed')"
    line = f"a program: ended by {number.name}; it goes on\n"
    for handler, said in ((signal.SIG_DFL, (128 + number, "closed\n", line)),
                          (signal.SIG_IGN, (0, "closed\n", ""))):  # fmt: skip
        set_up = lambda handler=handler: signal.signal(number, handler)  # noqa: E731
        done = run(program, int(number), text=True, preexec_fn=set_up)
        assert (done.returncode, done.stdout, done.stderr) == said
