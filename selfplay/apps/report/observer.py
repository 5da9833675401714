"""Keeps a run's page up to date."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

from selfplay.apps.report import refresh_report
from selfplay.config import Config
from selfplay.distributed import World
from selfplay.metrics.observer import Observer, Step
from selfplay.step import evaluates_after
from selfplay.step.ending import saves_after

MIN_AGE_S = 30.0


class Page(Observer):
    """Draws report.html in the background after steps that are saved or evaluated, and at the end
    of the run."""

    def __init__(self, config: Config, world: World) -> None:
        """For the run in `config.out`; only rank 0 draws."""
        super().__init__(config, world)
        self._folder, self._drawing = Path(config.out), Thread()
        self._drawing.start()  # does nothing; it can be joined

    def on_step(self, step: Step) -> None:
        """Start to draw, unless the page is younger than `MIN_AGE_S`."""
        if saves_after(self.config, step.number) or evaluates_after(self.config, step.number):
            self._draw(min_age_s=MIN_AGE_S)

    def close(self) -> None:
        """Wait for the page. Draw it again if the run has its last held-out games."""
        if (self._folder / "held_out_after.json").exists():
            self._draw()
        self._drawing.join()

    def _draw(self, *, min_age_s: float = 0.0) -> None:
        """Draw after the previous page is complete."""
        self._drawing.join()
        words = {"rank": self.world.rank, "min_age_s": min_age_s}
        self._drawing = Thread(target=refresh_report, args=(self._folder,), kwargs=words)
        self._drawing.start()
