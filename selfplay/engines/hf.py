"""The transformers engine: one model in this process, batched over all waiting prompts.

It is the reference engine of the tests. It can share the policy's parameters, which then need no
push. Each request samples by inverse CDF from uniforms of its own seed, so a completion does not
depend on its batch (up to the rounding of the matmuls).

Shapes: B requests, R rows of the cache, C first tokens that all prompts share, P longest rest of a
prompt, Q new positions of a row, K keys so far, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from selfplay.engines.base import Ask, Completion, Request, Sampling

# A shared prefix of at least this many tokens is computed once; for a shorter one the extra forward
# pass costs as much as it saves.
LEAST_SHARED = 64
# A batch is cut in two if this saves at least so many tokens of padding for each of its decode
# steps. The second part's decode steps then cost less than the padding: one reads all weights once,
# which takes the time of some tens of prompt tokens.
LEAST_PADDING = 128


class _Slots(CacheLayerMixin):
    """One layer's keys and values in preallocated memory, so that a step writes in place."""

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.length = capacity, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        R, heads, _, width = key_states.shape
        self.keys = key_states.new_empty(R, heads, self.capacity, width)
        self.values = value_states.new_empty(R, heads, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.length = self.length, self.length + key_states.shape[2]
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def take(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may be repeated."""
        self.keys, self.values = self.keys[rows], self.values[rows]

    def get_seq_length(self) -> int:
        return self.length

    def get_max_cache_shape(self) -> int:
        return self.capacity

    def get_max_length(self) -> int:
        return self.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0


def _uniforms(requests: Sequence[Request], length: int) -> np.ndarray:
    """Uniform draws [B, length], each request's from its own seed."""
    draws = np.empty((len(requests), length))
    for row, request in enumerate(requests):
        draws[row] = np.random.Generator(np.random.Philox(request.seed)).random(length)
    return draws


def _common(prompts: Sequence[Sequence[int]]) -> int:
    """C, the length of the prefix that all prompts share; 0 if a separate pass does not pay off.

    Every prompt has at least one token of its own.
    """
    most = min(len(prompt) for prompt in prompts) - 1
    first = prompts[0]
    shared = next((i for i in range(most) if any(p[i] != first[i] for p in prompts)), most)
    return shared if shared >= LEAST_SHARED and len(prompts) > 1 else 0


def first_batch(prompts: Sequence[int], steps: int) -> int:
    """How many of the next prompts decode together, at most `steps` tokens each.

    `prompts` are lengths in tokens, shortest first. Rows are padded to the longest of a batch, so
    one long prompt would make all others long.
    """
    num = len(prompts)
    while num > 1:
        saved = [i * (prompts[num - 1] - prompts[i - 1]) for i in range(1, num)]
        if max(saved) < LEAST_PADDING * steps:
            break
        num = saved.index(max(saved)) + 1
    return num


def _sample(logits_BV: Tensor, temperature: float, draws_B: Tensor) -> tuple[Tensor, Tensor]:
    """Sampled ids [B] and their log-probs [B] under the full softmax after the temperature.

    Temperature 0 takes the likeliest token.
    """
    logprobs_BV = (logits_BV.float() / (temperature or 1.0)).log_softmax(-1)
    if temperature == 0.0:
        ids_B = logprobs_BV.argmax(-1)
    else:
        cdf_BV = logprobs_BV.double().exp().cumsum(-1)
        ids_B = torch.searchsorted(cdf_BV, (draws_B[:, None] * cdf_BV[:, -1:]), right=True)[:, 0]
        ids_B.clamp_(max=logits_BV.shape[-1] - 1)
    return ids_B, logprobs_BV.gather(1, ids_B[:, None])[:, 0]


class HFEngine:
    """Batched generation with a transformers causal language model."""

    streaming = False

    def __init__(self, model: PreTrainedModel, *, max_batch: int = 512) -> None:
        self.model, self.max_batch, self.version = model, max_batch, 0

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Answer all requests, in order.

        Prompts of similar length share a batch; equal prompts share one prefill.
        """
        order = sorted(
            range(len(requests)),
            key=lambda i: (len(requests[i].prompt_ids), tuple(requests[i].prompt_ids)),
        )
        answers: dict[int, Completion] = {}
        was_training = self.model.training
        self.model.eval()
        prompts = [len(requests[i].prompt_ids) for i in order]
        steps = max((request.max_new_tokens for request in requests), default=0)
        start = 0
        while start < len(order):
            stop = start + first_batch(prompts[start : start + self.max_batch], steps)
            places = order[start:stop]
            batch = [requests[i] for i in places]
            answers.update(zip(places, self._generate_batch(batch, sampling), strict=True))
            start = stop
        self.model.train(was_training)
        return [answers[i] for i in range(len(requests))]

    @torch.no_grad()
    def _generate_batch(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Requests share a row of the cache as long as their tokens are the same."""
        device = self.model.device
        horizon = max(r.max_new_tokens for r in requests)
        draws = torch.from_numpy(_uniforms(requests, horizon)).to(device)
        layers, valid_RK, lengths_R, logits_RV, row_B = self._prefill(requests, horizon)
        limits = torch.tensor([r.max_new_tokens for r in requests], device=device)
        stops = torch.tensor(sampling.stop_ids, device=device)
        request_B = torch.arange(len(requests), device=device)  # those that go on
        ids: list[list[int]] = [[] for _ in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        stopped = [False] * len(requests)
        for step in range(horizon):
            new_B, logprob_B = _sample(
                logits_RV[row_B], sampling.temperature, draws[request_B, step]
            )
            stop_B = torch.isin(new_B, stops)
            for request, token, logprob, stop in zip(
                *(t.tolist() for t in (request_B, new_B, logprob_B, stop_B)), strict=True
            ):
                ids[request].append(token)
                logprobs[request].append(logprob)
                stopped[request] = stop
            going_B = ~stop_B & (limits[request_B] > step + 1)
            if not going_B.any():
                break
            request_B, row_B, new_B = request_B[going_B], row_B[going_B], new_B[going_B]
            (parent_R, _), child_B = torch.stack((row_B, new_B)).unique(dim=1, return_inverse=True)
            splits = bool((parent_R[1:] == parent_R[:-1]).any())
            # Dropping finished rows copies the cache, which pays off once a quarter has finished.
            if splits or len(parent_R) <= 0.75 * len(lengths_R):
                for layer in layers:
                    layer.take(parent_R)
                row_B, valid_RK, lengths_R = child_B, valid_RK[parent_R], lengths_R[parent_R]
            valid_RK[:, layers[0].length] = True
            new_R = torch.zeros_like(lengths_R).scatter(0, row_B, new_B)
            logits_RV = self._forward(new_R[:, None], lengths_R[:, None], valid_RK[:, None], layers)
            lengths_R = lengths_R + 1
        return [
            Completion(ids=i, logprobs=p, finish="stop" if s else "length", version=self.version)
            for i, p, s in zip(ids, logprobs, stopped, strict=True)
        ]

    def _prefill(
        self, requests: Sequence[Request], horizon: int
    ) -> tuple[list[_Slots], Tensor, Tensor, Tensor, Tensor]:
        """Prefill the left-padded prompts, equal ones (a group's first turns) as one row: layers,
        valid keys [R, K], lengths [R], logits [R, V], each request's row [B].

        A long prefix that all prompts share (the game's rules) is computed once and then copied.
        The padding is then behind it, so a sliding window that does not reach over all keys
        excludes this: it counts keys.
        """
        prompts = [tuple(request.prompt_ids) for request in requests]
        unique = list(dict.fromkeys(prompts))
        row_of = {prompt: row for row, prompt in enumerate(unique)}
        device, longest = self.model.device, max(len(p) for p in unique) + horizon
        C = _common(unique) if longest <= self._window() else 0
        P = longest - horizon - C
        layers = [_Slots(longest) for _ in range(self.model.config.num_hidden_layers)]
        if C:
            ids_1C = torch.tensor([list(unique[0][:C])], device=device)
            causal_1CC = torch.ones(1, C, C, dtype=torch.bool, device=device).tril()
            self._forward(ids_1C, torch.arange(C, device=device)[None], causal_1CC, layers)
            for layer in layers:
                layer.take(torch.zeros(len(unique), dtype=torch.long, device=device))
        ids_RP = torch.zeros(len(unique), P, dtype=torch.long)
        valid_RK = torch.zeros(len(unique), longest, dtype=torch.bool)
        valid_RK[:, :C] = True
        for row, prompt in enumerate(unique):
            ids_RP[row, C + P - len(prompt) :] = torch.tensor(prompt[C:])
            valid_RK[row, 2 * C + P - len(prompt) : C + P] = True
        ids_RP, valid_RK = ids_RP.to(device), valid_RK.to(device)
        positions_RP = (valid_RK[:, : C + P].cumsum(-1) - 1).clamp(min=0)[:, C:]
        # A padding position attends to itself, because a softmax without keys is NaN.
        before_PK = torch.ones(P, C + P, dtype=torch.bool, device=device).tril(C)
        itself_PK = torch.eye(P, C + P, dtype=torch.bool, device=device).roll(C, 1)
        mask_RPK = (before_PK & valid_RK[:, None, : C + P]) | itself_PK
        logits_RV = self._forward(ids_RP, positions_RP, mask_RPK, layers)
        row_B = torch.tensor([row_of[prompt] for prompt in prompts], device=device)
        return layers, valid_RK, positions_RP[:, -1] + 1, logits_RV, row_B

    def _window(self) -> float:
        """The narrowest sliding window of the model's layers, in tokens; infinite without one."""
        settings = self.model.config.get_text_config()
        return getattr(settings, "sliding_window", None) or math.inf

    def _forward(
        self, ids_RQ: Tensor, positions_RQ: Tensor, mask_RQK: Tensor, layers: list[_Slots]
    ) -> Tensor:
        """Logits of the last position, [R, V]; writes the new keys and values into `layers`."""
        K = layers[0].length + ids_RQ.shape[1]
        output = self.model(
            input_ids=ids_RQ,
            position_ids=positions_RQ,
            attention_mask=mask_RQK[:, None, :, :K],
            past_key_values=Cache(layers=layers),
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def stream(
        self,
        tasks: Iterable[Callable[[Ask], Awaitable[Any]]],
        sampling: Sampling,
    ) -> list[Any]:
        raise NotImplementedError("the hf engine answers in waves: use generate")

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy tensors into the model by name. Raises KeyError for an unknown name."""
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in named_tensors:
                if name not in parameters:
                    raise KeyError(f"the engine's model has no parameter {name!r}")
                if parameters[name].data_ptr() != tensor.data_ptr():  # shared with the policy
                    parameters[name].copy_(tensor)
        self.version = version

    def sleep(self) -> None:
        """Does nothing: the cache exists only in `generate`, and the policy needs the weights."""

    def wake(self, what: str) -> None:
        """Does nothing, since `sleep` frees nothing."""

    def restart(self) -> None:
        """Does nothing: only the weights can be wrong, and the next push copies them."""

    def close(self) -> None:
        """Does nothing: the engine has no processes."""
