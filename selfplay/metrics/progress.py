"""Progress bars of a run's phases."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm


def progress(
    items: Iterable[Any] | int, label: str, *, rank: int = 0, at_once: bool = False
) -> tqdm[Any]:
    """A progress bar with the remaining time, on standard error; ranks above 0 show none. Items
    processed `at_once` end together, so the first ones do not predict the remaining time.

    Iterate over it, or pass a count as `items` and call `bar.update(k)` inside
    `with progress(count, …) as bar:`. Without a terminal it prints a line at most every ten
    seconds, and none in the first ten.
    """
    iterable, total = (None, items) if isinstance(items, int) else (items, None)
    if rank or sys.stderr.isatty():
        form = "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}" if at_once else None
        return tqdm(
            iterable,
            label,
            total,
            leave=False,
            dynamic_ncols=True,
            disable=bool(rank),
            bar_format=form,
        )
    left = "" if at_once else ", {remaining} left"
    form = f"{{desc}} {{n_fmt}}/{{total_fmt}}, {{elapsed}} gone{left}{{postfix}}"
    return _Lines(
        iterable, label, total, leave=False, bar_format=form, mininterval=10, miniters=1, delay=10
    )


class _Lines(tqdm):  # type: ignore[type-arg, unused-ignore]
    """Progress as separate lines, for an output that is not a terminal."""

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Write a line instead of a bar; tqdm calls this when it is time for one."""
        if msg is None:
            self.fp.write(f"{self}\n")
            self.fp.flush()
