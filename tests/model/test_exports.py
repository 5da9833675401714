"""An exported folder names what ends a text and has no sampling defaults; whatever a save would
refuse is refused before the first step."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast

from selfplay.checkpoint import export_atomically, export_final
from selfplay.config import Config, LoraConfig, load_config
from selfplay.distributed import init_world
from selfplay.errors import SettingsError
from selfplay.learner.learner import Learner
from selfplay.model.lora import Adapters, add_adapters
from selfplay.model.policy import end_ids, export, load_model
from selfplay.preflight.model import check_model
from selfplay.preflight.run import read_rendering
from selfplay.setup import make_tokenizer
from selfplay.weight_sync.start import merged_folder
from tests.helpers.chat_families import tokenizer_of
from tests.helpers.small_updates import learner_of
from tests.helpers.tiny_run import CPU, tiny_model, write_tiny

# Contents of generation_config.json that transformers loads; it refuses to save the first three.
LOADED: dict[str, dict[str, Any]] = {
    "sampling flags without do_sample": {"temperature": 0.9, "top_p": 0.6},
    "a temperature that is a text": {"temperature": "hot"},
    "beams without beams": {"length_penalty": 2.0, "early_stopping": True},
    "Qwen's": {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05},
    "greedy": {"do_sample": False, "max_new_tokens": 5},
    "a minimum and marks": {"min_new_tokens": 9, "suppress_tokens": [5], "watermarking_config": {}},
}
IDS = {"bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"}
LORA = LoraConfig(rank=2, alpha=4, targets=("q_proj",))


def _folder(folder: Path, settings: dict[str, Any]) -> Path:
    """A tiny model and its tokenizer; two ids end a text."""
    tokenizer = tokenizer_of("qwen2.5")
    tokenizer.save_pretrained(folder)
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(folder)
    given = {"eos_token_id": [2, 0], **settings}
    (folder / "generation_config.json").write_text(json.dumps(given))
    return folder


def _config(base: Path, folder: Path) -> Config:
    words = [f"model.path={base}", "model.scratch=", "warm_start.num_games=0"]
    return load_config(write_tiny(folder), words)


def _learner(base: Path) -> Learner:
    model = load_model(str(base), device=CPU, dtype=torch.float32)
    add_adapters(model, LORA, seed=0)
    return replace(learner_of(model), adapters=Adapters(LORA, base))


def _plain(base: Path, out: Path) -> Path:
    export(load_model(str(base), device=CPU, dtype=torch.float32), None, out)
    return out


def _pool(base: Path, out: Path) -> Path:
    model = load_model(str(base), device=CPU, dtype=torch.float32)
    export_atomically(model, tokenizer_of("qwen2.5"), out, world=init_world(device="cpu"))
    return out


def _final(base: Path, out: Path) -> Path:
    export_final(out, {"": (_learner(base), tokenizer_of("qwen2.5"), ())}, step=1)
    return out / "final"


def _merged(base: Path, out: Path) -> Path:
    learner = _learner(base)
    export_final(out, {"": (learner, tokenizer_of("qwen2.5"), ())}, step=1)
    optim = _config(base, out).optim
    return merged_folder(out / "final_adapters", learner.world, optim)


EXPORTS: list[Callable[[Path, Path], Path]] = [_plain, _pool, _final, _merged]


@pytest.mark.parametrize("exported", EXPORTS)
@pytest.mark.parametrize("settings", LOADED.values(), ids=LOADED)
def test_an_export_keeps_the_ends_and_no_sampling_default(
    tmp_path: Path, settings: dict[str, Any], exported: Callable[[Path, Path], Path]
) -> None:
    base = _folder(tmp_path / "base", settings)
    folder = exported(base, tmp_path / "run")
    written = json.loads((folder / "generation_config.json").read_text())
    assert set(written) <= IDS and written["eos_token_id"] == [2, 0]
    assert end_ids(folder) == end_ids(base) == (2, 0)
    neutral = GenerationConfig.from_pretrained(folder)
    assert neutral.temperature is neutral.top_p is neutral.top_k is neutral.do_sample is None


def test_what_only_a_save_refuses_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(_folder(tmp_path / "base", LOADED["Qwen's"]), tmp_path / "run")
    world = init_world(device="cpu")
    rendering = read_rendering(config.model, config.game, seed=0)
    tokenizer = make_tokenizer(config, tmp_path / "run", world)
    check_model(config, tokenizer, rendering, world)

    def fail(*args: object, **kwargs: object) -> None:
        raise ValueError("this tokenizer\ncannot be saved")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", fail)
    with pytest.raises(SettingsError, match=r"saved, got .*ValueError: this tokenizer cannot"):
        check_model(config, tokenizer, rendering, world)
