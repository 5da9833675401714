"""The private names of SGLang on which the engine's pace and some repeats rest.

`engine.fast` uses them. An SGLang that lacks one still runs: `SGLangEngine.start` then takes
`plain.PlainEngine`, which needs its public calls alone. Written for SGLang 0.5.17.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Private(NamedTuple):
    """Names of one module below `sglang.srt`: what they are for, what a run lacks without them, and
    where SGLang's own project speaks of it."""

    module: str
    names: str
    why: str
    without: str
    upstream: str = "not reported"


PRIVATE = (
    Private(
        "managers.tokenizer_manager",
        "rid_to_state send_to_scheduler _handle_batch_output _result_dispatcher",
        "requests go to the scheduler's socket in lists, answers come from it (SchedulerClient)",
        "a turn costs as much Python in SGLang's front as the game itself",
    ),
    Private(
        "managers.tokenizer_manager",
        "sampling_params_class config_value",
        "sampling parameters are checked once; the stamp of the last push is read",
        "as above; a push's stamp is the trainer's alone",
    ),
    Private(
        "managers.tokenizer_manager",
        "auto_create_handle_loop _subprocess_watchdog _dispatch_to_scheduler",
        "the trainer keeps its signals; kills of an engine are not reported; long-lived objects are"
        " frozen in the scheduler",
        "signals are taken back after the first answer; garbage collections in the scheduler",
    ),
    Private(
        "managers.io_struct",
        "TokenizedGenerateReqInput SessionParams OpenSessionReqInput CloseSessionReqInput AbortReq"
        " FreezeGCReq sock_send",
        "the messages to the scheduler",
        "no sessions; games that an error ends run out instead of being aborted",
    ),
    Private(
        "managers.io_struct",
        "UpdateWeightsFromTensorReqInput ReleaseMemoryOccupationReqInput"
        " ResumeMemoryOccupationReqInput",
        "control calls are made to all processes at once, under a time-out, beside other work",
        "a push's next bucket waits for the last one; a control call has no time-out",
    ),
    Private(
        "weight_sync.tensor_bucket",
        "FlattenedTensorMetadata",
        "a bucket is one buffer with one handle",
        "a handle for each parameter: about three times a push's time for a small model",
    ),
    Private(
        "utils",
        "MultiprocessingSerializer",
        "as above: each rank of a replica makes the handle to its own copy",
        "the replica's first rank passes its copy to all of them",
    ),
    Private(
        "utils.patch_torch",
        "monkey_patch_torch_reductions",
        "a handle names its GPU by UUID, where processes number them differently",
        "all processes must see the same GPUs",
    ),
    Private(
        "entrypoints.engine",
        "_launch_scheduler_processes run_scheduler_process_func run_detokenizer_process_func"
        " _scheduler_init_result wait_for_ready",
        "several engines load at once; schedulers import early; children end with the trainer",
        "one process; a start takes about ten seconds more",
    ),
    Private(
        "managers.scheduler_components.request_receiver",
        "SchedulerRequestReceiver _pull_raw_reqs",
        "the scheduler reads a list of messages as one (patches.accept_lists)",
        "as for rid_to_state",
    ),
    Private(
        "managers.scheduler",
        "Scheduler open_session run_scheduler_process",
        "sessions open without a reply (patches.accept_lists); patches are applied at its start",
        "no sessions, and nothing of patches.py",
    ),
    Private(
        "managers.detokenizer_manager",
        "run_detokenizer_process",
        "it ends with the trainer, even one that is killed while it imports",
        "it may outlive a trainer that is killed in its first seconds",
    ),
    Private(
        "managers.scheduler_components.batch_result_processor",
        "SchedulerBatchResultProcessor process_batch_result_decode",
        "little Python for each running request and token (patches.append_decoded_tokens)",
        "a small model's decoding step is bound by the scheduler's Python",
    ),
    Private(
        "model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph",
        "_weak_ref_if_tensor",
        "prefill graphs own their tensors (patches.keep_graph_tensors)",
        "no prefill graphs",
        "sglang #37606, mended by #37448",
    ),
    Private(
        "utils.torch_memory_saver_adapter",
        "_TorchMemorySaverAdapterReal pause",
        "kernels end before memory is unmapped (patches.pause_when_idle)",
        "an engine beside others on one GPU may end when it goes to sleep",
    ),
    Private(
        "layers.attention.flashattention_backend",
        "flash_attn_with_kvcache _compute_scheduler_metadata",
        "the same blocks of keys for any number of queries (patches.keep_key_blocks)",
        "no engine.deterministic for heads of 64",
    ),
    Private(
        "layers.layernorm",
        "RMSNorm forward_cuda",
        "the residual's sum in one kernel, its norm in another (patches.norm_in_two_kernels)",
        "engine.deterministic is slower",
    ),
    Private(
        "utils.numa_utils",
        "get_numa_node_if_available numa_bind_to_node",
        "a scheduler that imports early is bound to its GPU's memory node (early.py)",
        "a start takes about ten seconds more",
    ),
    Private(
        "batch_invariant_ops.batch_invariant_ops",
        "matmul_persistent rms_norm_batch_invariant log_softmax",
        "engine.exact computes the trainer's log-probs with the engine's kernels",
        "no engine.exact",
    ),
    Private(
        "batch_invariant_ops",
        "rms_norm_batch_invariant",
        "as above, and engine.exact computes with the same kernels",
        "no engine.exact",
    ),
)


def missing(rows: Sequence[Private] | None = None, package: str = "sglang.srt") -> str | None:
    """The first of these names that the installed package lacks, dotted; None if all are there.

    They are looked for in the modules' text: to import some of them needs a GPU.
    """
    for row in PRIVATE if rows is None else rows:
        module = f"{package}.{row.module}"
        try:
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            spec = None
        if spec is None or spec.origin is None:
            return module
        folder = Path(spec.origin)
        files = folder.parent.glob("*.py") if folder.name == "__init__.py" else [folder]
        text = "\n".join(file.read_text(encoding="utf-8") for file in files)
        for name in row.names.split():
            if re.search(rf"\b{name}\b", text) is None:
                return f"{module}.{name}"
    return None
