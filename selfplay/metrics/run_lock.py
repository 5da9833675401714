"""One trainer in a run folder: an operating system's lock, which ends with the process that holds
it, however that ends. Reading the folder, as eval.py does, needs no lock."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import TextIO

from selfplay.config.settings import SettingsError


def hold_run(folder: Path) -> TextIO:
    """Make the folder and lock it until the returned file is closed; the file `.lock` in it says
    who holds it.

    Raises SettingsError where another process holds it or the storage has no locks.
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
                f"out: {folder} must lie where files can be locked: {error}"
            ) from None
        raise SettingsError(
            f"out: {folder} is in use by {holder or 'another process'}; wait for its end, stop it, "
            "or give another folder with out=FOLDER"
        ) from None
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file
