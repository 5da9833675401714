"""Engines that fail in the calls that a test names, and stay failed until they are restarted."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from selfplay.config import EngineConfig
from selfplay.distributed import World
from selfplay.engines.base import Completion, Request, Sampling
from selfplay.engines.hf import HFEngine
from selfplay.engines.options import ChosenEngine
from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.errors import EngineFault

DEATH = "the engine died during generation: pid 7 with exit code -9"
GARBAGE = {
    "wrong length": {"logprobs": [-1.0]},
    "no ids": {"ids": [], "logprobs": []},
    "nan": {"logprobs": math.nan},
    "stale": {"version": -1},
}
# The ends that the real engine's event loop finds.
ENDS = {"dies": DEATH, "hangs": "no answer within 600 s during generation: 3 requests wait"}
KINDS = (*ENDS, "few", *GARBAGE)


class Faults:
    """Which calls fail and how: `plan[(method, number)]`, numbers from 1, counted over restarts."""

    def __init__(self, plan: dict[tuple[str, int], str] | None = None) -> None:
        self.plan, self.num = plan or {}, Counter[str]()
        self.dead: str | None = None
        self.num_restarts = 0
        self.happened: set[tuple[str, int]] = set()

    def call(self, method: str) -> str:
        """Count a call; returns the garbage it must give, "" for none; raises if it fails."""
        self.num[method] += 1
        kind = self.plan.get((method, self.num[method]), "")
        if kind:
            self.happened.add((method, self.num[method]))
        try:
            if kind in ENDS:
                raise EngineFault(ENDS[kind])
        except EngineFault as fault:
            self.dead = str(fault)
            raise
        if self.dead is not None:
            raise EngineFault(f"the engine is gone ({self.dead})")
        return kind

    def restart(self) -> None:
        self.num_restarts += 1
        self.num["restart"] += 1
        self.dead = None
        if self.plan.get(("restart", self.num["restart"])):
            self.dead = "it does not start again"
            raise EngineFault(self.dead)


def spoilt(kind: str, completion: Completion) -> Completion:
    if kind not in GARBAGE:
        return completion
    changes: dict[str, Any] = dict(GARBAGE[kind])
    if kind == "nan":
        changes = {"logprobs": [math.nan] * len(completion.ids)}
    elif kind == "wrong length":
        changes = {"logprobs": completion.logprobs[1:]}
    return replace(completion, **changes)


class FaultyHF(HFEngine):
    """The transformers engine, failing by the plan in `faults`."""

    faults = Faults()

    def generate_batch(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        kind = self.faults.call("generate")
        completions = super().generate_batch(requests, sampling)
        if kind == "few":
            return completions[1:]
        # The last game of the wave gets the garbage, after the others have gone on.
        return [*completions[:-1], spoilt(kind, completions[-1])]

    def update_weights(self, named_tensors: Iterable[Any], version: int) -> None:
        self.faults.call("push")
        super().update_weights(named_tensors, version)

    def sleep(self) -> None:
        self.faults.call("sleep")

    def wake(self, what: str) -> None:
        self.faults.call("wake")

    def restart(self) -> None:
        self.faults.restart()


class Unstarted(SGLangEngine):
    """An SGLang engine on a machine that has all it needs, which dies as it starts."""

    def __init__(self, folder: str, config: ChosenEngine, **_: Any) -> None:
        raise RuntimeError("Rank 0 scheduler died during initialization (exit code: -9).")

    @classmethod
    def check(cls, engine: EngineConfig, *, here: bool) -> None: ...

    @classmethod
    def _able(cls, chosen: ChosenEngine, world: World) -> tuple[type[SGLangEngine], ChosenEngine]:
        return cls, chosen
