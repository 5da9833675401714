"""The SGLang engine: continuous batching in child processes of the trainer, replaceable weights.

The trainer's process holds SGLang's front end; one scheduler process per tensor-parallel rank does
the work. `SGLangEngine` is the common base of `fast.FastEngine`, which uses private names of SGLang
for speed (`engine.fast`), and `plain.PlainEngine`, which needs only its public calls. All
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
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

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
from selfplay.engines.sglang import launch
from selfplay.engines.sglang import weights as sending
from selfplay.engines.sglang.choose import Load, burst_share, choose
from selfplay.engines.sglang.event_loop import EngineLoop
from selfplay.engines.sglang.fast import private
from selfplay.engines.sglang.fast.sessions import GameSessions, SessionPool
from selfplay.engines.sglang.requests import Bursts, GameRouter, RequestCounters, RequestSender
from selfplay.engines.weights import Bucket, Compared, Weights, why_merged
from selfplay.errors import EngineFault, EngineLost, SettingsError
from selfplay.model.hub import described_in
from selfplay.model.policy import DTYPES
from selfplay.model.stored import check_tensors

TAGS = ("kv_cache", "weights")  # the memory that `sleep` releases; CUDA graphs stay
TURNS_TO_ADAPT = 64  # fewer turns do not show how long turns are
BURST_AFTER_S = 0.5  # longest time that a burst holds a request back


class SGLangEngine(Engine):
    """One engine on `engine.tp_size` GPUs; it ends with the process that builds it."""

    starts_empty = True
    scores, score_temperature = True, 1.0
    part: ClassVar[type[sending.EnginePart]] = sending.EnginePart  # for a rank that does not lead
    counters: RequestCounters
    senders: list[RequestSender]  # one per process
    pools: list[SessionPool]  # one per process, with `engine.sessions`
    start_s: dict[str, float]  # duration of the start by phase
    _loop: EngineLoop

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
        group: the ranks that share the engine, led by this rank (`sending.EnginePart`).

        Raises RuntimeError outside the main thread or when a child process dies during the start,
        ValueError for `config.deterministic` on a CPU, and SettingsError if the memory leaves no
        room for a cache.
        """
        self.dtype, self.device, self._group = getattr(torch, dtype), device, group
        self._alone = config.alone
        self.tp_size, self.num_processes = config.tp_size, config.processes
        self.num_copies, self.num_ranks = config.processes, config.processes * config.tp_size
        self.deterministic, self.sessions = config.deterministic, config.sessions
        expected = launch.expected_parameters(model_path)
        self._holds_folder = self._whole = load_format != "dummy"
        self._expected, self.cache_tokens = expected, 0
        self._budget_bytes = 0.0
        self._released: set[str] = set()
        self._timeout_s, self._num_starts, self._adapts = config.timeout_s, 0, config.adapts
        if device == "cpu" and not config.max_cache_tokens:
            config = replace(config, max_cache_tokens=launch.CPU_CACHE)
        sizes = launch.Sizes.of(model_path, self.dtype.itemsize, expected)
        self._room = launch.room_of(config, sizes, gpu=base_gpu_id if device == "cuda" else None)
        if config.processes > 1 or (device == "cuda" and config.tp_size == 1):
            config = launch.config_of_each(config, sizes, gpu=base_gpu_id)
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
        """Check for its library, a GPU or the CPU build, and the kernels of `engine.exact`."""
        assert isinstance(engine, SGLangOptions)
        if here:
            launch.check_machine(engine)

    @classmethod
    def why_not(cls, model: PreTrainedModel) -> str | None:
        """Its loader does not accept a layer's experts merged into one tensor."""
        return why_merged(model, "SGLang")

    @classmethod
    def num_weights(cls, folder: Path) -> int:
        """The number of parameters of the model with this folder's config."""
        shapes = launch.expected_parameters(str(described_in(folder)))
        return sum(shape.numel() for shape in shapes.values())

    @classmethod
    def choose(cls, engine: EngineConfig, load: Load) -> ChosenEngine:
        """Choose by measured sizes of models, turns and hosts (`choose`)."""
        assert isinstance(engine, SGLangOptions)
        return choose(engine, load)

    @classmethod
    def parted(cls, engines: Sequence[EngineConfig]) -> list[EngineConfig]:
        """`engine.mem_fraction` of each, divided by their number if their sum is above 0.95, as a
        share of the memory that the earlier ones leave."""
        return launch.parted(engines)

    @classmethod
    def start(
        cls, config: Config, weights: Path, world: World, *, load_format: str = "auto"
    ) -> Engine:
        """An engine on `world.replica.size` GPUs; on a rank that does not lead, a part of it."""
        # An evaluation's policies may come from runs with engines of other sizes.
        assert isinstance(config.engine, ChosenEngine)
        kind, chosen = cls._able(replace(config.engine, tp_size=world.replica.size), world)
        if not world.replica.leads:
            dtype = DTYPES[config.model.dtype]
            sizes = launch.Sizes.of(str(weights), dtype.itemsize)
            room = launch.room_of(chosen, sizes, gpu=world.device.index)
            return kind.part(world, dtype, room=room)
        return kind._of_rank(config, chosen, weights, world, load_format=load_format)

    @classmethod
    def _able(cls, chosen: ChosenEngine, world: World) -> tuple[type[SGLangEngine], ChosenEngine]:
        """The engine class that the installed SGLang supports, and the settings that remain.
        Raises SettingsError for a setting that only the fast engine has."""
        from selfplay.engines.sglang.fast.engine import FastEngine
        from selfplay.engines.sglang.plain import PlainEngine

        lacks = private.missing() if chosen.fast else None
        if lacks is not None and chosen.deterministic:
            name = "engine.exact" if chosen.exact else "engine.deterministic"
            raise SettingsError(
                f"{name} needs SGLang {private.VERSION}: the installed one lacks {lacks}"
            )
        if world.rank == 0 and lacks is not None:
            _warn(f"this SGLang lacks {lacks}; engine.fast is off and the run is slower")
        if chosen.fast and lacks is None:
            if world.rank == 0 and (other := private.other_version()) is not None:
                _warn(f"SGLang {other} is untested; {private.VERSION} is pinned")
            return FastEngine, chosen
        return PlainEngine, replace(chosen, fast=False, adapts=False, **NEED_FAST)

    @classmethod
    def start_partner(cls, config: Config, weights: Path, world: World) -> Engine | None:
        """An engine with a smaller cache than the policy's (`launch.config_of_partner`)."""
        if not world.replica.leads:
            return None
        assert isinstance(config.engine, ChosenEngine)
        chosen = launch.config_of_partner(
            replace(config.engine, tp_size=world.replica.size),
            launch.Sizes.of(str(weights), DTYPES[config.model.dtype].itemsize),
            gpu=_first_gpu(world) if world.device.type == "cuda" else None,
            context=config.rollout.max_game_tokens,
        )
        kind, chosen = cls._able(chosen, world)
        return kind._of_rank(config, chosen, weights, world, load_format="auto")

    @classmethod
    def _of_rank(
        cls, config: Config, chosen: ChosenEngine, weights: Path, world: World, *, load_format: str
    ) -> Self:
        """An engine with these settings on a rank that leads its replica. Raises SettingsError for
        a folder that SGLang would read differently from the trainer."""
        if load_format == "auto":
            check_tensors(weights)
        if world.device.type == "cuda":
            gc.collect()  # free the warm start's memory before the engine takes its share
            torch.cuda.empty_cache()
        # The engines of further policies draw from random streams of their own.
        earlier = [] if chosen.alone else [len(EngineLoop.of_policies)]
        try:
            return cls(
                str(weights),
                chosen,
                device=world.device.type,
                dtype=config.model.dtype,
                # SGLang limits a prompt to the context - 6 tokens, prompt and answer to - 2.
                context_length=config.rollout.max_game_tokens + 8,
                seed=named_seed(config.seed, "engine", world.replica.index, *filter(None, earlier)),
                base_gpu_id=_first_gpu(world),
                load_format=load_format,
                group=world.replica.group,
            )
        except (RuntimeError, OSError) as error:  # a child has printed its own traceback
            raise EngineLost(f"the engine does not start: {error}") from error

    def _start(self) -> None:
        """Start the processes; sets `_loop`, `senders` and `counters`."""
        raise NotImplementedError

    def _say_up(self, attention: str) -> None:
        seconds = ", ".join(f"{name} {took_s:.1f} s" for name, took_s in self.start_s.items())
        print(
            f"engine up: {seconds}; attention {attention}, tp {self.tp_size}, processes "
            f"{self.num_processes}, cache of {self.cache_tokens} tokens",
            flush=True,
        )

    def _arguments_of_start(self) -> dict[str, Any]:
        """SGLang's arguments of this start: a new port, a new random stream and, from the second
        start on, the cache size of the first."""
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

    # Generation

    def run_games(
        self, games: Iterable[GameCoroutine], sampling: Sampling, partners: Generate | None = None
    ) -> list[Any]:
        """Run one coroutine per game concurrently; return the results in order.

        Each coroutine gets `generate(request)`; `partners` answers requests for other models. The
        first exception cancels the other games and their requests, then propagates. Also raises
        ValueError for a request that does not fit the context; EngineFault if the engine dies,
        gives no answer for `timeout_s`, aborts a request or sends an unreadable reply; and
        RuntimeError while it has no valid weights or cache (it sleeps, or a push is incomplete).
        """
        self._check_awake()
        router = GameRouter(self.num_processes)

        async def play(game: GameCoroutine) -> Any:
            with self._game(router, sampling, partners) as generate:
                return await game(generate)

        results = self._loop.run(self._play_all(map(play, games)), what="generation")
        self._adapt_to_turns()
        return results

    def answering(self, sampling: Sampling) -> Callable[[], AbstractContextManager[Generate]]:
        """Requests go to this engine's processes at once, beside those of the engine that runs the
        games: both are on one event loop. Raises as `run_games`."""
        self._check_awake()
        self._adapt_to_turns()
        return partial(self._game, GameRouter(self.num_processes), sampling)

    @contextmanager
    def _game(
        self, router: GameRouter, sampling: Sampling, partners: Generate | None = None
    ) -> Iterator[Generate]:
        """The requests of a game, whose sessions end with it."""
        requests = _GameRequests(self, router, sampling, partners)
        try:
            yield requests.generate
        finally:
            requests.close_sessions()

    def _adapt_to_turns(self) -> None:
        """Set the share of the bursts once, by the length of the first rollout's turns."""
        num_turns = self.counters.num_turns
        if self._adapts and num_turns >= TURNS_TO_ADAPT:
            mean = self.counters.num_sampled_tokens / num_turns
            share = burst_share(self.num_processes, mean)
            if share != self.bursts[0].share:
                print(f"engine: turns have {mean:.0f} tokens, burst_share is {share:g}", flush=True)
            self.adapt(share, again=False)

    def adapt(self, share: float, *, again: bool) -> None:
        """Set the share of the bursts; with `again` adapt it once more to the following turns."""
        for bursts in self.bursts:
            bursts.share = share
        self._adapts = again
        self.counters.num_turns = self.counters.num_sampled_tokens = 0

    async def _play_all(self, playing: Iterable[Awaitable[Any]]) -> list[Any]:
        """The games' results, after the engine has answered or dropped every request."""
        try:
            return await run_all(playing)
        finally:
            for each in self._loop.sharing:
                await each.drain()

    def score(
        self, texts: Sequence[Sequence[int]], *, temperature: float = 1.0
    ) -> Callable[[], list[list[float]]]:
        """Request the log-prob of each token of these texts given the tokens before it.

        Returns at once, while the engine works. The returned function waits for the answers: one
        list per text, one entry shorter than the text, in nats at temperature 1. Process
        `n % num_processes` scores text n. Both raise like `run_games`.
        """
        if temperature != self.score_temperature:
            raise ValueError(f"SGLang scores at temperature 1, got {temperature:g}")
        self._check_awake()

        async def score_one(number: int, ids: Sequence[int]) -> list[float]:
            parameters = {"max_new_tokens": 1, "temperature": 1.0}
            sender = self.senders[number % self.num_processes]
            answer = await sender.send(ids, parameters, score=True)
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
        self._check_whole()

    def parameters(self, request: Request, sampling: Sampling) -> dict[str, Any]:
        """SGLang's sampling parameters for one request."""
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
        """Raises ValueError, before anything is sent, if the parameters are not the engine's, and
        RuntimeError if its weights sleep. It refuses requests until all weights have arrived."""
        self._check_loadable()
        self._whole = False
        with self._update_open("a weight push"):
            sending.load(weights, self._group, self._begin, expected=self._expected)
        self.version, self._whole = version, True
        if "kv_cache" not in self._released:  # in `push_again`; in a step it sleeps until `wake`
            self.flush_cache("a weight push")

    def compare(self, weights: Weights) -> Compared:
        """Runs the model's own loader in each process, with each write replaced by a comparison."""
        self._check_loadable()
        self._check_whole()
        with self._update_open("a comparison of weights"):
            return sending.compare(weights, self._group, self._begin)

    @contextmanager
    def _update_open(self, what: str) -> Iterator[None]:
        """SGLang 0.5.21 takes buckets, to load or compare, only in such a session."""
        self._agreed("begin_weight_update", what)
        try:
            yield
        except Exception:
            with suppress(EngineFault):  # the next session can only open after this one
                self._agreed("end_weight_update", what)
            raise
        self._agreed("end_weight_update", what)

    def _agreed(self, name: str, what: str) -> None:
        """`_control`, with EngineFault for a refusal."""
        for success, message in self._control(name, what):
            if not success:
                raise EngineFault(f"the engine refused {name}: {message}")

    def _control(self, name: str, what: str, **fields: Any) -> list[Any]:
        """The answers of all processes to this control call of SGLang, named `what` in errors; none
        if this SGLang does not have it."""
        raise NotImplementedError

    def _begin(self, bucket: Bucket, folder: str) -> Callable[[], None]:
        """A `sending.Begin`: let every process read this bucket."""
        raise NotImplementedError

    def _check_loadable(self) -> None:
        if "weights" in self._released:
            raise RuntimeError("the engine's weights sleep: wake them before a push")

    def _check_whole(self) -> None:
        if not self._whole:
            raise RuntimeError("the engine holds no valid weights: push them first")

    def sleep(self) -> None:
        """Free the GPU memory of cache and weights; their contents are lost.

        Does nothing on a CPU: the memory saver is a CUDA library.
        """
        if self.device != "cuda" or self._released:
            return
        self._control("release_memory_occupation", "going to sleep", tags=list(TAGS))
        self._released, self._whole = set(TAGS), False

    def wake(self, what: str) -> None:
        """Allocate memory again: "weights" before a push, "kv_cache" after it.

        The weights are invalid until the push is complete.
        """
        if what not in self._released:  # SGLang would then end its whole process tree
            return
        sending.make_room(torch.device("cuda", torch.cuda.current_device()), self._room)
        self._control("resume_memory_occupation", f"waking {what}", tags=[what])
        self._released.discard(what)
        if what == "kv_cache":
            self.flush_cache("flushing the prefix cache")

    def flush_cache(self, what: str) -> None:
        """Empty the prefix cache once the scheduler is idle. `what` names the call in errors."""
        raise NotImplementedError

    def restart(self) -> None:
        """Kill the engine's processes and start new ones from the same folder.

        The new engine has that folder's weights and a cache of the same size as before, although
        the trainer's state now takes memory. If it does not start, this call and all later ones
        raise EngineFault.
        """
        self._whole = self._holds_folder
        self.version, self._released = 0, set()
        try:
            self.close()
            self._start()
        except (RuntimeError, OSError) as error:
            self.close()
            raise EngineFault(f"the engine does not start again: {error}") from error

    def close(self) -> None:
        """Kill only the engine's processes. Safe to call twice."""
        self._loop.close()
        self._ports.close()

    @property
    def lost(self) -> bool:
        """Whether a process of the engine has ended or did not answer in time."""
        return self._loop.lost

    @property
    def num_weight_bytes(self) -> int:
        """The size in bytes of one copy of the weights."""
        return launch.bytes_of(self._expected, self.dtype.itemsize)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


def _first_gpu(world: World) -> int:
    """The first GPU of this rank's engine; 0 on a CPU, where SGLang takes it for a memory node."""
    on_gpu = world.device.type == "cuda"
    return world.local_rank // world.replica.size * world.replica.size if on_gpu else 0


class _GameRequests:
    """The requests of one game. The process that gets the first request answers all of them."""

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
        """The completion of one request. A turn that ends with a stop token is complete: SGLang
        tests the length first, so it reports a stop token at the limit as cut off."""
        if request.model and self._partners is not None:
            return await self._partners(request)
        engine = self._engine
        if self._process is None:
            self._process = self._router.process_for(request.prompt_ids)
            if engine.sessions:
                self._sessions = GameSessions(engine.pools[self._process])
        version = engine.version
        answer = await engine.senders[self._process].send(
            request.prompt_ids,
            engine.parameters(request, self._sampling),
            sessions=self._sessions,
        )
        stopped = bool(answer.ids) and answer.ids[-1] in self._sampling.stop_ids
        finish = "stop" if stopped else answer.finish
        return Completion(answer.ids, answer.logprobs, finish, version)

    def close_sessions(self) -> None:
        """End the game's sessions when the game has ended."""
        if self._sessions is not None:
            self._sessions.close()
