"""Takes a decode step's tokens in SGLang's scheduler with little Python for each running request.

SGLang 0.5.17 calls about twenty functions for each request and token, which is a large part of a
small model's step. A token request that goes on needs three appends. Here only the requests whose
turn ends in this step are passed to SGLang's own function, which finishes and sends them.

`install` replaces that function in a scheduler process. It changes no token and no log-prob.
"""

from __future__ import annotations

import copy
from typing import Any

VERSION = "0.5.17"  # of SGLang; another version keeps its own function


def install() -> None:
    """Replace SGLang's function in this process."""
    import sglang
    from sglang.srt.managers.scheduler_components.batch_result_processor import (
        SchedulerBatchResultProcessor,
    )

    if sglang.__version__ != VERSION:
        return
    process_all = SchedulerBatchResultProcessor.process_batch_result_decode

    def process(self: Any, batch: Any, result: Any) -> None:
        logits = result.logits_output
        if not batch.spec_algorithm.is_none() or logits.next_token_logprobs is None:
            process_all(self, batch, result)
            return
        if result.copy_done is not None:
            result.copy_done.synchronize()
        ending = _take(batch.reqs, result.next_token_ids.tolist(), logits.next_token_logprobs)
        few, their_result, their_logits = copy.copy(batch), copy.copy(result), copy.copy(logits)
        few.reqs = [batch.reqs[place] for place in ending]
        their_logits.next_token_logprobs = logits.next_token_logprobs[ending]
        their_result.next_token_ids = result.next_token_ids[ending]
        their_result.logits_output = their_logits
        self.metrics_reporter.num_generated_tokens += len(batch.reqs) - len(ending)
        process_all(self, few, their_result)

    SchedulerBatchResultProcessor.process_batch_result_decode = process


def _take(requests: list[Any], tokens: list[int], logprobs_R: Any) -> list[int]:
    """Append each token and its log-prob to its request; the places of the requests that SGLang has
    to handle, because they end or ask for more than ids and log-probs."""
    left = []
    for place, (request, token, logprob) in enumerate(
        zip(requests, tokens, logprobs_R.tolist(), strict=True)
    ):
        try:
            ends, limit = request.selfplay_ends
        except AttributeError:
            ends, limit = request.selfplay_ends = _ends(request)
        ids = request.output_ids
        if (
            token in ends
            or len(ids) + 1 >= limit
            or request.to_finish is not None
            or request.finished_reason is not None
            or request.is_retracted
            or not 0 <= token < request.vocab_size
        ):
            left.append(place)
            continue
        ids.append(token)
        request.logprob.output_token_logprobs_val.append(logprob)
        request.logprob.output_token_logprobs_idx.append(token)
    return left


def _ends(request: Any) -> tuple[frozenset[int], int]:
    """The tokens that end this request, and its limit of new tokens; (nothing, 0) if it asks for
    more than ids and log-probs, so that SGLang handles all its tokens."""
    sampling, logprob = request.sampling_params, request.logprob
    more = (
        not request.return_logprob,
        request.stream,
        request.grammar is not None,
        request.tokenizer is not None,
        request.require_reasoning,
        request.return_hidden_states,
        request.return_sampling_mask,
        logprob is None or logprob.top_logprobs_num > 0 or logprob.token_ids_logprob is not None,
        sampling.stop_strs,
        sampling.stop_regex_strs,
    )
    if any(more):
        return frozenset(), 0
    ids = frozenset(sampling.stop_token_ids or ()) | frozenset(request.eos_token_ids or ())
    return frozenset() if sampling.ignore_eos else ids, sampling.max_new_tokens
