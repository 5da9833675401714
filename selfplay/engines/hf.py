"""The transformers engine: one model in this process, batched over all waiting prompts.

It is the reference engine of the tests. It can share the policy's parameters, which then need no
push. Each request samples by inverse CDF from uniforms of its own seed, so a completion does not
depend on its batch (up to the rounding of the matmuls).

Shapes: B rows, C first tokens that all prompts share, P longest rest of a prompt, Q new positions
of a row, K keys so far, V vocabulary.
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
        B, heads, _, width = key_states.shape
        self.keys = key_states.new_empty(B, heads, self.capacity, width)
        self.values = value_states.new_empty(B, heads, self.capacity, value_states.shape[-1])
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
    """Uniform draws [B, length], each row from its request's own seed."""
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
        device = self.model.device
        horizon = max(r.max_new_tokens for r in requests)
        draws = torch.from_numpy(_uniforms(requests, horizon)).to(device)
        layers, valid_BK, lengths_B, logits_BV = self._prefill(requests, horizon)
        limits = torch.tensor([r.max_new_tokens for r in requests], device=device)
        stops = torch.tensor(sampling.stop_ids, device=device)
        rows = torch.arange(len(requests), device=device)  # which request each live row answers
        going_B = torch.ones(len(requests), dtype=torch.bool, device=device)
        ids: list[list[int]] = [[] for _ in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        stopped = [False] * len(requests)
        for step in range(horizon):
            new_B, logprob_B = _sample(logits_BV, sampling.temperature, draws[rows, step])
            stop_B = torch.isin(new_B, stops)
            for row, token, logprob, stop, going in zip(
                *(t.tolist() for t in (rows, new_B, logprob_B, stop_B, going_B)), strict=True
            ):
                if going:
                    ids[row].append(token)
                    logprobs[row].append(logprob)
                    stopped[row] = stop
            going_B = going_B & ~stop_B & (limits[rows] > step + 1)
            num_going = int(going_B.sum())
            if num_going == 0:
                break
            # Dropping finished rows copies the cache, which pays off once a quarter has finished.
            if num_going <= 0.75 * len(rows):
                keep = going_B.nonzero()[:, 0]
                for layer in layers:
                    layer.take(keep)
                rows, new_B, valid_BK = rows[keep], new_B[keep], valid_BK[keep]
                lengths_B, going_B = lengths_B[keep], going_B[keep]
            valid_BK[:, layers[0].length] = True
            logits_BV = self._forward(new_B[:, None], lengths_B[:, None], valid_BK[:, None], layers)
            lengths_B = lengths_B + 1
        return [
            Completion(ids=i, logprobs=p, finish="stop" if s else "length", version=self.version)
            for i, p, s in zip(ids, logprobs, stopped, strict=True)
        ]

    def _prefill(
        self, requests: Sequence[Request], horizon: int
    ) -> tuple[list[_Slots], Tensor, Tensor, Tensor]:
        """Prefill the left-padded prompts: layers, valid keys [B, K], lengths [B], logits [B, V].

        Equal neighbouring prompts (a group's first turns) are computed once and then copied, and so
        is a long prefix that all prompts share (the game's rules). The padding is then behind it,
        so a sliding window that does not reach over all keys excludes this: it counts keys.
        """
        unique: list[Sequence[int]] = []
        index: list[int] = []
        for request in requests:
            if not unique or list(unique[-1]) != list(request.prompt_ids):
                unique.append(request.prompt_ids)
            index.append(len(unique) - 1)
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
        ids_BP = torch.zeros(len(unique), P, dtype=torch.long)
        valid_BK = torch.zeros(len(unique), longest, dtype=torch.bool)
        valid_BK[:, :C] = True
        for row, prompt in enumerate(unique):
            ids_BP[row, C + P - len(prompt) :] = torch.tensor(prompt[C:])
            valid_BK[row, 2 * C + P - len(prompt) : C + P] = True
        ids_BP, valid_BK = ids_BP.to(device), valid_BK.to(device)
        positions_BP = (valid_BK[:, : C + P].cumsum(-1) - 1).clamp(min=0)[:, C:]
        # A padding position attends to itself, because a softmax without keys is NaN.
        before_PK = torch.ones(P, C + P, dtype=torch.bool, device=device).tril(C)
        itself_PK = torch.eye(P, C + P, dtype=torch.bool, device=device).roll(C, 1)
        mask_BPK = (before_PK & valid_BK[:, None, : C + P]) | itself_PK
        logits_BV = self._forward(ids_BP, positions_BP, mask_BPK, layers)
        take = torch.tensor(index, device=device)
        for layer in layers:
            layer.take(take)
        return layers, valid_BK[take], positions_BP[take, -1] + 1, logits_BV[take]

    def _window(self) -> float:
        """The narrowest sliding window of the model's layers, in tokens; infinite without one."""
        settings = self.model.config.get_text_config()
        return getattr(settings, "sliding_window", None) or math.inf

    def _forward(
        self, ids_BQ: Tensor, positions_BQ: Tensor, mask_BQK: Tensor, layers: list[_Slots]
    ) -> Tensor:
        """Logits of the last position, [B, V]; writes the new keys and values into `layers`."""
        K = layers[0].length + ids_BQ.shape[1]
        output = self.model(
            input_ids=ids_BQ,
            position_ids=positions_BQ,
            attention_mask=mask_BQK[:, None, :, :K],
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
