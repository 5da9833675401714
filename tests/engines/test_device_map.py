"""A model split by a device map plays as on one device (`engine.device_map`). Here the parts are in
memory and on disk; tests/gpu/test_device_map_gpu.py has two GPUs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import selfplay
from selfplay.api.run import join_world
from selfplay.checkpoint import export, export_adapters
from selfplay.config import LoraConfig
from selfplay.distributed import init_world
from selfplay.engines.base import Completion
from selfplay.engines.hf import HFEngine
from selfplay.errors import SettingsError
from selfplay.model.lora import Adapters, add_adapters
from selfplay.model.policy import load_model
from selfplay.weight_sync.start import load_whole
from tests.engines.test_engine_hf import BEHIND_RULES, SAMPLING
from tests.helpers.interrupted import replaced
from tests.helpers.small_updates import config_of
from tests.helpers.tiny_run import FORWARD, finished, tiny_model
from tests.helpers.tolerance import assert_near

ON_DISK = dict.fromkeys(
    ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.norm", "lm_head"), "cpu"
) | {"model.layers.1": "disk"}


def answers(model: PreTrainedModel) -> list[Completion]:
    """The answers of two turns; the second reads the first."""
    engine = HFEngine(model)
    with engine.rollout():
        first = engine.generate_batch(BEHIND_RULES, SAMPLING)
        after = [
            replace(request, prompt_ids=(*request.prompt_ids, *answer.ids, 5))
            for request, answer in zip(BEHIND_RULES, first, strict=True)
        ]
        return first + engine.generate_batch(after, SAMPLING)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The device map of each model that is loaded; "auto" puts one layer of two on disk."""
    maps: list[dict[str, Any]] = []

    def load(folder: str, *, device: Any, dtype: torch.dtype) -> PreTrainedModel:
        model = load_model(folder, device=ON_DISK if device == "auto" else device, dtype=dtype)
        maps.append(getattr(model, "hf_device_map", {}))
        return model

    monkeypatch.setattr("selfplay.weight_sync.start.load_model", load)
    monkeypatch.setattr("selfplay.engines.hf.load_model", load)
    return maps


def test_a_split_model_plays_as_a_whole_one(tmp_path: Path) -> None:
    export(tiny_model(), None, tmp_path)
    whole, split, auto = (
        load_model(str(tmp_path), device=device, dtype=torch.float32).requires_grad_(False)
        for device in ("cpu", ON_DISK, "auto")
    )
    assert {p.device.type for p in split.parameters()} == {"cpu", "meta"}  # meta: now on disk
    assert answers(split) == answers(auto) == answers(whole)


def test_adapters_are_merged_before_they_are_split(
    tmp_path: Path, loaded: list[dict[str, Any]]
) -> None:
    """transformers itself would lose those of the layer on disk."""
    base, adapters = tmp_path / "base", tmp_path / "adapters"
    world, lora, model = init_world(device="cpu"), LoraConfig(rank=2), tiny_model()
    export(model, None, base)
    add_adapters(model, lora, seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # drawn as zeros
            torch.nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(1))
    export_adapters(model, Adapters(lora, base), None, adapters, world=world)
    export(model, None, adapters / "merged", world=world)
    config = config_of("engine.device_map=auto")
    split = load_whole(adapters, config, world, dtype=torch.float32).requires_grad_(False)
    assert loaded == [ON_DISK]
    ids = torch.tensor([[1, 2, 3, 4]])
    assert_near(split(ids).logits, model(ids).logits, FORWARD)


def test_an_evaluation_and_its_partner_are_split(
    tmp_path: Path, loaded: list[dict[str, Any]]
) -> None:
    run, partner = selfplay.load_run(finished()), f"checkpoint:{finished()}"

    def evaluate(out: str, **more: Any) -> Any:
        rows = selfplay.evaluate(run, num=4, partner=partner, out=tmp_path / out, **more).rows
        return {name: row["scores"] for name, row in rows.items()}

    assert evaluate("split", **{"engine.device_map": "auto"}) == evaluate("whole")
    assert loaded == [ON_DISK, ON_DISK, {}, {}]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: selfplay.start("tiny", **{"engine.device_map": "auto"}),
            r"engine\.device_map must be null in training, got auto; parallel\.fsdp",
        ),
        (
            lambda: selfplay.evaluate(finished(), **{"engine.device_map": "balanced"}),
            r"engine\.device_map must be 'auto', got balanced",
        ),
        (
            lambda: selfplay.evaluate(
                finished(), **{"engine.device_map": "auto", "engine.kind": "sglang"}
            ),
            r"engine\.device_map must be null with engine\.kind sglang, got auto",
        ),
    ],
)
def test_where_no_model_can_be_split_one_line_says_so(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        call()


def test_several_processes_are_refused() -> None:
    two = replace(init_world(device="cpu"), world_size=2)
    said = r"device_map must be null with 2 processes, got auto"
    with replaced(join_world, lambda *_: two), pytest.raises(SettingsError, match=said):
        selfplay.evaluate(finished(), **{"engine.device_map": "auto"})
