"""Changes inside SGLang's scheduler process: three fixes and three speed-ups.

The target of each scheduler process, `processes.run_scheduler`, calls `apply`; the trainer's side
of `accept_lists` is `client.SchedulerClient`. SGLang is imported only inside the functions, in the
process that they change. Written for SGLang 0.5.17.
"""

from __future__ import annotations

import copy
from typing import Any

from selfplay.engines.sglang.fast.private import VERSION

# FlashAttention 3 uses another kernel for at most 64 queries times the heads that share a key.
MIN_QUERIES = 65


def apply(server_args: Any) -> None:
    """Change SGLang in this process, before its scheduler starts with these `ServerArgs`."""
    import sglang

    keep_graph_tensors()
    pause_when_idle()
    accept_lists()
    if server_args.enable_deterministic_inference:
        norm_in_two_kernels()
        if server_args.attention_backend == "fa3":
            keep_key_blocks()
    if sglang.__version__ == VERSION:
        append_decoded_tokens()


def keep_graph_tensors() -> None:
    """Let a prefill graph own the tensors that it passes to attention.

    SGLang drops them, and graphs that are captured later write into them (sglang #37606). This is
    the fix from #37448.
    """
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
        breakable_cuda_graph,
    )

    name = "_weak_ref_if_tensor"
    assert hasattr(breakable_cuda_graph, name), f"SGLang must have {name}, as {VERSION} has"
    breakable_cuda_graph._weak_ref_if_tensor = lambda tensor: tensor


def pause_when_idle() -> None:
    """Make this process finish its kernels before it frees GPU memory.

    SGLang copies the model's buffers just before it goes to sleep, and torch_memory_saver unmaps
    memory without waiting. If the GPU is shared with other processes, the copy may still be
    running: an illegal memory access, which ends the engine.
    """
    import torch
    from sglang.srt.utils.torch_memory_saver_adapter import _TorchMemorySaverAdapterReal as Saver

    pause = Saver.pause

    def paused(self: Any, tag: str) -> Any:
        torch.cuda.synchronize()
        return pause(self, tag)

    Saver.pause = paused


def keep_key_blocks() -> None:
    """Make FlashAttention 3 sum over the same blocks of keys for any number of queries.

    For heads of 64 its kernel for few queries, used in decoding, has blocks of 192 keys, the other
    one of 128. SGLang's deterministic mode is then not deterministic: beyond 128 keys a token's
    numbers depend on whether it is decoded or prefilled. A larger `max_seqlen_q` selects the other
    kernel; the plan that SGLang makes ahead of a decode step is for the unused one.
    """
    from sglang.srt.layers.attention import flashattention_backend as backend

    attend, plan = (
        backend.flash_attn_with_kvcache,
        backend.FlashAttentionBackend._compute_scheduler_metadata,
    )

    def attend_in_same_blocks(*, q: Any, max_seqlen_q: int, **others: Any) -> Any:
        if q.shape[-1] == 64:
            max_seqlen_q = max(int(max_seqlen_q), MIN_QUERIES)
        return attend(q=q, max_seqlen_q=max_seqlen_q, **others)

    def plan_unless_narrow(self: Any, *words: Any, **named: Any) -> Any:
        return None if self.head_dim == 64 else plan(self, *words, **named)

    backend.flash_attn_with_kvcache = attend_in_same_blocks
    backend.FlashAttentionBackend._compute_scheduler_metadata = plan_unless_narrow


def norm_in_two_kernels() -> None:
    """In deterministic mode, add the residual first, then norm the rounded sum.

    SGLang has a batch-invariant kernel only for the norm. With a residual it runs nine torch
    operations, which take 0.3 of a small model's GPU time.
    """
    from sglang.srt.batch_invariant_ops import rms_norm_batch_invariant
    from sglang.srt.layers.layernorm import RMSNorm

    norm = RMSNorm.forward_cuda

    def add_and_norm(
        self: Any, x: Any, residual: Any = None, post_residual_addition: Any = None
    ) -> Any:
        special = self.cast_x_before_out_mul or self.fp32_residual or self.override_orig_dtype
        special = special or self.variance_size_override is not None
        special = special or post_residual_addition is not None
        if residual is None or special or x.numel() == 0:
            return norm(self, x, residual, post_residual_addition)
        residual = x + residual
        return rms_norm_batch_invariant(residual, self.weight.data, self.variance_epsilon), residual

    RMSNorm.forward_cuda = add_and_norm


def accept_lists() -> None:
    """Let the scheduler accept a list of messages as one, and open sessions without a reply.

    SGLang 0.5.17 accepts several requests in one message, but reads and answers a separate message
    for each session that opens.
    """
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver

    pull, open_session = SchedulerRequestReceiver._pull_raw_reqs, Scheduler.open_session

    def pull_each(self: Any) -> list[Any] | None:
        pulled = pull(self)  # None on a rank that gets its messages from another rank
        return pulled and [m for one in pulled for m in (one if type(one) is list else [one])]

    def open_silently(self: Any, message: Any) -> None:
        open_session(self, message)

    SchedulerRequestReceiver._pull_raw_reqs = pull_each
    Scheduler.open_session = open_silently


def append_decoded_tokens() -> None:
    """Handle a decode step's tokens with little Python per running request.

    SGLang 0.5.17 calls about twenty functions per request and token, which is a large part of a
    small model's step. A token request that continues needs three appends. Only the requests whose
    turn ends in this step are passed to SGLang's own function, which finishes and sends them. No
    token and no log-prob changes.
    """
    from sglang.srt.managers.scheduler_components.batch_result_processor import (
        SchedulerBatchResultProcessor,
    )

    process_all = SchedulerBatchResultProcessor.process_batch_result_decode

    def process(self: Any, batch: Any, result: Any) -> None:
        logits = result.logits_output
        if not batch.spec_algorithm.is_none() or logits.next_token_logprobs is None:
            process_all(self, batch, result)
            return
        if result.copy_done is not None:
            result.copy_done.synchronize()
        ending = _append(batch.reqs, result.next_token_ids.tolist(), logits.next_token_logprobs)
        few, their_result, their_logits = copy.copy(batch), copy.copy(result), copy.copy(logits)
        few.reqs = [batch.reqs[index] for index in ending]
        their_logits.next_token_logprobs = logits.next_token_logprobs[ending]
        their_result.next_token_ids = result.next_token_ids[ending]
        their_result.logits_output = their_logits
        self.metrics_reporter.num_generated_tokens += len(batch.reqs) - len(ending)
        process_all(self, few, their_result)

    SchedulerBatchResultProcessor.process_batch_result_decode = process


def _append(requests: list[Any], tokens: list[int], logprobs_R: Any) -> list[int]:
    """Append each token and its log-prob to its request; returns the indices of the requests that
    end, which SGLang must handle.

    All requests come from `client.SchedulerClient`: ids and log-probs, without stop strings,
    grammars or streams.
    """
    left = []
    for index, (request, token, logprob) in enumerate(
        zip(requests, tokens, logprobs_R.tolist(), strict=True)
    ):
        try:
            ends, limit = request.selfplay_ends
        except AttributeError:
            sampling = request.sampling_params
            ends = frozenset(sampling.stop_token_ids or ()) | frozenset(request.eos_token_ids or ())
            limit = sampling.max_new_tokens
            request.selfplay_ends = ends, limit
        ids = request.output_ids
        if (
            token in ends
            or len(ids) + 1 >= limit
            or request.to_finish is not None
            or request.finished_reason is not None
            or request.is_retracted
            or not 0 <= token < request.vocab_size
        ):
            left.append(index)
            continue
        ids.append(token)
        request.logprob.output_token_logprobs_val.append(logprob)
        request.logprob.output_token_logprobs_idx.append(token)
    return left
