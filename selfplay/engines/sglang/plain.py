"""The SGLang engine by its public calls alone (`engine.fast: false`): `async_generate` for turns
and `update_weights_from_tensor` for weights. Slower, for any SGLang that has these two.

One scheduler for each tensor-parallel rank, no sessions, no bursts; a bucket is loaded before the
next one is gathered. Sizes in bytes, times in seconds.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from selfplay.engines.sglang import buckets, early, launch, processes
from selfplay.engines.sglang import weights as sending
from selfplay.engines.sglang.engine import TAGS, SGLangEngine
from selfplay.engines.sglang.event_loop import EngineLoop
from selfplay.engines.sglang.requests import RequestCounters, RequestSender
from selfplay.engines.sglang.scheduler_client import Answer
from selfplay.engines.weights import Bucket, Compared, Weights
from selfplay.errors import EngineFault

LOADER = "selfplay.engines.sglang.plain.compare_in_engine"
IDLE_S = 60.0  # longest time to an idle scheduler


class PlainLoop(EngineLoop):
    """The one event loop of an engine whose front is left alone."""

    managers = ()
    _calling = False

    async def _free_signals(self) -> None:
        """Read the first answer, with which SGLang installs handlers of its own."""
        [engine] = self.engines
        parameters = {"max_new_tokens": 1}
        await engine.async_generate(input_ids=[1, 2, 3, 4], sampling_params=parameters)
        for number in (signal.SIGTERM, signal.SIGQUIT):
            self._loop.remove_signal_handler(number)

    def _on_death(self) -> None:
        """Also end a control call, which would wait forever for the answer."""
        super()._on_death()
        if self._calling:
            self._loop.stop()

    def call(self, control: Callable[..., Any], *words: Any, what: str, **named: Any) -> Any:
        """The answer of one of SGLang's control calls, which run the loop themselves. Raises
        EngineFault if the engine is gone, dies or gives no answer for `timeout_s`."""
        self.check_alive(what)

        def give_up() -> None:
            self._dead = f"silent for {self.timeout_s:g} s during {what}"
            self._loop.stop()

        self._calling, late = True, self._loop.call_later(self.timeout_s, give_up)
        try:
            return control(*words, **named)
        except RuntimeError as error:  # of the loop, if it was stopped
            raise EngineFault(f"the engine failed in {what}: {self._dead or error}") from error
        finally:
            late.cancel()
            self._calling = False


class PlainClient:
    """Sends requests to the engine by `async_generate`."""

    loaded_version = None

    def __init__(self, engine: Any, context_length: int) -> None:
        """`engine` is SGLang's; a request of more than `context_length` tokens is not sent."""
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
        """As `SchedulerClient.request`, without sessions; a caller that is cancelled leaves the
        request to its end."""
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


class PlainPart(sending.EnginePart):
    """What a rank has of a plain engine that another rank leads: it takes part in the gathers."""

    def load(self, weights: Weights, version: int) -> None:
        """Gather every bucket, for the leader's sake. Raises the leader's fault."""
        sending.check_names(None, weights.shapes, self._group)
        with _told(weights, self._group):
            for _ in weights:
                pass

    def compare(self, weights: Weights) -> Compared:
        """Nothing: the leader counts for all ranks."""
        with _told(weights, self._group):
            for _ in weights:
                pass
        return Compared(0, 0)


class PlainEngine(SGLangEngine):
    """One engine on `engine.tp_size` GPUs; it ends with the process that builds it."""

    part = PlainPart
    _loop: PlainLoop

    def _start(self) -> None:
        started_s, arguments = time.perf_counter(), self._arguments_of_start()
        arguments |= {"custom_weight_loader": [LOADER]}
        signals = processes.Signals()
        started = _launch(arguments)
        self._engine = started.engines[0]
        self._loop = PlainLoop(started, signals, timeout_s=self._timeout_s)
        client = PlainClient(self._engine, self._arguments.get("context_length", sys.maxsize))
        self.counters = RequestCounters()
        self.senders = [RequestSender(self._loop, client, self.bursts[0], self.counters)]
        info = self._loop.call(self._engine.get_server_info, what="the start")
        self.cache_tokens = self.cache_tokens or int(info["max_total_num_tokens"])
        self.start_s = {"start": time.perf_counter() - started_s}
        print(
            f"engine up: {self.start_s['start']:.1f} s; SGLang's public calls alone, attention "
            f"{arguments['attention_backend']}, tp {self.tp_size}, cache of {self.cache_tokens} "
            "tokens",
            flush=True,
        )

    def load(self, weights: Weights, version: int) -> None:
        """Pass all weights, bucket by bucket. Raises as `SGLangEngine.load`."""
        sending.check_names(self, weights.shapes, self._group)
        num_left = len(weights.shapes)
        self.ledger.invalidate()
        with _told(weights, self._group):
            if "weights" in self._released:
                raise RuntimeError("the engine's weights sleep: wake them before a push")
            for bucket in weights:
                num_left -= len(bucket.shapes)
                flush = not num_left and "kv_cache" not in self._released
                if flush:
                    self.flush_cache("a weight push")
                self._update(bucket, [], load_format=None, flush_cache=flush)
                self.ledger.receive(list(bucket.shapes))
                del bucket
            self.version = version

    def compare(self, weights: Weights) -> Compared:
        """As `SGLangEngine.compare`; the leader's counts are those of all its ranks."""
        counts = [0, 0]
        with _told(weights, self._group), tempfile.TemporaryDirectory() as folder:
            if not self.ledger.complete:
                raise RuntimeError("the engine holds no valid weights: push them first")
            for bucket in weights:
                marker = [(folder, torch.zeros(1))]
                self._update(bucket, marker, load_format=LOADER, flush_cache=False)
                for found in Path(folder).iterdir():
                    own = json.loads(found.read_text(encoding="utf-8"))
                    counts = [counts[0] + own[0], counts[1] + own[1]]
                    found.unlink()
                del bucket
        return Compared(*counts)

    def _update(self, bucket: Bucket, first: list[tuple[str, Tensor]], **options: Any) -> None:
        """Let SGLang read a bucket's parameters, after the pairs in `first`."""
        if bucket.flat_N.is_cuda:  # the values must be final
            torch.cuda.current_stream(bucket.flat_N.device).synchronize()
        named = [(name, _sent(value)) for name, value in [*first, *bucket.named()]]
        success, message = self._loop.call(
            self._engine.update_weights_from_tensor, named, what="a weight push", **options
        )
        if not success:
            raise EngineFault(f"the engine refused a bucket: {message}")
        if bucket.flat_N.is_cuda:
            del named
            torch.cuda.ipc_collect()

    def _release(self) -> None:
        self.flush_cache("going to sleep")  # waits until the scheduler is idle
        self._loop.call(self._engine.release_memory_occupation, list(TAGS), what="going to sleep")

    def _resume(self, what: str) -> None:
        self._loop.call(self._engine.resume_memory_occupation, [what], what=f"waking {what}")

    def flush_cache(self, what: str) -> None:
        """Empty the prefix cache once the scheduler is idle. `what` names the call in errors."""
        until_s = time.perf_counter() + IDLE_S
        while not self._loop.call(self._engine.flush_cache, what=what).success:
            if time.perf_counter() > until_s:
                raise EngineFault("the engine could not flush its prefix cache")
            time.sleep(0.05)


@contextmanager
def _told(weights: Weights, group: dist.ProcessGroup | None) -> Iterator[None]:
    """At the block's end every rank of the replica raises the leader's EngineFault. Before, the
    buckets that it left are taken: the other ranks wait for their gathers."""
    message: str | None = None
    try:
        yield
    except EngineFault as fault:
        message = str(fault)
        for _ in weights:
            pass
    if (message := sending.of_leader(message, group)) is not None:
        raise EngineFault(message)


def _launch(arguments: dict[str, Any]) -> launch.Started:
    """Start SGLang's own engine. Raises RuntimeError outside the main thread and when a child
    process dies."""
    early.end()
    began_s = time.perf_counter()
    with launch.importing(arguments["device"]):
        from sglang import Engine
    imported_s = time.perf_counter()
    with launch.starting(arguments["device"], arguments["tp_size"]) as children:
        engine = Engine(**arguments)
    launch_s = time.perf_counter() - imported_s
    return launch.Started((engine,), tuple(children), imported_s - began_s, launch_s)


class _Shared:
    """A parameter on a CPU, pickled as a call that opens the same memory and gives it its shape.
    SGLang unpickles calls of few libraries, torch among them."""

    def __init__(self, value: Tensor) -> None:
        self._flat, self._shape = buckets.SharedMemory(value.flatten().clone()), tuple(value.shape)

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.reshape, (self._flat, self._shape)


def _sent(value: Tensor) -> Any:
    return value if value.is_cuda else _Shared(value)


def compare_in_engine(model: nn.Module, named: Sequence[tuple[str, Tensor]]) -> None:
    """In SGLang's process: compare these weights with the model's. The first pair's name is the
    folder for this rank's counts."""
    (folder, _), *weights = named
    counts = buckets.compare(model, weights)
    path = Path(folder) / str(dist.get_rank() if dist.is_initialized() else 0)
    path.write_text(json.dumps(counts), encoding="utf-8")
