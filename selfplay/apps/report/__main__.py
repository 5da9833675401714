"""Write the page of one run or several.

    python -m selfplay.apps.report runs/talk
    python -m selfplay.apps.report runs/a runs/b --out both.html

The page of one run goes to its `report.html`, the page of several to ./report.html.
"""

from __future__ import annotations

from dialop.terminal import open_terminal

open_terminal("selfplay.apps.report")  # before the imports, which take seconds

# isort: split

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dialop.shown import on_one_line
from selfplay.apps.report import REPORT
from selfplay.apps.report.page import is_page, write_report
from selfplay.apps.report.run_files import read_run
from selfplay.preflight.command_line import Parser, refused


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and print its path; returns the exit status. Problems of a run's files go to
    standard error, a line each."""
    parser = Parser("selfplay.apps.report", __doc__, takes_settings=False)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    parser.add_argument("--out", type=Path, help="the .html file to write")
    try:
        args = parser.parse_args(arguments)
        out: Path = args.out or (args.runs[0] / REPORT if len(args.runs) == 1 else Path(REPORT))
        if out.suffix != ".html":
            raise ValueError(f"--out must end in .html, got {out}")
        if out != args.runs[0] / REPORT and os.path.lexists(out) and not is_page(out):
            raise ValueError(f"--out must be a new file or an earlier page, got {out}")
        runs = [read_run(folder) for folder in args.runs]
        unread = [run for run in runs if run.config is None]
        if unread and out.exists():
            raise ValueError(
                f"{unread[0].problems[0]}; {out} is unchanged, --out FILE writes another page"
            )
        out.parent.mkdir(parents=True, exist_ok=True)
        write_report(runs, out)
    except (ValueError, OSError) as error:
        return refused("selfplay.apps.report", error)
    for run in runs:
        for problem in run.problems:
            print(f"selfplay.apps.report: {run.folder}: {on_one_line(problem)}", file=sys.stderr)
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
