"""Keys and values of computed tokens, kept as a tree of texts: texts that begin alike share them.

Each token has a slot, found by the slot of the token before it. So a beginning is computed once,
whether it is the rules of all games, the first prompt of a group's games or a seat's transcript up
to its last turn. Slot 0 is the empty text; padding points to it.
Knows token ids and tensors, no requests and no models.

Shapes: N new tokens of a pass, K all tokens of its texts, S texts, M last tokens of texts, T slots,
G key/value heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, groupby
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from selfplay.model.row import PackedRow, Prefixes

# All tokens of a pass's texts, to which up to one text is added: attention copies their keys.
MOST_AT_ONCE = 16_384


class TextTree:
    """The slots of all texts added so far, and each layer's keys and values of these slots."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.layers, self.device = [SlotLayer() for _ in range(num_layers)], device
        self._slots: dict[tuple[int, int], int] = {}
        self._most = 0

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self._slots)

    def make_room(self, num_tokens: int) -> None:
        """Before a batch of so many tokens: forget all texts if they have more than twice the most
        of any batch."""
        self._most = max(self._most, 2 * num_tokens)
        if len(self) > self._most:
            self.forget()

    def forget(self) -> None:
        """Forget all texts, whose keys and values are freed."""
        self.layers = [SlotLayer() for _ in self.layers]
        self._slots.clear()

    def after(self, slot: int, token: int) -> int:
        """The slot of a token after the text that ends in `slot`; a new one if it has none yet."""
        return self._slots.setdefault((slot, token), len(self._slots) + 1)

    def add(self, text: Sequence[int]) -> tuple[list[int], int]:
        """The slots of a text's tokens, and how many of its last tokens have to be computed: the
        new ones, and always the last one, whose logits are not kept."""
        before, slot, path = len(self), 0, []
        for token in text:
            slot = self.after(slot, token)
            path.append(slot)
        return path, max(1, len(self) - before)

    def reserve(self, slots_N: Tensor) -> None:
        """What each layer is given next goes to these slots."""
        for layer in self.layers:
            layer.reserve(slots_N, num_slots=len(self) + 1)

    def passes(
        self,
        texts: Sequence[Sequence[int]],
        paths: Sequence[Sequence[int]],
        num_new: Sequence[int],
    ) -> Iterator[PackedRow]:
        """The rows that compute what `add` found new in these texts, given in the order in which
        they were added. What a row computes goes to its slots until the next row is taken."""
        ends = list(accumulate(map(len, paths)))
        for _, places in groupby(range(len(texts)), key=lambda i: (ends[i] - 1) // MOST_AT_ONCE):
            part = [(texts[i], paths[i], num_new[i]) for i in places]
            self.reserve(self._joined(path[-new:] for _, path, new in part))
            bounds_S1, whole_S1 = (
                torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self.device)
                for lengths in ([new for _, _, new in part], [len(path) for _, path, _ in part])
            )
            yield PackedRow(
                ids_N=self._joined(text[-new:] for text, _, new in part),
                positions_N=self._joined(range(len(t) - new, len(t)) for t, _, new in part),
                cu_seqlens_S1=bounds_S1,
                max_seqlen=max(new for _, _, new in part),
                predict_M=bounds_S1[1:].long() - 1,
                prefixes=Prefixes(
                    tokens_K=self._joined(path for _, path, _ in part),
                    cu_seqlens_S1=whole_S1,
                    max_seqlen=max(len(path) for _, path, _ in part),
                ),
            )

    def _joined(self, parts: Iterable[Iterable[int]]) -> Tensor:
        return torch.tensor(list(chain.from_iterable(parts)), device=self.device)


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values of all slots [T, G, D]."""

    is_sliding = False
    _slots_N: Tensor
    _num_slots = 0

    def reserve(self, slots_N: Tensor, *, num_slots: int) -> None:
        """What is written next goes to these slots, of `num_slots` in all."""
        self._slots_N, self._num_slots = slots_N, num_slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (
            x.new_zeros(1, x.shape[1], x.shape[3]) for x in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Fill slots with new tokens [1, G, N, D]; returns all slots as one row [1, G, T, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.write(*(x[0].transpose(0, 1) for x in (key_states, value_states)))
        return self.keys.transpose(0, 1)[None], self.values.transpose(0, 1)[None]

    def write(self, keys_NGD: Tensor, values_NGD: Tensor) -> None:
        if self._num_slots > len(self.keys):
            self.keys, self.values = (self._grown(x) for x in (self.keys, self.values))
        self.keys.index_copy_(0, self._slots_N, keys_NGD)
        self.values.index_copy_(0, self._slots_N, values_NGD)

    def _grown(self, x_TGD: Tensor) -> Tensor:
        size = max(self._num_slots, len(x_TGD) * 3 // 2)
        grown = x_TGD.new_empty(size, *x_TGD.shape[1:])
        grown[: len(x_TGD)] = x_TGD
        return grown

    def get_seq_length(self) -> int:
        return self._num_slots

    def get_max_cache_shape(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._num_slots, 0
