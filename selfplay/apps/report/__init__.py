"""Runs as one page for a browser: the contents of a run folder, its curves, tables and games.

Handles files of a run folder, charts and HTML; plays no games. Pictures of a game come from its
kit.
"""

import os
import subprocess
import sys
from pathlib import Path

from dialop.shown import on_one_line

REPORT = "report.html"  # the page of a run, in its folder
PAGE_LOG = "page.jsonl"  # what no other file has for it
_ROOT = Path(__file__).resolve().parents[3]  # the folder that contains the package


def refresh_report(folder: Path, *, rank: int) -> None:
    """Write `report.html` into a run's folder; does nothing on other ranks than 0.

    A separate process draws the page, because that needs more memory the longer the run is. If it
    fails, one line goes to stderr and the run continues.
    """
    if rank:
        return
    paths = (str(_ROOT), os.environ.get("PYTHONPATH"))
    command = [sys.executable, "-m", "selfplay.apps.report", str(folder.absolute())]
    drawn = subprocess.run(
        command,
        # Not cwd: the settings may name files by their path from here.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches only the trainer
    )
    if drawn.returncode:
        reason = (drawn.stderr.strip() or f"exit status {drawn.returncode}").splitlines()[-1]
        print(f"{folder} has no page: {on_one_line(reason)}", file=sys.stderr, flush=True)
