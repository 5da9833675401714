"""Keeps a run's page up to date, and writes what only the page shows."""

from __future__ import annotations

import resource
import sys
import time
from itertools import compress
from pathlib import Path
from threading import Thread

import torch

from selfplay.advantages.rewards import sample_name, spans_until
from selfplay.apps.report import PAGE_LOG, refresh_report
from selfplay.config import Config
from selfplay.distributed import World
from selfplay.errors import SettingsError
from selfplay.metrics.observer import Observer, Step, TokenRecord
from selfplay.metrics.records import MAX_PIECES, logged
from selfplay.metrics.step_log import StepLog
from selfplay.rollout.episode import Episode


class Page(Observer):
    """Draws report.html in the background after the first step, then at most every minute, and at
    the end of the run. Writes page.jsonl: each step's memory, and what the update saw of the tokens
    of the logged games."""

    pause_s = 60.0  # between two drawings, at least
    pause_share = 20  # and this many times as long as the drawing before it: 5 % of one core

    def __init__(self, config: Config, world: World) -> None:
        """For the run in `config.out`; only rank 0 writes and draws."""
        super().__init__(config, world)
        self._folder, self._drawing, self._next = Path(config.out), Thread(), 0.0
        self._drawing.start()  # does nothing; it can be joined
        self._log: StepLog | None = None
        self._writes = world.rank == 0

    def on_step(self, step: Step) -> None:
        """Write the step's line, and start to draw if it is time."""
        if self.world.rank:
            return
        if self._writes:
            self._write(step)
        if not self._drawing.is_alive() and time.monotonic() >= self._next:
            self._draw()

    def close(self) -> None:
        """Wait for the page. Draw it again if the run has its last held-out games."""
        if self._log is not None:
            self._log.close()
        self._drawing.join()
        if (self._folder / "held_out_after.json").exists():
            refresh_report(self._folder, rank=self.world.rank)

    def _write(self, step: Step) -> None:
        """Add a line to page.jsonl. Lines of steps that are repeated after a resume are removed; a
        file that cannot be written costs only itself."""
        games = [
            {"instance": game.instance, "episode": game.index, "turns": turns}
            for game in logged(step.episodes, step.number, self.config.log_games_every)
            if any(turns := token_numbers(game, step.tokens))
        ]
        line = {"step": step.number, **memory(self.world.device), "games": games}
        try:
            if self._log is None:
                self._log = StepLog(self._folder / PAGE_LOG, after_step=step.number - 1)
            self._log.append(line)
        except (SettingsError, OSError) as error:
            self._writes = False
            print(f"the page shows no tokens from here: {error}", file=sys.stderr, flush=True)

    def _draw(self) -> None:
        """Draw in a thread, which sets when the next drawing may start."""

        def draw() -> None:
            """Draw, then wait in proportion."""
            start = time.monotonic()
            refresh_report(self._folder, rank=self.world.rank)
            drawn_s = time.monotonic() - start
            self._next = time.monotonic() + max(self.pause_s, self.pause_share * drawn_s)

        self._drawing = Thread(target=draw)
        self._drawing.start()


def memory(device: torch.device) -> dict[str, float]:
    """GiB of memory: on a GPU the most that the trainer has allocated since the last call, and what
    all processes use of the device now; elsewhere the most that this process has used so far."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        free, total = torch.cuda.mem_get_info(device)
        torch.cuda.reset_peak_memory_stats(device)
        return {"memory_gib": peak / 2**30, "device_gib": (total - free) / 2**30}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"memory_gib": peak / (2**30 if sys.platform == "darwin" else 2**20)}


def token_numbers(
    game: Episode, records: dict[str, TokenRecord]
) -> list[dict[str, list[float | None]] | None]:
    """For each turn the `advantages` of its first tokens and, if the update saw them before any
    weight changed, `mismatch`, the trainer's log-prob minus the engine's in nats. A list has None
    for a token that did not train; a turn without such a token is None."""
    values = {}
    for seat, transcript in enumerate(game.transcripts):
        record = records.get(sample_name(game, seat))
        if transcript is None or record is None:
            continue
        mask = list(transcript.mask)
        for point in game.branches:  # a turn there trains in samples of its own
            if point.seat == seat:
                span = spans_until(game, seat, point.turn + 1)[-1]
                mask[span.start : span.end] = [0] * (span.end - span.start)
        places = [*compress(range(len(mask)), mask)]
        if len(places) == len(record.advantages):
            numbers = {"advantages": record.advantages, "mismatch": record.mismatch}
            values[seat] = {
                name: dict(zip(places, of, strict=True)) for name, of in numbers.items() if of
            }
    turns: list[dict[str, list[float | None]] | None] = []
    for number, turn in enumerate(game.turns):
        own: dict[str, list[float | None]] = {}
        for name, of in values.get(turn.seat, {}).items():
            span = spans_until(game, turn.seat, number + 1)[-1]
            shown = range(span.start, min(span.end, span.start + MAX_PIECES))
            own[name] = [float(f"{of[place]:.3g}") if place in of else None for place in shown]
        turns.append(own if any(n is not None for n in own.get("advantages", ())) else None)
    return turns
