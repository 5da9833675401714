"""What a start does with a run's folder before it resumes: deletes what killed processes left, and
sets damaged checkpoints aside."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from selfplay.atomic import clear_leftovers, damage, discard
from selfplay.checkpoint.saving import checkpoints
from selfplay.errors import SettingsError


def repair_folder(folder: Path, *, imitation: Path) -> None:
    """Make the folder of a run ready to resume. `imitation` is the folder of an unfinished warm
    start in it, which has checkpoints of its own. One process calls.

    Raises SettingsError, which says what to do, for damage that cannot be repaired.
    """
    homes = (folder, folder / "checkpoints", folder / "policy_pool", imitation / "checkpoints")
    clear_leftovers(homes)
    if (folder / "warm_start").exists():
        discard(imitation)
    set_damaged_aside(folder)
    set_damaged_aside(imitation)
    log = folder / "metrics.jsonl"
    if not checkpoints(folder) and log.exists() and log.stat().st_size:
        print(
            f"warning: {folder / 'checkpoints'} holds no checkpoint: the run begins with its first "
            "step again",
            file=sys.stderr,
        )
    for made in (folder / "tokenizer", folder / "random_start", folder / "warm_start"):
        found = damage(made) if made.exists() else None
        if found is not None:
            raise SettingsError(
                f"{made} must be undamaged, got {found}; delete it and the run makes it again, "
                "or restore a copy"
            )


def set_damaged_aside(folder: Path) -> None:
    """Rename damaged checkpoints newer than the newest undamaged one to `damaged_step_N`, and
    print it.

    Raises SettingsError if there are checkpoints and all are damaged.
    """
    saved, damaged = checkpoints(folder), dict[Path, str]()
    while saved and (found := damage(saved[-1])) is not None:
        damaged[saved.pop()] = found
    if damaged and not saved:
        got = "; ".join(f"{path.name}: {found}" for path, found in damaged.items())
        raise SettingsError(
            f"{folder / 'checkpoints'} must hold an undamaged checkpoint, got {got}; "
            "restore a copy of one, or start a new run with out=FOLDER"
        )
    for path, found in damaged.items():
        aside = path.with_name(f"damaged_{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        print(
            f"warning: checkpoint {path} is damaged: {found}; it is now {aside.name}, and the run "
            "goes on from the one before",
            file=sys.stderr,
        )
