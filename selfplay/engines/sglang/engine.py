"""The SGLang engine: continuous batching in child processes of the trainer, replaceable weights.

The trainer's process holds SGLang's front end; one scheduler process for each tensor-parallel rank
does the work. A scheduler is bound to one core, so an engine of a small model may have `processes`,
each with its own copy of the weights, its cache and its games. All asynchronous code runs on one
event loop. Sizes in tokens unless a name says bytes, times in seconds. Knows no games and no
rewards.

Reproducibility: with `deterministic=True` a completion depends only on its prompt, its seed and the
weights. Otherwise `Request.seed` is ignored: each scheduler draws from one generator, seeded by
`seed`, and a draw depends on which requests share a batch. Such a run samples correctly but cannot
be repeated token for token.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from selfplay.distributed import gather_flat
from selfplay.engines.base import Completion, GameCoroutine, Generate, Request, Sampling, run_all
from selfplay.engines.sglang import compare, launch, processes, weights
from selfplay.engines.sglang.event_loop import EngineLoop
from selfplay.engines.sglang.fast import Answer, GameSessions
from selfplay.engines.sglang.requests import Bursts, GameRouter, RequestCounters, RequestSender
from selfplay.errors import EngineFault

TAGS = ("kv_cache", "weights")  # the memory that `sleep` releases; CUDA graphs stay
BURST_AFTER_S = 0.5  # longest time that a burst holds a request back
FLUSH_TIMEOUT_S = 60.0  # longest wait for the scheduler to become idle before a flush


class SGLangEngine:
    """One engine on `tp_size` GPUs; it ends with the process that builds it."""

    def __init__(
        self,
        model_path: str,
        *,
        tp_size: int = 1,
        processes: int = 1,
        mem_fraction: float = 0.7,
        attention_backend: str = "auto",
        dtype: str = "bfloat16",
        context_length: int | None = None,
        max_running_requests: int = 512,
        max_total_tokens: int | None = None,
        seed: int = 0,
        deterministic: bool = False,
        device: str = "cuda",
        base_gpu_id: int = 0,
        timeout_s: float = 300.0,
        memory_saver: bool = True,
        load_format: str = "auto",
        burst_share: float = 0.0,
        sessions: bool = False,
        prefill_graphs: bool = False,
        server_args: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the engine; blocks until it has answered one request.

        model_path: a local folder with config.json and, unless `load_format` is "dummy", weights.
        processes: SGLang engines on the same GPU, which share the games and `mem_fraction`; above 1
        only with `tp_size` 1.
        mem_fraction: share of the currently free GPU memory for weights and cache.
        attention_backend: "auto" picks by hardware, see `launch.pick_attention_backend`.
        max_running_requests, max_total_tokens: of all processes together; None derives the size of
        the cache from the memory.
        base_gpu_id: the engine's first visible GPU; it uses `tp_size` consecutive ones.
        timeout_s: how long a call may wait without any answer from the engine.
        load_format: "dummy" starts with random weights; requests are refused until a push.
        burst_share: see `requests.Bursts`; 0 sends each request at once.
        sessions: keep each seat's context in the engine between its turns, see `fast`.
        prefill_graphs: capture short prefills as CUDA graphs.
        server_args: further arguments of SGLang's server, which win over ours.

        Raises RuntimeError outside the main thread or when a child process dies during the start,
        ValueError for `deterministic` on a CPU and for memory that leaves no cache.
        """
        if attention_backend == "auto":
            attention_backend = launch.pick_attention_backend(device, deterministic=deterministic)
        if device == "cpu" and max_total_tokens is None:
            max_total_tokens = 65_536
        self.tp_size, self.dtype, self.device = tp_size, getattr(torch, dtype), device
        self.num_processes, self.num_ranks = processes, processes * tp_size
        self.attention_backend = attention_backend
        self.deterministic = deterministic
        self.version = 0
        self.can_sleep = memory_saver and device == "cuda"
        expected = launch.expected_parameters(model_path)
        self._holds_folder = load_format != "dummy"
        self.weights = weights.Ledger(expected, complete=self._holds_folder)
        self.cache_tokens = 0
        self._budget_bytes = 0.0
        self._released: set[str] = set()
        if processes > 1:
            # Games with the same prompt stay together, so a process may get more than its share.
            max_running_requests = math.ceil(1.25 * max_running_requests / processes)
            if max_total_tokens is not None:
                max_total_tokens //= processes
            else:
                free, _ = torch.cuda.mem_get_info(base_gpu_id)
                max_total_tokens = launch.cache_tokens(
                    model_path,
                    expected,
                    share_bytes=mem_fraction * free / processes,
                    itemsize=self.dtype.itemsize,
                )
                mem_fraction = (1 + mem_fraction) / 2  # the cache has a fixed size
        self._timeout_s, self._num_starts = timeout_s, 0
        self._arguments = launch.engine_arguments(
            model_path,
            device=device,
            dtype=dtype,
            tp_size=tp_size,
            mem_fraction=mem_fraction,
            attention_backend=attention_backend,
            context_length=context_length,
            max_running_requests=max_running_requests,
            max_total_tokens=max_total_tokens,
            seed=seed,
            deterministic=deterministic,
            base_gpu_id=base_gpu_id,
            memory_saver=self.can_sleep,
            load_format=load_format,
            sessions=sessions,
            prefill_graphs=prefill_graphs,
        ) | dict(server_args or {})
        self.sessions = sessions
        self.bursts = [Bursts(burst_share, after_s=BURST_AFTER_S) for _ in range(processes)]
        self._start()

    def _start(self) -> None:
        # Each process has its own random stream, and a restart begins a new one.
        seed, port = self._arguments["random_seed"] + 7919 * self._num_starts, launch.free_port()
        self._num_starts += 1
        arguments = self._arguments
        if self.device == "cuda":
            free_bytes = torch.cuda.mem_get_info(arguments["base_gpu_id"])[0]
            if self.cache_tokens:
                arguments = launch.with_cache(
                    arguments, self.cache_tokens, self._budget_bytes, free_bytes=free_bytes
                )
            else:
                self._budget_bytes = arguments["mem_fraction_static"] * free_bytes
        signals = processes.Signals()
        started = launch.launch(
            [
                arguments | {"nccl_port": port + i, "random_seed": (seed + 104_729 * i) % 2**31}
                for i in range(self.num_processes)
            ]
        )
        self.cache_tokens = self.cache_tokens or started.cache_tokens
        self._loop = EngineLoop(started, signals, timeout_s=self._timeout_s)
        self.counters = RequestCounters()
        self._senders = [
            RequestSender(
                self._loop,
                process,
                bursts,
                self.counters,
                session_slots=self._session_slots(),
                cache_tokens=self.cache_tokens,
            )
            for process, bursts in enumerate(self.bursts)
        ]
        self.start_s = self._warm_up(started, patience_s=max(self._timeout_s, 600.0))
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.start_s.items())
        print(
            f"engine up: {parts}; attention {self.attention_backend}, tp {self.tp_size}, "
            f"processes {self.num_processes}, cache of {started.cache_tokens} tokens",
            flush=True,
        )

    def _session_slots(self) -> int:
        """The sessions that one process may hold: two for each running request."""
        if not self.sessions:
            return 0
        # SGLang has at most one request slot for two tokens of the cache.
        slots = min(self._arguments["max_running_requests"], self.cache_tokens // 2)
        return max(0, slots - self._arguments["pp_max_micro_batch_size"])

    def _warm_up(self, started: launch.Started, *, patience_s: float) -> dict[str, float]:
        """Answer one request, which compiles kernels; return seconds for each part of the start."""
        began_s = time.perf_counter()
        parameters = self._parameters(Request([1, 2, 3, 4], 2, 0), Sampling(1.0, ()))

        async def answer_once() -> None:
            for sender in self._senders:
                await sender.send([1, 2, 3, 4], parameters, version=self.version)

        self._loop.run(answer_once(), what="the first answer", timeout_s=patience_s)
        self._on_all(self._freeze, what="the start")
        return {
            "import": started.import_s,
            "processes and weights": started.launch_s,
            "first answer": time.perf_counter() - began_s,
        }

    async def _freeze(self, manager: Any) -> None:
        from sglang.srt.managers.io_struct import FreezeGCReq

        # Half a million objects live as long as the scheduler: its garbage collector skips them.
        manager._dispatch_to_scheduler(FreezeGCReq())

    def _on_all(self, call: Callable[[Any], Awaitable[Any]], *, what: str) -> list[Any]:
        """The answers of every process's front to one control call, made at the same time."""

        async def every() -> list[Any]:
            return await asyncio.gather(*map(call, self._loop.managers))

        return self._loop.control(every(), what=what)

    # Generation

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Answer all requests, in order. Raises like `run_games`."""

        def game(request: Request) -> GameCoroutine:
            return lambda generate: generate(request)

        return self.run_games(map(game, requests), sampling)

    def rollout(self) -> AbstractContextManager[None]:
        """Does nothing: SGLang's prefix cache lasts from push to push."""
        return nullcontext()

    def run_games(
        self, games: Iterable[GameCoroutine], sampling: Sampling, partners: Generate | None = None
    ) -> list[Any]:
        """Run one coroutine for each game concurrently; return the results in order.

        Each coroutine gets `generate(request)`; `partners` answers requests of other models. The
        first exception cancels the other games and their requests, then propagates. Also raises
        ValueError for a request that does not fit the context; EngineFault if the engine dies,
        gives no answer for `timeout_s`, aborts a request or sends an unreadable reply; and
        RuntimeError while it has no valid weights or cache (it sleeps, or a push is incomplete).
        """
        self._check_awake()
        router = GameRouter(self.num_processes)

        async def play(game: GameCoroutine) -> Any:
            sender: RequestSender | None = None
            sessions: GameSessions | None = None

            async def generate(request: Request) -> Completion:
                nonlocal sender, sessions
                if request.model and partners is not None:
                    return await partners(request)
                if sender is None:  # a game stays with the process of its first request
                    sender = self._senders[router.process_for(request.prompt_ids)]
                    sessions = sender.new_sessions() if self.sessions else None
                answer = await sender.send(
                    request.prompt_ids,
                    self._parameters(request, sampling),
                    version=self.version,
                    sessions=sessions,
                )
                return completion_of(answer, sampling, self.version)

            try:
                return await game(generate)
            finally:
                if sessions is not None:
                    sessions.close()

        async def play_all() -> list[Any]:
            try:
                return await run_all(map(play, games))
            finally:
                await self._loop.drain()

        return self._loop.run(play_all(), what="generation")

    def begin_scoring(self, texts: Sequence[Sequence[int]]) -> Callable[[], list[list[float]]]:
        """Request the log-prob of each token of these texts given the tokens before it.

        Returns at once, while the engine works. The returned function waits for the answers: one
        list for each text, one entry shorter than the text, in nats at temperature 1. Process
        `n % num_processes` scores text n. Both raise like `run_games`.
        """
        self._check_awake()

        async def score(number: int, ids: Sequence[int]) -> list[float]:
            parameters = {"max_new_tokens": 1, "temperature": 1.0}
            sender = self._senders[number % self.num_processes]
            answer = await sender.send(ids, parameters, version=self.version, score=True)
            logprobs = [x for x in answer.prompt_logprobs[1:] if x is not None]
            if len(logprobs) != len(ids) - 1:
                raise EngineFault(f"the engine scored {len(logprobs)} of {len(ids) - 1} tokens")
            return logprobs

        async def every() -> list[list[float]]:
            return await asyncio.gather(*map(score, itertools.count(), texts))

        return self._loop.begin(every(), what="scoring")

    def _check_awake(self) -> None:
        if self._released:
            raise RuntimeError(f"the engine sleeps: wake {sorted(self._released)} first")
        if not self.weights.complete:
            raise RuntimeError("the engine holds no valid weights: push them first")

    def _parameters(self, request: Request, sampling: Sampling) -> dict[str, Any]:
        """SGLang's sampling parameters of one request."""
        parameters = {
            "max_new_tokens": request.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "stop_token_ids": list(sampling.stop_ids),
        }
        if self.deterministic:  # SGLang's default seed is 42: a group's games would be identical
            parameters["sampling_seed"] = request.seed % 2**63
        return parameters

    # Weights

    def update_weights(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> None:
        """Generate with these weights (Hugging Face names, all of them) from the next request on.

        Takes full tensors; `selfplay.weight_sync.push.push` gathers sharded ones, one bucket
        at a time.
        """
        named = dict(named_tensors)
        shapes = {name: tensor.shape for name, tensor in named.items()}
        self.weights.check_names(shapes)
        self.weights.lose()
        for names in weights.plan_buckets(shapes, self.dtype):
            sizes = [shapes[name] for name in names]
            device = named[names[0]].device
            flat_N = gather_flat([named[n] for n in names], dtype=self.dtype, device=device)
            if flat_N.is_cuda:  # the engine must not open the buffer before its values are final
                torch.cuda.current_stream(device).synchronize()
            payloads = [weights.serialise(flat_N, names, sizes) for _ in range(self.num_ranks)]
            self.begin_bucket(payloads, names=names, version=version)()
            del flat_N
            weights.collect(device)

    def begin_bucket(
        self, payloads: Sequence[bytes], *, names: Sequence[str], version: int
    ) -> Callable[[], None]:
        """Start loading one bucket and return at once.

        `payloads` has one payload of `weights.serialise` for each rank of each process, in order.
        The returned function waits until the engine has read the bucket. Only then may the next
        bucket begin or this one's buffer be freed. The engine refuses requests until a push is
        complete.
        """
        last = self.weights.expect(names)
        flush = last and "kv_cache" not in self._released
        if flush:
            # The scheduler crashes if it must flush while it still processes its last batch.
            self.flush_cache("a weight push")
        wait = self._send(
            payloads,
            load_format="flattened_bucket",
            flush_cache=flush,
            weight_version=str(version) if last else None,
        )

        def finish() -> None:
            wait()
            self.weights.receive(names)
            if last:
                self.version = version

        return finish

    def begin_compare(self, payloads: Sequence[bytes]) -> Callable[[], None]:
        """Start a comparison of payloads of `weights.serialise_compared`; return at once.

        The engine loads nothing and fills the result slots. The returned function waits for it.
        """
        if not self.weights.complete:
            raise RuntimeError("the engine holds no valid weights: push them first")
        return self._send(
            payloads, load_format=compare.LOADER, flush_cache=False, weight_version=None
        )

    def _send(self, payloads: Sequence[bytes], **options: Any) -> Callable[[], None]:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        if "weights" in self._released:
            raise RuntimeError("the engine's weights sleep: wake them before a push")
        if len(payloads) != self.num_ranks:
            raise ValueError(f"a bucket needs {self.num_ranks} payloads, got {len(payloads)}")
        updating = []
        for place, manager in enumerate(self._loop.managers):
            part = list(payloads[place * self.tp_size :][: self.tp_size])
            request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=part, **options)
            updating.append(manager.update_weights_from_tensor(request, None))

        async def send() -> list[tuple[bool, str]]:
            return await asyncio.gather(*updating)

        result = self._loop.begin(self._loop.awaiting_answer(send()), what="a weight push")

        def wait() -> None:
            for success, message in result():
                if not success:
                    raise EngineFault(f"the engine refused a bucket: {message}")

        return wait

    def sleep(self) -> None:
        """Free the GPU memory of cache and weights, whose contents are lost.

        Does nothing unless `can_sleep`: the memory saver is a CUDA library.
        """
        if not self.can_sleep or self._released:
            return
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        request = ReleaseMemoryOccupationReqInput(tags=list(TAGS))
        self._on_all(lambda m: m.release_memory_occupation(request, None), what="going to sleep")
        self._released = set(TAGS)
        self.weights.lose()

    def wake(self, what: str) -> None:
        """Allocate memory again: "weights" before a push, "kv_cache" after it.

        The weights are invalid until the push is complete. Raises ValueError for any other `what`.
        """
        if what not in TAGS:
            raise ValueError(f"wake takes one of {TAGS}, got {what!r}")
        if what not in self._released:  # SGLang would end its whole process tree
            return
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        request = ResumeMemoryOccupationReqInput(tags=[what])
        self._on_all(lambda m: m.resume_memory_occupation(request, None), what=f"waking {what}")
        self._released.discard(what)
        if what == "kv_cache":
            self.flush_cache("flushing the prefix cache")

    def flush_cache(self, what: str) -> None:
        """Empty the prefix cache once the scheduler is idle. `what` names the call in errors."""
        answers = self._on_all(lambda m: m.flush_cache(timeout_s=FLUSH_TIMEOUT_S), what=what)
        if not all(answer.success for answer in answers):
            raise EngineFault("the engine could not flush its prefix cache")

    def restart(self) -> None:
        """Kill the engine's processes and start others, from the same folder.

        The new engine has that folder's weights and a cache of the same size as before, although
        the trainer's state now takes memory. If it does not start, this call and all later ones
        raise EngineFault.
        """
        self.weights = weights.Ledger(self.weights.expected, complete=self._holds_folder)
        self.version, self._released = 0, set()
        try:
            self.close()
            self._start()
        except (RuntimeError, OSError) as error:
            self._loop.close()
            raise EngineFault(f"the engine does not start again: {error}") from error

    def close(self) -> None:
        """Kill the engine's processes and no others. Safe to call twice."""
        self._loop.close()


def completion_of(answer: Answer, sampling: Sampling, version: int) -> Completion:
    """A turn, which is complete if it ends with a stop token.

    SGLang tests the length first: a stop token at the limit would count as cut off.
    """
    stopped = bool(answer.ids) and answer.ids[-1] in sampling.stop_ids
    finish = "stop" if stopped else answer.finish
    return Completion(answer.ids, answer.logprobs, finish, version)
