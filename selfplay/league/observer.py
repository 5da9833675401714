"""The observer `exploitability`: how much a best response wins from the policy, over the steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dialop.tree import Average, Tree, entropies, mean_over_moves, tree_of, values_of, view_use
from selfplay.config import Config
from selfplay.distributed import World, broadcast_object
from selfplay.engines.base import Engine
from selfplay.engines.kinds import engine_kind
from selfplay.errors import SettingsError
from selfplay.league.exploitability import LEAST_MASS, MoveTexts, Read
from selfplay.metrics.observer import Observer, Step
from selfplay.metrics.step_log import StepLog

LOG = "exploitability.jsonl"
_WHO = "the observer exploitability"


class Exploitability(Observer):
    """Exact values of the policy and of the realisation-weighted average of the policies of its
    evaluations so far. Each evaluation is a line of `exploitability.jsonl` with the probability of
    every move."""

    measures = True

    @dataclass(frozen=True)
    class Options:
        every: int = 1
        """steps between two evaluations"""
        average_after: int = 0
        """finished steps before the first policy of the average"""

    def __init__(self, config: Config, world: World, options: Any = None) -> None:
        """Plays the whole game, to know its information sets.

        The texts of its moves need the policy's tokens, and the log the place where the run
        continues; both come later.
        """
        super().__init__(config, world, options)
        kit, given = config.game.kit, config.game.options
        self._tree = tree_of(kit, given)
        even = [[1.0 / len(info.moves)] * len(info.moves) for info in self._tree.sets]
        self._of_uniform = values_of(self._tree, even).exploitability
        self._average = Average()
        self._texts: MoveTexts | None = None
        self._log: StepLog | None = None
        self._last = 0

    @classmethod
    def ready(cls, config: Config, options: Any = None, *, here: bool = True) -> None:
        """Raise SettingsError for a game without a list of its moves, for seats that others play,
        for limits that cut the game off, and for an engine that does not score."""
        game, rollout = config.game, config.rollout
        if not game.kit.has("deals"):
            raise SettingsError(
                f"{_WHO} needs a game that lists its deals and moves (docs/exploitability.md), got "
                f"game.name {game.name}"
            )
        if options.every < 1 or options.average_after < 0:
            raise SettingsError(
                f"{_WHO} needs every of at least 1 and average_after of at least 0, got "
                f"{options.every} and {options.average_after}"
            )
        if config.policies:
            raise SettingsError(
                f"{_WHO} needs one policy in every seat: policies must be empty, got "
                f"{', '.join(config.policies)}"
            )
        if rollout.policy_seats:
            raise SettingsError(
                f"{_WHO} needs the policy in every seat: rollout.policy_seats must be empty, got "
                f"{list(rollout.policy_seats)}"
            )
        longest = max(len(info.path) + 1 for info in tree_of(game.kit, game.options).sets)
        if longest > rollout.max_turns:
            raise SettingsError(
                f"{_WHO} needs whole games: rollout.max_turns must be at least {longest}, got "
                f"{rollout.max_turns}"
            )
        kind = engine_kind(config.engine.kind)
        if kind.score is Engine.score:
            raise SettingsError(f"{_WHO} needs an engine that scores, got {config.engine.kind}")
        if kind.score_temperature not in (None, rollout.temperature):
            raise SettingsError(
                f"{_WHO} needs rollout.temperature {kind.score_temperature:g} with engine.kind "
                f"{config.engine.kind}, which scores at no other, got {rollout.temperature:g}"
            )

    def on_step(self, step: Step) -> Mapping[str, float] | None:
        """Every `every` steps; nothing for a step whose push failed."""
        self._last = step.number
        if step.number % self.options.every or not step.complete:
            return None
        if self._texts is None:
            self._texts = MoveTexts(self._tree, self.config, step.policy.rendering)
        found = self._read(step.policy.engine)
        if found is None:  # the engine failed; the next rollout restarts it
            return None
        return self._measured(step.number, found)

    def _read(self, engine: Any) -> Read | None:
        """The policy by rank 0's engine, on every rank; None without scores."""
        assert self._texts is not None
        scores = None
        if self.world.rank == 0:
            temperature = self.config.rollout.temperature
            scores = engine.score(self._texts.texts, temperature=temperature)()
        scores = broadcast_object(scores, self.world)
        return self._texts.read(scores) if scores else None

    def _measured(self, number: int, found: Read) -> dict[str, float]:
        """The numbers of a policy, and its line in the log.

        Without the mass of the listed moves they are NaN, and the policy does not enter the
        average: a figure would be that of another policy.
        """
        usable = found.mass >= LEAST_MASS
        if usable and number > self.options.average_after:
            self._average.add(self._tree, found.policy)
        exploitability = average = math.nan
        if usable:
            exploitability = values_of(self._tree, found.policy).exploitability
        if self._average.sums:
            average = values_of(self._tree, self._average.policy(self._tree)).exploitability
        used = view_use(self._tree, found.policy)
        numbers = {
            "exploitability": exploitability,
            "exploitability_share": exploitability / self._of_uniform,
            "exploitability_average": average,
            "view_effect": used.effect if usable else math.nan,
            "view_distance": used.distance if usable else math.nan,
            "legal_mass": found.mass,
            "legal_entropy": mean_over_moves(self._tree, found.policy, entropies(found.policy)),
        }
        if self._log is not None:
            self._log.append({"step": number, **numbers, "sets": table(self._tree, found.policy)})
        return numbers

    def state(self) -> dict[str, Any]:
        """The sums of the average, and where the log ends."""
        lines = 0 if self._log is None else self._log.num_lines
        return {"average": self._average.sums, "step": self._last, "num_lines": lines}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue the average and the log."""
        self._average, self._last = Average(state.get("average")), state.get("step", 0)
        path, num = Path(self.config.out) / LOG, state.get("num_lines")
        self._log = StepLog(path, after_step=self._last, rank=self.world.rank, num=num)

    def close(self) -> None:
        """The log is complete."""
        if self._log is not None:
            self._log.close()


def table(tree: Tree, policy: list[list[float]]) -> dict[str, dict[str, float]]:
    """The probability of each move by the name of its information set."""

    return {
        info.name: {m: round(p, 6) for m, p in zip(info.moves, probabilities, strict=True)}
        for info, probabilities in zip(tree.sets, policy, strict=True)
    }
