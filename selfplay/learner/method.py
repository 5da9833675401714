"""What a method adds to a training step: the hooks of `Method`, loss terms, trained modules.

A step calls its methods in the order of the settings (docs/your_method.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfplay.advantages.sample import Sample
from selfplay.chat.rendering import Rendering
from selfplay.config import Config
from selfplay.config.player_spec import Spec
from selfplay.config.plugins import NoOptions, methods_of, own_call
from selfplay.distributed import World, raise_on_all_ranks
from selfplay.engines.base import Completion, Request
from selfplay.errors import OwnFault, SettingsError
from selfplay.learner.batch import MicroBatch
from selfplay.rollout.driver import Rollout
from selfplay.rollout.episode import Episode

if TYPE_CHECKING:
    from selfplay.learner.learner import Learner

# A micro-batch's token losses [M] and metrics [M] by name.
Objective = Callable[["Learner", MicroBatch], tuple[Tensor, dict[str, Tensor]]]

# Plays this many further instances of the step over all ranks and returns this rank's games. Every
# rank must call.
More = Callable[[int], Rollout]

# Answers chats outside games, in order.
Ask = Callable[[Sequence[Request]], list[Completion]]


@dataclass(frozen=True, slots=True)
class LossTerm:
    """One term of an optimizer step's loss: samples, their objective, its weight.

    `name` is the loss's name in messages. The term's sum is divided by its number of trained
    tokens, or with `by_sample` of samples. Without `trains_policy` it leaves the policy unchanged.
    `faults` are the faults of custom code in the objective. They end the step after its last pass,
    because the passes involve the other ranks.
    """

    samples: Sequence[Sample]
    objective: Objective
    weight: float = 1.0
    name: str = ""
    by_sample: bool = False
    trains_policy: bool = True
    faults: list[OwnFault] = field(default_factory=list)


@dataclass(slots=True)
class Trained:
    """A module that a method trains along with the policy, and its optimizer. It is offloaded,
    clipped, stepped and saved like the policy; its parameters are already sharded."""

    module: nn.Module
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True, slots=True)
class Parts:
    """The inputs of a method: the run's settings, the learner with its ranks (`learner.world`),
    `load`, which returns another model with the policy's first weights, sharded like the policy,
    the run's exact texts, and `reader`, which answers chats with the model of a spec. `policy` is
    the policy's name and `seats` its seats, if there are several."""

    config: Config
    learner: Learner
    load: Callable[[], PreTrainedModel]
    rendering: Rendering | None = None
    reader: Callable[[Spec], Ask] | None = None
    policy: str = ""
    seats: Sequence[int] = ()


class Method:
    """A method: six hooks, which do nothing by default. Every rank calls each at the same point of
    a step, in the order below.

    `Options` is the dataclass of its settings; its `check(config)` may raise ValueError for other
    settings that do not fit. Its `more_instances` is the number of instances that the method may
    add to a step. `trained` are the modules that it trains, by their names in checkpoints and
    metrics; `kept` are tensors that it keeps beside them, sharded like the policy: they are
    offloaded and saved. One that `has_reference` gives the samples the column `reference`, the
    log-probs to which `algorithm.kl` holds the policy, and no reference is loaded for it.
    """

    Options: type = NoOptions
    name = ""  # in the settings
    has_reference = False

    def __init__(self, options: Any, parts: Parts) -> None:
        self.options, self.parts, self.trained = options, parts, dict[str, Trained]()
        self.kept = dict[str, Tensor]()

    @classmethod
    def ready(cls, options: Any, config: Config, *, ask: bool) -> None:
        """Raise SettingsError for what the method lacks on this machine, before a start writes
        anything. With `ask`, on the first rank, it may also ask a model."""

    def after_play(self, rollout: Rollout, more: More, *, config: Config) -> Rollout:
        """This rank's games that the step uses, including games of `more`; `rollout` has passed the
        earlier methods. `reward.function` is applied later (`with_rewards` applies it here).

        Every rank must request equally many further instances, in total at most `more_instances` of
        the settings; otherwise `more` raises OwnFault.
        """
        return rollout

    def samples(self, samples: list[Sample], episodes: Sequence[Episode]) -> list[Sample]:
        """The samples of this rank's games, with rewards, before they are compared in groups.

        A sample is compared with the samples of the same `group`. A sample that is left out is not
        trained on, but still counts in the statistics of its group.
        """
        return samples

    def prepare(
        self, samples: Sequence[Sample], *, step: int, config: Config
    ) -> tuple[Sequence[Sample], dict[str, float]]:
        """This rank's samples with advantages, perhaps with new columns or advantages, and metrics
        over all ranks; called before any weight changes. `config` is the step's."""
        return samples, {}

    def terms(
        self, terms: Sequence[LossTerm], minibatch: Sequence[Sample], *, step: int
    ) -> Sequence[LossTerm]:
        """The loss terms of an optimizer step: the given terms, with additions or removals.

        The first is the policy's loss on the samples of `minibatch`, unless an earlier method has
        removed it. Every rank must return the same number of terms, in the same order. A term's
        loss is divided by its own number of tokens over all ranks.
        """
        return terms

    def state(self) -> dict[str, Any]:
        """Its state in a checkpoint besides `trained`, as plain JSON values, equal on every rank.

        It is also called before a step, and written if the step fails: return copies of anything
        that a step changes.
        """
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from this state; {} in a new run.

        Called after `trained` and `kept` have been filled from the checkpoint: before the first
        step, and when a monitor sends the run back.
        """


def checked_samples(samples: Sequence[Sample]) -> Sequence[Sample]:
    """The samples that a hook gives. Raises OwnFault for one without a number per token."""
    for sample in samples:
        lists: dict[str, Sequence[float]] = {"mask": sample.mask, **sample.columns}
        lists["old_logprobs"] = sample.old_logprobs
        if sample.advantages:
            lists["advantages"] = sample.advantages
        for name, values in lists.items():
            if len(values) != len(sample.ids):
                raise OwnFault(
                    f"it must give a number of {name} per token, got {len(values)} for the "
                    f"{len(sample.ids)} tokens of sample {sample.name}"
                )
    return samples


def check_methods(config: Config, *, ask: bool, of_run: Config | None = None) -> None:
    """Ask each method of the settings whether it is `ready`. `of_run` are the settings of a run
    with several policies, of which `config` is one's: a method of its own cannot have the games,
    which all policies share."""
    for name, kind, options in methods_of(config):
        with own_call("methods", name):
            kind.ready(options, config, ask=ask)
        if of_run and name not in of_run.methods and kind.after_play is not Method.after_play:
            raise SettingsError(
                f"methods.{name} must be set for the run, not for one policy: its after_play "
                f"chooses the games of all; nearest is methods={{{name}: ...}}"
            )


def make_methods(parts: Parts) -> list[Method]:
    """The methods of the settings, in their order, each with its name there.

    Raises SettingsError for two methods with the same class name or the same name of a trained
    module, and OwnFault for a custom method that cannot be created.
    """
    methods = []
    for name, kind, options in methods_of(parts.config):
        with own_call("methods", name):
            methods.append(kind(options, parts))
        methods[-1].name = name
    names = [type(method).__name__ for method in methods]
    names += [name for method in methods for name in method.trained]
    for name in (name for i, name in enumerate(names) if name in names[:i]):
        raise SettingsError(f"methods must have different names, got {name} twice")
    return methods


def methods_of_games(config: Config, every: Sequence[Sequence[Method]]) -> list[Method]:
    """The methods whose `after_play` has a run's games, from those of `every` policy: each of the
    run's settings, as the first policy has it that has it."""
    found = {each.name: each for methods in reversed(every) for each in methods}
    return [found[name] for name in config.methods if name in found]


@contextmanager
def hook_call(method: Method, world: World) -> Iterator[None]:
    """Wraps a call of a hook: an error in a custom method becomes an OwnFault of one line on every
    rank. A hook that gathers must not fail on one rank only, or the others wait for it.
    """
    with raise_on_all_ranks(world), own_call("methods", method.name):
        yield
