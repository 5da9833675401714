"""A folder with two sets of weights is refused by every reader, with the names of both."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict

from selfplay.errors import SettingsError
from selfplay.model.hub import check_weights, weights_digest
from selfplay.model.policy import export, load_model
from selfplay.model.stored import Stored
from selfplay.partners.checkpoints import find_source
from tests.helpers.tiny_run import CPU, tiny_model

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PART = "model-00001-of-00002.safetensors"


def _export(folder: Path) -> None:
    export(tiny_model(), None, folder)


def _shards(folder: Path, *, seed: int = 1) -> None:
    """The weights of another policy in parts."""
    save_torch_state_dict(
        tiny_model(seed=seed).state_dict(), folder, max_shard_size="60KB", metadata={"format": "pt"}
    )


def _beside(folder: Path) -> None:
    _shards(folder)
    _export(folder / "other")
    shutil.copy(folder / "other" / SINGLE, folder)
    shutil.rmtree(folder / "other")


def _without_index(folder: Path) -> None:
    _beside(folder)
    (folder / INDEX).unlink()


def _another_name(folder: Path) -> None:
    _export(folder)
    shutil.copy(folder / SINGLE, folder / "model.fp16.safetensors")


def _adapters_beside(folder: Path) -> None:
    _export(folder)
    named = {"base_model_name_or_path": str(folder), "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(named))


TWO: dict[str, tuple[Callable[[Path], None], tuple[str, str]]] = {
    "one file and parts with an index": (_beside, (INDEX, SINGLE)),
    "one file and parts without an index": (_without_index, (PART.split("-of")[0], "-of-")),
    "one file and one of another name": (_another_name, ("model.fp16.safetensors", SINGLE)),
    "a full model and adapters": (_adapters_beside, ("adapter_config.json", SINGLE)),
}


@pytest.mark.parametrize(("make", "names"), TWO.values(), ids=TWO)
def test_two_sets_of_weights_are_refused_by_name(
    tmp_path: Path, make: Callable[[Path], None], names: tuple[str, str]
) -> None:
    folder = tmp_path / "model"
    _export(folder)
    make(folder)
    readers: list[Callable[[], object]] = [
        partial(check_weights, folder, what="model.path"),
        partial(load_model, str(folder), device=CPU, dtype=torch.float32),
        partial(Stored, folder, tiny_model()),
        partial(find_source, folder),
        partial(weights_digest, folder),
    ]
    for read in readers:
        with pytest.raises(SettingsError, match="must hold one set of weights, got ") as refused:
            read()
        assert all(name in str(refused.value) for name in names)


def test_one_set_is_read_in_either_form(tmp_path: Path) -> None:
    """In parts, as one file, and as one file that an index lists."""
    for name in ("parts", "single", "listed"):
        _export(tmp_path / name)
    (tmp_path / "parts" / SINGLE).unlink()
    _shards(tmp_path / "parts", seed=0)
    weights = dict.fromkeys(tiny_model().state_dict(), SINGLE)
    (tmp_path / "listed" / INDEX).write_text(json.dumps({"weight_map": weights}))
    ids = torch.tensor([[1, 2, 3]])
    wanted = tiny_model()(ids).logits
    for name in ("parts", "single", "listed"):
        check_weights(tmp_path / name, what="model.path")
        model = load_model(str(tmp_path / name), device=CPU, dtype=torch.float32)
        assert torch.equal(model(ids).logits, wanted)
