"""What a person sees of a run: its folder, one JSON line and one readable line a step, progress.

Times are seconds and end in `_s`. Only rank 0 writes; the others may call everything and change
nothing. This module must not know games, tokens or gradients: it writes the plain numbers and
records it is given. `wandb` is imported here, when a run asks for it, and nowhere else.
"""

from __future__ import annotations

import json
import math
import platform
import secrets
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from tqdm import tqdm

from selfplay.config import Config, WandbConfig
from selfplay.config.settings import SettingsError, difference, dump, load

# What may change when a run goes on: how long and how closely it is watched, not what it computes.
_MAY_CHANGE = ("out", "steps", "save_every", "keep_checkpoints", "log_games_every", "eval", "wandb")
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "scipy", "pyarrow")
_GPU_PACKAGES = ("sglang", "flash-attn", "liger-kernel")


def open_run(folder: Path, config: Config, *, rank: int = 0) -> bool:
    """Create the run's folder or, if it holds a run, open it to go on; True when it goes on.

    Writes `config.yaml` (resolved, loads back to an equal object) and appends to `code.txt`. Raises
    SettingsError when the folder's run was started with other settings or wandb is not installed.
    """
    saved = folder / "config.yaml"
    goes_on = saved.exists()
    if rank:
        return goes_on
    check_wandb(config.wandb)
    if goes_on:
        changed = difference(load(Config, saved), config)
        refused = [line for line in changed if line.split(":")[0].split(".")[0] not in _MAY_CHANGE]
        if refused:
            raise SettingsError(
                f"{folder} holds a run with other settings (saved -> asked for): "
                f"{'; '.join(refused)}; give the saved ones or another folder with out=FOLDER"
            )
    folder.mkdir(parents=True, exist_ok=True)
    _replace(saved, dump(config))
    with (folder / "code.txt").open("a", encoding="utf-8") as file:
        file.write(describe_code() + "\n")
    return goes_on


def describe_code() -> str:
    """The git commit, whether files differ from it, and the versions of what computes."""
    root = Path(__file__).resolve().parents[2]
    commit = _git(root, "rev-parse", "HEAD")
    if commit:
        commit += " with uncommitted changes" if _git(root, "status", "--porcelain") else ""
    versions = [f"python {platform.python_version()}"]
    for name in (*_PACKAGES, *_GPU_PACKAGES):
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    started = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return f"started {started}\ncommit {commit or 'unknown'}\n{', '.join(versions)}\n"


def _git(root: Path, *words: str) -> str:
    """What git answers, "" without git or outside a repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


class StepLog:
    """A file of JSON lines, each of one step, in the order of the steps.

    `after_step` is the step of the checkpoint the run goes on from: lines of later steps are taken
    out, for those steps will be done again. None starts an empty file.
    """

    def __init__(self, path: Path, *, after_step: int | None, rank: int = 0) -> None:
        self._file = None
        if rank:
            return
        _replace(path, "".join(_lines_until(path, after_step)))
        # A lone surrogate, which no UTF-8 can hold, is then written as its JSON escape.
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n")

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line at once. JSON has no NaN or infinity: such a number becomes null and its
        name joins the line's `non_finite` list.

        Raises ValueError without an integer `step`.
        """
        if not isinstance(record.get("step"), int):
            raise ValueError(f"a log line needs an integer step, got {record.get('step')!r}")
        if self._file is None:
            return
        bad: list[str] = []
        line = {name: _finite(value, name, bad) for name, value in record.items()}
        if bad:
            line["non_finite"] = bad
        self._file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _lines_until(path: Path, step: int | None) -> Iterator[str]:
    """The file's whole lines up to and including `step`; a last line torn by a crash, which has no
    end, is left out. Raises SettingsError for any other line that is none of a log."""
    if step is None or not path.exists():
        return
    # As bytes: a torn line may end inside a character, and a game's text may hold characters that
    # Python takes for the end of a line.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                text = line.decode("utf-8")
                written = json.loads(text)["step"]
                if not isinstance(written, int):
                    raise TypeError("step is no whole number")
            except (ValueError, RecursionError, LookupError, TypeError) as error:
                raise SettingsError(
                    f"{path} line {number} must be JSON with a step, got {line[:40]!r} ({error}); "
                    "mend or move the file to go on in this folder"
                ) from None
            if written <= step:
                yield text


def _replace(path: Path, text: str) -> None:
    """Write the whole file or leave the old one: a crash in between loses nothing."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def _finite(value: Any, name: str, bad: list[str]) -> Any:
    """`value` as JSON can hold it; names of non-finite numbers are added to `bad`."""
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        bad.append(name)
        return None
    if isinstance(value, Mapping):
        return {str(part): _finite(item, f"{name}.{part}", bad) for part, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item, f"{name}[{index}]", bad) for index, item in enumerate(value)]
    return value


class Wandb:
    """The same metrics on Weights & Biases. With mode "off" or another rank it does nothing."""

    def __init__(self, folder: Path, settings: WandbConfig, config: Config, *, rank: int = 0):
        self._run = None
        if rank or settings.mode == "off":
            return
        # The id lies in the run's folder, so that a run that goes on stays one run over there.
        name = folder / "wandb_id.txt"
        if not name.exists():
            name.write_text(secrets.token_hex(4), encoding="utf-8")
        self._run = _import_wandb(settings).init(
            project=settings.project,
            mode=settings.mode,
            dir=str(folder),
            name=folder.name,
            id=name.read_text(encoding="utf-8").strip(),
            resume="allow" if settings.mode == "online" else None,
            config={"settings": dump(config)},
        )

    def log(self, metrics: Mapping[str, Any]) -> None:
        if self._run is not None:
            self._run.log(dict(metrics), step=metrics["step"])

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def check_wandb(settings: WandbConfig) -> None:
    """Raise SettingsError for a missing package, now and not after the warm start."""
    if settings.mode != "off":
        _import_wandb(settings)


def _import_wandb(settings: WandbConfig) -> Any:
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"wandb.mode={settings.mode} needs the wandb package, which is not installed: "
            "`pip install wandb`, or set wandb.mode=off"
        ) from error
    return wandb


class Stopwatch:
    """Seconds by stage: `with watch("play"): …`, then `lap()` gives {"play_s": …, "step_s": …}.

    `step_s` is the whole time since the lap before, so what no stage covers shows as the rest.
    """

    def __init__(self) -> None:
        self._stages: dict[str, float] = {}
        self._laps: deque[float] = deque(maxlen=20)
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
        """The seconds since the last lap; begins the next."""
        now = time.perf_counter()
        seconds = {**self._stages, "step_s": now - self._start}
        self._laps.append(seconds["step_s"])
        self._stages, self._start = {}, now
        return seconds

    def remaining_s(self, num_laps: int) -> float | None:
        """`num_laps` at the pace of the last twenty; None before the first."""
        return num_laps * sum(self._laps) / len(self._laps) if self._laps else None


# How a step reads: the metric, the word before it, the format of the number.
_SHOWN = (
    ("score", "score", ".3f"),
    ("agreement", "agree", ".2f"),
    ("messages", "msgs", ".3g"),
    ("errors", "err", ".3g"),
    ("entropy", "ent", ".3g"),
    ("mismatch_mean", "gap", ".0e"),
)
_STAGES = ("play_s", "credit_s", "update_s", "push_s", "eval_s", "save_s")


def step_line(
    metrics: Mapping[str, Any], *, num_steps: int, remaining_s: float | None = None
) -> str:
    """One line of at most 120 columns.

    A metric that is not there is left out, and so is a stage of under a twentieth of the step.
    """
    parts = [f"{metrics['step']:>{len(str(num_steps))}}/{num_steps}"]
    for name, word, form in _SHOWN:
        if metrics.get(name) is not None:
            parts.append(f"{word} {metrics[name]:{form}}")
    if metrics.get("num_void"):  # games that a partner left are worth a look at once
        parts.append(f"void {metrics['num_void']:.0f}")
    if metrics.get("tokens_per_s") is not None:
        rate = metrics["tokens_per_s"]
        parts.append(f"{rate / 1000:.3g}k tok/s" if rate >= 1000 else f"{rate:.0f} tok/s")
    if remaining_s is not None:
        parts.append(f"{clock(remaining_s)} left")
    stages = {name[:-2]: metrics[name] for name in _STAGES if name in metrics}
    whole_s = sum(stages.values())
    if whole_s > 0:
        parts += [f"{name} {s:.3g}s" for name, s in stages.items() if s >= 0.05 * whole_s]
    while len(" ".join(parts)) > 120:
        parts.pop()
    return " ".join(parts)


def clock(seconds: float) -> str:
    """Seconds as 4s, 3m05s or 2h07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class _Lines(tqdm):  # type: ignore[type-arg, unused-ignore]
    """Progress where nobody watches a terminal: a line at most every ten seconds."""

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if msg is None:
            self.fp.write(f"{self}\n")
            self.fp.flush()


def progress(
    what: Iterable[Any] | int, label: str, *, total: int | None = None, rank: int = 0
) -> tqdm[Any]:
    """A bar with the remaining time for a long stage, on standard error.

    Iterate over it, or give a number as `what` and use `with progress(n, …) as bar: bar.update(k)`.
    A stage of under ten seconds shows nothing where there is no terminal.
    """
    items: Iterable[Any] | None = None if isinstance(what, int) else what
    if isinstance(what, int):
        total = what
    if rank or sys.stderr.isatty():
        return tqdm(items, label, total, leave=False, dynamic_ncols=True, disable=bool(rank))
    form = "{desc} {n_fmt}/{total_fmt}, {elapsed} gone, {remaining} left"
    return _Lines(
        items, label, total, leave=False, bar_format=form, mininterval=10, miniters=1, delay=10
    )


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that it is either all there or not there: a crash leaves no half of it."""
    fresh = path.with_name(path.name + ".new")
    # A lone surrogate, which no UTF-8 can hold, is then written as its escape.
    fresh.write_text(text, encoding="utf-8", errors="backslashreplace")
    fresh.replace(path)
