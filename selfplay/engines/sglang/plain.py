"""The SGLang engine by its public calls alone (`engine.fast: false`): `async_generate` for turns
and `update_weights_from_tensor` for weights. Slower, for any SGLang that has these two.

One scheduler for each tensor-parallel rank, no sessions, no bursts; a bucket is loaded before the
next one is gathered. Sizes in bytes, times in seconds.
"""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dialop.workers import without_main
from selfplay.engines.base import Completion, GameCoroutine, Generate, Request, Sampling
from selfplay.engines.sglang import buckets, early, launch, processes
from selfplay.engines.sglang import weights as sending
from selfplay.engines.sglang.engine import TAGS, SGLangEngine
from selfplay.engines.sglang.event_loop import EngineLoop
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
        self._calling, late = True, self._loop.call_later(self.timeout_s, self._loop.stop)
        try:
            return control(*words, **named)
        except RuntimeError as error:  # the loop was stopped
            self._dead = self._dead or f"silent for {self.timeout_s:g} s during {what}"
            raise EngineFault(f"the engine died during {what}: {self._dead}") from error
        finally:
            late.cancel()
            self._calling = False


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
        info = self._loop.call(self._engine.get_server_info, what="the start")
        self.cache_tokens = self.cache_tokens or int(info["max_total_num_tokens"])
        self.start_s = {"start": time.perf_counter() - started_s}
        print(
            f"engine up: {self.start_s['start']:.1f} s; SGLang's public calls alone, attention "
            f"{arguments['attention_backend']}, tp {self.tp_size}, cache of {self.cache_tokens} "
            "tokens",
            flush=True,
        )

    def run_games(
        self, games: Iterable[GameCoroutine], sampling: Sampling, partners: Generate | None = None
    ) -> list[Any]:
        """As `SGLangEngine.run_games`."""
        self._check_awake()

        async def generate(request: Request) -> Completion:
            if request.model and partners is not None:
                return await partners(request)
            version = self.version
            answer = await self._answer(request.prompt_ids, self.parameters(request, sampling))
            pairs = answer["meta_info"]["output_token_logprobs"]
            ids, logprobs = [pair[1] for pair in pairs], [pair[0] for pair in pairs]
            stopped = bool(ids) and ids[-1] in sampling.stop_ids
            finish = "stop" if stopped else answer["meta_info"]["finish_reason"]["type"]
            return Completion(ids, logprobs, finish, version)

        return self._loop.run(self._play_all(game(generate) for game in games), what="generation")

    async def _answer(
        self, ids: Sequence[int], parameters: dict[str, Any], *, score: bool = False
    ) -> dict[str, Any]:
        """SGLang's answer to one prompt. Raises ValueError for one that does not fit, EngineFault
        if SGLang aborts it."""
        num_new, context = parameters["max_new_tokens"], self._arguments["context_length"]
        if context is not None and len(ids) + num_new > context:
            raise ValueError(
                f"prompt and max_new_tokens must fit the engine's context of {context} tokens, got "
                f"{len(ids)} + {num_new}"
            )
        with self._loop.pending_answer():
            try:
                answer: dict[str, Any] = await self._engine.async_generate(
                    input_ids=list(ids),
                    sampling_params=parameters,
                    return_logprob=True,
                    logprob_start_len=0 if score else -1,
                )
            except Exception as error:
                raise EngineFault(f"the engine failed in a request: {error!r}") from error
        finish = answer["meta_info"]["finish_reason"]["type"]
        if finish not in ("stop", "length"):
            raise EngineFault(f"the engine ended a request with {finish}")
        return answer

    def score(self, texts: Sequence[Sequence[int]]) -> Callable[[], list[list[float]]]:
        """As `SGLangEngine.score`."""
        self._check_awake()

        async def score(ids: Sequence[int]) -> list[float]:
            parameters = {"max_new_tokens": 1, "temperature": 1.0}
            answer = await self._answer(ids, parameters, score=True)
            pairs = answer["meta_info"]["input_token_logprobs"][1:]
            if len(pairs) != len(ids) - 1:
                raise EngineFault(f"the engine scored {len(pairs)} of {len(ids) - 1} tokens")
            return [pair[0] for pair in pairs]

        return self._loop.begin(self._play_all(map(score, texts)), what="scoring")

    # Weights

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
    message: list[str | None] = [None]
    try:
        yield
    except EngineFault as fault:
        message = [str(fault)]
        for _ in weights:
            pass
    if group is not None:
        dist.broadcast_object_list(message, group=group, group_src=0)
    if message[0] is not None:
        raise EngineFault(message[0])


def _launch(arguments: dict[str, Any]) -> launch.Started:
    """Start SGLang's own engine. Raises RuntimeError outside the main thread and when a child
    process dies."""
    early.end()
    began_s = time.perf_counter()
    launch.check_main_thread()
    if arguments["device"] == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # read when sglang is imported
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import sglang
    imported_s = time.perf_counter()
    # It warns of the custom handler of SIGQUIT, which we pass on purpose.
    logging.getLogger("sglang.srt.entrypoints.engine").setLevel(logging.CRITICAL)
    before, engines = set(multiprocessing.active_children()), list[Any]()
    try:
        with processes.child_environment(arguments["device"], arguments["tp_size"]), without_main():
            engines.append(sglang.Engine(**arguments))
    finally:
        children = tuple(set(multiprocessing.active_children()) - before)
        if not engines:
            processes.kill(children)
        gc.collect()
        gc.freeze()
    launch_s = time.perf_counter() - imported_s
    return launch.Started(tuple(engines), children, imported_s - began_s, launch_s)


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
