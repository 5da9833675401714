"""The parts of a run, and the values passed from verb to verb of a step: `Batch`, `UpdateResult`.

Everything belongs to this rank unless noted otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from transformers import PreTrainedTokenizerBase

from selfplay.advantages.advantages import CreditStats
from selfplay.advantages.sample import Sample
from selfplay.chat.rendering import Rendering
from selfplay.config import Config
from selfplay.config.plugins import plain_state
from selfplay.data.stream import TrainStream
from selfplay.distributed import World
from selfplay.errors import SettingsError
from selfplay.evaluation.evaluate import EvaluationContext
from selfplay.learner.learner import Learner
from selfplay.learner.method import Method
from selfplay.metrics.observer import Observer, TokenRecord
from selfplay.metrics.step_log import Journal, Stopwatch
from selfplay.partners.opponents import Opponents, opponents_state, restore_opponents
from selfplay.partners.partners import Partners
from selfplay.rollout.seating import Cast, Partner
from selfplay.weight_sync.supervised import SupervisedPolicy
from selfplay.weight_sync.sync_check import SyncCheck


@dataclass(frozen=True, slots=True, repr=False)
class Policy:
    """A policy in training, with its own parts of a run. A step goes through `Run.policies` in
    order. `name` marks its samples, metrics and files: "" for a single policy."""

    name: str
    config: Config
    tokenizer: PreTrainedTokenizerBase
    rendering: Rendering  # texts as exact tokens
    engine: SupervisedPolicy  # plays games, takes weights; restarts after failures
    baselines: dict[str, float]  # the state of `algorithm.advantage` after the finished steps
    learner: Learner  # the policy, sharded, and its optimizer
    sync_check: SyncCheck  # the log-probs of engine and trainer after a push
    partners: Partners  # who else plays its seats or with it, and its pool
    opponents: Opponents  # chooses the partners of a step
    trains: Callable[[int], bool]  # whether it does after so many steps, or rests
    meets: Callable[[int], bool]  # whether its partners play, since another policy trains with them

    def state(self) -> dict[str, Any]:
        """Its part of the trainer state besides the learner's, as plain values. Raises OwnFault for
        an invalid state of custom code."""
        methods = self.learner.methods
        states = {type(m).__name__: plain_state("methods", m.name, m.state) for m in methods}
        return {
            "baselines": dict(self.baselines),
            "methods": {name: state for name, state in states.items() if state},
            "sync_check": self.sync_check.state(),
            "partners": self.partners.state(),
            "opponents": opponents_state(self.opponents),
            "reference": self.learner.reference_digest,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`, whose learner is restored. The noise floor stays."""
        for method in self.learner.methods:
            method.restore(state["methods"].get(type(method).__name__, {}))
        self.baselines.clear()
        self.baselines.update(state["baselines"])
        self.partners.restore(state["partners"], self.learner, self.tokenizer)
        restore_opponents(self.opponents, state["opponents"])


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """The parts of a run, made by `setup.set_up`, in the order in which a step uses them."""

    config: Config
    folder: Path
    world: World  # the ranks: processes, their device, the engine's replica
    stream: TrainStream  # the instances of each step
    policies: list[Policy]  # in training; the first one's engine runs the games
    cast: Cast  # the policy of each seat
    evaluation: EvaluationContext
    fixed_partners: list[Partner]  # of `eval.partners`
    lock: TextIO | None  # on rank 0
    observers: list[Observer]  # of each finished step, in this order
    journal: Journal  # one of the observers, whose lines a checkpoint counts
    timed: Stopwatch  # duration of the step's stages
    first_step: int
    methods: Sequence[Method]  # the run's, whose `after_play` has the games of all policies
    changed: dict[str, float] = field(default_factory=dict)  # metrics of this step only
    overrides: dict[str, str] = field(default_factory=dict)  # settings of this step only

    @property
    def learner(self) -> Learner:
        """The learner of the only policy. Raises SettingsError with several."""
        return self._only("learner").learner

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the only policy. Raises SettingsError with several."""
        return self._only("tokenizer").tokenizer

    def _only(self, part: str) -> Policy:
        """The policy of a run with one; with several each has a part of this name of its own, and
        none of them stands for all."""
        if len(self.policies) == 1:
            return self.policies[0]
        of = f"that of a run's only policy, this run has {', '.join(p.name for p in self.policies)}"
        raise SettingsError(f"parts.{part} is {of}; nearest: parts.policies[0].{part}")


@dataclass(frozen=True, slots=True)
class Batch:
    """This rank's samples of a step with their advantages, by the name of the policy that sampled
    them, and the statistics of credit assignment."""

    samples: dict[str, list[Sample]]
    stats: CreditStats


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The update's metrics over all ranks, why optimizer steps were skipped, the token records of
    logged games, and each sample's mean advantage by name over all ranks."""

    metrics: dict[str, float] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    tokens: dict[str, TokenRecord] = field(default_factory=dict)
    advantages: dict[str, float] = field(default_factory=dict)
