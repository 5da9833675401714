"""The sync check: compares engine and trainer log-probs of the policy's turns after each push.

The bits of the weights are compared with each push. This check finds faults that equal weights do
not exclude: a stale cache, a wrong kernel, a wrong buffer. It scores a few turns of each engine. If
they are suspicious, it scores other turns, more of them. If these are suspicious too, it pushes
again, compares all weights and scores a third set. The run ends only if that set is suspicious and
its mismatch is above `engine.max_mismatch` and the start check's bound.

**What is compared.** Engine and trainer score the same sampled turns after their true prefixes. A
turn's mismatch is the mean of |engine - trainer| over the tokens that the policy sampled, in nats.
In bf16 the difference of a token is noise with a heavy tail, larger for improbable tokens. No bound
in nats fits all models: a healthy run's mismatch lies anywhere from 1e-6 (fp32) to 0.03 (bf16).

**The noise floor** is the mismatches of the latest `WINDOW_TURNS` turns that were scored with equal
weights. It is first measured in the first step, between play and update, and every healthy
comparison updates it. Checkpoints hold it, so a resumed run has the bounds of an uninterrupted one.

**The test.** n new turns of one engine are suspicious if at least three quarters of them each lie
above `FACTOR` times the largest mismatch of the floor. A NaN lies above everything.

**How often the test is wrong.** With equal weights, new turns and the floor's are draws from one
distribution, so every order of their mismatches is equally likely, whatever the distribution and
its tail. If at least m of n new turns lie above all N of the floor, then the m largest of the N + n
are new, which has a probability of at most C(n, m) / C(N + n, m). FACTOR only lowers it.

| comparison | n | m | N = 32 | N = 64 |
|---|---|---|---|---|
| first, each step | 4 | 3 | 5.6e-4 | 8.0e-5 |
| second, other turns | 16 | 12 | 2.6e-8 | 2.8e-11 |

The first comparison costs little and only decides whether the second is needed. The second alone
bounds the rate at which equal weights are suspected: below 2.6e-8 per step and engine, below 1e-5
per step with up to 380 engines. A run ends only after a third comparison, which follows a new push.

**Limits.** The noise changes with the policy. The floor adapts over WINDOW_TURNS turns, and FACTOR
covers the change in one step. Noise that grows by more than FACTOR in one step is suspected
although the weights are equal. The weights are then compared bit for bit, and the floor is measured
again.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import compress
from typing import Any

from selfplay.advantages.sample import Sample
from selfplay.config import Config
from selfplay.distributed import gather_objects
from selfplay.errors import EngineDisagrees
from selfplay.learner.learner import Learner, batch_logprobs
from selfplay.learner.rescore import token_values
from selfplay.weight_sync.supervised import SupervisedPolicy

WINDOW_TURNS = 64
MIN_TURNS = 32  # turns that the noise floor needs before use
FIRST_TURNS = 4  # turns of each engine in the first comparison
RECHECK_TURNS = 16  # in each later one
FACTOR = 2.0

# A turn: all ids up to its end, and a mask that is 1 where the policy sampled the id in this turn.
ScoredTurn = tuple[Sequence[int], Sequence[int]]


class SyncCheck:
    """The comparison after each push, with its noise floor.

    It is off with the hf engine, whose parameters are the policy's own or a copy that is compared
    bit for bit, and with offloaded parameters, which cannot score. `start_bound` is the bound from
    the noise that the start check measured. `config` is the policy's, with the chosen engine. Every
    rank must call each method. `turns` are this rank's, at most `num_turns`. Each process of an
    engine scores its own turns and is compared like an engine.
    """

    def __init__(
        self, learner: Learner, engine: SupervisedPolicy, config: Config, *, start_bound: float
    ) -> None:
        self._learner, self._engine, self._optim = learner, engine, config.optim
        self._exact = bool(config.engine.kernels)
        self._least = 0.0 if self._exact else max(config.engine.max_mismatch, start_bound)
        self._off = config.parallel.offload == "all" or not engine.engine.scores
        self._num_processes = config.engine.copies
        self.num_turns = (FIRST_TURNS + RECHECK_TURNS + RECHECK_TURNS) * self._num_processes
        self._floor = NoiseFloor()
        self._turns: Sequence[ScoredTurn] = ()
        self._healthy = False  # whether a comparison after a push was

    @property
    def bound(self) -> float:
        """The largest accepted mean mismatch of a rollout, in nats per token: the maximum of the
        setting, the start check's bound and, after the first healthy comparison, the noise floor's
        bound. 0 with the engine's `kernels`."""
        if self._exact:
            return 0.0
        return max(self._least, self._floor.bound if self._healthy else 0.0)

    def state(self) -> dict[str, Any]:
        """The part of the trainer state that `restore` takes, as plain values."""
        return {"floor": list(self._floor.mismatches), "healthy": self._healthy}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the noise floor of `state()`."""
        self._floor.add(state.get("floor", []))
        self._healthy = bool(state.get("healthy", False))

    def keep_turns(self, turns: Sequence[ScoredTurn]) -> None:
        """Keep a step's turns, which `after_push` scores with the new weights. Engine and trainer
        still have equal weights: measure the noise floor on them if there is none."""
        self._turns = turns
        if not self._off and not self._floor.mismatches:
            self._add_to_floor(self._mismatches(self._turns[:MIN_TURNS]))

    def after_push(self, *, version: int) -> dict[str, float]:
        """Compare after the push of `version`. Raises EngineDisagrees for a mismatch that stays.

        An engine that fails to score is left out; the next rollout restarts it.
        """
        if self._off:
            return {}
        turns, num = self._turns, self._num_processes
        first = self._mismatches(turns[: FIRST_TURNS * num])
        if not first:
            return {}
        of_all = [mismatch for of_engine in first.values() for mismatch in of_engine]
        metrics = {"sync_check_mismatch": sum(of_all) / len(of_all)}
        suspected = self._floor.suspects(first, fewest=1)
        second = (
            self._mismatches(turns[FIRST_TURNS * num :][: RECHECK_TURNS * num]) if suspected else {}
        )
        if self._floor.suspects(second, fewest=RECHECK_TURNS):
            self._push_again(turns[-RECHECK_TURNS * num :], version)
            return metrics | {"num_suspected": 1.0}
        self._add_to_floor(first)
        self._add_to_floor(second)
        self._healthy = True
        return metrics | {"num_suspected": 0.0}

    def _push_again(self, turns: Sequence[ScoredTurn], version: int) -> None:
        """Push and compare again. Raises EngineDisagrees if the mismatch stays."""
        self._engine.warn("log-prob mismatch above the noise floor: weights are pushed again")
        if not self._engine.push_again(version):
            return
        third = self._mismatches(turns)
        if not self._floor.suspects(third, fewest=RECHECK_TURNS):
            self._add_to_floor(third)
            return
        worst = max(sum(of_engine) / len(of_engine) for of_engine in third.values())
        if worst > self._least:
            raise EngineDisagrees(
                f"sync check failed: with equal weights the log-prob mismatch is {worst:.4f} nats "
                f"per token, above {self._least:.4g}, the larger of engine.max_mismatch and the "
                "start check's bound, and above the noise floor, whose largest turn has "
                f"{self._floor.largest:.4f}"
            )
        self._engine.warn(f"the noise floor has risen to {worst:.4f} nats per token")
        self._floor.mismatches.clear()
        self._add_to_floor(third)

    def _add_to_floor(self, mismatches: dict[int, list[float]]) -> None:
        for of_engine in mismatches.values():
            self._floor.add(of_engine)

    def _mismatches(self, turns: Sequence[ScoredTurn]) -> dict[int, list[float]]:
        """The turns' mismatches by the process that scored them, numbered over all ranks' engines;
        equal on every rank. Engine and trainer score concurrently."""
        world = self._learner.world
        samples = [
            Sample(f"{world.rank}/{number}", [*ids], [*mask], old_logprobs=[], advantages=[])
            for number, (ids, mask) in enumerate(turns)
        ]
        await_scores = self._engine.score([sample.ids for sample in samples])
        by_trainer = self._trainer_logprobs(samples)
        scores = await_scores()  # empty if the engine failed
        by_engine = {
            sample.name: list(compress(logprobs, sample.mask[1:]))
            for sample, logprobs in zip(samples, scores, strict=bool(scores))
        }
        of_ranks = gather_objects((by_engine, by_trainer), world)
        trainers = {name: logprobs for _, scored in of_ranks for name, logprobs in scored.items()}
        mismatches: dict[int, list[float]] = defaultdict(list)
        for rank, (scored, _) in enumerate(of_ranks):
            for number, (name, logprobs) in enumerate(scored.items()):
                process = rank * self._num_processes + number % self._num_processes
                mismatches[process].append(turn_mismatch(logprobs, trainers[name]))
        return mismatches

    def _trainer_logprobs(self, samples: Sequence[Sample]) -> dict[str, list[float]]:
        """The trainer's log-probs of the masked tokens at temperature 1, by sample name, for this
        data-parallel rank's share of all ranks' samples."""
        learner, world = self._learner, self._learner.world
        everyone = [sample for of_rank in gather_objects(samples, world) for sample in of_rank]
        own = everyone[world.dp_rank :: world.dp_size]
        score = partial(batch_logprobs, learner, learner.model, temperature=1.0)
        values = token_values(learner, own, lambda batch: score(batch)[0], optim=self._optim)
        return {one.name: [*compress(of, one.mask)] for one, of in zip(own, values, strict=True)}


def turn_mismatch(engine_T: Sequence[float], trainer_T: Sequence[float]) -> float:
    """Mean |difference| of the two log-probs of a turn's tokens, in nats; infinite for a NaN.

    Raises ValueError unless both have the same number of log-probs, at least one.
    """
    if not engine_T or len(engine_T) != len(trainer_T):
        raise ValueError(
            f"a turn's mismatch needs the same number of log-probs, at least 1, got {len(engine_T)}"
            f" from the engine and {len(trainer_T)} from the trainer"
        )
    mean = sum(abs(e - t) for e, t in zip(engine_T, trainer_T, strict=True)) / len(engine_T)
    return math.inf if math.isnan(mean) else mean


class NoiseFloor:
    """The `mismatches`, in nats, of the latest turns that engine and trainer scored with equal
    weights, oldest first."""

    def __init__(self) -> None:
        self.mismatches: deque[float] = deque(maxlen=WINDOW_TURNS)

    @property
    def known(self) -> bool:
        """Whether it has enough turns for a comparison."""
        return len(self.mismatches) >= MIN_TURNS

    @property
    def largest(self) -> float:
        """The largest mismatch of its turns; infinite without turns."""
        return max(self.mismatches, default=math.inf)

    @property
    def bound(self) -> float:
        """An upper bound for the mean over many turns with equal weights; 0 while not `known`."""
        return FACTOR * self.largest if self.known else 0.0

    def add(self, mismatches: Sequence[float]) -> None:
        """Add mismatches of turns scored with equal weights, except infinite ones."""
        self.mismatches.extend(filter(math.isfinite, mismatches))

    def suspects(self, mismatches: Mapping[int, Sequence[float]], *, fewest: int) -> bool:
        """Whether the turns of any engine are suspicious.

        `mismatches` are keyed by the number of the engine process. An engine with fewer than
        `fewest` turns is never suspicious, nor is any engine before the floor is `known`.
        """
        bound = FACTOR * self.largest
        return self.known and any(
            len(turns) >= fewest and 4 * sum(turn > bound for turn in turns) >= 3 * len(turns)
            for turns in mismatches.values()
        )
