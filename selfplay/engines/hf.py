"""The transformers engine: one model in this process, batched over all waiting prompts.

It is the reference engine of the tests. It can share the policy's parameters, which then need no
push. Each request samples by inverse CDF from uniforms of its own seed, so a completion does not
depend on its batch (up to the rounding of the matmuls).

Prompts are computed as a tree (`text_tree`), without padding. In a rollout the tree is kept, so a
turn computes only what its seat has read since its last one.

Shapes: B requests, R rows of different texts, T steps, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from selfplay.engines.base import Ask, Completion, Request, Sampling
from selfplay.engines.decode_rows import DecodeRows
from selfplay.engines.text_tree import TextTree
from selfplay.model.attention import packed_kwargs

# A batch is cut in two if this saves at least so many tokens of padding for each of its decode
# steps, which each read the padding's keys. The second part's steps read all weights again.
LEAST_PADDING = 128


def _uniforms(requests: Sequence[Request], length: int) -> np.ndarray:
    """Uniform draws [B, length], each request's from its own seed."""
    draws = np.empty((len(requests), length))
    for row, request in enumerate(requests):
        draws[row] = np.random.Generator(np.random.Philox(request.seed)).random(length)
    return draws


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
        self._tree: TextTree | None = None  # of the rollout

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Answer all requests, in order.

        Prompts of similar length share a batch; equal beginnings are computed once.
        """
        tree = self._new_tree() if self._tree is None else self._tree
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
            tree.make_room((stop - start) * (prompts[stop - 1] + steps))
            batch = [requests[i] for i in places]
            answers.update(zip(places, self._generate_batch(batch, sampling, tree), strict=True))
            start = stop
        self.model.train(was_training)
        return [answers[i] for i in range(len(requests))]

    @torch.no_grad()
    def _generate_batch(
        self, requests: Sequence[Request], sampling: Sampling, tree: TextTree
    ) -> list[Completion]:
        """Requests share a row as long as their tokens are the same."""
        device, horizon = self.model.device, max(r.max_new_tokens for r in requests)
        draws_BT, stops = _uniforms(requests, horizon), set(sampling.stop_ids)
        prompts = [tuple(request.prompt_ids) for request in requests]
        unique = list(dict.fromkeys(prompts))
        paths, logits_RV = self._prefill(unique, tree)
        row_of = {prompt: row for row, prompt in enumerate(unique)}
        going, rows = list(range(len(requests))), [row_of[prompt] for prompt in prompts]
        decoding = DecodeRows(tree, paths, most=len(requests), horizon=horizon)
        ids: list[list[int]] = [[] for _ in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        while True:
            step = len(ids[going[0]])
            draws_B = torch.from_numpy(draws_BT[going, step]).to(device)
            sampled = _sample(logits_RV[rows], sampling.temperature, draws_B)
            continued = []
            for request, row, token, logprob in zip(
                going, rows, *(x.tolist() for x in sampled), strict=True
            ):
                ids[request].append(token)
                logprobs[request].append(logprob)
                if token not in stops and step + 1 < requests[request].max_new_tokens:
                    continued.append((request, (row, token)))
            if not continued:
                break
            children = list(dict.fromkeys(child for _, child in continued))
            row_of_child = dict(zip(children, decoding.advance(children), strict=True))
            going = [request for request, _ in continued]
            rows = [row_of_child[child] for _, child in continued]
            output = self.model(**decoding.inputs(), use_cache=True, logits_to_keep=1)
            logits_RV = output.logits[:, -1]
        decoding.keep()
        return [
            Completion(
                ids=new,
                logprobs=p,
                finish="stop" if new[-1] in stops else "length",
                version=self.version,
            )
            for new, p in zip(ids, logprobs, strict=True)
        ]

    def _new_tree(self) -> TextTree:
        return TextTree(self.model.config.num_hidden_layers, self.model.device)

    def _prefill(
        self, prompts: Sequence[Sequence[int]], tree: TextTree
    ) -> tuple[list[list[int]], Tensor]:
        """Each prompt's slots in the tree, and the logits after it [R, V]."""
        added = [tree.add(prompt) for prompt in prompts]
        paths, num_new = [path for path, _ in added], [num for _, num in added]
        logits = []
        for row in tree.passes(prompts, paths, num_new):
            output = self.model(
                input_ids=row.ids_N[None],
                position_ids=row.positions_N[None],
                past_key_values=Cache(layers=tree.layers),
                use_cache=True,
                logits_to_keep=row.predict_M,
                **packed_kwargs(row),
            )
            logits.append(output.logits[0])
        return paths, torch.cat(logits)

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Inside it keys and values are kept from call to call: at most twice as many as the
        largest batch has, before the next batch adds its own."""
        self._tree = self._new_tree()
        try:
            yield
        finally:
            self._tree = None

    def stream(
        self,
        tasks: Iterable[Callable[[Ask], Awaitable[Any]]],
        sampling: Sampling,
    ) -> list[Any]:
        raise NotImplementedError("the hf engine answers in waves: use generate")

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy tensors into the model by name. Raises KeyError for an unknown name."""
        if self._tree is not None:
            self._tree.forget()
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in named_tensors:
                if name not in parameters:
                    raise KeyError(f"the engine's model has no parameter {name!r}")
                if parameters[name].data_ptr() != tensor.data_ptr():  # shared with the policy
                    parameters[name].copy_(tensor)
        self.version = version

    def sleep(self) -> None:
        """Does nothing: the policy needs the weights, and the cache ends with the rollout."""

    def wake(self, what: str) -> None:
        """Does nothing, since `sleep` frees nothing."""

    def restart(self) -> None:
        """Does nothing: only the weights can be wrong, and the next push copies them."""

    def close(self) -> None:
        """Does nothing: the engine has no processes."""
