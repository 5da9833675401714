"""The transformers engine: one model in this process, batched over all waiting prompts.

It is the reference engine of the tests. It can share the policy's parameters, which then need no
push. Each request samples by inverse CDF from uniforms of its own seed, so a completion does not
depend on its batch (up to the rounding of the matmuls).

Prompts are computed as a tree of texts (`TextTree`), without padding. The tree lives as long as the
rollout, so a turn computes only the tokens that its seat has read since its last turn. The rows of
a batch then decode from copies of their keys and values (`DecodeRows`), because attention reads all
keys of a row in each step. New keys and values are copied back to the tree.

Shapes: B requests, R rows of different texts, T steps, V vocabulary; N new tokens of a pass, K all
tokens of its texts, S texts, M last tokens of texts; T slots in `SlotLayer`, L columns and C
columns since the last copy back in `DecodeRows`; G key/value heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, chain, groupby
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from selfplay.config import Config, EngineConfig
from selfplay.distributed import World
from selfplay.engines.base import Completion, Engine, GameCoroutine, Generate, Request, Sampling
from selfplay.engines.waves import WaveScheduler
from selfplay.engines.weights import Compared, Weights
from selfplay.model.attention import PackedRow, Prefixes, packed_kwargs
from selfplay.model.lora import use_adapters
from selfplay.model.policy import load_model, policy_logprobs

# A batch is split in two if that saves at least this many padding tokens per decode step. Each step
# reads the keys of the padding, but a second batch has to read all weights again.
MIN_SAVED_PADDING = 128

# Tokens of a pass's texts, not counting the last text: attention copies their keys.
MAX_PASS_TOKENS = 16_384

# Finished rows are still computed, and their results ignored, until they are this fraction of all.
MIN_DROPPED = 0.25


class HFEngine(Engine):
    """Batched generation with a transformers causal language model. It computes exactly as the
    trainer does, so no step compares their scores. It lives in the trainer's memory, so sleep and
    restart do nothing."""

    in_trainer, dtype = True, torch.float32

    def __init__(self, model: PreTrainedModel, *, max_batch: int = 512, policy: str = "") -> None:
        """`model` is used without a copy; `max_batch` is the maximum number of games at once, and
        of prompts in a batch; `policy` names the adapters of a learner's model."""
        self.model, self.max_batch, self.policy = model, max_batch, policy
        self._tree: TextTree | None = None  # of the rollout

    @classmethod
    def shares(cls, world: World) -> bool:
        """It cannot generate with sharded parameters; then each rank's engine has a full copy."""
        return world.mesh is None

    @classmethod
    def needs_merged(cls, engine: EngineConfig) -> bool:
        """Only for a device map: transformers cannot split adapters over devices."""
        return engine.device_map is not None

    @classmethod
    def start(
        cls, config: Config, weights: Path, world: World, *, load_format: str = "auto"
    ) -> Self:
        """An engine with its own copy of all weights in fp32, on this rank's device or split by
        `engine.device_map`."""
        device = config.engine.device_map or world.device
        copy = load_model(str(weights), device=device, dtype=cls.dtype)
        return cls.around(copy.requires_grad_(False), config.engine)

    @classmethod
    def around(cls, model: PreTrainedModel, engine: EngineConfig, policy: str = "") -> Self:
        """An engine on the parameters of this model, which then need no push."""
        return cls(model, max_batch=engine.max_batch, policy=policy)

    @property
    def num_weight_bytes(self) -> int:
        """The size in bytes of the model's parameters on all devices."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    def generate_batch(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Answer all requests, in order.

        Prompts of similar length share a batch; common prefixes are computed once.
        """
        if self.model.device.type == "cuda":  # per thread; a new thread starts with device 0
            torch.cuda.set_device(self.model.device)
        tree = self._new_tree() if self._tree is None else self._tree
        prompts = [tuple(request.prompt_ids) for request in requests]
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), prompts[i]))
        lengths = [len(prompts[i]) for i in order]
        answers: dict[int, Completion] = {}
        was_training = self.model.training
        self.model.eval()
        use_adapters(self.model, self.policy)  # another policy may have computed since
        steps = max((request.max_new_tokens for request in requests), default=0)
        start = 0
        while start < len(order):
            stop = start + first_batch(lengths[start : start + self.max_batch], steps)
            indices = order[start:stop]
            tree.make_room((stop - start) * (lengths[stop - 1] + steps))
            batch = [requests[i] for i in indices]
            answers.update(zip(indices, self._generate_batch(batch, sampling, tree), strict=True))
            start = stop
        self.model.train(was_training)
        return [answers[i] for i in range(len(requests))]

    @torch.no_grad()
    def _generate_batch(
        self, requests: Sequence[Request], sampling: Sampling, tree: TextTree
    ) -> list[Completion]:
        """Answer one batch. Requests share a row as long as their tokens are the same."""
        device, horizon = self.model.device, max(r.max_new_tokens for r in requests)
        draws_BT, stops = _uniforms(requests, horizon), set(sampling.stop_ids)
        prompts = [tuple(request.prompt_ids) for request in requests]
        unique = list(dict.fromkeys(prompts))
        paths, logits_RV = self._prefill(unique, tree)
        row_of = {prompt: row for row, prompt in enumerate(unique)}
        going, rows = list(range(len(requests))), [row_of[prompt] for prompt in prompts]
        decoding = DecodeRows(tree, paths, max_rows=len(requests), horizon=horizon)
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
        decoding.save()
        return [
            Completion(new, p, "stop" if new[-1] in stops else "length", self.version)
            for new, p in zip(ids, logprobs, strict=True)
        ]

    @torch.no_grad()
    def score(
        self, texts: Sequence[Sequence[int]], *, temperature: float = 1.0
    ) -> Callable[[], list[list[float]]]:
        """The log-probs at once, of at most MAX_PASS_TOKENS tokens in a pass."""
        use_adapters(self.model, self.policy)
        scores = []
        ends = accumulate(map(len, texts))
        for _, group in groupby(
            zip(texts, ends, strict=True), lambda each: each[1] // MAX_PASS_TOKENS
        ):
            batch = [text for text, _ in group]
            row, targets_M = _scored_row(batch, self.model.device)
            logprobs_M, _ = policy_logprobs(self.model, row, targets_M, temperature=temperature)
            scores += [part.tolist() for part in logprobs_M.split([len(t) - 1 for t in batch])]
        return lambda: scores

    def _new_tree(self) -> TextTree:
        """An empty tree, for a rollout or for one call outside of a rollout."""
        return TextTree(self.model.config.num_hidden_layers, self.model.device)

    def _prefill(
        self, prompts: Sequence[Sequence[int]], tree: TextTree
    ) -> tuple[list[list[int]], Tensor]:
        """Compute the prompts; returns their slots in the tree and the logits after them [R, V]."""
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
        """Keeps keys and values from call to call: before each batch at most twice as many as the
        largest batch so far has."""
        self._tree = self._new_tree()
        try:
            yield
        finally:
            self._tree = None

    def run_games(
        self, games: Iterable[GameCoroutine], sampling: Sampling, partners: Generate | None = None
    ) -> list[Any]:
        """Play the games in waves, at most `max_batch` games at a time."""
        games, results = list(games), []
        for start in range(0, len(games), self.max_batch):
            waves = WaveScheduler(
                partial(self.generate_batch, sampling=sampling), partners=partners
            )
            results += waves.run_games(games[start : start + self.max_batch])
        return results

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

    def load(self, weights: Weights, version: int) -> None:
        """Copy the weights, unless they are the trainer's own parameters that this engine uses."""
        self.update_weights(() if weights.model is self.model else weights.named(), version)

    def compare(self, weights: Weights) -> Compared:
        """With the model's own parameters, which shared weights are."""
        if weights.model is self.model:
            return Compared(weights.num_elements, 0)
        held = dict(self.model.named_parameters())
        different = sum(int((held[name] != tensor).sum()) for name, tensor in weights.named())
        return Compared(weights.num_elements, different)


def _scored_row(texts: Sequence[Sequence[int]], device: torch.device) -> tuple[PackedRow, Tensor]:
    """These texts back to back, each token after a text's first scored, and those tokens [M]."""
    lengths = [len(text) for text in texts]
    ids_N = torch.tensor([*chain(*texts)], device=device)
    places_N = torch.cat([torch.arange(length) for length in lengths]).to(device)
    bounds_S1 = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    predict_M = places_N.nonzero()[:, 0] - 1
    row = PackedRow(ids_N, places_N, bounds_S1, max(lengths), predict_M)
    return row, ids_N[predict_M + 1]


def _uniforms(requests: Sequence[Request], length: int) -> np.ndarray:
    """Uniform draws [B, length], each request's from its own seed."""
    generators = (np.random.Generator(np.random.Philox(request.seed)) for request in requests)
    return np.stack([generator.random(length) for generator in generators])


def first_batch(prompts: Sequence[int], steps: int) -> int:
    """How many of the next prompts decode together, at most `steps` tokens each.

    `prompts` are lengths in tokens, shortest first. Rows are padded to the longest in the batch, so
    one long prompt makes all rows long.
    """
    num = len(prompts)
    while num > 1:
        saved = [i * (prompts[num - 1] - prompts[i - 1]) for i in range(1, num)]
        if max(saved) < MIN_SAVED_PADDING * steps:
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


class TextTree:
    """Keys and values of computed tokens; texts with a common prefix share them.

    Each token has a slot, found by the slot of the token before it. So a prefix is computed once,
    whether it is the rules of all games, the first prompt of a group's games or a seat's transcript
    up to its last turn. Slot 0 is the empty text; padding points to it.
    """

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.layers, self.device = [SlotLayer() for _ in range(num_layers)], device
        self._slots: dict[tuple[int, int], int] = {}
        self._max_tokens = 0

    def __len__(self) -> int:
        """The number of tokens in the tree."""
        return len(self._slots)

    def make_room(self, num_tokens: int) -> None:
        """Call before a batch of `num_tokens`: forgets all texts if they have more than twice the
        tokens of the largest batch so far."""
        self._max_tokens = max(self._max_tokens, 2 * num_tokens)
        if len(self) > self._max_tokens:
            self.forget()

    def forget(self) -> None:
        """Forget all texts and free their keys and values."""
        self.layers = [SlotLayer() for _ in self.layers]
        self._slots.clear()

    def after(self, slot: int, token: int) -> int:
        """The slot of a token after the text that ends in `slot`, assigned on first use."""
        return self._slots.setdefault((slot, token), len(self._slots) + 1)

    def add(self, text: Sequence[int]) -> tuple[list[int], int]:
        """The slots of a text's tokens, and how many of its last tokens must be computed: the new
        ones, and always the last one, because logits are not kept."""
        before, slot, path = len(self), 0, []
        for token in text:
            slot = self.after(slot, token)
            path.append(slot)
        return path, max(1, len(self) - before)

    def reserve(self, slots_N: Tensor) -> None:
        """Have each layer write its next keys and values to these slots."""
        for layer in self.layers:
            layer.reserve(slots_N, num_slots=len(self) + 1)

    def passes(
        self,
        texts: Sequence[Sequence[int]],
        paths: Sequence[Sequence[int]],
        num_new: Sequence[int],
    ) -> Iterator[PackedRow]:
        """The rows that compute the new tokens of these texts, in the order of their `add` calls.
        A row must be computed before the next one is taken, which reserves other slots."""
        ends = list(accumulate(map(len, paths)))
        for _, group in groupby(range(len(texts)), key=lambda i: (ends[i] - 1) // MAX_PASS_TOKENS):
            batch = [(texts[i], paths[i], num_new[i]) for i in group]
            self.reserve(self._joined(path[-new:] for _, path, new in batch))
            new_S1, full_S1 = (
                torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self.device)
                for lengths in ([new for _, _, new in batch], [len(path) for _, path, _ in batch])
            )
            yield PackedRow(
                ids_N=self._joined(text[-new:] for text, _, new in batch),
                positions_N=self._joined(range(len(t) - new, len(t)) for t, _, new in batch),
                cu_seqlens_S1=new_S1,
                max_seqlen=max(new for _, _, new in batch),
                predict_M=new_S1[1:].long() - 1,
                prefixes=Prefixes(
                    tokens_K=self._joined(path for _, path, _ in batch),
                    cu_seqlens_S1=full_S1,
                    max_seqlen=max(len(path) for _, path, _ in batch),
                ),
            )

    def _joined(self, parts: Iterable[Iterable[int]]) -> Tensor:
        """The concatenation of the parts, as int64 on the device of the tree."""
        return torch.tensor(list(chain.from_iterable(parts)), device=self.device)


class _Layer(CacheLayerMixin):
    """One layer's keys and values. transformers only asks for their number; attention takes its
    bounds from the packed row or the mask."""

    is_sliding = False

    def get_max_cache_shape(self) -> int:
        return -1

    get_max_length = get_max_cache_shape  # its name in transformers 5.19

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of keys, including this step's, and their offset."""
        return self.get_seq_length() + query_length, 0


class SlotLayer(_Layer):
    """One layer's keys and values for all slots [T, G, D]."""

    _slots_N: Tensor
    _num_slots = 0

    def reserve(self, slots_N: Tensor, *, num_slots: int) -> None:
        """Send the next write to these slots, out of `num_slots`."""
        self._slots_N, self._num_slots = slots_N, num_slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Start with slot 0 alone, in the dtype, heads and width of the first keys."""
        self.keys, self.values = (
            x.new_zeros(1, x.shape[1], x.shape[3]) for x in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new tokens [1, G, N, D] to their slots; returns all slots as a row [1, G, T, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.write(*(x[0].transpose(0, 1) for x in (key_states, value_states)))
        return self.keys.transpose(0, 1)[None], self.values.transpose(0, 1)[None]

    def write(self, keys_NGD: Tensor, values_NGD: Tensor) -> None:
        """Write new tokens' keys and values to the reserved slots; grows the storage if needed."""
        if self._num_slots > len(self.keys):
            self.keys, self.values = (self._grown(x) for x in (self.keys, self.values))
        slots_N = self._slots_N.to(self.keys.device)  # a device map gives layers their own devices
        self.keys.index_copy_(0, slots_N, keys_NGD)
        self.values.index_copy_(0, slots_N, values_NGD)

    def _grown(self, x_TGD: Tensor) -> Tensor:
        """A copy with room for all slots, at least half as large again, so that it grows rarely."""
        size = max(self._num_slots, len(x_TGD) * 3 // 2)
        grown = x_TGD.new_empty(size, *x_TGD.shape[1:])
        grown[: len(x_TGD)] = x_TGD
        return grown

    def get_seq_length(self) -> int:
        return self._num_slots


class DecodeRows:
    """Rows of texts that decode together, one token per step, on their own keys and values.

    They start as the texts at `paths` in the tree, become at most `max_rows`, and grow by at most
    `horizon` tokens. All rows end in the same column; shorter ones are padded in front.
    """

    def __init__(
        self, tree: TextTree, paths: Sequence[Sequence[int]], *, max_rows: int, horizon: int
    ) -> None:
        self._tree, self._device = tree, tree.device
        longest = max(map(len, paths))
        padding = [longest - len(path) for path in paths]
        slots_RL = self._tensor(
            [
                [0] * num + list(path) + [0] * horizon
                for num, path in zip(padding, paths, strict=True)
            ]
        )
        self._layers = [RowLayer(slots, slots_RL, longest, max_rows) for slots in tree.layers]
        self._padding_R = self._tensor(padding)
        self._ends = [path[-1] for path in paths]  # the slot of each row's newest token
        self._columns: list[list[int]] = []  # the slots of all rows, for each column to copy back

    def advance(self, children: Sequence[tuple[int, int]]) -> list[int]:
        """Append a token to rows, given as distinct (row, token) pairs; returns the pairs' rows.

        A row with several tokens becomes several rows. A row without a token has ended.
        """
        parents = [row for row, _ in children]
        rows = parents
        max_unmoved = (1 - MIN_DROPPED) * len(self._ends)
        if len(set(parents)) < len(parents) or len(parents) <= max_unmoved:
            rows = self._move(parents)
        tokens, slots = [0] * len(self._ends), [0] * len(self._ends)
        for row, (_, token) in zip(rows, children, strict=True):
            tokens[row] = token
            slots[row] = self._ends[row] = self._tree.after(self._ends[row], token)
        self._columns.append(slots)
        self._tokens_R = self._tensor(tokens)
        return rows

    def inputs(self) -> dict[str, Any]:
        """The arguments of the forward pass over the newest token of each row."""
        length = self._layers[0].length
        valid_RL = torch.arange(length + 1, device=self._device) >= self._padding_R[:, None]
        return {
            "input_ids": self._tokens_R[:, None],
            "position_ids": (length - self._padding_R)[:, None],
            "attention_mask": valid_RL[:, None, None],
            "past_key_values": Cache(layers=self._layers),
        }

    def save(self) -> None:
        """Copy the keys and values computed since the last copy to the tree."""
        if self._columns:
            slots_RC = self._tensor(self._columns).T
            self._tree.reserve(slots_RC.flatten())
            for layer in self._layers:
                layer.save(len(self._columns))
            self._columns.clear()

    def _move(self, parents: Sequence[int]) -> list[int]:
        """Make one row of each of these rows, which may repeat, and drop the others. Returns their
        new numbers, which start at 0; most rows keep their place, which saves copies."""
        self.save()
        num = len(parents)
        staying = {row for row in parents if row < num}
        free = iter([row for row in range(num) if row not in staying])
        new_rows = []
        for row in parents:
            new_rows.append(row if row in staying else next(free))
            staying.discard(row)
        source = dict(zip(new_rows, parents, strict=True))
        moved = [(source[row], row) for row in range(num) if source[row] != row]
        from_M, to_M = self._tensor(moved).view(-1, 2).T
        for layer in self._layers:
            layer.move(num, from_M, to_M)
        self._padding_R = self._padding_R[self._tensor([source[row] for row in range(num)])]
        self._ends = [self._ends[source[row]] for row in range(num)]
        return new_rows

    def _tensor(self, values: Sequence[Any]) -> Tensor:
        """Indices or ids as int64 on the device of the rows."""
        return torch.tensor(values, dtype=torch.int64, device=self._device)


class RowLayer(_Layer):
    """One layer's keys and values for the rows [R, L, G, D]; each step fills the next column."""

    def __init__(self, slots: SlotLayer, slots_RL: Tensor, length: int, max_rows: int) -> None:
        """The first `length` columns are copies of slots; there are at most `max_rows` rows."""
        super().__init__()
        self._slots, self.length, self.is_initialized = slots, length, True
        self._num_rows, num_columns = slots_RL.shape
        self.keys, self.values = (
            x.new_empty(max_rows, num_columns, *x.shape[1:]) for x in (slots.keys, slots.values)
        )
        for x, of_slots in ((self.keys, slots.keys), (self.values, slots.values)):
            out = x[: self._num_rows].flatten(0, 1)
            torch.index_select(of_slots, 0, slots_RL.flatten().to(of_slots.device), out=out)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Fill the next column with [R, G, 1, D]; returns all filled columns [R, G, L, D]."""
        self.keys[: self._num_rows, self.length] = key_states[:, :, 0]
        self.values[: self._num_rows, self.length] = value_states[:, :, 0]
        self.length += 1
        keys, values = (x[: self._num_rows, : self.length] for x in (self.keys, self.values))
        return keys.transpose(1, 2), values.transpose(1, 2)

    def move(self, num_rows: int, from_M: Tensor, to_M: Tensor) -> None:
        """Copy rows; all are read before any is written."""
        from_M, to_M = from_M.to(self.keys.device), to_M.to(self.keys.device)
        for x in (self.keys, self.values):
            x[to_M, : self.length] = x[from_M, : self.length]
        self._num_rows = num_rows

    def save(self, num_columns: int) -> None:
        """Copy the newest columns to the slots that the tree reserved for them."""
        newest = slice(self.length - num_columns, self.length)
        keys, values = (x[: self._num_rows, newest] for x in (self.keys, self.values))
        self._slots.write(keys.flatten(0, 1), values.flatten(0, 1))

    def get_seq_length(self) -> int:
        return self.length
