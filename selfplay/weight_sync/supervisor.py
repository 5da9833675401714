"""The supervisor of the policy's engine: games are played and weights pushed through it.

Engine and trainer take turns on the GPU, so only the larger of the two has to fit:

    play → sleep → update → push weights (wake weights, push, compare, wake cache) → play

An engine that fails is killed and started again, and its work is repeated: unfinished games are
played again from their start, a push is sent again. The seeds of a game are the same; SGLang uses
them only with `engine.deterministic`, and else samples other turns. Every rank must call
each method, because the ranks meet in collectives and learn of a failure at the same point.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from dialop.shown import error_text
from selfplay.config import ChosenEngine
from selfplay.distributed import World, all_reduce_sum, barrier, raise_on_all_ranks
from selfplay.engines.base import Engine, GameRunner
from selfplay.errors import EngineDisagrees, EngineFault, EnginesFailed, RunEnds
from selfplay.learner.learner import Learner
from selfplay.model.lora import plain_weights
from selfplay.weight_sync.offload import Offload
from selfplay.weight_sync.push import compare, push

T = TypeVar("T")
MAX_FAILURES = 3  # in a row; the last of them ends the run
# Memory that must be free beside an engine's weights and cache: its workspace and a push's buckets.
SPARE_BYTES = 6 * 2**30


class EngineLost(RunEnds):
    """An engine failed too often in a row; every rank raises it at the same point."""


class EngineSupervisor:
    """Supervises an engine that keeps the weights of its folder.

    `engine` is None on a rank that shares another rank's. `runner` plays games, each time inside
    `retry`: a router over this engine and the partners' (`Partners.routed`), or the engine itself.
    """

    def __init__(
        self, engine: Engine | None, world: World, *, runner: GameRunner | None = None
    ) -> None:
        self.engine, self._world = engine, world
        self.runner: GameRunner | None = engine if runner is None else runner
        self._num_restarts = 0

    def retry(self, attempt: Callable[[], T]) -> T:
        """The result of `attempt`, which uses this rank's engine and no collective. If an engine
        fails, it is restarted, and every rank repeats the attempt. Raises EngineLost after the last
        failure in a row."""

        def on_all_ranks() -> T:
            with raise_on_all_ranks(self._world):
                return attempt()

        return _repeat(on_all_ranks, self._recover)

    def take_num_restarts(self) -> float:
        """Restarts of all ranks' engines since the last call."""
        num, self._num_restarts = self._num_restarts, 0
        return float(num)

    def _recover(self, failed: EnginesFailed, number: int) -> None:
        """Print what failed and restart this rank's engine if it failed. After the last failure in
        a row the engine is closed instead, which frees memory that saving may need."""
        world, last = self._world, number == MAX_FAILURES
        if world.rank == 0:
            end = "" if last else ": it is restarted"
            text = f"engine failure {number} of {MAX_FAILURES} in a row, {failed}{end}"
            print(text, file=sys.stderr, flush=True)
        self._num_restarts += 0 if last else len(failed.causes)
        if self.engine is None or world.rank not in failed.causes:
            return
        if last:
            self.engine.close()
            return
        if world.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()  # the engine's memory is a share of the free memory
        try:
            self.engine.restart()
        except EngineFault as error:  # the next call fails and counts as the next failure
            print(f"engine restart: {error_text(error)}", file=sys.stderr, flush=True)


class PolicySupervisor(EngineSupervisor):
    """Supervises the engine of the policy in training: it sleeps during the update and then gets
    the learner's weights."""

    def __init__(
        self,
        learner: Learner,
        engine: Engine | None,
        offload: Offload,
        *,
        config: ChosenEngine,
        runner: GameRunner | None = None,
    ) -> None:
        super().__init__(engine, learner.world, runner=runner)
        self._learner, self._offload, self._config = learner, offload, config
        self._version = 0  # of the last push

    def sleep_and_onload(self) -> None:
        """Put every engine to sleep, then onload what was offloaded, for an update or a save."""
        sleep_or_close(self.engine)
        barrier(self._world)
        self._offload.onload()

    def push_and_wake(self, version: int) -> None:
        """Push the learner's weights as `version`, compare some bit for bit, and wake the engine.

        A failed engine is restarted first. Raises EngineLost after the last failure in a row, with
        every engine asleep and nothing offloaded, and EngineDisagrees if the engine's weights still
        differ after two pushes.
        """
        self._version = version

        def push_and_compare() -> int:
            self._offload.offload_state()
            self._wake("weights")
            num_different = self._push(version, self._compared_names(version))
            if num_different:
                self.warn("the engine's weights differ from the trainer's: pushed again")
                num_different = self._push(version, [*self._shapes()])
            # Also after a difference: the engine is awake and the offload complete.
            self._offload.offload_parameters()
            self._wake("kv_cache")
            return num_different

        _check_equal(_repeat(push_and_compare, self._restart_asleep), version)

    def push_again(self, version: int) -> None:
        """Push and compare all weights; raises EngineDisagrees on every rank if any differs."""
        _check_equal(self._push(version, [*self._shapes()]), version)

    def warn(self, message: str) -> None:
        """Print a warning about the weight sync on rank 0."""
        if self._world.rank == 0:
            print(f"weight sync: {message}", file=sys.stderr, flush=True)

    def _wake(self, what: str) -> None:
        make_room(self._world.device, self._config.mem_fraction)
        with raise_on_all_ranks(self._world):
            if self.engine is not None:
                self.engine.wake(what)

    def _shapes(self) -> dict[str, torch.Size]:
        """The full shape of each parameter by its Hugging Face name."""
        return {
            name: weight.base.shape for name, weight in plain_weights(self._learner.model).items()
        }

    def _compared_names(self, version: int) -> list[str]:
        """Two parameters to compare after the push of `version`.

        One is a matrix, which detects every missed push: an AdamW step at 1e-6 moves 1 in 100
        elements of size 0.02 to the next bf16 number. Of a model with adapters it is one that has
        some. The other is each parameter in turn. Correctly pushed weights are equal bit for bit,
        so there are no false alarms.
        """
        weights = plain_weights(self._learner.model)
        matrices = [name for name, weight in weights.items() if weight.base.dim() > 1]
        trained = [name for name in matrices if weights[name].layer is not None] or matrices
        return sorted({trained[version % len(trained)], [*weights][version % len(weights)]})

    def _push(self, version: int, compared: Sequence[str]) -> int:
        """Push all weights, then compare the parameters of these names (`_num_different`)."""
        with raise_on_all_ranks(self._world):
            push(
                self._learner.model,
                self.engine,
                version=version,
                group=self._world.replica.group,
                dtype=push_dtype(self._learner, self._config),
            )
        return self._num_different(compared)

    def _num_different(self, names: Sequence[str]) -> int:
        """The number of elements of these parameters whose bits differ between the learner and any
        rank's engine. Those that an engine did not compare count as different."""
        with raise_on_all_ranks(self._world):
            compared = compare(
                self._learner.model,
                self.engine,
                names,
                group=self._world.replica.group,
                dtype=push_dtype(self._learner, self._config),
            )
        counts = [float(compared.num_elements), float(compared.num_different)]
        num_compared, num_different = map(int, all_reduce_sum(counts, self._world))
        shapes, num_copies = self._shapes(), self._config.processes * self._world.replica.num
        expected = num_copies * sum(shapes[name].numel() for name in names)
        if num_compared < expected:
            self.warn(
                f"the engine compared {num_compared} of {expected} elements of its weights; its "
                "loader for this model writes them in an unknown way"
            )
        return num_different + max(0, expected - num_compared)

    def _recover(self, failed: EnginesFailed, number: int) -> None:
        """A restarted engine gets the weights of the last push."""
        self._restart_asleep(failed, number)
        if number < MAX_FAILURES:
            self.push_and_wake(self._version)

    def _restart_asleep(self, failed: EnginesFailed, number: int) -> None:
        """Restart the failed engines; all engines sleep and nothing is offloaded afterwards."""
        super()._recover(failed, number)
        self.sleep_and_onload()


def sleep_or_close(engine: Engine | None) -> None:
    """Put the engine to sleep. If that fails, close it, which frees its memory too; the next push
    restarts it."""
    if engine is not None:
        try:
            engine.sleep()
        except EngineFault as fault:
            print(f"engine ended instead of put to sleep: {fault}", file=sys.stderr, flush=True)
            engine.close()


def push_dtype(learner: Learner, config: ChosenEngine) -> torch.dtype:
    """The dtype of the engine's weights: fp32 for the hf engine, the compute dtype for SGLang."""
    return torch.float32 if config.kind == "hf" else learner.compute_dtype


def make_room(device: torch.device, mem_fraction: float) -> None:
    """Empty the trainer's allocator cache if the engine needs the memory to wake.

    `mem_fraction` is the engine's share of the GPU. Keeping the allocator's cache saves the next
    update its allocations, and the engine wakes several times faster if no memory was freed just
    before (docs/gpu.md).
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if free < mem_fraction * total + SPARE_BYTES:
            torch.cuda.empty_cache()


def _repeat(attempt: Callable[[], T], recover: Callable[[EnginesFailed, int], None]) -> T:
    """The result of the first attempt in which no engine fails. `recover` gets each failure and its
    number, from 1. Raises EngineLost after the last in a row."""
    number = 0
    while True:
        try:
            return attempt()
        except EnginesFailed as failed:
            number += 1
            recover(failed, number)
            if number == MAX_FAILURES:
                raise EngineLost(
                    f"an engine failed {number} times in a row; last error, {failed}"
                ) from failed


def _check_equal(num_different: int, version: int) -> None:
    """Raise EngineDisagrees unless the compared weights are equal."""
    if num_different:
        raise EngineDisagrees(
            f"weight sync failed: after two pushes of version {version} {num_different} elements "
            "of the engine's weights differ from the trainer's or were not compared"
        )
