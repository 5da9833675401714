"""A program and its terminal: a failed print does not end it; Ctrl-C and an error in custom code
print one line."""

from __future__ import annotations

import errno
import io
import os
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType

from dialop.shown import error_text, own_place

# Signals of a scheduler, a closed terminal or Ctrl-\\, which by default end a program silently.
ENDING = (
    *(signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU),
)
_PROJECT = ("dialop", "selfplay", "__main__")


def open_terminal(program: str, *, stopped: Callable[[], str] = str) -> None:
    """Call first in a program. Text outside an encoding is printed and read as an escape; once the
    reader of a standard stream is gone (`| head`, a lost terminal, a full disk), further output is
    dropped and the program continues. After Ctrl-C, standard error names the program and says
    what `stopped` returns; likewise after a signal of ENDING, with status 128 + its number. An
    error in custom code ends the program with the line of `show_error`.

    If other code has replaced the streams, as a test runner does, they stay unchanged.
    """
    if sys.stdout is not sys.__stdout__ or sys.stderr is not sys.__stderr__:
        return
    sys.stdout, sys.stderr = _opened(sys.stdout, 1), _opened(sys.stderr, 2)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="backslashreplace")

    def say(what: str) -> None:
        sys.stderr.write(f"{program}: {'; '.join(filter(None, (what, stopped())))}\n")

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            say("stopped by Ctrl-C")
        elif own_place(error):
            show_error(program, error)
        elif package := _lacking(error):
            sys.stderr.write(
                f"{program}: this Python ({sys.executable}) has no package {package}: `source "
                ".venv/bin/activate` after `make train`, or `pip install -r requirements.txt`\n"
            )
        else:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = end

    def leave(number: int, _: FrameType | None) -> None:
        say(f"ended by {name_of(number)}")
        raise Ended(128 + number)

    for number in ENDING:
        if signal.getsignal(number) == signal.SIG_DFL:  # not if nohup ignores it
            signal.signal(number, leave)


class Ended(SystemExit):
    """A signal has ended the program, and its line has been printed."""


def name_of(number: int) -> str:
    """The name of a signal, such as SIGTERM."""
    return signal.Signals(number).name


def _lacking(error: BaseException) -> str:
    """The package that an import in this project did not find; "" for any other error."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    names = [
        frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    imports = [name.partition(".")[0] for name in names if not name.startswith("importlib.")]
    package = error.name.partition(".")[0]
    return package if imports[-1] in _PROJECT and package not in _PROJECT else ""


def show_error(program: str, error: BaseException, folder: Path | None = None) -> None:
    """Print an error in one line on standard error. Its traceback is written to the folder's
    error.txt, or to a new temporary folder."""
    trace = "".join(traceback.format_exception(error))
    try:
        if folder is None or not folder.is_dir():
            folder = Path(tempfile.mkdtemp(prefix="selfplay-"))
        (folder / "error.txt").write_text(trace, encoding="utf-8", errors="backslashreplace")
        kept = f"the traceback is in {folder / 'error.txt'}"
    except OSError:
        sys.stderr.write(trace)
        kept = "the traceback is above"
    sys.stderr.write(f"{program}: {' '.join(error_text(error).split())}; {kept}\n")


class _Output(io.FileIO):
    """A standard stream whose writes never fail."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        try:
            while (written := super().write(data)) is None:  # a full non-blocking pipe
                select.select([], [self], [])
            return written
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())  # for child processes, too
            os.close(null)
            if error.errno != errno.EPIPE and self.fileno() == 1:
                print(f"standard output is lost: {error.strerror}", file=sys.stderr)
            return len(data)


def _opened(stream: object, number: int) -> io.TextIOWrapper:
    if not isinstance(stream, io.TextIOWrapper):  # None: the program was started without it
        return Path(os.devnull).open("w", encoding="utf-8", errors="backslashreplace")
    raw = _Output(number, "w", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
