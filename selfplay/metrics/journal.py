"""What a step leaves behind: a line of metrics, every n-th game in full, a readable line, Weights &
Biases if asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from selfplay.config import Config
from selfplay.metrics.log import StepLog, Stopwatch, Wandb, step_line
from selfplay.metrics.step import game_record
from selfplay.rollout.episode import Episode


class Journal:
    """A run's open logs. Rank 0 writes; on other ranks every call does nothing."""

    def __init__(self, folder: Path, config: Config, *, after_step: int, rank: int) -> None:
        self._config, self._rank = config, rank
        self._metrics = StepLog(folder / "metrics.jsonl", after_step=after_step, rank=rank)
        self._games = StepLog(folder / "games.jsonl", after_step=after_step, rank=rank)
        self._wandb = Wandb(folder, config.wandb, config, rank=rank)

    def step(
        self, step: int, metrics: dict[str, float], episodes: Sequence[Episode], watch: Stopwatch
    ) -> None:
        """Write step number `step` (1 after the first update).

        Games are counted over the run, on this rank.
        """
        line = {"step": step, **metrics, **watch.lap()}
        self._metrics.append(line)
        self._wandb.log(line)
        first = (step - 1) * len(episodes)
        for place, episode in enumerate(episodes):
            if (first + place) % self._config.log_games_every == 0:
                self._games.append(game_record(episode, step=step))
        left = watch.remaining_s(self._config.steps - step)
        if self._rank == 0:
            print(step_line(line, num_steps=self._config.steps, remaining_s=left), flush=True)

    def close(self) -> None:
        self._metrics.close()
        self._games.close()
        self._wandb.close()
