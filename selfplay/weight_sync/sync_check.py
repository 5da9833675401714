"""The sync check: compares engine and trainer log-probs of the policy's turns after each push.

`handover.deliver` compares the weights of each push bit for bit. This check finds what equal
weights cannot show: a stale cache, a wrong kernel, a wrong buffer. It scores a few turns of each
engine. If they are suspicious (`noise_floor` defines this and its error rate), it scores more,
other turns. If these are suspicious too, it pushes again, compares all weights and scores a third
set. The run ends only if that set is suspicious and its mismatch is above `engine.max_mismatch`.

Log-prob mismatches in nats a token. Knows no games.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any, Protocol

import torch
from torch.distributed.fsdp import FSDPModule

from selfplay.config import EngineConfig
from selfplay.credit.sample import Sample
from selfplay.distributed import gather_objects
from selfplay.engines.base import Engine
from selfplay.errors import EngineFault
from selfplay.learner.batch import is_filler, micro_batches, split
from selfplay.learner.learner import Learner, batch_logprobs, even_out
from selfplay.learner.mismatch import EngineDisagrees
from selfplay.metrics.ending import Ending
from selfplay.weight_sync.faults import EnginesFailed
from selfplay.weight_sync.handover import deliver_again, warn
from selfplay.weight_sync.noise_floor import FEWEST, FIRST, MORE, NoiseFloor, turn_mismatch
from selfplay.weight_sync.supervisor import Restarts

# A turn: all ids up to its end, and a mask that is 1 where the policy sampled the id in this turn.
Turn = tuple[Sequence[int], Sequence[int]]


class ScoringEngine(Engine, Protocol):
    """An engine that can score texts while the trainer works, see `SGLangEngine`."""

    def begin_scoring(self, texts: Sequence[Sequence[int]]) -> Callable[[], list[list[float]]]: ...


class SyncCheck:
    """The comparison after each push, with its noise floor.

    It is off with the hf engine, whose parameters are the policy's own or a copy that is compared
    bit for bit, and with `offloaded` parameters, which cannot score. `token_budget` is that of a
    micro-batch. Every rank must call each method. `turns` are this rank's, at most `num_turns`.
    Each of an engine's processes scores its own turns and is compared like an engine.
    """

    def __init__(
        self,
        learner: Learner,
        engine: Engine | None,
        restarts: Restarts,
        ending: Ending,
        *,
        config: EngineConfig,
        token_budget: int,
        offloaded: bool,
    ) -> None:
        self._restarts, self._ending = restarts, ending
        self._learner, self._engine, self._config = learner, engine, config
        self._token_budget, self._off = token_budget, config.kind == "hf" or offloaded
        self._num_processes = config.processes
        self.num_turns = (FIRST + MORE + MORE) * self._num_processes
        self._floor = NoiseFloor()
        self._turns: Sequence[Turn] = ()
        self._healthy = False  # whether a comparison after a push was

    @property
    def bound(self) -> float:
        """The largest accepted mean mismatch of a rollout, in nats per token: the setting, or the
        noise floor's bound if that is larger and a comparison has been healthy."""
        return max(self._config.max_mismatch, self._floor.bound if self._healthy else 0.0)

    def state(self) -> dict[str, Any]:
        """The part of the trainer state that `restore` takes, as plain values."""
        return {"floor": self._floor.mismatches, "healthy": self._healthy}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._floor.add(state.get("floor", []))
        self._healthy = bool(state.get("healthy", False))

    def before_update(self, turns: Sequence[Turn]) -> None:
        """Keep a step's turns before the update. The first call of a run measures the noise
        floor."""
        self._turns = turns
        if not self._off and not self._floor.mismatches:
            self._add_to_floor(self._mismatches(turns[:FEWEST]))

    def after_push(self, *, version: int) -> dict[str, float]:
        """Compare after the push of `version`; `ending` keeps an error that must end the run.

        An engine that fails to score is left out; the next rollout restarts it.
        """
        if self._off or self._ending.error is not None:
            return {}
        turns, num = self._turns, self._num_processes
        first = self._mismatches(turns[: FIRST * num])
        if not first:
            return {}
        of_all = [mismatch for of_engine in first.values() for mismatch in of_engine]
        metrics = {"sync_check_mismatch": sum(of_all) / len(of_all)}
        suspected = self._floor.suspects(first, fewest=1)
        second = self._mismatches(turns[FIRST * num :][: MORE * num]) if suspected else {}
        if self._floor.suspects(second, fewest=MORE):
            with self._ending.deferred():
                try:
                    self._push_again(turns[-MORE * num :], version)
                except EnginesFailed:
                    self._restarts.push(version)
            return metrics | {"num_suspected": 1.0}
        self._add_to_floor(first)
        self._add_to_floor(second)
        self._healthy = True
        return metrics | {"num_suspected": 0.0}

    def _push_again(self, turns: Sequence[Turn], version: int) -> None:
        """Push and compare again. Raises EngineDisagrees if the mismatch stays."""
        warn("log-prob mismatch above the noise floor: weights are pushed again", self._learner)
        deliver_again(self._learner, self._engine, version=version, config=self._config)
        third = self._mismatches(turns)
        if not self._floor.suspects(third, fewest=MORE):
            self._add_to_floor(third)
            return
        worst = max(sum(of_engine) / len(of_engine) for of_engine in third.values())
        bound = self._config.max_mismatch
        if worst > bound:
            raise EngineDisagrees(
                f"sync check failed: with equal weights the log-prob mismatch is {worst:.4f} nats "
                f"a token, above engine.max_mismatch, {bound:g}, and above the noise floor, whose "
                f"largest turn has {self._floor.largest:.4f}"
            )
        warn(f"the noise floor has risen to {worst:.4f} nats a token", self._learner)
        self._floor.forget()
        self._add_to_floor(third)

    def _add_to_floor(self, mismatches: dict[int, list[float]]) -> None:
        for of_engine in mismatches.values():
            self._floor.add(of_engine)

    def _mismatches(self, turns: Sequence[Turn]) -> dict[int, list[float]]:
        """The turns' mismatches by the process that scored them; processes are numbered over all
        ranks' engines. Equal on every rank. Engine and trainer score at the same time."""
        world = self._learner.world
        samples = [
            Sample(f"{world.rank}/{place}", list(ids), [0, *mask[1:]], [], [])
            for place, (ids, mask) in enumerate(turns)
        ]
        await_scores = None
        with self._without_failed():
            if self._engine is not None:
                scorer: ScoringEngine = self._engine  # type: ignore[assignment]
                await_scores = scorer.begin_scoring([sample.ids for sample in samples])
        by_trainer = self._trainer_logprobs(samples)
        by_engine: dict[str, list[float]] = {}
        with self._without_failed():
            if await_scores is not None:
                for sample, logprobs in zip(samples, await_scores(), strict=True):
                    by_engine[sample.name] = list(compress(logprobs, sample.mask[1:]))
        parts = gather_objects((by_engine, by_trainer), world)
        trainers = {name: logprobs for _, part in parts for name, logprobs in part.items()}
        mismatches: dict[int, list[float]] = defaultdict(list)
        for rank, (part, _) in enumerate(parts):
            for place, (name, logprobs) in enumerate(part.items()):
                process = rank * self._num_processes + place % self._num_processes
                mismatches[process].append(turn_mismatch(logprobs, trainers[name]))
        return mismatches

    @contextmanager
    def _without_failed(self) -> Iterator[None]:
        """Go on without the scores of an engine that fails; the other ranks wait in a gather."""
        try:
            yield
        except EngineFault as fault:
            print(f"sync check: no scores: {fault}", file=sys.stderr, flush=True)

    def _trainer_logprobs(self, samples: Sequence[Sample]) -> dict[str, list[float]]:
        """The trainer's log-probs of the masked tokens at temperature 1, by sample name, for this
        data-parallel rank's share of all ranks' samples."""
        learner, world = self._learner, self._learner.world
        everyone = [sample for part in gather_objects(samples, world) for sample in part]
        share = everyone[world.dp_rank :: world.dp_size]
        by_name: dict[str, list[float]] = {sample.name: [] for sample in share}
        plan = even_out(split(share, budget=self._token_budget), world)
        for batch in micro_batches(share, plan, device=world.device):
            with torch.no_grad():
                logprobs_M, _ = batch_logprobs(learner, learner.model, batch, temperature=1.0)
            if not is_filler(batch):
                for place, logprob in zip(
                    batch.sample_M.tolist(), logprobs_M.tolist(), strict=True
                ):
                    by_name[batch.names[place]].append(logprob)
        if isinstance(learner.model, FSDPModule):
            learner.model.reshard()  # no backward pass follows to free the gathered copy
        return by_name
