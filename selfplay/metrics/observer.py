"""A finished step and the base class of its observers.

A program that only draws a page imports this room, so it imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from selfplay.advantages.sample import Sample
from selfplay.metrics.records import group_records
from selfplay.rollout.episode import Episode

if TYPE_CHECKING:  # they import torch, which a program that draws a page does not need
    from selfplay.advantages.advantages import CreditStats
    from selfplay.config import Config
    from selfplay.distributed import World


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """The trained tokens of a sample, in order: ids, the engine's log-probs in nats at the sampling
    temperature, advantages as used in the loss, and `mismatch`, trainer minus engine before any
    weight changed; it is empty for a sample of a later mini-batch."""

    ids: list[int]
    logprobs: list[float]
    advantages: list[float]
    mismatch: list[float]


@dataclass(frozen=True, slots=True)
class Step:
    """A finished step; `number` counts from 1. It has this rank's games, the samples it trained on
    with their advantages, the line of metrics.jsonl, which is over all ranks, and the statistics of
    credit assignment. `advantages` has each trained sample's mean advantage in the loss by name,
    over all ranks; those of `samples` are from before the methods' `prepare`."""

    number: int
    episodes: list[Episode]
    samples: list[Sample]
    metrics: dict[str, Any]
    stats: CreditStats
    advantages: dict[str, float]
    skipped: list[str] = field(default_factory=list)  # why optimizer steps were skipped
    complete: bool = True  # False if the push or the validation games end the run
    tokens: dict[str, TokenRecord] = field(default_factory=dict)
    """the tokens of each trained sample of the games in games.jsonl, by name, over all ranks"""
    policy: Any = None
    """an `EvaluationContext` (selfplay/evaluation/evaluate.py) with the engine that has the step's
    weights, for an observer that asks the policy; None outside `on_step`"""

    def __repr__(self) -> str:
        """One line, without the games and the tokens."""
        num_groups = len({sample.group for sample in self.samples})
        return (
            f"Step {self.number}: {len(self.episodes)} games, "
            f"score {self.metrics.get('score', math.nan):.3f}, "
            f"{len(self.samples)} samples in {num_groups} groups"
        )

    @property
    def groups(self) -> list[dict[str, Any]]:
        """This rank's games by instance, with each seat's reward, return and advantage, in the
        format of groups.jsonl."""
        return group_records(self.episodes, self.stats, self.advantages, step=self.number)


class Observer:
    """Reads each finished step, on every rank; each method does nothing by default. A custom one is
    a subclass in a file, listed in `observers` as my_file.py:Name.

    It is created once when a run starts or resumes, with the settings and the ranks; an `Options`
    dataclass in the class declares its own settings, found in `self.options`. It must not hold a
    part of the run: a closed run must free its memory at once.
    """

    Options: type | None = None
    key = ""  # names its state in a checkpoint; "" for one without state
    measures = False  # a built-in one whose numbers enter the line, as those of custom ones

    def __init__(self, config: Config, world: World, options: Any = None) -> None:
        """`config` is the run's, with an absolute `out`; `options` an instance of `Options`."""
        self.config, self.world, self.options = config, world, options

    @classmethod
    def ready(cls, config: Config, options: Any = None, *, here: bool = True) -> None:
        """Raise SettingsError before a start writes anything for settings that do not fit, or if a
        package is missing; without `here` the run is for another machine."""

    def on_step(self, step: Step) -> Mapping[str, float] | None:
        """Called after the push and the validation games. The numbers returned on rank 0 enter the
        step's line of metrics.jsonl as observed/NAME, and the page. A RunEnds that it raises ends
        the run after all observers have read the step and the step is saved."""

    def state(self) -> dict[str, Any]:
        """Its state for a checkpoint, as plain values."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`; {} at the start of a run."""

    def close(self) -> None:
        """Called after the last step, when the run is finished or closed."""
