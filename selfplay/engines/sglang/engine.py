"""The SGLang engine: continuous batching in child processes of the trainer, replaceable weights.

The trainer's process holds SGLang's front end; one scheduler process for each tensor-parallel rank
does the work. A scheduler is bound to one core, so an engine of a small model may have several
processes (`engine.processes`), each with its own copy of the weights, its cache and its games. All
asynchronous code runs on one event loop. Sizes in tokens unless a name says bytes, times in
seconds.

Reproducibility: with `engine.deterministic` a completion depends only on its prompt, its seed and
the weights. Otherwise `Request.seed` is ignored: each scheduler draws from one generator, and a
draw depends on which requests share a batch. Such a run samples correctly but cannot be repeated
token for token.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from selfplay.config import Config, EngineConfig
from selfplay.data.seeds import named_seed
from selfplay.distributed import World
from selfplay.engines.base import (
    Completion,
    Engine,
    GameCoroutine,
    Generate,
    Request,
    Sampling,
    run_all,
)
from selfplay.engines.options import NEED_FAST, ChosenEngine, SGLangOptions
from selfplay.engines.sglang import buckets, launch, patches, private
from selfplay.engines.sglang import weights as sending
from selfplay.engines.sglang.choose import Load, burst_share, choose
from selfplay.engines.sglang.event_loop import EngineLoop
from selfplay.engines.sglang.processes import Signals
from selfplay.engines.sglang.requests import Bursts, GameRouter, RequestCounters, RequestSender
from selfplay.engines.sglang.scheduler_client import SchedulerClient
from selfplay.engines.sglang.sessions import GameSessions, SessionPool, max_session_tokens
from selfplay.engines.weights import Compared, Weights
from selfplay.errors import EngineFault, EngineLost, SettingsError
from selfplay.model.hub import described_in
from selfplay.model.policy import DTYPES
from selfplay.model.stored import check_tensors

TAGS = ("kv_cache", "weights")  # the memory that `sleep` releases; CUDA graphs stay
TURNS_TO_ADAPT = 64  # fewer say too little about the length of turns
BURST_AFTER_S = 0.5  # longest time that a burst holds a request back
FLUSH_TIMEOUT_S = 60.0  # longest wait for the scheduler to become idle before a flush


class SGLangEngine(Engine):
    """One engine on `engine.tp_size` GPUs; it ends with the process that builds it."""

    scores = True
    part: type[sending.EnginePart] = sending.EnginePart  # of a rank that another one leads

    def __init__(
        self,
        model_path: str,
        config: ChosenEngine,
        *,
        device: str = "cuda",
        dtype: str = "bfloat16",
        context_length: int | None = None,
        seed: int = 0,
        base_gpu_id: int = 0,
        load_format: str = "auto",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Start the engine; blocks until it has answered one request.

        model_path: a local folder with config.json and, unless `load_format` is "dummy", weights.
        base_gpu_id: the engine's first visible GPU; it uses `config.tp_size` consecutive ones.
        load_format: "dummy" starts with random weights; requests are refused until a push.
        group: of the ranks that share the engine, which this rank leads (`sending.EnginePart`).

        Raises RuntimeError outside the main thread or when a child process dies during the start,
        ValueError for `config.deterministic` on a CPU, and SettingsError for memory that leaves no
        cache.
        """
        self.dtype, self.device, self._group = getattr(torch, dtype), device, group
        self._mem_fraction = config.mem_fraction
        self.tp_size, self.num_processes = config.tp_size, config.processes
        self.num_copies, self.num_ranks = config.processes, config.processes * config.tp_size
        self.deterministic, self.sessions = config.deterministic, config.sessions
        expected = launch.expected_parameters(model_path)
        self._holds_folder = load_format != "dummy"
        self.ledger = buckets.Ledger(expected, complete=self._holds_folder)
        self.cache_tokens = 0
        self._budget_bytes = 0.0
        self._released: set[str] = set()
        self._timeout_s, self._num_starts, self._adapts = config.timeout_s, 0, config.adapts
        if device == "cpu" and not config.max_cache_tokens:
            config = replace(config, max_cache_tokens=launch.CPU_CACHE)
        if config.processes > 1 or (device == "cuda" and config.tp_size == 1):
            config = launch.config_of_each(
                config, model_path, expected, gpu=base_gpu_id, itemsize=self.dtype.itemsize
            )
        self._arguments = launch.engine_arguments(
            model_path,
            config,
            device=device,
            dtype=dtype,
            context_length=context_length,
            seed=seed,
            base_gpu_id=base_gpu_id,
            load_format=load_format,
        )
        self.bursts = [
            Bursts(config.burst_share, after_s=BURST_AFTER_S) for _ in range(self.num_processes)
        ]
        self._start()

    @classmethod
    def check(cls, engine: EngineConfig, *, here: bool) -> None:
        """Its library, a GPU or the build for CPUs, and the kernels of `engine.exact`."""
        assert isinstance(engine, SGLangOptions)
        if here:
            launch.check_machine(engine)

    @classmethod
    def why_not(cls, model: PreTrainedModel) -> str | None:
        """Its loader takes no experts in one tensor."""
        if any("experts" in name and p.ndim == 3 for name, p in model.named_parameters()):
            return "weight sync with SGLang does not support merged experts: set engine.kind to hf"
        return None

    @classmethod
    def num_weights(cls, folder: Path) -> int:
        """By its config: how many parameters SGLang's model of it has."""
        shapes = launch.expected_parameters(str(described_in(folder)))
        return sum(shape.numel() for shape in shapes.values())

    @classmethod
    def choose(cls, engine: EngineConfig, load: Load) -> ChosenEngine:
        """By the sizes of models, turns and cores that were measured (`choose`)."""
        assert isinstance(engine, SGLangOptions)
        return choose(engine, load)

    @classmethod
    def start(
        cls, config: Config, weights: Path, world: World, *, load_format: str = "auto"
    ) -> Engine:
        """Of `world.replica.size` GPUs; a part of it on a rank that does not lead its replica."""
        # An evaluation's policies may come from runs with engines of other sizes.
        assert isinstance(config.engine, ChosenEngine)
        kind, chosen = cls._able(replace(config.engine, tp_size=world.replica.size), world)
        if not world.replica.leads:
            dtype = DTYPES[config.model.dtype]
            return kind.part(world, dtype, mem_fraction=chosen.mem_fraction)
        return kind._of_rank(config, chosen, weights, world, load_format=load_format)

    @classmethod
    def _able(cls, chosen: ChosenEngine, world: World) -> tuple[type[SGLangEngine], ChosenEngine]:
        """The class of engine that the installed SGLang can be with `engine.fast`, and what is left
        of the settings. Raises SettingsError for a setting that only the faster one has."""
        from selfplay.engines.sglang.plain import PlainEngine

        lacks = private.missing() if chosen.fast else None
        if chosen.fast and lacks is None:
            return cls, chosen
        if lacks is not None and chosen.deterministic:
            name = "engine.exact" if chosen.exact else "engine.deterministic"
            raise SettingsError(
                f"{name} needs SGLang {patches.VERSION}: the installed one lacks {lacks}"
            )
        if lacks is not None and world.rank == 0:
            print(
                f"warning: this SGLang lacks {lacks}; engine.fast is off, the run is slower",
                file=sys.stderr,
                flush=True,
            )
        return PlainEngine, replace(chosen, fast=False, adapts=False, **NEED_FAST)

    @classmethod
    def start_partner(cls, config: Config, weights: Path, world: World) -> Engine | None:
        """With a smaller cache than the policy's, of what memory is free (`config_of_partner`)."""
        if not world.replica.leads:
            return None
        assert isinstance(config.engine, ChosenEngine)
        chosen = launch.config_of_partner(
            replace(config.engine, tp_size=world.replica.size),
            str(weights),
            launch.expected_parameters(str(weights)),
            gpu=_first_gpu(world) if world.device.type == "cuda" else None,
            itemsize=DTYPES[config.model.dtype].itemsize,
            context=config.rollout.max_game_tokens,
        )
        kind, chosen = cls._able(chosen, world)
        return kind._of_rank(config, chosen, weights, world, load_format="auto")

    @classmethod
    def _of_rank(
        cls, config: Config, chosen: ChosenEngine, weights: Path, world: World, *, load_format: str
    ) -> Self:
        """An engine with these settings, of a rank that leads its replica. Raises SettingsError for
        a folder that SGLang would read in another way than the trainer."""
        if load_format == "auto":
            check_tensors(weights)
        if world.device.type == "cuda":
            gc.collect()  # free the warm start's memory before the engine takes its share
            torch.cuda.empty_cache()
        try:
            return cls(
                str(weights),
                chosen,
                device=world.device.type,
                dtype=config.model.dtype,
                # SGLang's longest prompt is the context less 6 tokens, with its answer less 2.
                context_length=config.rollout.max_game_tokens + 8,
                seed=named_seed(config.seed, "engine", world.replica.index),
                base_gpu_id=_first_gpu(world),
                load_format=load_format,
                group=world.replica.group,
            )
        except (RuntimeError, OSError) as error:  # a child has printed its own traceback
            raise EngineLost(f"the engine does not start: {error}") from error

    def _start(self) -> None:
        """Start the processes and read their first answers; the cache is as large as at first."""
        arguments, signals = self._arguments_of_start(), Signals()
        seed, port = arguments["random_seed"], arguments["nccl_port"]
        started = launch.launch(
            [
                arguments | {"nccl_port": port + i, "random_seed": (seed + 104_729 * i) % 2**31}
                for i in range(self.num_processes)
            ]
        )
        launch.warn_of_small_cache(started.cache_tokens, arguments.get("max_total_tokens", 0))
        self.cache_tokens = self.cache_tokens or started.cache_tokens
        self._loop = EngineLoop(started, signals, timeout_s=self._timeout_s)
        self.counters = RequestCounters()
        clients = [SchedulerClient(manager) for manager in self._loop.managers]
        self.senders = [
            RequestSender(self._loop, client, bursts, self.counters)
            for client, bursts in zip(clients, self.bursts, strict=True)
        ]
        if self.sessions:
            # SGLang has at most one request slot for two tokens of the cache.
            slots = min(arguments["max_running_requests"], self.cache_tokens // 2)
            slots = max(0, slots - arguments["pp_max_micro_batch_size"])
            tokens = max_session_tokens(self.cache_tokens, self.senders[0].context_length)
            self._pools = [
                SessionPool(client, slots=slots, max_tokens=tokens) for client in clients
            ]
        try:
            self.start_s = self._warm_up(started, patience_s=max(self._timeout_s, 600.0))
        except BaseException:
            self.close()  # no one else has this engine yet
            raise
        seconds = ", ".join(f"{name} {took_s:.1f} s" for name, took_s in self.start_s.items())
        print(
            f"engine up: {seconds}; attention {arguments['attention_backend']}, tp {self.tp_size}, "
            f"processes {self.num_processes}, cache of {started.cache_tokens} tokens",
            flush=True,
        )

    def _arguments_of_start(self) -> dict[str, Any]:
        """SGLang's arguments of this start: a port and a random stream of its own, and, from the
        second on, the first one's cache."""
        # Each process has its own random stream, and a restart begins a new one.
        seed = self._arguments["random_seed"] + 7919 * self._num_starts
        self._num_starts += 1
        self._ports = launch.reserve_ports()
        port = self._ports.getsockname()[1] + 1
        arguments = self._arguments | {"nccl_port": port, "random_seed": seed % 2**31}
        if self.device == "cuda":
            free_bytes = torch.cuda.mem_get_info(arguments["base_gpu_id"])[0]
            if self.cache_tokens:
                return launch.with_cache(
                    arguments, self.cache_tokens, self._budget_bytes, free_bytes=free_bytes
                )
            self._budget_bytes = arguments["mem_fraction_static"] * free_bytes
        return arguments

    def _warm_up(self, started: launch.Started, *, patience_s: float) -> dict[str, float]:
        """Answer one request, which compiles kernels; return the start's seconds by phase."""
        began_s = time.perf_counter()
        parameters = self.parameters(Request([1, 2, 3, 4], 2, 0), Sampling(1.0, ()))

        async def answer_once() -> None:
            for sender in self.senders:
                await sender.send([1, 2, 3, 4], parameters, version=self.version)

        self._loop.run(answer_once(), what="the first answer", timeout_s=patience_s)
        self._on_all(self._freeze, what="the start")
        return {
            "import": started.import_s,
            "processes and weights": started.launch_s,
            "first answer": time.perf_counter() - began_s,
        }

    async def _freeze(self, manager: Any) -> None:
        """Let the scheduler's garbage collector skip half a million objects that live as long."""
        from sglang.srt.managers.io_struct import FreezeGCReq

        manager._dispatch_to_scheduler(FreezeGCReq())

    def _on_all(self, call: Callable[[Any], Awaitable[Any]], *, what: str) -> list[Any]:
        """The answers of every process's front to one control call, made at the same time."""

        async def every() -> list[Any]:
            with self._loop.pending_answer():
                return await asyncio.gather(*map(call, self._loop.managers))

        return self._loop.run(every(), what=what)

    # Generation

    def generate_batch(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Answer all requests, in order. Raises like `run_games`."""

        def game(request: Request) -> GameCoroutine:
            return lambda generate: generate(request)

        return self.run_games(map(game, requests), sampling)

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

        def begin(game: GameCoroutine) -> asyncio.Task[Any]:
            requests = _GameRequests(self, router, sampling, partners)
            playing = asyncio.create_task(game(requests.generate))
            playing.add_done_callback(requests.close_sessions)
            return playing

        results = self._loop.run(self._play_all(map(begin, games)), what="generation")
        num_turns = self.counters.num_turns
        if self._adapts and num_turns >= TURNS_TO_ADAPT:
            mean = self.counters.num_sampled_tokens / num_turns
            share = burst_share(self.num_processes, mean)
            if share != self.bursts[0].share:
                print(f"engine: turns have {mean:.0f} tokens, burst_share is {share:g}", flush=True)
            self.adapt(share, again=False)
        return results

    def adapt(self, share: float, *, again: bool) -> None:
        """Send requests in bursts of this share; with `again` choose it by the turns from here."""
        for bursts in self.bursts:
            bursts.share = share
        self._adapts = again
        self.counters.num_turns = self.counters.num_sampled_tokens = 0

    async def _play_all(self, playing: Iterable[Awaitable[Any]]) -> list[Any]:
        """The games' results, once the engine has answered or dropped every request."""
        try:
            return await run_all(playing)
        finally:
            await self._loop.drain()

    def score(self, texts: Sequence[Sequence[int]]) -> Callable[[], list[list[float]]]:
        """Request the log-prob of each token of these texts given the tokens before it.

        Returns at once, while the engine works. The returned function waits for the answers: one
        list for each text, one entry shorter than the text, in nats at temperature 1. Process
        `n % num_processes` scores text n. Both raise like `run_games`.
        """
        self._check_awake()

        async def score_one(number: int, ids: Sequence[int]) -> list[float]:
            parameters = {"max_new_tokens": 1, "temperature": 1.0}
            sender = self.senders[number % self.num_processes]
            answer = await sender.send(ids, parameters, version=self.version, score=True)
            logprobs = [x for x in answer.prompt_logprobs[1:] if x is not None]
            if len(logprobs) != len(ids) - 1:
                raise EngineFault(f"the engine scored {len(logprobs)} of {len(ids) - 1} tokens")
            return logprobs

        async def every() -> list[list[float]]:
            return await asyncio.gather(*map(score_one, itertools.count(), texts))

        return self._loop.begin(every(), what="scoring")

    def _check_awake(self) -> None:
        """Raise RuntimeError while the engine cannot generate."""
        if self._released:
            raise RuntimeError(f"the engine sleeps: wake {sorted(self._released)} first")
        if not self.ledger.complete:
            raise RuntimeError("the engine holds no valid weights: push them first")

    def parameters(self, request: Request, sampling: Sampling) -> dict[str, Any]:
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

    def load(self, weights: Weights, version: int) -> None:
        """Raises ValueError, before anything is sent, for other parameters than the engine's."""
        sending.load(weights, self, self._group, version=version)

    def compare(self, weights: Weights) -> Compared:
        """Runs the model's own loader in each process, with comparisons in place of its writes."""
        return sending.compare(weights, self, self._group)

    def begin_bucket(
        self, payloads: Sequence[bytes], *, names: Sequence[str], version: int
    ) -> Callable[[], None]:
        """Start loading one bucket and return at once.

        `payloads` has one payload of `buckets.serialise` for each rank of each process, in order.
        The returned function waits until the engine has read the bucket. Only then may the next
        bucket begin or this one's buffer be freed. The engine refuses requests until a push is
        complete.
        """
        self._check_loadable(payloads)
        last = self.ledger.expect(names)
        flush = last and "kv_cache" not in self._released
        if flush:  # only in `push_again`: in a step the cache sleeps, and `wake` flushes it
            # The scheduler crashes if it must flush while it still processes its last batch.
            self.flush_cache("a weight push")

        async def load() -> None:
            await self._send_payloads(
                payloads,
                load_format="flattened_bucket",
                flush_cache=flush,
                weight_version=str(version) if last else None,
            )
            self.ledger.receive(names)
            if last:
                self.version = version

        return self._loop.begin(load(), what="a weight push")

    def begin_compare(self, payloads: Sequence[bytes]) -> Callable[[], None]:
        """Start a comparison of payloads of `buckets.serialise_compared`; return at once.

        The engine loads nothing and fills the result slots. The returned function waits for it.
        """
        self._check_loadable(payloads)
        if not self.ledger.complete:
            raise RuntimeError("the engine holds no valid weights: push them first")
        options = {"load_format": buckets.LOADER, "flush_cache": False, "weight_version": None}
        return self._loop.begin(
            self._send_payloads(payloads, **options), what="a comparison of weights"
        )

    def _check_loadable(self, payloads: Sequence[bytes]) -> None:
        """Raise if the weights sleep, or unless there is a payload for each of the ranks."""
        if "weights" in self._released:
            raise RuntimeError("the engine's weights sleep: wake them before a push")
        if len(payloads) != self.num_ranks:
            raise ValueError(f"a bucket needs {self.num_ranks} payloads, got {len(payloads)}")

    async def _send_payloads(self, payloads: Sequence[bytes], **options: Any) -> None:
        """Send each rank its payload, and wait until all have answered. Raises EngineFault for a
        payload that the engine refuses."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        answers = []
        for process, manager in enumerate(self._loop.managers):
            of_ranks = list(payloads[process * self.tp_size :][: self.tp_size])
            request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=of_ranks, **options)
            answers.append(manager.update_weights_from_tensor(request, None))
        with self._loop.pending_answer():
            for success, message in await asyncio.gather(*answers):
                if not success:
                    raise EngineFault(f"the engine refused a bucket: {message}")

    def sleep(self) -> None:
        """Free the GPU memory of cache and weights, whose contents are lost.

        Does nothing on a CPU: the memory saver is a CUDA library.
        """
        if self.device != "cuda" or self._released:
            return
        self._release()
        self._released = set(TAGS)
        self.ledger.invalidate()

    def _release(self) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        request = ReleaseMemoryOccupationReqInput(tags=list(TAGS))
        self._on_all(lambda m: m.release_memory_occupation(request, None), what="going to sleep")

    def wake(self, what: str) -> None:
        """Allocate memory again: "weights" before a push, "kv_cache" after it.

        The weights are invalid until the push is complete. Raises ValueError for any other `what`.
        """
        if what not in TAGS:
            raise ValueError(f"wake takes one of {TAGS}, got {what!r}")
        if what not in self._released:  # SGLang would end its whole process tree
            return
        sending.make_room(torch.device("cuda", torch.cuda.current_device()), self._mem_fraction)
        self._resume(what)
        self._released.discard(what)
        if what == "kv_cache":
            self.flush_cache("flushing the prefix cache")

    def _resume(self, what: str) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        request = ResumeMemoryOccupationReqInput(tags=[what])
        self._on_all(lambda m: m.resume_memory_occupation(request, None), what=f"waking {what}")

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
        self.ledger = buckets.Ledger(self.ledger.expected, complete=self._holds_folder)
        self.version, self._released = 0, set()
        try:
            self.close()
            self._start()
        except (RuntimeError, OSError) as error:
            self.close()
            raise EngineFault(f"the engine does not start again: {error}") from error

    def close(self) -> None:
        """Kill the engine's processes and no others. Safe to call twice."""
        self._loop.close()
        self._ports.close()

    @property
    def lost(self) -> bool:
        """Whether a process of the engine has ended, or gave no answer in time."""
        return self._loop.lost

    @property
    def num_weight_bytes(self) -> int:
        """The bytes of one copy of the weights."""
        return launch.bytes_of(self.ledger.expected, self.dtype.itemsize)


def _first_gpu(world: World) -> int:
    """The first GPU of this rank's engine."""
    return world.local_rank // world.replica.size * world.replica.size


class _GameRequests:
    """The requests of one game. The process that gets the first one answers them all."""

    def __init__(
        self,
        engine: SGLangEngine,
        router: GameRouter,
        sampling: Sampling,
        partners: Generate | None,
    ) -> None:
        self._engine, self._router = engine, router
        self._sampling, self._partners = sampling, partners
        self._process: int | None = None
        self._sessions: GameSessions | None = None

    async def generate(self, request: Request) -> Completion:
        """The completion of one request. A turn is complete if it ends with a stop token: SGLang
        tests the length first, so a stop token at the limit would count as cut off."""
        if request.model and self._partners is not None:
            return await self._partners(request)
        engine = self._engine
        if self._process is None:
            self._process = self._router.process_for(request.prompt_ids)
            if engine.sessions:
                self._sessions = GameSessions(engine._pools[self._process])
        version = engine.version
        answer = await engine.senders[self._process].send(
            request.prompt_ids,
            engine.parameters(request, self._sampling),
            version=version,
            sessions=self._sessions,
        )
        stopped = bool(answer.ids) and answer.ids[-1] in self._sampling.stop_ids
        finish = "stop" if stopped else answer.finish
        return Completion(answer.ids, answer.logprobs, finish, version)

    def close_sessions(self, _ended: asyncio.Task[Any]) -> None:
        """The sessions of the game end with it."""
        if self._sessions is not None:
            self._sessions.close()
