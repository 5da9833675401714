"""The SGLang engine with public calls only (`engine.fast: false`): `async_generate` for turns and
`update_weights_from_tensor` for weights. Slower, but works with any SGLang that has these two.

One scheduler per tensor-parallel rank, no sessions, no bursts; a bucket is loaded before the next
one is gathered. Times in seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from selfplay.engines.sglang import buckets, launch, processes
from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.engines.sglang.event_loop import EngineLoop
from selfplay.engines.sglang.fast import early
from selfplay.engines.sglang.requests import Answer, RequestCounters, RequestSender
from selfplay.engines.sglang.weights import purpose
from selfplay.engines.weights import Bucket
from selfplay.errors import EngineFault

IDLE_S = 60.0  # longest wait for the scheduler to become idle


class PlainLoop(EngineLoop):
    """The event loop of an engine with SGLang's unmodified front end."""

    _calling = False

    async def _install_handlers(self) -> None:
        """SGLang's front end installs them with its first answer."""
        [engine] = self.engines
        parameters = {"max_new_tokens": 1}
        await engine.async_generate(input_ids=[1, 2, 3, 4], sampling_params=parameters)

    async def drain(self) -> None:
        """Does nothing: no request is aborted."""

    def _on_death(self) -> None:
        """Also end a control call, which would otherwise wait for its answer forever."""
        super()._on_death()
        if self._calling:
            self._loop.stop()

    def call(self, control: Callable[..., Any], *words: Any, what: str, **named: Any) -> Any:
        """The answer to one of SGLang's control calls, which run the loop themselves. Raises
        EngineFault if the engine is gone, dies or does not answer within `timeout_s`."""
        self.check_alive(what)

        def give_up() -> None:
            self._dead = f"silent for {self.timeout_s:g} s during {what}"
            self._loop.stop()

        self._calling, late = True, self._loop.call_later(self.timeout_s, give_up)
        try:
            return control(*words, **named)
        except RuntimeError as error:  # also raised by the loop if it was stopped
            raise EngineFault(f"the engine failed in {what}: {self._dead or error}") from error
        finally:
            late.cancel()
            self._calling = False


class PlainClient:
    """Sends requests to the engine by `async_generate`."""

    def __init__(self, engine: Any, context_length: int) -> None:
        """`engine` is SGLang's; `context_length` limits the tokens of a request."""
        self._engine, self.context_length = engine, context_length

    async def request(
        self,
        rid: str,
        ids: Sequence[int],
        parameters: Mapping[str, Any],
        *,
        score: bool = False,
        session: str = "",
    ) -> Answer:
        """As `SchedulerClient.request`, without sessions; a request whose caller is cancelled still
        runs to its end."""
        answer = await self._engine.async_generate(
            rid=rid,
            input_ids=list(ids),
            sampling_params=dict(parameters),
            return_logprob=True,
            logprob_start_len=0 if score else -1,
        )
        meta = answer["meta_info"]
        return Answer(
            [pair[1] for pair in meta["output_token_logprobs"]],
            [pair[0] for pair in meta["output_token_logprobs"]],
            [pair[0] for pair in meta["input_token_logprobs"]] if score else [],
            meta["finish_reason"]["type"],
            meta["prompt_tokens"],
            meta["cached_tokens"],
        )


class PlainEngine(SGLangEngine):
    """One engine on `engine.tp_size` GPUs, with SGLang's own front end."""

    _loop: PlainLoop

    def _start(self) -> None:
        began_s, arguments = time.perf_counter(), self._arguments_of_start()
        signals = processes.Signals()
        started = _launch(arguments)
        self._engine = started.engines[0]
        self._loop = PlainLoop(started, signals, timeout_s=self._timeout_s, alone=self._alone)
        client = PlainClient(self._engine, self._arguments.get("context_length", sys.maxsize))
        self.counters = RequestCounters()
        self.senders = [RequestSender(self._loop, client, self.bursts[0], self.counters)]
        info = self._loop.call(self._engine.get_server_info, what="the start")
        self.cache_tokens = self.cache_tokens or int(info["max_total_num_tokens"])
        self.start_s = {"SGLang's public calls alone": time.perf_counter() - began_s}
        self._say_up(arguments["attention_backend"])

    def _begin(self, bucket: Bucket, folder: str) -> Callable[[], None]:
        success, message = self._loop.call(
            self._engine.update_weights_from_tensor,
            buckets.message(bucket.flat_N, bucket.shapes, folder=folder),
            load_format=buckets.LOADER,
            flush_cache=False,
            what=purpose(folder),
        )
        if not success:
            raise EngineFault(f"the engine refused a bucket: {message}")
        return lambda: None

    def _control(self, name: str, what: str, **fields: Any) -> list[Any]:
        if not hasattr(self._engine, name):
            return []
        return [self._loop.call(getattr(self._engine, name), *fields.values(), what=what)]

    def sleep(self) -> None:
        """Waits until the scheduler is idle."""
        if self.device == "cuda" and not self._released:
            self.flush_cache("going to sleep")
        super().sleep()

    def flush_cache(self, what: str) -> None:
        until_s = time.perf_counter() + IDLE_S
        while not self._loop.call(self._engine.flush_cache, what=what).success:
            if time.perf_counter() > until_s:
                raise EngineFault("the engine could not flush its prefix cache")
            time.sleep(0.05)


def _launch(arguments: dict[str, Any]) -> launch.Started:
    """Start SGLang's own engine. Raises RuntimeError outside the main thread and if a child process
    dies."""
    early.end()
    began_s = time.perf_counter()
    with launch.importing(arguments["device"]):
        from sglang import Engine
    imported_s = time.perf_counter()
    with launch.starting(arguments["device"], arguments["tp_size"]) as children:
        engine = Engine(**arguments)
    launch_s = time.perf_counter() - imported_s
    return launch.Started((engine,), tuple(children), imported_s - began_s, launch_s)
