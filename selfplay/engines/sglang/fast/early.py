"""Scheduler processes that import SGLang while the trainer is still starting.

A scheduler spends about ten seconds on the import, as long as the trainer needs before it launches
the engine. Child processes import this module first, so it imports neither torch nor sglang at the
top level. Written for SGLang 0.5.17.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import reduction
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

from dialop.workers import Spawned
from selfplay.config import Config
from selfplay.engines.options import SGLangOptions
from selfplay.engines.sglang import processes
from selfplay.engines.sglang.choose import choose, load_of

_waiting: list[EarlyScheduler] = []
_coming: list[str] = []  # the policies whose engines will use them


class EarlyScheduler(Spawned):
    """A process that runs and imports from its creation on; `start` gives it its work.

    It keeps the environment of its creation; `start` adds to it.
    """

    def __init__(self, *, gpu: bool) -> None:
        ours, theirs = multiprocessing.Pipe()
        target: Any = processes.ChildOf(os.getpid(), _wait)
        super().__init__(target=target, args=(theirs, gpu))
        super().start()
        theirs.close()
        self._pipe, self._gpus = ours, os.environ.get("CUDA_VISIBLE_DEVICES")
        self._work: tuple[processes.ChildOf, tuple[Any, ...]] | None = None

    def takes(self, body: processes.ChildOf, words: tuple[Any, ...]) -> bool:
        """Whether the process still waits and sees the same GPUs; `start` then runs `body`."""
        if not self.is_alive() or self._gpus != os.environ.get("CUDA_VISIBLE_DEVICES"):
            return False
        self._work = body, words
        return True

    def start(self) -> None:
        """Run the work. Raises BrokenPipeError if the process has ended."""
        assert self._work is not None and self.pid is not None
        body, (*words, answers) = self._work  # the pipe `answers` cannot be pickled here
        self._pipe.send((body, words, dict(os.environ)))
        reduction.send_handle(self._pipe, answers.fileno(), self.pid)
        self._pipe.close()

    def end(self) -> None:
        """End the process, which has no work."""
        self.kill()
        self.join()
        self._pipe.close()


def begin(config: Config) -> None:
    """Start the schedulers that this rank's engines will need, one of each policy, about as many as
    they will choose.

    It starts none before a warm start without a GPU, where they would hold memory that the warm
    start needs, and none with `engine.server_args`, for which SGLang may set variables that are
    read at the import.
    """
    if not _waiting:
        _coming[:] = config.policy_names
        for name in _coming:
            _begin(config.of_policy(name))


def _begin(config: Config) -> None:
    """Start the schedulers of one policy's engine, by its settings.

    Their number is a guess: weights that nobody has read may be too large for several.
    """
    engine = config.engine
    if not isinstance(engine, SGLangOptions):
        return
    wanted = engine.fast and not engine.server_args
    imitates = config.warm_start.imitates and not os.path.lexists(f"{config.out}/warm_start")
    main_thread = threading.current_thread() is threading.main_thread()  # children end with it
    here = all(map(importlib.util.find_spec, ("sglang", "torch_memory_saver")))
    if not (wanted and main_thread and here):
        return
    try:
        rank, ranks, of_host = (
            int(os.environ.get(name, default))
            for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1"))
        )
    except ValueError:
        return  # `init_world` raises, with the variable's name
    if rank % engine.tp_size:
        return  # another rank leads its replica
    import torch

    gpu = config.device != "cpu" and torch.cuda.is_available()
    if imitates and not gpu:
        return
    cores = len(os.sched_getaffinity(0)) // max(1, of_host // engine.tp_size)
    replicas = max(1, ranks // engine.tp_size)
    load = load_of(config, 0, replicas=replicas, continues=True, cores=cores, gpu=gpu)
    start(choose(engine, load).processes * engine.tp_size, gpu=gpu, tp_size=engine.tp_size)


def start(num: int, *, gpu: bool, tp_size: int) -> None:
    """Start `num` schedulers that wait for this process's next engine."""
    memory_saver: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if gpu:
        memory_saver = importlib.import_module("torch_memory_saver").configure_subprocess()
    atexit.register(end)  # otherwise Python would wait for them
    # They inherit the ignored SIGINT: Ctrl-C is for the trainer, which ends them.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with processes.child_environment("cuda" if gpu else "cpu", tp_size), memory_saver:
            for _ in range(num):
                _waiting.append(EarlyScheduler(gpu=gpu))
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if handler is None else handler)


def waiting() -> tuple[EarlyScheduler, ...]:
    """The schedulers without work."""
    return tuple(_waiting)


def end() -> None:
    """End the schedulers without work."""
    while _waiting:
        _waiting.pop().end()


@contextlib.contextmanager
def handed_over(engine_module: Any) -> Iterator[None]:
    """Let SGLang's launch use the waiting schedulers first; the rest end with the block, unless
    another policy's engine will use them."""

    def process(*, target: Any, args: Any = (), kwargs: Any = None) -> BaseProcess:
        while isinstance(target, processes.ChildOf) and target.body is processes.run_scheduler:
            if not _waiting:
                break
            if (early := _waiting.pop(0)).takes(target, args):
                return early
            early.end()
        if isinstance(target, processes.ChildOf) and target.body is processes.run_detokenizer:
            args = ()  # to unpickle them would import SGLang
        return multiprocessing.Process(target=target, args=args, kwargs=kwargs or {})

    engine_module.mp = SimpleNamespace(**{**vars(multiprocessing), "Process": process})
    try:
        yield
    finally:
        engine_module.mp = multiprocessing
        del _coming[:1]
        if not _coming:
            end()


def _wait(pipe: Connection, on_gpu: bool) -> None:
    """Import what a scheduler needs, then do the work that arrives, or raise why it cannot. With a
    GPU it also compiles flashinfer's norms, which takes 40 s, once for a machine."""
    failed = None
    logging.disable(logging.WARNING)  # SGLang warns about each model that cannot be imported
    try:
        # A title needs the original environment; SGLang sets its own title later.
        importlib.import_module("setproctitle").setproctitle("sglang::early")
        for name in ("managers.scheduler", "models.registry"):
            importlib.import_module(f"sglang.srt.{name}")
        from sglang.srt.utils import numa_utils
    except (ImportError, OSError, RuntimeError) as error:
        failed = error
    logging.disable(logging.NOTSET)
    if on_gpu and failed is None:
        threading.Thread(target=_compile_norms, daemon=True).start()
    try:
        body, words, environment = pipe.recv()
        answers = Connection(reduction.recv_handle(pipe), readable=False)
    except EOFError:
        return
    if failed is not None:
        raise failed
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(environment)
    server_args, _, gpu = words[:3]
    # SGLang binds a scheduler to the GPU's memory node before Python starts.
    if (node := numa_utils.get_numa_node_if_available(server_args, gpu)) is not None:
        numa_utils.numa_bind_to_node(node)
    body(*words, answers)


def _compile_norms() -> None:
    """Compile them, or load them if this machine has; a lock lets one process compile."""
    with contextlib.suppress(Exception):  # the engine's own call says what is wrong
        importlib.import_module("flashinfer.norm").get_norm_module()
