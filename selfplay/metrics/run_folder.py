"""The run's folder: its lock, its saved settings, the record of the code that ran in it."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import socket
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import TextIO

import selfplay
from selfplay.config import Config
from selfplay.config.settings import SettingsError, difference, dump, load

# These settings may change when a run resumes: they set its length and its logs, not its results.
_MAY_CHANGE = (
    *(
        "out",
        "steps",
        "save_every",
        "keep_checkpoints",
        "log_games_every",
        "eval",
        "watch",
        "track",
    ),
    "warm_start.save_every",
)
# They decide where memory is, not what is computed: they may change until a step has been saved.
_MEMORY = (
    *("engine.mem_fraction", "engine.max_cache_tokens", "engine.max_batch"),
    *("optim.tokens_per_microbatch", "parallel.checkpointing"),
    *("parallel.offload_optimizer", "parallel.offload_parameters", "parallel.offload_reference"),
)
# What a start makes before anything is trained, and what tells that something was.
_PREPARED = ("tokenizer", "random_start")
_TRAINED = ("warm_start", "warm_start_progress", "held_out_before.json", "checkpoints")
IMITATED_BOARDS = "imitated_boards.json"  # digests of the recorded boards that were imitated
_PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "numpy", "scipy", "pyarrow"),
    *("sglang", "flash-attn", "liger-kernel"),
)


def hold_run(folder: Path) -> TextIO:
    """Create the folder and lock it against a second trainer until the returned file is closed.

    The operating system releases the lock when the process ends, however it ends. The file `.lock`
    names the process that holds it. Reading the folder, as eval.py does, needs no lock.

    Raises SettingsError if another process holds the lock or the storage does not support locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        holder = file.read(200).strip()
        file.close()
        if not isinstance(error, BlockingIOError):
            raise SettingsError(
                f"out: {folder} must be on storage that supports file locks: {error}"
            ) from None
        raise SettingsError(
            f"out: {folder} is in use by {holder or 'another process'}; wait until it ends, stop "
            "it, or use another folder with out=FOLDER"
        ) from None
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def open_run(folder: Path, config: Config) -> None:
    """Create the run's folder, or open an existing run to resume it. Only rank 0 calls this.

    Writes `config.yaml`, which loads back to an equal `config`, and appends to `code.txt`. A start
    that failed before anything was trained leaves no run: other settings begin anew. Raises
    SettingsError if the folder holds a run with other settings.
    """
    saved = folder / "config.yaml"
    if saved.exists():
        changed = difference(load(Config, saved), config)
        stepped = any((folder / "checkpoints").glob("step_*"))
        refused = [line for line in changed if not _may_change(line.split(":")[0], stepped=stepped)]
        if refused and not any((folder / name).exists() for name in _TRAINED):
            for name in _PREPARED:
                shutil.rmtree(folder / name, ignore_errors=True)
        elif refused:
            raise SettingsError(
                f"{folder} holds a run with other settings (saved -> given): {'; '.join(refused)}; "
                "give the saved ones, or another folder with out=FOLDER"
            )
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(saved, dump(config))
    with (folder / "code.txt").open("a", encoding="utf-8") as file:
        file.write(_describe_code() + "\n")


def _may_change(key: str, *, stepped: bool) -> bool:
    if key in _MEMORY and not stepped:
        return True
    return key in _MAY_CHANGE or key.split(".")[0] in _MAY_CHANGE


def write_atomically(path: Path, text: str) -> None:
    """Write the complete file or none of it: a crash or a full disk leaves the old file."""
    new = path.with_name(path.name + ".new")
    try:
        # UTF-8 cannot encode a lone surrogate; it is written as an escape.
        with new.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _describe_code() -> str:
    """The start time, the git commit of a clone and whether files differ from it, and versions."""
    root = Path(__file__).resolve().parents[2]
    # An installed copy may lie inside someone else's repository.
    commit = _git(root, "rev-parse", "HEAD") if (root / ".git").exists() else ""
    if commit and _git(root, "status", "--porcelain"):
        commit += " with uncommitted changes"
    versions = [f"selfplay {selfplay.__version__}", f"python {platform.python_version()}"]
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    started = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return f"started {started}\ncommit {commit or 'unknown'}\n{', '.join(versions)}\n"


def _git(root: Path, *arguments: str) -> str:
    """The output of a git command; "" if git is missing or `root` is not a repository."""
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
