"""A folder with two sets of weights, or with a head that readers would take differently, is refused
by every reader, with the names of both."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel

from selfplay.config import GameConfig, ModelConfig
from selfplay.errors import SettingsError
from selfplay.model.hub import check_weights, weights_digest
from selfplay.model.policy import empty_model, export, load_model
from selfplay.model.stored import Stored, check_tensors
from selfplay.partners.checkpoints import find_source
from selfplay.preflight.run import read_rendering
from selfplay.preflight.small_copy import in_shards
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


def _changed(folder: Path, change: dict[str, torch.Tensor | None], **settings: object) -> Path:
    """A tiny model with these tensors added, replaced or (None) left out, and these settings."""
    _export(folder)
    tensors = {**load_file(folder / SINGLE), **change}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / SINGLE, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHAPE = tiny_model().get_input_embeddings().weight.shape
READERS: list[Callable[[Path], object]] = [
    lambda folder: load_model(str(folder), device=CPU, dtype=torch.float32),
    in_shards,
    check_tensors,  # before SGLang reads a folder
    lambda folder: read_rendering(ModelConfig(path=str(folder)), GameConfig(), seed=0),  # a check
]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("change", "tied", "words"),
    [
        ({HEAD: torch.ones(SHAPE)}, True, ("one head", "tie_word_embeddings: true", HEAD)),
        ({}, False, (HEAD,)),
        ({EMBEDDING: None}, True, (".weight",)),
        ({EMBEDDING: torch.ones(SHAPE).to(torch.int8)}, True, (EMBEDDING, "BF16, got I8")),
        ({HEAD: torch.ones(SHAPE).to(torch.float8_e4m3fn)}, False, (HEAD, "got F8_E4M3")),
    ],
)
def test_no_reader_makes_a_model_of_its_own_from_a_folder(
    tmp_path: Path,
    read: Callable[[Path], object],
    change: dict[str, torch.Tensor | None],
    tied: bool,
    words: tuple[str, ...],
) -> None:
    """A tied head beside another, no head at all, weights that are no floats: one line."""
    folder = _changed(tmp_path, change, tie_word_embeddings=tied)
    with pytest.raises(SettingsError) as refused:
        read(folder)
    assert all(word in str(refused.value) for word in words) and "\n" not in str(refused.value)


@pytest.mark.parametrize("named", [EMBEDDING, HEAD])
def test_a_tied_head_may_be_stored_under_either_name_or_both(tmp_path: Path, named: str) -> None:
    """Each reader makes the same model of it, with one head."""
    weight = torch.randn(SHAPE)
    whole = {EMBEDDING: weight, HEAD: weight.clone()}
    for name, change in {"one": {EMBEDDING: None, named: weight}, "both": whole}.items():
        folder = _changed(tmp_path / name, change)
        check_tensors(folder)
        for read in (READERS[0], in_shards):
            model = read(folder)
            assert isinstance(model, PreTrainedModel)
            head = model.get_output_embeddings().weight
            assert head is model.get_input_embeddings().weight and torch.equal(head, weight)


def test_every_reader_names_tensors_that_it_does_not_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = _changed(tmp_path, {"model.layers.9.mlp.up_proj.weight": torch.ones(2, 2)})
    model = empty_model(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    assert Stored(folder, model).unread == {"model.layers.9.mlp.up_proj.weight"}
    for read in (READERS[0], check_tensors):
        read(folder)
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith("warning: ") and "such as model.layers.9." in line
