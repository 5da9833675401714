"""The SGLang engine: continuous batching in processes beside the trainer, its weights replaceable.

The trainer's process keeps the front of the engine; one scheduler process a tensor-parallel rank
does the work. Everything asynchronous runs on the engine's one event loop. Sizes in tokens unless a
name says bytes, times in seconds. Knows no games and no rewards. SGLang itself is imported when an
engine starts, never before.

What can be reproduced: with `deterministic=True` a completion depends on its prompt, its seed and
the weights alone. Without it `Request.seed` is ignored: draws come from one generator a scheduler,
seeded by `seed`, and depend on which requests share a batch, so a run is a fair sample but not
repeatable token for token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import torch

from selfplay.engines.base import Completion, Request, Sampling
from selfplay.engines.sglang import compare as sglang_compare
from selfplay.engines.sglang import launch as sglang_start
from selfplay.engines.sglang import processes as sglang_children
from selfplay.engines.sglang import weights as sglang_push
from selfplay.engines.sglang.event_loop import EngineLoop
from selfplay.engines.sglang.requests import Asker, Served

Ask = Callable[[Request], Awaitable[Completion]]
TAGS = ("kv_cache", "weights")  # what sleeps; CUDA graphs stay resident


class SGLangEngine:
    """One replica: `tp_size` GPUs wide, led by the process that builds it, ended with it."""

    streaming = True

    def __init__(
        self,
        model_path: str,
        *,
        tp_size: int = 1,
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
    ) -> None:
        """Start the engine; blocks until it has answered once.

        model_path: a local folder with config.json and, unless `load_format` is "dummy", weights.
        mem_fraction: weights' and cache's share of the GPU memory that is free at this moment.
        attention_backend: "auto" picks by hardware, see `sglang_start.pick_attention_backend`.
        max_total_tokens: size of the cache, where memory should not decide it.
        base_gpu_id: the replica's first GPU among those visible; it takes `tp_size` in a row.
        timeout_s: how long the engine may be silent while it owes an answer.
        load_format: "dummy" starts with random weights; asking is refused until others are pushed.

        Raises RuntimeError outside the main thread or when a child process dies while starting,
        ValueError for `deterministic` on a CPU.
        """
        if attention_backend == "auto":
            attention_backend = sglang_start.pick_attention_backend(
                device, deterministic=deterministic
            )
        if device == "cpu" and max_total_tokens is None:
            max_total_tokens = 65_536
        self.tp_size, self.dtype, self.device = tp_size, getattr(torch, dtype), device
        self.attention_backend = attention_backend
        self.deterministic = deterministic
        self.version = 0
        self.can_sleep = memory_saver and device == "cuda"
        expected = sglang_start.expected_parameters(model_path)
        self.weights = sglang_push.Ledger(expected, complete=load_format != "dummy")
        self._released: set[str] = set()
        arguments = sglang_start.engine_arguments(
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
        )
        signals = sglang_children.Signals()
        started = sglang_start.launch(arguments)
        self._loop = EngineLoop(started, signals, timeout_s=timeout_s)
        self._manager = self._loop.manager
        self._asker = Asker(self._loop)
        self.start_s = self._warm_up(started, patience_s=max(timeout_s, 600.0))
        self._asker.served = Served()
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.start_s.items())
        print(f"engine up: {parts}; attention {attention_backend}, tp {tp_size}", flush=True)

    def _warm_up(self, started: sglang_start.Started, *, patience_s: float) -> dict[str, float]:
        """Answer once, which compiles kernels; the seconds of each part of the start."""
        began_s = time.perf_counter()
        answer = self._answer(Request([1, 2, 3, 4], 2, 0), Sampling(1.0, ()))
        self._loop.run(answer, what="the first answer", timeout_s=patience_s)
        return {
            "import": started.import_s,
            "processes and weights": started.launch_s,
            "first answer": time.perf_counter() - began_s,
        }

    @property
    def served(self) -> Served:
        """Running counts since the start."""
        return self._asker.served

    # Answers

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Answer all requests, in order. Raises like `stream`."""

        def one(request: Request) -> Callable[[Ask], Awaitable[Completion]]:
            return lambda ask: ask(request)

        return self.stream([one(request) for request in requests], sampling)

    def stream(
        self, tasks: Iterable[Callable[[Ask], Awaitable[Any]]], sampling: Sampling
    ) -> list[Any]:
        """Run one coroutine a game, all at once, each given `ask(request)`; results in order.

        The first exception cancels the other games and their requests, then propagates. Also raises
        ValueError for a request that cannot fit the context, RuntimeError when the engine has died,
        stays silent for `timeout_s` while it owes an answer, aborts a request, or holds no valid
        weights or cache (asleep, or a push is incomplete).
        """
        self._check_awake()

        async def ask(request: Request) -> Completion:
            return await self._answer(request, sampling)

        async def play() -> list[Any]:
            games = [asyncio.ensure_future(task(ask)) for task in tasks]
            try:
                return await asyncio.gather(*games)
            finally:
                for game in games:
                    game.cancel()
                await asyncio.gather(*games, return_exceptions=True)
                await self._loop.drain()

        return self._loop.run(play(), what="generation")

    def begin_scoring(self, texts: Sequence[Sequence[int]]) -> Callable[[], list[list[float]]]:
        """Ask for the log-prob of each token given those before it, and go on while the engine
        works. What is returned waits for the answers: a list a text, one shorter than the text, at
        temperature 1. Both raise like `stream`."""
        self._check_awake()

        async def score(ids: Sequence[int]) -> list[float]:
            parameters = {"max_new_tokens": 1, "temperature": 1.0}
            answer = await self._asker.ask(ids, parameters, version=self.version, score=True)
            return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]

        async def every() -> list[list[float]]:
            return await asyncio.gather(*map(score, texts))

        return self._loop.begin(every(), what="scoring")

    def _check_awake(self) -> None:
        if self._released:
            raise RuntimeError(f"the engine sleeps: wake {sorted(self._released)} before asking")
        if not self.weights.complete:
            raise RuntimeError("the engine holds no valid weights: push them before asking")

    async def _answer(self, request: Request, sampling: Sampling) -> Completion:
        parameters = {
            "max_new_tokens": request.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "stop_token_ids": list(sampling.stop_ids),
        }
        if self.deterministic:  # a missing seed would be 42 for all, and a group's games identical
            parameters["sampling_seed"] = request.seed % 2**63
        answer = await self._asker.ask(request.prompt_ids, parameters, version=self.version)
        meta = answer["meta_info"]
        return Completion(
            ids=[int(i) for i in answer["output_ids"]],
            logprobs=[entry[0] for entry in meta["output_token_logprobs"]],
            finish=meta["finish_reason"]["type"],
            version=self.version,
        )

    # Weights

    def update_weights(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> None:
        """Speak with these weights (Hugging Face names, all of them) from the next request on.

        For whole tensors; `selfplay.colocation.weight_sync.push` gathers sharded ones bucket by bucket.
        """
        named = dict(named_tensors)
        shapes = {name: tensor.shape for name, tensor in named.items()}
        self.weights.check_names(shapes)
        self.weights.lose()
        for names in sglang_push.plan_buckets(shapes, self.dtype):
            sizes = [shapes[name] for name in names]
            sources = (named[name].detach() for name in names)
            device = named[names[0]].device
            flat_N = sglang_push.fill(sources, sizes, dtype=self.dtype, device=device)
            payloads = [sglang_push.serialise(flat_N, names, sizes) for _ in range(self.tp_size)]
            self.begin_bucket(payloads, names=names, version=version)()
            del flat_N
            sglang_push.collect(device)

    def begin_bucket(
        self, payloads: Sequence[bytes], *, names: Sequence[str], version: int
    ) -> Callable[[], None]:
        """Have one bucket loaded, and go on meanwhile: one payload a rank, in order, made by
        `sglang_push.serialise`. What is returned waits until the engine has read it; only then may
        the next one begin, and this one's buffer go.

        Between the first bucket and the one that completes the weights the engine will not answer.
        """
        last = self.weights.expect(names)
        updated = self._send(
            payloads,
            load_format="flattened_bucket",
            flush_cache=last and "kv_cache" not in self._released,
            weight_version=str(version) if last else None,
        )

        def finish() -> None:
            updated()
            self.weights.receive(names)
            if last:
                self.version = version

        return finish

    def begin_compare(self, payloads: Sequence[bytes]) -> Callable[[], None]:
        """The same for payloads of `serialise_compared`: nothing is loaded, slots are filled."""
        if not self.weights.complete:
            raise RuntimeError("the engine holds no valid weights: push them before comparing")
        return self._send(
            payloads, load_format=sglang_compare.LOADER, flush_cache=False, weight_version=None
        )

    def _send(self, payloads: Sequence[bytes], **how: Any) -> Callable[[], None]:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        if "weights" in self._released:
            raise RuntimeError("the engine's weights sleep: wake them before a push")
        if len(payloads) != self.tp_size:
            raise ValueError(f"a bucket needs {self.tp_size} payloads, got {len(payloads)}")
        request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=list(payloads), **how)
        updating = self._manager.update_weights_from_tensor(request, None)
        return sglang_push.settled(
            self._loop.begin(self._loop.owed(updating), what="a weight push")
        )

    def fingerprints(self) -> list[dict[str, str]]:
        """The engine's hash of each parameter and buffer, one dict a rank. CUDA only."""
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        checked = self._manager.check_weights(CheckWeightsReqInput(action="checksum"))
        success, message, ranks, _ = self._loop.control(checked, what="a weight check")
        if not success or ranks is None:
            raise RuntimeError(f"the engine could not hash its weights: {message}")
        return [rank["checksums"] for rank in ranks]

    # Memory

    def sleep(self) -> None:
        """Give cache and weights back to the GPU, contents lost; no-op unless `can_sleep`.

        The memory saver is a CUDA library: on CPU, or without it, the engine keeps what it holds.
        """
        if not self.can_sleep or self._released:
            return
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        released = self._manager.release_memory_occupation(
            ReleaseMemoryOccupationReqInput(tags=list(TAGS)), None
        )
        self._loop.control(released, what="going to sleep")
        self._released = set(TAGS)
        self.weights.lose()

    def wake(self, what: str) -> None:
        """Take memory again: "weights" (void until pushed) before a push, "kv_cache" after it."""
        if what not in TAGS:
            raise ValueError(f"wake takes one of {TAGS}, got {what!r}")
        if what not in self._released:  # resuming it would end the whole process tree
            return
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        resumed = self._manager.resume_memory_occupation(
            ResumeMemoryOccupationReqInput(tags=[what]), None
        )
        self._loop.control(resumed, what=f"waking {what}")
        self._released.discard(what)
        if what == "kv_cache":
            flushed = self._manager.flush_cache()
            if not self._loop.control(flushed, what="flushing the prefix cache").success:
                raise RuntimeError("the engine could not flush its prefix cache")

    def close(self) -> None:
        """End the engine's processes, and only those. Safe to call twice."""
        self._loop.close()
