"""The engine as a run uses it: it answers, or it ends the run on every rank.

Engine and trainer take turns on the GPU, so only the larger of the two has to fit:

    play → sleep → update → push weights (wake weights, load, compare, wake cache) → play

An engine that fails is killed and restarted, and its work is repeated: unfinished games are played
again from their start, a push is sent again. The seeds of a game are the same; SGLang uses them
only with `engine.deterministic`, and otherwise samples other turns. Every rank must call each
method, because the ranks meet in collectives and learn about a failure at the same point.

In games of several policies only the engines that were lost are restarted, and then each policy's
last weights are pushed to its own.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from dialop.shown import error_text
from selfplay.distributed import World, all_reduce_sum, barrier, raise_on_all_ranks
from selfplay.engines.base import (
    Engine,
    GameCoroutine,
    GameRunner,
    Generate,
    Sampling,
)
from selfplay.engines.weights import Weights
from selfplay.errors import EngineDisagrees, EngineFault, EngineLost, EnginesFailed
from selfplay.learner.learner import Learner
from selfplay.model.lora import plain_weights
from selfplay.weight_sync.offload import Offload

T = TypeVar("T")
MAX_FAILURES = 3  # in a row; the last of them ends the run


class Supervised(GameRunner):
    """An engine that keeps the weights of its folder and is restarted if it fails.

    `runner` plays the games: a router over this engine and the partners' engines
    (`Partners.routed`), or the engine itself. A caller never sees a failure: this runner answers,
    or it raises EngineLost on every rank. Each attempt of `run_games` is a rollout.
    """

    name = ""  # of the policy, if the run has several
    beside: Sequence[Supervised] = ()  # the other policies, whose engines answer in its games

    def __init__(self, engine: Engine, world: World, *, runner: GameRunner | None = None) -> None:
        """`engine` is this rank's, or its part of another rank's."""
        self.engine, self._world = engine, world
        self._runner: GameRunner = runner or engine
        self._num_restarts = 0

    def run_games(
        self, games: Iterable[GameCoroutine], sampling: Sampling, partners: Generate | None = None
    ) -> list[Any]:
        """Run one coroutine per game; results in order. If any rank's engine fails, all ranks run
        their games again, so a game that has ended must return at once. Raises EngineLost after the
        last failure in a row."""
        games, number = list(games), 0
        while True:
            try:
                with raise_on_all_ranks(self._world), self._runner.rollout():
                    return self._runner.run_games(games, sampling, partners) if games else []
            except EnginesFailed as failed:
                number += 1
                self._restart(failed, number, self.beside)
                self._load_last()

    def score(
        self, texts: Sequence[Sequence[int]], *, temperature: float = 1.0
    ) -> Callable[[], list[list[float]]]:
        """As `Engine.score`, without scores if the engine fails; the next rollout restarts it. This
        is the only method that no other rank waits for."""
        wait = _or_none(partial(self.engine.score, texts, temperature=temperature))
        return list if wait is None else lambda: _or_none(wait) or []

    def take_num_restarts(self) -> float:
        """The number of restarts of all ranks' engines since the last call."""
        num, self._num_restarts = self._num_restarts, 0
        return float(num)

    def _restart(
        self, failed: EnginesFailed, number: int, beside: Sequence[Supervised] = ()
    ) -> None:
        """Print what failed; if this rank's engines did, restart the lost ones among its own and
        those `beside` it; if none is lost, the one that failed a request, else all. After the last
        failure in a row, close them instead, which frees memory that saving may need, and raise
        EngineLost."""
        world, last, every = self._world, number == MAX_FAILURES, (self, *beside)
        failing: Sequence[Supervised] = ()
        if world.rank in failed.causes:
            model = getattr(failed.__cause__, "model", None)
            asked = [each for each in every if model == ("" if each is self else each.name)]
            failing = [each for each in every if each.engine.lost] or asked or every
        # Only a rank itself knows which of its engines are lost.
        nums = all_reduce_sum([float(each in failing) for each in every], world)
        if world.rank == 0:
            names = ", ".join(each.name for each, num in zip(every, nums, strict=True) if num)
            end = "" if last else f"; restarting{names and f' the engine of {names}'}"
            text = f"engine failure {number} of {MAX_FAILURES} in a row, {failed}{end}"
            print(text, file=sys.stderr, flush=True)
        for each, num in zip(every, nums, strict=True):
            each._num_restarts += 0 if last else int(num)
        for each in failing:
            if last:
                each.engine.close()
            else:
                each._restart_own()
        self.sleep(every)
        if last:
            raise EngineLost(f"an engine failed {number} times in a row; last error, {failed}")

    def _restart_own(self) -> None:
        """Restart this rank's engine, after freeing memory that the trainer only caches."""
        if self._world.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()  # the engine's memory is a share of the free memory
        try:
            self.engine.restart()
        except EngineFault as error:  # the next call fails and counts as the next failure
            print(f"engine restart: {error_text(error)}", file=sys.stderr, flush=True)

    def sleep(self, every: Sequence[Supervised] = ()) -> None:
        """Does nothing: this engine shares its GPU with no trainer."""

    def _load_last(self) -> None:
        """Does nothing: a restarted engine has its folder's weights."""


class SupervisedPolicy(Supervised):
    """The engine of the policy in training: it sleeps during the update and then gets the
    learner's weights."""

    beside: Sequence[SupervisedPolicy]

    def __init__(
        self,
        learner: Learner,
        engine: Engine,
        offload: Offload,
        *,
        runner: GameRunner | None = None,
        name: str = "",
        beside: Sequence[SupervisedPolicy] = (),
    ) -> None:
        """The engine sleeps and holds no weights, or the learner's first. `offload` moves the parts
        selected by `parallel.offload` to the host during play, and back before an update. With
        several policies `name` is its own, and `beside` are the others that `runner` asks."""
        super().__init__(engine, learner.world, runner=runner)
        self._learner, self._offload = learner, offload
        self.name, self.beside = name, beside
        self._version = 0  # of the last push

    def sleep(self, every: Sequence[Supervised] = ()) -> None:
        """Put every engine of its games to sleep, or those of `every`, then onload everything of
        this policy, for its update or a save."""
        for each in every or (self, *self.beside):
            sleep_or_close(each.engine)
        barrier(self._world)
        self._offload.onload()

    def onload(self) -> None:
        """Onload everything of this policy, while the engines sleep.

        Before its update, a checkpoint or an export; `sleep` has done it for the first policy.
        """
        self._offload.onload()

    def make_way(self) -> None:
        """Free the memory that the learner needs only in an update, if it may be offloaded."""
        self._offload.offload_state()

    def push(self, version: int) -> None:
        """Wake the engine with the learner's weights as `version`, and compare some bit for bit.

        A failed engine is restarted first. Raises EngineLost after the last failure in a row, with
        every engine asleep and nothing offloaded, and EngineDisagrees if the engine's weights still
        differ after two pushes.
        """
        self._version, number = version, 0
        while True:
            try:
                num_different = self._wake_with_weights(version)
                break
            except EnginesFailed as failed:
                number += 1
                self._restart(failed, number)
        _check_equal(num_different, version)

    def push_again(self, version: int) -> bool:
        """Push and compare all weights. False if an engine failed and was restarted with them.
        Raises EngineDisagrees on every rank if any differs."""
        try:
            num_different = self._load_and_compare(version, None)
        except EnginesFailed:
            self.push(version)
            return False
        _check_equal(num_different, version)
        return True

    def warn(self, message: str) -> None:
        """Print a warning about the weight sync on rank 0."""
        if self._world.rank == 0:
            print(f"weight sync: {message}", file=sys.stderr, flush=True)

    def _load_last(self) -> None:
        """Wake all ranks' engines with the last weights of each policy, one after the other, so
        that only one policy's optimizer takes memory at a time."""
        for each in (self, *self.beside):
            each._offload.onload()
            each.push(each._version)

    def _wake_with_weights(self, version: int) -> int:
        """One attempt of `push` to a sleeping engine; returns how many elements still differ. Even
        then the engine is awake and the offload complete."""
        self._offload.offload_state()
        self._wake("weights")
        num_different = self._load_and_compare(version, compared_names(self._learner, version))
        if num_different:
            self.warn("the engine's weights differ from the trainer's: pushed again")
            num_different = self._load_and_compare(version, None)
        self._offload.offload_parameters()
        self._wake("kv_cache")
        return num_different

    def _wake(self, what: str) -> None:
        """Wake every rank's engine. Raises EnginesFailed."""
        with raise_on_all_ranks(self._world):
            self.engine.wake(what)

    def _load_and_compare(self, version: int, names: Collection[str] | None) -> int:
        """Push all weights, then compare the ones with these names (None: all). Returns how many of
        their elements differ in any rank's engine or were not compared."""
        model, policy = self._learner.model, self._learner.policy
        weights = Weights(model, self.engine.dtype, policy=policy)
        with raise_on_all_ranks(self._world), weights.all_taken():
            self.engine.load(weights, version)
        weights = Weights(model, self.engine.dtype, names=names, policy=policy)
        with raise_on_all_ranks(self._world), weights.all_taken():
            own = self.engine.compare(weights)
        counts: list[float] = [own.num_elements, own.num_different, self.engine.num_copies]
        num_compared, num_different, num_copies = map(int, all_reduce_sum(counts, self._world))
        expected = num_copies * weights.num_elements
        if num_compared < expected:
            self.warn(
                f"the engine compared {num_compared} of {expected} elements of its weights; its "
                "loader for this model writes the others in an unknown way"
            )
        return num_different + max(0, expected - num_compared)


def compared_names(learner: Learner, version: int) -> set[str]:
    """Two parameters to compare after the push of `version`.

    One is a matrix, which detects every missed push: an AdamW step at 1e-6 moves 1 in 100 elements
    of size 0.02 to the next bf16 number. In a model with adapters it is a matrix that has some. The
    other cycles through all parameters. Correctly pushed weights are equal bit for bit, so there
    are no false alarms.
    """
    weights = plain_weights(learner.model, learner.policy)
    matrices = [name for name, weight in weights.items() if weight.base.dim() > 1]
    trained = [name for name in matrices if weights[name].layer is not None] or matrices
    return {trained[version % len(trained)], [*weights][version % len(weights)]}


def sleep_or_close(engine: Engine) -> None:
    """Put the engine to sleep. If that fails, close it, which also frees its memory; the next push
    restarts it."""
    try:
        engine.sleep()
    except EngineFault as fault:
        print(f"engine closed, because it cannot sleep: {fault}", file=sys.stderr, flush=True)
        engine.close()


def _or_none(score: Callable[[], T]) -> T | None:
    """The result of `score`; None, with a printed line, if the engine fails."""
    try:
        return score()
    except EngineFault as fault:
        print(f"no scores: {fault}", file=sys.stderr, flush=True)
        return None


def _check_equal(num_different: int, version: int) -> None:
    """Raise EngineDisagrees unless the compared weights are equal."""
    if num_different:
        raise EngineDisagrees(
            f"weight sync failed: after two pushes of version {version} {num_different} elements "
            "of the engine's weights differ from the trainer's or were not compared"
        )
