"""Rows of texts that decode together, one token a step, with keys and values of their own.

Attention reads all keys of a row in each step, so rows begin as copies of slots of a `TextTree`.
What the steps add is copied back. All rows end in one column; shorter ones are padded in front.
Knows token ids and tensors, no requests and no models.

Shapes: R rows, L columns, C columns since the last copy back, M rows that are copied, G key/value
heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from selfplay.engines.text_tree import SlotLayer, TextTree

# Rows that ended are computed further, unread, until they are this share of all.
LEAST_DROPPED = 0.25


class DecodeRows:
    """The texts at these paths of the tree, which become at most `most` rows and are continued by
    at most `horizon` tokens."""

    def __init__(
        self, tree: TextTree, paths: Sequence[Sequence[int]], *, most: int, horizon: int
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
        self._layers = [RowLayer(slots, slots_RL, longest, most) for slots in tree.layers]
        self._padding_R = self._tensor(padding)
        self._ends = [path[-1] for path in paths]  # the slot of each row's newest token
        self._columns: list[list[int]] = []  # the slots of all rows, for each column to copy back

    def advance(self, children: Sequence[tuple[int, int]]) -> list[int]:
        """Continue rows with a token each, given as (row, token), none twice; returns their rows.

        A row with several tokens becomes several rows. A row without any has ended.
        """
        parents = [row for row, _ in children]
        rows = parents
        most = (1 - LEAST_DROPPED) * len(self._ends)
        if len(set(parents)) < len(parents) or len(parents) <= most:
            rows = self._move(parents)
        tokens, slots = [0] * len(self._ends), [0] * len(self._ends)
        for row, (_, token) in zip(rows, children, strict=True):
            tokens[row] = token
            slots[row] = self._ends[row] = self._tree.after(self._ends[row], token)
        self._columns.append(slots)
        self._tokens_R = self._tensor(tokens)
        return rows

    def inputs(self) -> dict[str, Any]:
        """The arguments of the forward pass over the newest tokens, one a row."""
        length = self._layers[0].length
        valid_RL = torch.arange(length + 1, device=self._device) >= self._padding_R[:, None]
        return {
            "input_ids": self._tokens_R[:, None],
            "position_ids": (length - self._padding_R)[:, None],
            "attention_mask": valid_RL[:, None, None],
            "past_key_values": Cache(layers=self._layers),
        }

    def keep(self) -> None:
        """Copy to the tree what the steps computed since the last copy."""
        if self._columns:
            slots_RC = self._tensor(self._columns).T
            self._tree.reserve(slots_RC.flatten())
            for layer in self._layers:
                layer.keep(len(self._columns))
            self._columns.clear()

    def _move(self, parents: Sequence[int]) -> list[int]:
        """Make one row of each of these rows, which may be repeated, and drop the others. The rows
        are in front; most stay where they are, which spares copies. Returns their places."""
        self.keep()
        num = len(parents)
        staying = {row for row in parents if row < num}
        free = iter([row for row in range(num) if row not in staying])
        places = []
        for row in parents:
            places.append(row if row in staying else next(free))
            staying.discard(row)
        source = dict(zip(places, parents, strict=True))
        moved = [(source[place], place) for place in range(num) if source[place] != place]
        from_M, to_M = self._tensor(moved).view(-1, 2).T
        for layer in self._layers:
            layer.move(num, from_M, to_M)
        self._padding_R = self._padding_R[self._tensor([source[place] for place in range(num)])]
        self._ends = [self._ends[source[place]] for place in range(num)]
        return places

    def _tensor(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


class RowLayer(CacheLayerMixin):
    """One layer's keys and values of the rows [R, L, G, D]; each step fills the next column."""

    is_sliding = False

    def __init__(self, slots: SlotLayer, slots_RL: Tensor, length: int, most: int) -> None:
        """Begins with copies of slots in the first `length` columns; at most `most` rows."""
        super().__init__()
        self._slots, self.length, self.is_initialized = slots, length, True
        self._num_rows, num_columns = slots_RL.shape
        self.keys, self.values = (
            x.new_empty(most, num_columns, *x.shape[1:]) for x in (slots.keys, slots.values)
        )
        for x, of_slots in ((self.keys, slots.keys), (self.values, slots.values)):
            out = x[: self._num_rows].flatten(0, 1)
            torch.index_select(of_slots, 0, slots_RL.flatten(), out=out)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Fill the next column with [R, G, 1, D]; returns all columns so far [R, G, L, D]."""
        self.keys[: self._num_rows, self.length] = key_states[:, :, 0]
        self.values[: self._num_rows, self.length] = value_states[:, :, 0]
        self.length += 1
        keys, values = (x[: self._num_rows, : self.length] for x in (self.keys, self.values))
        return keys.transpose(1, 2), values.transpose(1, 2)

    def move(self, num_rows: int, from_M: Tensor, to_M: Tensor) -> None:
        """Copy rows, all of them read before any is written."""
        for x in (self.keys, self.values):
            x[to_M, : self.length] = x[from_M, : self.length]
        self._num_rows = num_rows

    def keep(self, num_columns: int) -> None:
        """Copy the newest columns to the slots that the tree reserved for them."""
        newest = slice(self.length - num_columns, self.length)
        keys, values = (x[: self._num_rows, newest] for x in (self.keys, self.values))
        self._slots.write(keys.flatten(0, 1), values.flatten(0, 1))

    def get_seq_length(self) -> int:
        return self.length

    def get_max_cache_shape(self) -> int:
        return self.keys.shape[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0
