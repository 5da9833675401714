"""How an SGLang engine comes up: the arguments it gets, the environment its children get, its
start-up by part.

Knows SGLang 0.5.17 and nothing of training. Times in seconds.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import logging
import multiprocessing
import os
import pathlib
import shutil
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from selfplay.engines.sglang import compare as sglang_compare
from selfplay.engines.sglang import processes as sglang_children
from selfplay.engines.sglang.processes import ChildOf

# What the children must see (a value) or must not see (None), and why:
CHILD_ENVIRONMENT: dict[str, str | None] = {
    # A child that believes in the launcher's store waits for a server that is not there.
    "TORCHELASTIC_USE_AGENT_STORE": None,
    # The memory saver and CUDA IPC both need plain cudaMalloc segments.
    "PYTORCH_CUDA_ALLOC_CONF": None,
    "PYTORCH_ALLOC_CONF": None,
    # NVLink multicast can put a shared host's GPUs out of service.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # Graphs are not backed up over a pause in this version; they stay resident.
    "SGLANG_MEMORY_SAVER_CUDA_GRAPH": None,
    # Log-probs after the temperature are the contract.
    "SGLANG_RETURN_ORIGINAL_LOGPROB": None,
    # Notes on absent hardware and progress bars, once a process, are not news to the reader of a
    # run.
    "PYTHONWARNINGS": "ignore",
    "TQDM_DISABLE": "1",
}


FIRST_PORT, NUM_PORTS = 20_000, 750


@dataclass(frozen=True, slots=True)
class Started:
    """A running engine, the processes it started and the seconds each part took."""

    engine: Any
    processes: tuple[multiprocessing.process.BaseProcess, ...]
    import_s: float
    launch_s: float


def pick_attention_backend(device: str, *, deterministic: bool = False) -> str:
    """The fastest attention that can run here: fa3, flashinfer, triton; torch_native on CPU.

    fa3 needs Hopper and sglang-kernel's flash_ops binary; flashinfer compiles, so it needs nvcc,
    and it would switch the prefix cache off in the deterministic mode.
    """
    if device == "cpu":
        return "torch_native"
    kernels = importlib.util.find_spec("sgl_kernel")
    if kernels is not None and kernels.origin is not None:
        binaries = list(pathlib.Path(kernels.origin).parent.glob("flash_ops*.so"))
        if binaries and torch.cuda.get_device_capability()[0] == 9:
            return "fa3"
    has_compiler = shutil.which("nvcc") is not None or "CUDA_HOME" in os.environ
    if not deterministic and has_compiler and importlib.util.find_spec("flashinfer") is not None:
        return "flashinfer"
    return "triton"


def free_port() -> int:
    """A port for an engine's ranks to meet at, which no other engine of this host will pick.

    SGLang takes whatever is free at the moment and binds it seconds later, when another rank or run
    may have taken the same. This one begins where this process's number says, 16 apart from its
    neighbours', below the ports that the kernel gives to outgoing connections.
    """
    first = os.getpid() % NUM_PORTS
    for step in range(NUM_PORTS):
        port = FIRST_PORT + 16 * ((first + step) % NUM_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no port is free from {FIRST_PORT} to {FIRST_PORT + 16 * NUM_PORTS}")


def engine_arguments(
    model_path: str,
    *,
    device: str,
    dtype: str,
    tp_size: int,
    mem_fraction: float,
    attention_backend: str,
    context_length: int | None,
    max_running_requests: int,
    max_total_tokens: int | None,
    seed: int,
    deterministic: bool,
    base_gpu_id: int,
    memory_saver: bool,
    load_format: str,
) -> dict[str, Any]:
    """Keyword arguments of `sglang.Engine`. Raises ValueError for `deterministic` on a CPU."""
    if deterministic and device == "cpu":
        raise ValueError(
            "engine.deterministic must be false on a CPU, got true: SGLang's batch-invariant "
            "kernels run on GPUs; engine.kind=hf repeats there"
        )
    arguments: dict[str, Any] = {
        "model_path": model_path,
        "skip_tokenizer_init": True,  # ids in, ids out
        "load_format": load_format,
        "device": device,
        "dtype": dtype,
        "tp_size": tp_size,
        "base_gpu_id": base_gpu_id,
        "mem_fraction_static": mem_fraction,
        "context_length": context_length,
        "max_running_requests": max_running_requests,
        "max_total_tokens": max_total_tokens,
        "random_seed": seed,
        "attention_backend": attention_backend,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "sleep_on_idle": True,  # else it polls all through training, one core a rank
        "weight_version": "0",
        "custom_weight_loader": [sglang_compare.LOADER],
        "log_level": "error",
        "custom_sigquit_handler": sglang_children.leave_launch_alone,
        "disable_custom_all_reduce": True,  # with the next line: no multicast rendezvous
        "enforce_disable_flashinfer_allreduce_fusion": True,
        "enable_memory_saver": memory_saver,
        "enable_deterministic_inference": deterministic,
        "nccl_port": free_port(),
    }
    if device == "cpu":
        arguments["disable_cuda_graph"] = True
    else:
        arguments["disable_prefill_cuda_graph"] = True  # open wrong-output bug, sglang #37606
        arguments["cuda_graph_max_bs_decode"] = max_running_requests
    return {name: value for name, value in arguments.items() if value is not None}


@contextlib.contextmanager
def child_environment(device: str, tp_size: int) -> Iterator[None]:
    """The environment in which children are started; the trainer's own comes back afterwards,
    SGLang's edits undone.

    SGLang forces CUDA_DEVICE_MAX_CONNECTIONS=8 and more on the process that starts it, and resets
    root logging.
    """
    environment, root = dict(os.environ), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    wanted = dict(CHILD_ENVIRONMENT)
    if device == "cpu" and tp_size > 1 and "SGLANG_CPU_OMP_THREADS_BIND" not in environment:
        cores = sorted(os.sched_getaffinity(0))
        wanted["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            str(cores[rank % len(cores)]) for rank in range(tp_size)
        )
    for name, value in wanted.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    try:
        yield
    finally:
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
        root.handlers[:] = handlers
        root.setLevel(level)


def launch(arguments: dict[str, Any]) -> Started:
    """Import SGLang, start its processes, load the weights; RuntimeError if a child dies."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "an engine starts in the main thread: the kernel ties its children's lives to it"
        )
    began_s = time.perf_counter()
    if arguments["device"] == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # read when sglang is imported
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as for the children
        from sglang.srt.entrypoints.engine import Engine

    imported_s = time.perf_counter()
    parent_pid = os.getpid()

    class GuardedEngine(Engine):
        run_scheduler_process_func = ChildOf(parent_pid, sglang_children.run_scheduler)
        run_detokenizer_process_func = ChildOf(parent_pid, sglang_children.run_detokenizer)

        def shutdown(self) -> None:
            """SGLang would SIGKILL every child of this process at exit; `close` is exact."""

    before = set(multiprocessing.active_children())
    # Its one line at this level announces the handler that we pass on purpose.
    logging.getLogger("sglang.srt.entrypoints.engine").setLevel(logging.CRITICAL)
    complete = False
    try:
        with child_environment(arguments["device"], arguments["tp_size"]):
            engine = GuardedEngine(**arguments)
        complete = True
    finally:
        processes = tuple(set(multiprocessing.active_children()) - before)
        if not complete:
            sglang_children.kill(processes)
    # Its modules bring half a million objects that live as long as the process. Out of the
    # collector's sight they cost neither 0.3 s a full collection nor 1.7 s at the exit, when a
    # scheduler of jobs may be waiting to kill.
    gc.collect()
    gc.freeze()
    return Started(engine, processes, imported_s - began_s, time.perf_counter() - imported_s)


def expected_parameters(model_path: str) -> dict[str, torch.Size]:
    """Names and shapes that a complete push must carry; a tied output head is not among them.

    SGLang only warns of names it does not know and says nothing of names it misses, so pushes are
    checked against the transformers model of the same config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: parameter.shape for name, parameter in model.named_parameters()}
