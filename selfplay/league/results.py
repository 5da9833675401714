"""The observer `league`: every partner's results, step by step, in `league.jsonl`."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from selfplay.config import Config
from selfplay.config.player_spec import SELF
from selfplay.distributed import World, gather_objects
from selfplay.metrics.observer import Observer, Step
from selfplay.metrics.step_log import StepLog
from selfplay.partners.opponents import both_scores

LOG = "league.jsonl"


class Results(Observer):
    """Writes, for each step and each partner but the policy itself, how many games ended with which
    scores of the policy and the partner.

    A line is {"step": 3, "partner": "pool:0", "scores": [[0.0, 1.0, 12], [1.0, 0.0, 4]]}.
    """

    measures = True

    def __init__(self, config: Config, world: World, options: Any = None) -> None:
        """The file is opened by `restore`, which knows where the run continues."""
        super().__init__(config, world, options)
        self._log: StepLog | None = None
        self._last = 0

    def on_step(self, step: Step) -> None:
        """Every rank sends the scores of its games.

        Equal scores of a partner are counted together, which keeps the mean and its interval exact
        and the line short.
        """
        self._last = step.number
        own = [(g.partner, both_scores(g)) for g in step.episodes if g.partner != SELF]
        scores: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for partner, both in chain(*gather_objects(own, self.world)):
            scores[partner].append(both)
        if self._log is not None:
            for partner, of in sorted(scores.items()):
                counts = [[*both, num] for both, num in sorted(Counter(of).items())]
                self._log.append({"step": step.number, "partner": partner, "scores": counts})

    def state(self) -> dict[str, Any]:
        """Where the file ends: the last step, and on rank 0 the number of lines."""
        lines = 0 if self._log is None else self._log.num_lines
        return {"step": self._last, "num_lines": lines}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue the file after the checkpoint's last line."""
        self._last = state.get("step", 0)
        path, num = Path(self.config.out) / LOG, state.get("num_lines")
        self._log = StepLog(path, after_step=self._last, rank=self.world.rank, num=num)

    def close(self) -> None:
        """The file is complete."""
        if self._log is not None:
            self._log.close()


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's `league.jsonl`; [] without one."""
    path = folder / LOG
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]
