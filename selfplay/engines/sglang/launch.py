"""Starts an SGLang engine: its arguments, the environment of its children, its processes.

Written for SGLang 0.5.17. Times in seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import inspect
import json
import logging
import math
import multiprocessing
import os
import pathlib
import shutil
import socket
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch

from dialop.specs import nearest
from dialop.workers import without_main
from selfplay.engines.options import ChosenEngine, SGLangOptions
from selfplay.engines.sglang import buckets, processes
from selfplay.engines.sglang.fast import early
from selfplay.errors import SettingsError

# Blocks of ports, one per engine: a port that reserves the block, and one for each of up to 16
# processes.
FIRST_PORT, BLOCK, NUM_BLOCKS = 20_000, 17, 705
CPU_CACHE = 65_536  # tokens, unless engine.max_cache_tokens is set

# Prefill sizes in tokens that are captured as CUDA graphs. SGLang pads a prefill to the next size.
# It uses no graph above the largest size or if padding would more than double the tokens.
PREFILL_GRAPHS = (4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)

# The largest output layer, in elements, whose logits a bf16 engine computes in fp32, as the trainer
# does. bf16 logits are the largest part of the mismatch (docs/notes/log.md), but for fp32 SGLang
# copies the layer in each step, which is slow for a large vocabulary.
MAX_FP32_HEAD = 2**22


@dataclass(frozen=True, slots=True)
class Started:
    """Running SGLang engines, their processes, and the duration of import and launch in seconds."""

    engines: tuple[Any, ...]
    processes: tuple[BaseProcess, ...]
    import_s: float
    launch_s: float


def pick_attention_backend(device: str, *, deterministic: bool = False) -> str:
    """The first of fa3, flashinfer and triton that runs on this machine; torch_native on a CPU.

    fa3 needs a Hopper GPU and sglang-kernel's flash_ops binary. flashinfer compiles kernels, so it
    needs nvcc; deterministic mode skips it because it would switch the prefix cache off.
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


def reserve_ports() -> socket.socket:
    """A bound socket that reserves its port and the 16 above it among the engines of this host,
    until it is closed. The 16 are the rendezvous ports of an engine's SGLang processes.

    SGLang picks a port that is free at the moment and binds it seconds later, when another engine
    may have picked the same one. The search starts at a block derived from this process's id. All
    ports lie below the range that the kernel uses for outgoing connections. A restart may reuse the
    killed engine's ports although connections to them linger. Raises RuntimeError when no block is
    free.
    """
    first = os.getpid() % NUM_BLOCKS
    for step in range(NUM_BLOCKS):
        port = FIRST_PORT + BLOCK * ((first + step) % NUM_BLOCKS)
        reserved = socket.socket()
        try:
            reserved.bind(("127.0.0.1", port))
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's server
                probe.bind(("127.0.0.1", port + 1))
        except OSError:
            reserved.close()
            continue
        return reserved
    raise RuntimeError(f"no port is free from {FIRST_PORT} to {FIRST_PORT + BLOCK * NUM_BLOCKS}")


def engine_arguments(
    model_path: str,
    config: ChosenEngine,
    *,
    device: str,
    dtype: str,
    context_length: int | None = None,
    seed: int = 0,
    base_gpu_id: int = 0,
    load_format: str = "auto",
) -> dict[str, Any]:
    """Keyword arguments of `sglang.Engine`. Raises ValueError for `deterministic` on a CPU."""
    if config.deterministic and device == "cpu":
        raise ValueError(
            "engine.deterministic must be false on a CPU, got true: SGLang's batch-invariant "
            "kernels run on GPUs; engine.kind=hf repeats there"
        )
    attention: str = config.attention
    if attention == "auto":
        attention = pick_attention_backend(device, deterministic=config.deterministic)
    arguments: dict[str, Any] = {
        "model_path": model_path,
        "skip_tokenizer_init": True,  # requests and answers are token ids
        "load_format": load_format,
        "device": device,
        "dtype": dtype,
        "tp_size": config.tp_size,
        "base_gpu_id": base_gpu_id,
        "mem_fraction_static": config.mem_fraction,
        "context_length": context_length,
        "max_running_requests": config.max_batch,
        "max_total_tokens": config.max_cache_tokens or None,
        "random_seed": seed,
        "attention_backend": attention,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "sleep_on_idle": True,  # else each rank polls during training and keeps one core busy
        "weight_version": "0",
        "custom_weight_loader": [buckets.LOADER],
        "log_level": "error",
        "custom_sigquit_handler": processes.leave_launch_alone,
        "disable_custom_all_reduce": True,  # together with the next line: no NVLink multicast
        "enforce_disable_flashinfer_allreduce_fusion": True,
        "enable_memory_saver": device == "cuda",
        "enable_deterministic_inference": config.deterministic,
    }
    if config.sessions:  # each of up to two per request takes a further request slot
        arguments["enable_streaming_session"] = True
        arguments["pp_max_micro_batch_size"] = config.max_batch
        arguments["max_running_requests"] = 3 * config.max_batch
    if device == "cpu":  # there SGLang may pack the output layer, which rules out fp32 logits
        arguments["disable_cuda_graph"] = True
    else:
        fp32_head = dtype == "bfloat16" and head_size(model_path) <= MAX_FP32_HEAD
        if fp32_head and not config.exact:
            arguments["enable_fp32_lm_head"] = True
        arguments["cuda_graph_max_bs_decode"] = config.max_batch
        if config.prefill_graphs:
            arguments["cuda_graph_backend_prefill"] = "breakable"
            arguments["cuda_graph_bs_prefill"] = list(PREFILL_GRAPHS)
        else:
            arguments["disable_prefill_cuda_graph"] = True
    arguments |= config.server_args
    return {name: value for name, value in arguments.items() if value is not None}


def check_machine(engine: SGLangOptions) -> None:
    """Raise SettingsError if this machine lacks SGLang, or hardware that these settings need."""
    if importlib.util.find_spec("sglang") is None:
        raise SettingsError(
            "engine.kind must be hf where SGLang is not installed, got sglang; `pip install -r "
            "requirements/gpu.txt` installs it"
        )
    if not torch.cuda.is_available() and os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        raise SettingsError(
            "engine.kind must be hf where torch finds no GPU, got sglang; SGLang's build for CPUs "
            "needs SGLANG_USE_CPU_ENGINE=1 in the environment"
        )
    if engine.exact and not (torch.cuda.is_available() and pick_attention_backend("cuda") == "fa3"):
        raise SettingsError(
            "engine.exact must be false without a Hopper GPU and FlashAttention 3 (flash_ops of "
            "sglang-kernel), got true"
        )
    if engine.server_args:  # SGLang takes seconds to import
        from sglang.srt.server_args import ServerArgs

        names = list(inspect.signature(ServerArgs).parameters)
        for name in engine.server_args.keys() - names:
            raise SettingsError(
                f"engine.server_args must name arguments of SGLang's ServerArgs, got {name}"
                f"{nearest(name, names)}"
            )


class Sizes(NamedTuple):
    """The bytes that a model's weights take in an engine, and a token in its cache."""

    weights: int
    token: int

    @classmethod
    def of(
        cls, folder: str, itemsize: int, parameters: Mapping[str, torch.Size] | None = None
    ) -> Sizes:
        """Those of the model with this folder's config and, if known, these parameters, with
        elements of this size."""
        from transformers import AutoConfig

        from selfplay.model.families import cache_width

        text = AutoConfig.from_pretrained(folder).get_text_config()
        token_bytes = int(text.num_hidden_layers * cache_width(text) * itemsize)
        return cls(bytes_of(parameters or expected_parameters(folder), itemsize), token_bytes)

    def fitting(self, share_bytes: float) -> int:
        """The size in tokens of the cache that fits, with the weights, into this share of a GPU."""
        return int((share_bytes - self.weights) / self.token)


def config_of_each(config: ChosenEngine, sizes: Sizes, *, gpu: int) -> ChosenEngine:
    """The settings of each of `config.processes` engines that share this GPU.

    Each has a cache of a fixed size: SGLang itself derives the size from the free memory during its
    start, which other engines and runs on this GPU change at the same time. Raises SettingsError if
    no memory is left for a cache.
    """
    num = config.processes
    if num > 1:  # games with the same prompt stay together, so a process may exceed its share
        config = replace(config, max_batch=math.ceil(1.25 * config.max_batch / num))
    if config.max_cache_tokens:
        return replace(config, max_cache_tokens=config.max_cache_tokens // num)
    share_bytes = config.mem_fraction * torch.cuda.mem_get_info(gpu)[0] / num
    tokens = sizes.fitting(share_bytes)
    if tokens < 1:
        raise SettingsError(
            f"engine.mem_fraction must leave each of engine.processes more than its weights, "
            f"{sizes.weights / 2**30:.1f} GiB, got {share_bytes / 2**30:.1f} GiB each"
        )
    fraction = min(0.95, (1 + config.mem_fraction) / 2)  # more than the fixed-size cache takes
    return replace(config, max_cache_tokens=tokens, mem_fraction=fraction)


def room_of(config: ChosenEngine, sizes: Sizes, *, gpu: int | None) -> float:
    """The bytes that the weights and caches of an engine that starts now will take on this GPU.

    Either its share of the free memory, or less if the size of the cache is set; with tensor
    parallel a rank has its part of both. `gpu` None is the CPU.
    """
    if gpu is None:
        return 0.0
    share = config.mem_fraction * torch.cuda.mem_get_info(gpu)[0]
    if not config.max_cache_tokens:
        return share
    taken = config.processes * sizes.weights + config.max_cache_tokens * sizes.token
    return min(share, taken / config.tp_size)


def parted(engines: Sequence[Any]) -> list[Any]:
    """The settings of engines that share a GPU (`SGLangEngine.parted`), all with a `mem_fraction`.
    Raises SettingsError if one gets too little."""
    fractions = [engine.mem_fraction for engine in engines]
    if sum(fractions) > 0.95:
        fractions = [fraction / len(engines) for fraction in fractions]
    taken = accumulate(fractions, initial=0.0)  # by the earlier ones; a part is of what they leave
    parts = [each / (1.0 - before) for each, before in zip(fractions, taken, strict=False)]
    if min(parts) < 0.05:
        raise SettingsError(
            "engine.mem_fraction must leave at least 0.05 of the free GPU memory for each "
            f"policy, got {', '.join(f'{engine.mem_fraction:g}' for engine in engines)}"
        )
    return [replace(one, mem_fraction=part) for one, part in zip(engines, parts, strict=True)]


def config_of_partner(
    config: ChosenEngine, sizes: Sizes, *, gpu: int | None, context: int
) -> ChosenEngine:
    """The settings of a frozen partner's engine, which keeps its memory for the whole run.

    Its cache has a fixed size (`partner_tokens`). `gpu` None is the CPU.
    """
    config = replace(config, processes=1, sessions=False, adapts=False, alone=True)
    if gpu is None or config.max_cache_tokens:
        return config
    tokens = partner_tokens(config, sizes, gpu=gpu, most=context)
    return replace(config, max_cache_tokens=tokens, mem_fraction=0.9)  # of the free memory


def partner_tokens(config: Any, sizes: Sizes, *, gpu: int, most: int) -> int:
    """The size in tokens of the cache of a frozen partner's engine.

    It holds transcripts of `most` tokens for all games at once, in at most a quarter of the
    policy's share of the GPU, by the `mem_fraction` of `config`. Raises SettingsError if it cannot
    hold one transcript.
    """
    free, total = torch.cuda.mem_get_info(gpu)
    weights_bytes = sizes.weights / config.tp_size
    share_bytes = min(0.8 * free, weights_bytes + config.mem_fraction / 4 * total)
    fitting = sizes.fitting(share_bytes * config.tp_size)
    if fitting < most:
        raise SettingsError(
            f"a partner's engine needs {weights_bytes / 2**30:.1f} GiB for its weights and a cache "
            f"for {most:,} tokens, got {free / 2**30:.1f} GiB of free GPU memory; lower "
            "engine.mem_fraction, or serve the partner elsewhere (endpoint:)"
        )
    return min(fitting, config.max_batch * most)


def bytes_of(parameters: Mapping[str, torch.Size], itemsize: int) -> int:
    """The size in bytes of a model's weights."""
    return sum(shape.numel() for shape in parameters.values()) * itemsize


def head_size(model_path: str) -> float:
    """The number of elements of a model's output layer; infinite if its config lacks the sizes."""
    try:
        config = json.loads((pathlib.Path(model_path) / "config.json").read_text("utf-8"))
        return float(config["vocab_size"] * config["hidden_size"])
    except (OSError, ValueError, LookupError):
        return math.inf


def with_cache(
    arguments: Mapping[str, Any], cache_tokens: int, budget_bytes: float, *, free_bytes: int
) -> dict[str, Any]:
    """The arguments of a restart that gives weights and cache as much memory as the first start.

    The first start took `budget_bytes`, a share of the free GPU memory. At a restart the trainer
    holds memory, so the same bytes are a larger share of `free_bytes`. 0.01 is added for CUDA's own
    memory; `cache_tokens`, the first cache's size, limits the new cache.
    """
    share = min(0.95, budget_bytes / free_bytes + 0.01)
    return {**arguments, "mem_fraction_static": share, "max_total_tokens": cache_tokens}


@contextlib.contextmanager
def importing(device: str) -> Iterator[None]:
    """Wrap the import of SGLang for an engine on this device. Raises RuntimeError outside the
    main thread."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "an engine must start in the main thread: its children end when that thread ends"
        )
    if device == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # read when sglang is imported
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as PYTHONWARNINGS does in the children
        yield


@contextlib.contextmanager
def starting(device: str, tp_size: int) -> Iterator[list[BaseProcess]]:
    """Wrap the start of engines. At the end the list holds their processes; if the block fails,
    they are killed."""
    before = set(multiprocessing.active_children()).difference(early.waiting())
    # This logger warns only about the custom SIGQUIT handler, which is intended.
    logging.getLogger("sglang.srt.entrypoints.engine").setLevel(logging.CRITICAL)
    children, complete = list[BaseProcess](), False
    asyncio.set_event_loop(None)  # SGLang 0.5.21 would take another engine's, which may be closed
    try:
        with processes.child_environment(device, tp_size), without_main():
            yield children
        # SGLang's modules create half a million objects that live as long as the process. Freezing
        # them saves 0.3 s in each full garbage collection and 1.7 s at exit.
        gc.collect()
        gc.freeze()
        complete = True
    finally:
        children += set(multiprocessing.active_children()).difference(before, early.waiting())
        if not complete:
            processes.kill(children)
            gc.freeze()  # a ZeroMQ context collected before its open sockets would wait forever


def expected_parameters(model_path: str) -> dict[str, torch.Size]:
    """Names and shapes of the parameters of a complete push, without a tied output head.

    They are the parameters of the transformers model with this config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: parameter.shape for name, parameter in model.named_parameters()}
