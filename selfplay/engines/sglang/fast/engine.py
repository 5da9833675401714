"""The SGLang engine with `engine.fast`: requests bypass SGLang's front end; several processes.

A scheduler is bound to one core, so an engine of a small model may have several processes
(`engine.processes`), each with its own copy of the weights, its cache and its games. Written for
SGLang 0.5.17. Sizes in tokens, times in seconds.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch.distributed as dist

from selfplay.engines.base import Request, Sampling
from selfplay.engines.sglang import buckets, launch, processes
from selfplay.engines.sglang import weights as sending
from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.engines.sglang.event_loop import EngineLoop
from selfplay.engines.sglang.fast import early
from selfplay.engines.sglang.fast.client import SchedulerClient
from selfplay.engines.sglang.fast.sessions import SessionPool, max_session_tokens
from selfplay.engines.sglang.launch import Started
from selfplay.engines.sglang.requests import RequestCounters, RequestSender
from selfplay.engines.weights import Bucket
from selfplay.errors import EngineFault

DRAIN_S = 10.0  # longest wait for aborted requests
FLUSH_TIMEOUT_S = 60.0  # longest wait for the scheduler to become idle before a flush


class FastLoop(EngineLoop):
    """The event loop of all SGLang front ends; a call on another loop would hang."""

    @property
    def managers(self) -> tuple[Any, ...]:
        """The front ends of the processes."""
        return tuple(engine.tokenizer_manager for engine in self.engines)

    async def _install_handlers(self) -> None:
        for manager in self.managers:
            manager.auto_create_handle_loop()

    async def drain(self) -> None:
        """Wait until the engine has dropped aborted requests: it must be idle before it sleeps."""
        until_s = time.perf_counter() + DRAIN_S
        while self._dead is None and time.perf_counter() < until_s:
            if not any(manager.rid_to_state for manager in self.managers):
                return
            await asyncio.sleep(0.005)


class FastPart(sending.EnginePart):
    """A rank's part of a fast engine that another rank leads: the engine's rank on this GPU reads
    this rank's own gathered copy."""

    def begin(self, bucket: Bucket, folder: str) -> Callable[[], None]:
        """Send the leader a handle to this rank's copy."""
        of_all_ranks(bucket, folder, self._group, num=1)
        return lambda: None


class FastEngine(SGLangEngine):
    """One engine on `engine.tp_size` GPUs, or several processes on one."""

    part = FastPart
    _loop: FastLoop

    def _start(self) -> None:
        arguments, signals = self._arguments_of_start(), processes.Signals()
        seed, port = arguments["random_seed"], arguments["nccl_port"]
        started = launch_all(
            [
                arguments | {"nccl_port": port + i, "random_seed": (seed + 104_729 * i) % 2**31}
                for i in range(self.num_processes)
            ]
        )
        info = started.engines[0]._scheduler_init_result.scheduler_infos[0]
        self.cache_tokens = self.cache_tokens or int(info["max_total_num_tokens"])
        self._loop = FastLoop(started, signals, timeout_s=self._timeout_s, alone=self._alone)
        self.counters = RequestCounters()
        clients = [SchedulerClient(manager) for manager in self._loop.managers]
        self.senders = [
            RequestSender(self._loop, client, bursts, self.counters)
            for client, bursts in zip(clients, self.bursts, strict=True)
        ]
        if self.sessions:
            # SGLang has at most one request slot per two tokens of the cache.
            slots = min(arguments["max_running_requests"], self.cache_tokens // 2)
            slots = max(0, slots - arguments["pp_max_micro_batch_size"])
            tokens = max_session_tokens(self.cache_tokens, self.senders[0].context_length)
            self.pools = [SessionPool(client, slots=slots, max_tokens=tokens) for client in clients]
        try:
            self.start_s = self._warm_up(started, patience_s=max(self._timeout_s, 600.0))
        except BaseException:
            self.close()  # nobody else holds this engine yet
            raise
        self._say_up(arguments["attention_backend"])

    def _warm_up(self, started: Started, *, patience_s: float) -> dict[str, float]:
        """Answer one request, which compiles kernels; return the start's duration by phase in s."""
        from sglang.srt.managers.io_struct import FreezeGCReq

        began_s = time.perf_counter()
        parameters = self.parameters(Request([1, 2, 3, 4], 2, 0), Sampling(1.0, ()))

        async def answer_once() -> None:
            for sender in self.senders:
                await sender.send([1, 2, 3, 4], parameters)

        self._loop.run(answer_once(), what="the first answer", timeout_s=patience_s)
        for manager in self._loop.managers:
            # Half a million objects live as long as the scheduler; its collector then skips them.
            manager._dispatch_to_scheduler(FreezeGCReq())
        return {
            "import": started.import_s,
            "processes and weights": started.launch_s,
            "first answer": time.perf_counter() - began_s,
        }

    def on_all(self, call: Callable[[Any], Awaitable[Any]], *, what: str) -> list[Any]:
        """The answers of all processes' front ends to one control call, made concurrently."""
        return self._loop.run(self._every(map(call, self._loop.managers)), what=what)

    async def _every(self, answers: Iterable[Awaitable[Any]]) -> list[Any]:
        with self._loop.pending_answer():
            return await asyncio.gather(*answers)

    def _begin(self, bucket: Bucket, folder: str) -> Callable[[], None]:
        num = 1 if self._group is not None else self.num_ranks
        payloads = of_all_ranks(bucket, folder, self._group, num=num)
        return self._loop.begin(self.read(payloads), what=sending.purpose(folder))

    async def read(self, payloads: Sequence[bytes]) -> None:
        """Let each rank of each process read its payload, and wait for all of them. Raises
        EngineFault for a payload that the engine refuses."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        answers = []
        for process, manager in enumerate(self._loop.managers):
            request = UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=list(payloads[process * self.tp_size :][: self.tp_size]),
                load_format=buckets.LOADER,
                flush_cache=False,
            )
            answers.append(manager.update_weights_from_tensor(request, None))
        for success, message in await self._every(answers):
            if not success:
                raise EngineFault(f"the engine refused a bucket: {message}")

    def _control(self, name: str, what: str, **fields: Any) -> list[Any]:
        from sglang.srt.managers import io_struct

        if not hasattr(self._loop.managers[0], name):
            return []
        kind = "".join(word.capitalize() for word in name.split("_"))
        request = getattr(io_struct, f"{kind}ReqInput")(**fields)
        return self.on_all(lambda manager: getattr(manager, name)(request, None), what=what)

    def flush_cache(self, what: str) -> None:
        answers = self.on_all(lambda m: m.flush_cache(timeout_s=FLUSH_TIMEOUT_S), what=what)
        if not all(answer.success for answer in answers):
            raise EngineFault("the engine could not flush its prefix cache")


def of_all_ranks(
    bucket: Bucket, folder: str, group: dist.ProcessGroup | None, *, num: int
) -> list[bytes]:
    """`num` payloads for this rank's copy; on the leader of a replica of several ranks, one payload
    from each. A handle can be opened only once, so each rank of the engine gets its own."""
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    if bucket.flat_N.is_cuda:
        # The patch names devices by UUID, because their numbers may differ in the engine.
        monkey_patch_torch_reductions()
    message = buckets.message(bucket.flat_N, bucket.shapes, folder=folder)
    payloads = [bytes(ForkingPickler.dumps(message)) for _ in range(num)]
    if group is None:
        return payloads
    leads = dist.get_rank(group) == 0
    gathered: list[Any] | None = [None] * dist.get_world_size(group) if leads else None
    dist.gather_object(payloads[0], gathered, group=group, group_dst=0)
    return gathered or []


def launch_all(every: Sequence[dict[str, Any]]) -> Started:
    """Import SGLang; start one engine per dict of arguments, all loading at the same time.

    Raises RuntimeError outside the main thread and if a child process dies.
    """
    began_s = time.perf_counter()
    with launch.importing(every[0]["device"]):
        from sglang.srt.entrypoints import engine as sglang_engine

    imported_s = time.perf_counter()

    class GuardedEngine(sglang_engine.Engine):
        run_scheduler_process_func = processes.ChildOf(os.getpid(), processes.run_scheduler)
        run_detokenizer_process_func = processes.ChildOf(os.getpid(), processes.run_detokenizer)

        @classmethod
        def _launch_scheduler_processes(cls, *words: Any, **named: Any) -> Any:
            """Start the next engine before SGLang waits for this one, in the same thread."""
            result, schedulers = super()._launch_scheduler_processes(*words, **named)
            wait = result.wait_for_ready

            def wait_for_ready() -> None:
                start_next()
                wait()

            result.wait_for_ready = wait_for_ready
            return result, schedulers

        def shutdown(self) -> None:
            """Do nothing: SGLang's own would SIGKILL every child of this process."""

    waiting, engines = list(every), []

    def start_next() -> None:
        if waiting:
            engines.append(GuardedEngine(**waiting.pop(0)))

    with (
        launch.starting(every[0]["device"], every[0]["tp_size"]) as children,
        early.handed_over(sglang_engine),
    ):
        start_next()
    engines.reverse()  # the last one to start is the first to be complete
    launch_s = time.perf_counter() - imported_s
    return Started(tuple(engines), tuple(children), imported_s - began_s, launch_s)
