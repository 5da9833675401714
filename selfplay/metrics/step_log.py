"""The files a run writes at each step: metrics.jsonl, games.jsonl, groups.jsonl.

Only rank 0 writes; on other ranks every call does nothing. Times are in seconds and their names end
in `_s`.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selfplay.atomic import write_atomically
from selfplay.errors import SettingsError
from selfplay.metrics.observer import Observer, Step
from selfplay.metrics.records import Pieces, logged_games

LOGS = ("metrics.jsonl", "games.jsonl", "groups.jsonl")


class Stopwatch:
    """Seconds by stage: `with timed("play"): …`, then `lap()` returns {"play_s": …, "step_s": …}.

    `step_s` is the full time since the last lap, including time outside of stages.
    """

    def __init__(self) -> None:
        self._stages: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            name = f"{stage}_s"
            self._stages[name] = self._stages.get(name, 0.0) + time.perf_counter() - start

    def lap(self) -> dict[str, float]:
        """The seconds since the last lap. Starts the next lap."""
        now = time.perf_counter()
        seconds = {**self._stages, "step_s": now - self._start}
        self._stages, self._start = {}, now
        return seconds


class Journal(Observer):
    """The open logs of a run.

    `after_step` is the step of the checkpoint that the run resumes from, 0 for a new run. One of
    `log_games_every` games of this rank is written in full to games.jsonl, with its tokens as
    rendered by `pieces`. `num_lines` is the `num_lines` saved by an earlier journal.
    """

    def __init__(
        self,
        folder: Path,
        *,
        log_games_every: int,
        after_step: int,
        rank: int,
        pieces: Pieces | None = None,
        num_lines: Mapping[str, int] | None = None,
    ) -> None:
        self._pieces, self._log_games_every, had = pieces, log_games_every, num_lines or {}
        self._logs = self._metrics, self._games, self._groups = [
            StepLog(folder / name, after_step=after_step, rank=rank, num=had.get(name))
            for name in LOGS
        ]

    @property
    def num_lines(self) -> dict[str, int]:
        """The lines of each file, on rank 0: what a resumed run must find there."""
        return {name: log.num_lines for name, log in zip(LOGS, self._logs, strict=True)}

    def groups(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write the groups of a step (`group_records`), before `on_step` writes its line."""
        for record in records:
            self._groups.append(record)

    def on_step(self, step: Step) -> None:
        """Write the step's line and its logged games."""
        self._metrics.append(step.metrics)
        every, pieces = self._log_games_every, self._pieces
        for record in logged_games(step.episodes, step.number, every=every, pieces=pieces):
            self._games.append(record)

    def sync(self) -> None:
        """Flush the lines to disk before a checkpoint, so that its step has its line. This waits
        for all other writes to the disk, so not every step does it."""
        for log in self._logs:
            log.sync()

    def close(self) -> None:
        for log in self._logs:
            log.close()


def check_logs(folder: Path, *, after_step: int, num_lines: Mapping[str, int]) -> None:
    """Raise SettingsError if a `Journal` could not continue these logs."""
    for name in LOGS:
        _lines_until(folder / name, after_step, num=num_lines.get(name))


class StepLog:
    """A file of JSON lines, each with its `step`, in the order of the steps.

    `after_step` is the step of the checkpoint that the run resumes from. Lines of later steps are
    removed, because these steps run again. None starts an empty file. `num` is the `num_lines` at
    that checkpoint; None if the checkpoint is too old to have it. Raises SettingsError for a file
    without these lines.
    """

    def __init__(
        self, path: Path, *, after_step: int | None, rank: int = 0, num: int | None = None
    ) -> None:
        self._file, self.num_lines = None, 0
        if rank:
            return
        lines = _lines_until(path, after_step, num=num)
        self.num_lines = len(lines)
        write_atomically(path, "".join(lines))
        if not lines and after_step and (num or path.name == LOGS[0]):
            print(
                f"warning: {path} holds no line of the finished steps 1 to {after_step}; the run "
                "continues without them",
                file=sys.stderr,
            )
        # Unbuffered, so that a failed write to a full disk is not retried at exit.
        self._file = path.open("ab", buffering=0)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line.

        JSON has no NaN or infinity: such a number becomes null, and its name is added to the line's
        `non_finite` list. Raises ValueError without an integer `step`.
        """
        if not isinstance(record.get("step"), int):
            raise ValueError(f"a log line needs an integer step, got {record.get('step')!r}")
        if self._file is None:
            return
        line = {name: _plain(value) for name, value in record.items()}
        non_finite = [name for name, value in line.items() if value is None is not record[name]]
        if non_finite:
            line["non_finite"] = non_finite
        # UTF-8 cannot encode a lone surrogate; it is written as its JSON escape.
        text = json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n"
        data = memoryview(text.encode("utf-8", errors="backslashreplace"))
        while data:
            data = data[self._file.write(data) :]
        self.num_lines += 1

    def sync(self) -> None:
        """Flush the lines to disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _lines_until(path: Path, step: int | None, *, num: int | None) -> list[str]:
    """The file's complete lines up to and including `step`.

    A last line without a line end, cut off by a crash, is left out. Raises SettingsError for any
    other line that is not JSON with a step, for steps out of order, and unless `num` lines (in
    metrics.jsonl one per step) or none are found.
    """
    kept: list[str] = []
    if step is None or not path.exists():
        return kept
    each, last = path.name == LOGS[0], 0
    # Read bytes: a line that was cut off may end inside a character, and the text of a game may
    # contain characters that Python treats as line ends.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                text = line.decode("utf-8")
                line_step = json.loads(text)["step"]
                if not isinstance(line_step, int):
                    raise TypeError("step is not an integer")
            except (ValueError, RecursionError, LookupError, TypeError) as error:
                raise SettingsError(
                    f"{path} line {number} must be JSON with a step, got {line[:40]!r} ({error}); "
                    "repair or move the file to resume in this folder"
                ) from None
            if line_step < last + each or (each and last and line_step > last + 1):
                raise SettingsError(
                    f"{path} line {number} must have step {last + each}, got step {line_step}; "
                    "repair or move the file to resume in this folder"
                )
            last = line_step
            if line_step <= step:
                kept.append(text)
    expected = step if num is None and each else num
    if kept and expected is not None and len(kept) != expected:
        raise SettingsError(
            f"{path} must hold {expected} lines for steps 1 to {step}, got {len(kept)}; restore "
            "the file, or move it to resume in this folder"
        )
    return kept


def plain_json(text: bytes) -> Any:
    """Parse a JSON text. NaN, infinity and numbers beyond 1e100, which no mean and no page can use,
    become None. Raises ValueError or RecursionError for other text."""

    def number(text: str) -> float | int | None:
        value = float(text)
        if not abs(value) <= 1e100:
            return None
        return int(text) if text.lstrip("-").isdigit() else value

    return json.loads(text, parse_constant=number, parse_float=number, parse_int=number)


def _plain(value: Any) -> Any:
    """`value` in JSON types, with null for NaN and infinity."""
    if hasattr(value, "item"):  # a number of numpy
        value = value.item()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
