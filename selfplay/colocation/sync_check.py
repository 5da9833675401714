"""Whether engine and trainer still say the same of the policy's turns, after each push.

Each push is compared bit for bit where it is made (`hand_over.deliver`), so what is looked for here
is what equal weights cannot show: a cache, a kernel or a buffer that went wrong. First a few turns
of each engine; if they are suspicious (`noise_floor` says when, and how often wrongly) more and
other ones; then a new push with a comparison of all weights, and a third comparison. The run ends
only if that one is suspicious, too, and its gap is above `engine.max_mismatch`.

Gaps in nats a token. Knows no games.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from pathlib import Path
from typing import Protocol

import torch
from torch.distributed.fsdp import FSDPModule

from selfplay.colocation.handover import deliver_again, tell
from selfplay.colocation.noise_floor import FEWEST, FIRST, MORE, NoiseFloor, turn_gap
from selfplay.config import Config
from selfplay.credit.sample import Sample
from selfplay.distributed import gather_objects
from selfplay.engines.base import Engine
from selfplay.learner.batch import micro_batches
from selfplay.learner.learner import Learner, batch_logprobs, even_out, is_filler
from selfplay.learner.mismatch import EngineDisagrees

# A turn: the ids up to its end, and a 1 for each that the policy sampled in it.
Turn = tuple[Sequence[int], Sequence[int]]
NUM_TURNS = FIRST + MORE + MORE


class Scores(Engine, Protocol):
    """An engine that scores texts while the trainer does, as `SGLangEngine` says."""

    def begin_scoring(self, texts: Sequence[Sequence[int]]) -> Callable[[], list[list[float]]]: ...


class SyncCheck:
    """The comparison after each push, with the noise floor it needs.

    It is off with the hf engine, which reads the policy's own parameters or a compared copy, and
    with `parallel.offload_parameters`, whose parameters wait on the host and cannot score. Every
    rank calls each method; `turns` are this rank's own, at best NUM_TURNS.
    """

    def __init__(self, learner: Learner, engine: Engine | None, *, config: Config) -> None:
        self._learner, self._engine, self._config = learner, engine, config
        self._off = config.engine.kind == "hf" or config.parallel.offload_parameters
        self._floor = NoiseFloor()
        self._turns: Sequence[Turn] = ()
        self._measured = False
        self.trouble: EngineDisagrees | None = None

    def listen(self, turns: Sequence[Turn]) -> None:
        """Take a step's turns, before any weight moves. The first ones measure the floor."""
        self._turns = turns
        if not self._off and not self._measured:
            self._measured = True
            self._learn(self._gaps(turns[:FEWEST]))

    def after_push(self, *, version: int) -> dict[str, float]:
        """Compare after the push of `version`; what ends the run is kept in `trouble`."""
        if self._off or self.trouble is not None:
            return {}
        turns = self._turns
        first = self._gaps(turns[:FIRST])
        if not first:
            return {}
        every = [gap for of_one in first.values() for gap in of_one]
        metrics = {"sync_check_mismatch": sum(every) / len(every)}
        more = self._gaps(turns[FIRST:][:MORE]) if self._floor.suspects(first, fewest=1) else {}
        if self._floor.suspects(more, fewest=MORE):
            with self.put_off():
                self._push_again(turns[-MORE:], version)
            return metrics | {"num_suspected": 1.0}
        self._learn(first)
        self._learn(more)
        return metrics | {"num_suspected": 0.0}

    def _push_again(self, turns: Sequence[Turn], version: int) -> None:
        """Raises EngineDisagrees where a new push mends nothing."""
        tell(
            "engine and trainer differ by more than noise: the weights are pushed again",
            self._learner,
        )
        deliver_again(self._learner, self._engine, version=version, config=self._config)
        gaps = self._gaps(turns)
        if not self._floor.suspects(gaps, fewest=MORE):
            self._learn(gaps)
            return
        worst = max(sum(of_one) / len(of_one) for of_one in gaps.values())
        bound = self._config.engine.max_mismatch
        if worst > bound:
            raise EngineDisagrees(
                f"with equal weights engine and trainer log-probs differ by {worst:.4f} nats a "
                f"token, above engine.max_mismatch, {bound:g}, and far above what they did before, at "
                f"most {self._floor.largest:.4f} a turn"
            )
        tell(f"with equal weights the noise has grown to {worst:.4f} nats a token", self._learner)
        self._floor.forget()
        self._learn(gaps)

    def _learn(self, gaps: dict[int, list[float]]) -> None:
        for of_one in gaps.values():
            self._floor.add(of_one)

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """An engine that disagrees in here ends the run in `hold`, after the step is written
        down."""
        try:
            yield
        except EngineDisagrees as error:
            self.trouble = self.trouble or error

    def hold(self, step: int) -> None:
        """End the run where it must; the state after `step` is saved. Raises EngineDisagrees."""
        if self.trouble is not None:
            raise EngineDisagrees(f"{self.trouble}; {goes_on(step)}")

    def _gaps(self, turns: Sequence[Turn]) -> dict[int, list[float]]:
        """The turns' gaps by the rank whose engine scored them, on every rank; both sides score at
        the same time."""
        world = self._learner.world
        mine = [
            Sample(f"{world.rank}/{place}", list(ids), [0, *said[1:]], [], [])
            for place, (ids, said) in enumerate(turns)
        ]
        answers = None
        if self._engine is not None:
            scorer: Scores = self._engine  # type: ignore[assignment]
            answers = scorer.begin_scoring([sample.ids for sample in mine])
        by_trainer = self._scored(mine)
        by_engine: dict[str, list[float]] = {}
        if answers is not None:
            for sample, logprobs in zip(mine, answers(), strict=True):
                by_engine[sample.name] = list(compress(logprobs, sample.mask[1:]))
        parts = gather_objects((by_engine, by_trainer), world)
        trainers = {name: logprobs for _, part in parts for name, logprobs in part.items()}
        return {
            rank: [turn_gap(logprobs, trainers[name]) for name, logprobs in part.items()]
            for rank, (part, _) in enumerate(parts)
            if part
        }

    def _scored(self, mine: Sequence[Sample]) -> dict[str, list[float]]:
        """The trainer's log-probs, at temperature 1, of what counts in this rank's share of all
        ranks' samples, by name."""
        learner, world = self._learner, self._learner.world
        everyone = [sample for part in gather_objects(mine, world) for sample in part]
        share = everyone[world.dp_rank :: world.dp_size]
        budget = self._config.optim.tokens_per_microbatch
        found: dict[str, list[float]] = {sample.name: [] for sample in share}
        for batch in even_out(micro_batches(share, budget=budget, device=world.device), world):
            with torch.no_grad():
                logprobs_M, _ = batch_logprobs(learner, learner.model, batch, temperature=1.0)
            if not is_filler(batch):
                for place, logprob in zip(
                    batch.sample_M.tolist(), logprobs_M.tolist(), strict=True
                ):
                    found[batch.names[place]].append(logprob)
        if isinstance(learner.model, FSDPModule):
            learner.model.reshard()  # without a backward pass nobody else drops the gathered copy
        return found


@contextmanager
def saved_first(save: Callable[[], Path], step: int) -> Iterator[None]:
    """An engine that disagrees in here, before a weight moved, ends the run, but `save` writes the
    state after `step` finished steps first."""
    try:
        yield
    except EngineDisagrees as error:
        save()
        raise EngineDisagrees(f"{error}; {goes_on(step)}") from error


def goes_on(step: int) -> str:
    """Where a restart begins."""
    return (
        f"the state after step {step} is saved, and the same command goes on with step {step + 1}"
    )
