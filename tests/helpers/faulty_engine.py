"""Engines that fail in the calls that a test names, and stay failed until they are restarted."""

import asyncio
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from selfplay.engines.base import Completion, Request, Sampling
from selfplay.engines.hf import HFEngine
from selfplay.engines.sglang.event_loop import EngineLoop
from selfplay.errors import EngineFault

DEATH = "the engine died during generation: pid 7 with exit code -9"
TIMEOUT_S = 0.2
GARBAGE = {
    "wrong length": {"logprobs": [-1.0]},
    "no ids": {"ids": [], "logprobs": []},
    "nan": {"logprobs": math.nan},
    "stale": {"version": -1},
}
KINDS = ("dies", "hangs", "few", *GARBAGE)


def wait_for_nothing() -> None:
    """A call on a real event loop of an engine whose answer never comes."""
    socket = SimpleNamespace(context=SimpleNamespace(destroy=lambda linger: None))
    manager = SimpleNamespace(
        auto_create_handle_loop=lambda: None,
        rid_to_state={},
        recv_from_detokenizer=socket,
        _subprocess_watchdog=None,
    )
    front = SimpleNamespace(
        tokenizer_manager=manager,
        loop=asyncio.new_event_loop(),
        shutdown=lambda: None,
        send_to_rpc=socket,
    )
    signals: Any = SimpleNamespace(take=lambda on_death: None, restore=lambda: None)
    started: Any = SimpleNamespace(engines=(front,), processes=())
    loop = EngineLoop(started, signals, timeout_s=TIMEOUT_S)
    try:
        loop.run(loop.awaiting_answer(asyncio.Event().wait()), what="generation")
    finally:
        loop.close()


class Faults:
    """Which calls fail and how: `plan[(method, number)]`, numbers from 1, counted over restarts."""

    def __init__(self, plan: dict[tuple[str, int], str]) -> None:
        self.plan, self.num = plan, Counter[str]()
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
            if kind == "hangs":  # in a thread, because a wave is generated inside a running loop
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(wait_for_nothing).result()
            if kind == "dies":
                raise EngineFault(DEATH)
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

    faults = Faults({})

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        kind = self.faults.call("generate")
        completions = super().generate(requests, sampling)
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
