"""Reads boxes of the tensors of a Hugging Face folder, under the model's own names.

Released mixtures of experts have one tensor per expert; transformers' model has one tensor for all
experts of a layer. transformers' own table maps the names.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Collection, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
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
FLOATS = ("F64", "F32", "F16", "BF16")  # supported dtypes of stored weights


def check_shape(folder: Path, name: str, stored: Sequence[int], expected: Sequence[int]) -> None:
    """Raise SettingsError unless a stored tensor has the shape that the model expects."""
    if list(stored) != list(expected):
        raise SettingsError(
            f"{folder} must hold tensors with the shapes given by its config.json, "
            f"{list(expected)} for {name}, got {list(stored)}"
        )


def check_complete(
    folder: Path | str, missing: Collection[str], unread: Collection[str], *, warns: bool = True
) -> None:
    """Raise SettingsError if the model has tensors that the folder lacks; warn about tensors that
    only the folder has."""
    if missing:
        raise SettingsError(
            f"{folder} must hold every tensor of the model described by its config.json; "
            f"{len(missing)} are missing, such as {min(missing)}"
        )
    if unread and warns:
        print(
            f"warning: {folder} holds {len(unread)} tensors that are not in the model described by "
            f"its config.json, such as {min(unread)}; they are ignored",
            file=sys.stderr,
        )


def check_tensors(folder: Path, *, warns: bool = True) -> None:
    """Check a folder that another program reads, as `check_complete` and `Stored` do."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    stored = Stored(folder, model)
    check_complete(folder, stored.missing, stored.unread, warns=warns)


class Stored:
    """A folder's tensors for one model, which may be on the meta device. `missing` are names that
    only the model has, `unread` names that only the folder has."""

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        """Read names, shapes and dtypes, and the values of a tied head if it is stored twice.
        Raises ValueError for a folder without safetensors, SettingsError for a tensor of the wrong
        shape, for a non-float where the model has a float, and for a tied head that differs."""
        self._folder, self._files = folder, dict[str, Path]()
        stored: dict[str, tuple[list[int], str]] = {}
        listed = tensor_files(folder)
        for path in dict.fromkeys(listed.values()):
            with safe_open(path, framework="pt") as file:
                for key in file.keys() & listed.keys():
                    self._files[key], part = path, file.get_slice(key)
                    stored[key] = part.get_shape(), part.get_dtype()
        table = get_model_conversion_mapping(model)
        renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in table if isinstance(entry, WeightConverter)]
        by_pattern = {p: converter for converter in converters for p in converter.source_patterns}
        known = model.state_dict()
        self._parts: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        self._converters: dict[str, WeightConverter] = {}  # for names made of several tensors
        for key in sorted(self._files, key=dot_natural_key):
            prefix = model.base_model_prefix
            name, pattern = rename_source_key(key, renamings, converters, prefix, known)
            if name not in known and key in known:
                name, pattern = key, None
            self._parts[name][pattern or ""].append(key)
            if pattern is not None:
                self._converters[name] = by_pattern[pattern]
            if name not in known:
                continue
            shape, dtype = stored[key]
            if pattern is None:
                check_shape(folder, name, shape, known[name].shape)
            if known[name].is_floating_point() and dtype not in FLOATS:
                raise SettingsError(
                    f"{folder} must hold {key} as one of {', '.join(FLOATS)}, got {dtype}; save "
                    "the model unquantized"
                )
        tied = model.get_expanded_tied_weights_keys(all_submodels=True)
        for head, embedding in tied.items():
            if {head, embedding} <= self._parts.keys():
                if not torch.equal(self.read(head, ()), self.read(embedding, ())):
                    raise SettingsError(
                        f"{folder} must have one head, got tie_word_embeddings: true in its "
                        f"config.json and a {head} that differs from {embedding}; set the first to "
                        "false, or delete the second"
                    )
            elif head in self._parts:
                self._parts[embedding] = self._parts[head]
        self.missing = known.keys() - self._parts.keys() - tied.keys()
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        self.unread = {
            name
            for name in self._parts.keys() - known.keys()
            if not any(re.search(pattern, name) for pattern in ignored)
        }

    def read(self, name: str, box: Box) -> torch.Tensor:
        """The part `box` of the model's tensor `name`.

        Of a tensor merged from experts it reads only the experts in the box, each in full. Raises
        SettingsError for a tensor that is not in the folder.
        """
        if name not in self._parts:
            raise SettingsError(
                f"{self._folder} must have a tensor named {name}, got {len(self._files)} others"
            )
        parts = dict(self._parts[name])
        if name not in self._converters:
            return self._slice(parts[""][-1], box)
        converter = self._converters[name]
        first, *rest = converter.operations
        if (
            isinstance(first, MergeModulelist)
            and first.dim == 0
            and all(isinstance(op, Concatenate) and op.dim > 0 for op in rest)
        ):
            parts = {pattern: keys[box[0]] for pattern, keys in parts.items()}
            box = (slice(None), *box[1:])
        if not all(parts.values()):  # this rank has no expert
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
