"""The private names of SGLang that the engine's speed and part of its repeatability depend on.

`engine.fast` uses them. An SGLang that lacks one still runs: `SGLangEngine.start` then uses
`plain.PlainEngine`, which needs only public calls. Written for SGLang 0.5.17.
"""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata
from pathlib import Path

VERSION = "0.5.17"  # of SGLang; another version keeps its own `process_batch_result_decode`

# Modules below `sglang.srt` and their names. The comments give their purpose, the effect of their
# absence and, where there is one, SGLang's own issue.
PRIVATE = (
    # Requests go to the scheduler's socket in lists, answers come from it (SchedulerClient).
    # Without: a turn costs as much Python time in SGLang's front end as in the game itself.
    (
        "managers.tokenizer_manager",
        "rid_to_state send_to_scheduler _handle_batch_output _result_dispatcher",
    ),
    # Sampling parameters are checked once. Without: as above.
    ("managers.tokenizer_manager", "sampling_params_class"),
    # The trainer keeps its signals; kills of an engine are not reported; long-lived objects are
    # frozen in the scheduler. Without: signals are restored after the first answer; garbage
    # collections in the scheduler.
    (
        "managers.tokenizer_manager",
        "auto_create_handle_loop _subprocess_watchdog _dispatch_to_scheduler",
    ),
    # The messages to the scheduler. Without: no sessions; games that an error ends run to their end
    # instead of being aborted.
    (
        "managers.io_struct",
        "TokenizedGenerateReqInput SessionParams OpenSessionReqInput CloseSessionReqInput "
        "AbortReq FreezeGCReq sock_send",
    ),
    # Control calls go to all processes at once, with a time-out, concurrently with other work.
    # Without: a push's next bucket waits for the previous one; a control call has no time-out.
    (
        "managers.io_struct",
        "UpdateWeightsFromTensorReqInput ReleaseMemoryOccupationReqInput "
        "ResumeMemoryOccupationReqInput",
    ),
    # A handle names its GPU by UUID, where processes number them differently. Without: all
    # processes must see the same GPUs.
    ("utils.patch_torch", "monkey_patch_torch_reductions"),
    # Several engines load at once; schedulers import early; children end with the trainer.
    # Without: one process; a start takes about ten seconds more.
    (
        "entrypoints.engine",
        "_launch_scheduler_processes run_scheduler_process_func run_detokenizer_process_func "
        "_scheduler_init_result wait_for_ready",
    ),
    # The scheduler reads a list of messages as one (patches.accept_lists). Without: as for
    # rid_to_state.
    ("managers.scheduler_components.request_receiver", "SchedulerRequestReceiver _pull_raw_reqs"),
    # Sessions open without a reply (patches.accept_lists); patches are applied at its start.
    # Without: no sessions, and nothing of patches.py.
    ("managers.scheduler", "Scheduler open_session run_scheduler_process"),
    # Little Python per running request and token (patches.append_decoded_tokens). Without: a small
    # model's decode step is bound by the scheduler's Python.
    (
        "managers.scheduler_components.batch_result_processor",
        "SchedulerBatchResultProcessor process_batch_result_decode",
    ),
    # Prefill graphs own their tensors (patches.keep_graph_tensors). Without: no prefill graphs.
    # Upstream: sglang #37606, fixed by #37448.
    (
        "model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph",
        "_weak_ref_if_tensor",
    ),
    # Kernels end before memory is unmapped (patches.pause_when_idle). Without: one of several
    # engines on a GPU may die when it goes to sleep.
    ("utils.torch_memory_saver_adapter", "_TorchMemorySaverAdapterReal pause"),
    # The same blocks of keys for any number of queries (patches.keep_key_blocks). Without: no
    # engine.deterministic for heads of 64.
    (
        "layers.attention.flashattention_backend",
        "flash_attn_with_kvcache _compute_scheduler_metadata",
    ),
    # The residual's sum and the norm in one kernel each (patches.norm_in_two_kernels). Without:
    # engine.deterministic is slower.
    ("layers.layernorm", "RMSNorm forward_cuda"),
    # A scheduler that imports early is bound to its GPU's memory node (early.py). Without: a start
    # takes about ten more seconds.
    ("utils.numa_utils", "get_numa_node_if_available numa_bind_to_node"),
    # engine.exact computes the trainer's log-probs with the engine's kernels. Without: no
    # engine.exact.
    (
        "batch_invariant_ops.batch_invariant_ops",
        "matmul_persistent rms_norm_batch_invariant log_softmax",
    ),
    # As the previous two. Without: no engine.exact.
    ("batch_invariant_ops", "rms_norm_batch_invariant"),
)


def missing(
    rows: tuple[tuple[str, str], ...] | None = None, package: str = "sglang.srt"
) -> str | None:
    """The first of these names that the installed package lacks, dotted; None if all are there.

    It searches the text of the modules, because importing some of them needs a GPU.
    """
    for short, names in PRIVATE if rows is None else rows:
        module = f"{package}.{short}"
        try:
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            spec = None
        if spec is None or spec.origin is None:
            return module
        folder = Path(spec.origin)
        files = folder.parent.glob("*.py") if folder.name == "__init__.py" else [folder]
        text = "\n".join(file.read_text(encoding="utf-8") for file in files)
        for name in names.split():
            if re.search(rf"\b{name}\b", text) is None:
                return f"{module}.{name}"
    return None


def other_version() -> str | None:
    """The version of the installed SGLang if it is not the pinned one."""
    installed = metadata.version("sglang")
    return None if installed == VERSION else installed
