"""The run's engine beside the warm start: it starts while the teachers play and sleeps while the
learner imitates them.

A start takes a minute on a machine that has compiled no kernel, else 20 s, in which a GPU would do
nothing. The engine starts with random weights, before any learner, and then gets the imitated ones
by the same push as in a step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from selfplay.config import Config
from selfplay.config.player_spec import CHECKPOINT, parse_shares
from selfplay.distributed import World
from selfplay.engines.base import Engine
from selfplay.engines.kinds import engine_kind
from selfplay.learner.learner import Learner
from selfplay.model.hub import described_in
from selfplay.weight_sync.offload import Offload
from selfplay.weight_sync.start import choose_engine, load_engine
from selfplay.weight_sync.supervised import Supervised, SupervisedPolicy, sleep_or_close


def fits_beside(config: Config, world: World | None = None) -> bool:
    """Whether the engine of a run's only policy sleeps on the GPU during its warm start.

    An imitation beside a sleeping engine needs no more memory than an update beside it, unless it
    trains all weights of a model whose adapters self-play trains. The engines of frozen partners
    must start before it, because each engine takes a share of the free memory. Without `world` the
    run has GPUs.
    """
    partners = {spec.kind for spec, _ in parse_shares(config.rollout.partners)}
    return (
        engine_kind(config.engine.kind).starts_empty
        and (world is None or world.device.type == "cuda")
        and CHECKPOINT not in partners
        and (config.model.lora is None or config.warm_start.lora)
    )


@dataclass(slots=True)
class EngineBeside:
    """The engine of a run during its warm start: if it `starts` there, before its weights exist.
    Every rank must call each method.

    `cleanup` closes it. `check` is called while it has the imitated weights. `rewritten` and
    `notes` are those of `choose_engine`.
    """

    config: Config
    world: World
    cleanup: ExitStack
    check: Callable[[Supervised], None]
    rewritten: str = ""
    notes: Path | None = None
    starts: bool = True
    engine: Engine | None = field(init=False, default=None)

    def start(self, own: Path) -> None:
        """Start it in the shape of the model in `own`, and put it to sleep. Raises EngineLost."""
        if self.starts:
            shape = described_in(own)
            chosen = self._choose(shape)
            self.engine = load_engine(
                chosen, shape, self.world, cleanup=self.cleanup, load_format="dummy"
            )
            self.config = chosen
            sleep_or_close(self.engine)

    def fill(self, learner: Learner) -> None:
        """Push the weights of this learner, call `check`, and put it to sleep again. A failed
        engine is restarted; raises as `SupervisedPolicy.push`."""
        if self.engine is not None:
            offload = Offload(learner, self.config.parallel)
            policy = SupervisedPolicy(learner, self.engine, offload)
            policy.push(0)
            self.check(policy)
            sleep_or_close(self.engine)

    def chosen(self, weights: Path) -> Config:
        """The settings with the engine's chosen: those that it has started with, or for these
        weights."""
        return self.config if self.engine is not None else self._choose(weights)

    def _choose(self, weights: Path) -> Config:
        return choose_engine(
            self.config, weights, self.world, rewritten=self.rewritten, notes=self.notes
        )[0]
