"""The parts of a run, and what a step hands from verb to verb: `Rollout`, `Batch`.

Each is of this rank, unless it says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from transformers import PreTrainedTokenizerBase

from selfplay.advantages.advantages import CreditStats
from selfplay.advantages.sample import Sample
from selfplay.chat.rendering import Rendering
from selfplay.config import Config
from selfplay.data.stream import TrainStream
from selfplay.distributed import World
from selfplay.evaluation.evaluate import EvaluationContext
from selfplay.learner.learner import Learner
from selfplay.metrics.observer import Observer, TokenRecord
from selfplay.metrics.step_log import Journal, Stopwatch
from selfplay.partners.judge import Judge
from selfplay.partners.opponents import Opponents
from selfplay.partners.partners import Partners
from selfplay.rollout.seating import Partner
from selfplay.weight_sync.supervised import SupervisedPolicy
from selfplay.weight_sync.sync_check import SyncCheck


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """The parts of a run, which `setup.set_up` makes, in the order in which a step uses them."""

    config: Config
    folder: Path
    world: World  # the ranks: processes, their device, the engine's replica
    stream: TrainStream  # the instances of each step
    partners: Partners  # who else plays, and the policy pool
    opponents: Opponents  # which of them play a step
    tokenizer: PreTrainedTokenizerBase
    rendering: Rendering  # texts as exact tokens
    engine: SupervisedPolicy  # plays games, takes weights; restarts what fails, or ends the run
    judge: Judge | None
    baselines: dict[str, float]  # the state of `algorithm.advantage` after the finished steps
    learner: Learner  # the policy, sharded, and its optimizer
    sync_check: SyncCheck  # the log-probs of engine and trainer after a push
    evaluation: EvaluationContext
    fixed_partners: list[Partner]  # of `eval.partners`
    lock: TextIO | None  # on rank 0
    observers: list[Observer]  # of each finished step, in this order
    journal: Journal  # one of them, whose lines a checkpoint counts
    timed: Stopwatch  # the seconds of the step's stages
    first_step: int
    changed: dict[str, float] = field(default_factory=dict)  # numbers that this step alone has


@dataclass(frozen=True, slots=True)
class Batch:
    """This rank's samples of a step with their advantages, and what credit counted."""

    samples: list[Sample]
    stats: CreditStats


@dataclass(frozen=True, slots=True)
class Learnt:
    """The update's metrics over all ranks, why optimizer steps were skipped, and what the update
    saw of logged games."""

    metrics: dict[str, float]
    skipped: list[str]
    tokens: dict[str, TokenRecord]
