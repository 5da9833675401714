"""The tensors of a Hugging Face folder, read in boxes under the names that a model gives them.

Released folders of mixtures of experts have a tensor for each expert; transformers' model has one
tensor for all experts of a layer. transformers' own table maps the names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from selfplay.errors import SettingsError
from selfplay.model.hub import tensor_files

Box = tuple[slice, ...]


def check_shape(folder: Path, name: str, stored: Sequence[int], told: Sequence[int]) -> None:
    """Raise SettingsError unless a stored tensor has the shape of the model's."""
    if list(stored) != list(told):
        raise SettingsError(
            f"{folder} must hold tensors of the shapes that its config.json tells, {list(told)} "
            f"for {name}, got {list(stored)}"
        )


class Stored:
    """A folder's tensors for one model, which may be on the meta device."""

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        """Read names and shapes only. Raises ValueError for a folder without safetensors,
        SettingsError for a tensor whose shape is not the model's."""
        self._folder, self._files = folder, tensor_files(folder)
        table = get_model_conversion_mapping(model)
        renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in table if isinstance(entry, WeightConverter)]
        by_pattern = {p: converter for converter in converters for p in converter.source_patterns}
        known = model.state_dict()
        self._single: dict[str, str] = {}
        self._parts: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        self._converters: dict[str, WeightConverter] = {}
        for key in sorted(self._files, key=dot_natural_key):
            prefix = model.base_model_prefix
            name, pattern = rename_source_key(key, renamings, converters, prefix, known)
            if name not in known and key in known:
                name, pattern = key, None
            if pattern is None:
                self._single[name] = key
            else:
                self._parts[name][pattern].append(key)
                self._converters[name] = by_pattern[pattern]

        for name, key in self._single.items():
            if name in known:
                with safe_open(self._files[key], framework="pt") as file:
                    shape = file.get_slice(key).get_shape()
                check_shape(folder, name, shape, known[name].shape)

    def read(self, name: str, box: Box) -> torch.Tensor:
        """The part `box` of the model's tensor `name`.

        For a tensor merged from experts it reads only the experts in the box, each in full. Raises
        SettingsError for a tensor that is not in the folder.
        """
        if name in self._single:
            return self._slice(self._single[name], box)
        if name not in self._parts:
            raise SettingsError(
                f"{self._folder} must have a tensor named {name}, got {len(self._files)} others"
            )
        converter, parts = self._converters[name], dict(self._parts[name])
        first, *rest = converter.operations
        if (
            isinstance(first, MergeModulelist)
            and first.dim == 0
            and all(isinstance(op, Concatenate) and op.dim > 0 for op in rest)
        ):
            parts = {pattern: keys[box[0]] for pattern, keys in parts.items()}
            box = (slice(None), *box[1:])
        if not all(parts.values()):  # this rank holds no expert
            return torch.empty(0)
        tensors: dict[str, Any] = {
            pattern: [self._slice(key, ()) for key in keys] for pattern, keys in parts.items()
        }
        for operation in deepcopy(converter.operations):
            tensors = operation.convert(
                tensors,
                source_patterns=converter.source_patterns,
                target_patterns=converter.target_patterns,
                full_layer_name=name,
            )
        (merged,) = tensors.values()
        part: torch.Tensor = (merged[0] if isinstance(merged, list) else merged)[box]
        return part

    def _slice(self, key: str, box: Box) -> torch.Tensor:
        with safe_open(self._files[key], framework="pt") as file:
            part: torch.Tensor = file.get_slice(key)[box] if box else file.get_tensor(key)
            return part
