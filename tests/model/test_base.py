"""Adapters are put on the base weights that they were trained on, wherever both have moved, or on
none: the base is known by its digest and not by its path."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from selfplay.atomic import MANIFEST
from selfplay.checkpoint import begin_checkpoint, export_final, resume
from selfplay.config import LoraConfig, OptimConfig, load_config
from selfplay.config.player_spec import parse_shares
from selfplay.distributed import init_world
from selfplay.errors import SettingsError
from selfplay.learner.learner import Learner, make_learner
from selfplay.learner.optimizer import make_optimizer
from selfplay.model.hub import BASE, check_base, described_in
from selfplay.model.lora import Adapters, add_adapters
from selfplay.model.policy import end_ids, export, load_model
from selfplay.partners.partners import Partners
from selfplay.preflight.run import read_rendering
from selfplay.weight_sync.start import merged_folder
from tests.helpers.chat_families import tokenizer_of
from tests.helpers.small_updates import config_of, learner_of
from tests.helpers.tiny_run import CPU, tiny_model, write_tiny

LORA = LoraConfig(rank=2, alpha=4, targets=("q_proj", "up_proj"))
TOKENIZER = tokenizer_of("qwen2.5")
IDS = torch.tensor([[1, 2, 3, 4, 5]])
PLACES = ("checkpoints/step_000001/hf", "final_adapters")


def _learner(base: Path, *, seed: int) -> Learner:
    model = load_model(str(base), device=CPU, dtype=torch.float32)
    add_adapters(model, LORA, seed=seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.ones_like(parameter) * 0.1 * (seed + 1))
    optimizer = make_optimizer(model, config_of().optim)
    return replace(learner_of(model), optimizer=optimizer, adapters=Adapters(LORA, base))


def _base(folder: Path, *, seed: int) -> Path:
    export(tiny_model(seed=seed, vocab_size=len(TOKENIZER)), TOKENIZER, folder)
    return folder


def _run(run: Path, *, seed: int, base: Path | None = None) -> Tensor:
    """A run's adapters on `warm_start/`, or on a base elsewhere; the logits of its policy."""
    learner = _learner(base or _base(run / "warm_start", seed=seed), seed=seed)
    begin_checkpoint(run, {"": (learner, TOKENIZER)}, step=1).finish({}, keep=1)
    export_final(run, {"": (learner, TOKENIZER, ())}, step=1)
    return _logits(run / "final")


def _logits(folder: Path) -> Tensor:
    with torch.no_grad():
        logits: Tensor = load_model(str(folder), device=CPU, dtype=torch.float32)(IDS).logits
    return logits


def _near(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() < 1e-4)


@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_moved_keeps_its_own_base(tmp_path: Path, place: str) -> None:
    """Another run, with other weights, has taken its old path."""
    wanted = _run(tmp_path / "a", seed=0)
    (tmp_path / "a").rename(tmp_path / "b")
    other = _run(tmp_path / "a", seed=1)
    assert not _near(wanted, other)
    for run, logits in (("b", wanted), ("a", other)):
        adapters = tmp_path / run / place
        assert described_in(adapters) == tmp_path / run / "warm_start"
        assert _near(_logits(adapters), logits)
        merged = merged_folder(adapters, init_world(device="cpu"), OptimConfig())
        assert _near(_logits(merged), logits)


def test_a_partner_that_moved_plays_on_its_own_base(tmp_path: Path) -> None:
    wanted = _run(tmp_path / "a", seed=0)
    (tmp_path / "a").rename(tmp_path / "b")
    _run(tmp_path / "a", seed=1)
    spec = f"checkpoint:{tmp_path}/b/{PLACES[0]}"
    config = load_config(
        write_tiny(tmp_path / "run"),
        [f"rollout.partners=[{spec}]", f"model.path={tmp_path}/a/final", "model.scratch=null"],
    )
    partners = Partners(
        [spec for spec, _ in parse_shares(config.rollout.partners)],
        config,
        rendering=read_rendering(config.model, config.game, seed=0),
        world=init_world(device="cpu"),
    )
    model = partners._frozen.engines[spec].engine.model  # type: ignore[attr-defined]
    assert _near(model(IDS).logits, wanted)


def _gone(base: Path) -> None:
    shutil.rmtree(base)


def _one_weight(base: Path) -> None:
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"][3] += 1e-3
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})


def _another_config(base: Path) -> None:
    config = json.loads((base / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 500.0
    (base / "config.json").write_text(json.dumps(config))


def _others(base: Path) -> None:
    shutil.rmtree(base)
    _base(base, seed=5)


CHANGES: list[Callable[[Path], None]] = [_gone, _one_weight, _another_config, _others]


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_adapters_without_their_base_are_refused(
    tmp_path: Path, change: Callable[[Path], None], elsewhere: bool
) -> None:
    base = _base(tmp_path / "models" / "base", seed=0) if elsewhere else None
    _run(tmp_path / "run", seed=0, base=base)
    change(base or tmp_path / "run" / "warm_start")
    for place in PLACES:
        adapters = tmp_path / "run" / place
        config = load_config(None, [f"model.path={adapters}"])
        reads: list[Callable[[], object]] = [
            partial(described_in, adapters),
            partial(end_ids, adapters),
            partial(load_model, str(adapters), device=CPU, dtype=torch.float32),
            partial(read_rendering, config.model, config.game, seed=0),
        ]
        for read in reads:
            with pytest.raises(SettingsError, match=r"the base weights .* sha256 \w{16}…, at "):
                read()
    assert end_ids(tmp_path / "run" / "final") == (), "the merged policy needs no base"


def test_adapters_of_another_program_are_no_model_to_train(tmp_path: Path) -> None:
    """Nor to read, if their base is not here: the message names it."""
    _run(tmp_path / "run", seed=0, base=_base(tmp_path / "models" / "base", seed=0))
    adapters = tmp_path / "run" / "final_adapters"
    (adapters / BASE).unlink()
    (adapters / MANIFEST).unlink()  # it holds digests of what is changed here
    told = json.loads((adapters / "adapter_config.json").read_text())
    told["base_model_name_or_path"] = str(tmp_path / "gone")
    (adapters / "adapter_config.json").write_text(json.dumps(told))
    config = load_config(None, [f"model.path={adapters}"])
    with pytest.raises(SettingsError, match="must be a full model to train, got adapters"):
        read_rendering(config.model, config.game, seed=0, adapters=False)
    with pytest.raises(SettingsError, match=f"or {tmp_path}/gone, the base of its adapters"):
        read_rendering(config.model, config.game, seed=0)


# A warning of peft's own class would be read by the process that deals tests out: it imports peft.
@pytest.mark.filterwarnings("ignore:Adapter 'default' has")
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"target_modules": ["q_proj", "embed_tokens"]}, "lora_embedding_A"),
        ({"target_modules": ["q_proj", "lm_head"]}, "got lm_head, whose weight is also"),
        ({"target_modules": ["q_proj"], "lora_bias": True}, "lora_B.default.bias"),
        ({"target_modules": ["q_proj"], "use_dora": True}, "lora_magnitude_vector"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["norm"]}, "modules_to_save"),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [1]}, "token_adapter"),
        ({"target_modules": "all-linear", "use_rslora": True}, None),
        ({"target_modules": ["q_proj"], "rank_pattern": {"q_proj": 3}}, None),
    ],
)
def test_adapters_of_another_program_merge_exactly_or_are_refused(
    tmp_path: Path, given: dict[str, Any], named: str | None
) -> None:
    """Before anything is exported, in one line that names the first tensor that cannot merge."""
    base = tmp_path / "base"
    export(tiny_model(), None, base)
    model = load_model(str(base), device=CPU, dtype=torch.float32)
    adapted = get_peft_model(model, PeftConfig(task_type="CAUSAL_LM", r=2, **given))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
        wanted = adapted(IDS).logits
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(tmp_path / "adapters")
    if named is not None:
        with pytest.raises(SettingsError, match=f"pairs of matrices for .*{named}") as refused:
            load_model(str(tmp_path / "adapters"), device=CPU, dtype=torch.float32)
        assert "\n" not in str(refused.value)
        return
    loaded = load_model(str(tmp_path / "adapters"), device=CPU, dtype=torch.float32)
    export(loaded, None, tmp_path / "merged")
    assert _near(_logits(tmp_path / "merged"), wanted)


def test_a_base_elsewhere_is_found_from_a_copy_of_the_adapters(tmp_path: Path) -> None:
    base = _base(tmp_path / "models" / "base", seed=0)
    wanted = _run(tmp_path / "run", seed=0, base=base)
    shutil.copytree(tmp_path / "run" / "final_adapters", tmp_path / "far" / "off" / "adapters")
    assert _near(_logits(tmp_path / "far" / "off" / "adapters"), wanted)
    (tmp_path / "far" / "off" / "adapters" / BASE).unlink()  # as another program writes adapters
    assert _near(_logits(tmp_path / "far" / "off" / "adapters"), wanted)


def test_a_checkpoint_names_the_base_that_was_loaded_not_a_later_one(tmp_path: Path) -> None:
    """The run whose `final/` is the base may go on while adapters are trained on it."""
    base, world = _base(tmp_path / "base", seed=0), init_world(device="cpu")
    words = [f"model.path={base}", "model.lora.rank=2", "rollout.max_game_tokens=1000"]
    learner = make_learner(load_config(None, words), base, world)
    _others(base)
    saved = begin_checkpoint(tmp_path / "run", {"": (learner, TOKENIZER)}, step=1)
    saved.finish({}, keep=1)
    with pytest.raises(SettingsError, match="base must hold the base weights of"):
        check_base(saved.folder / "hf", base)
    shutil.rmtree(base)
    check_base(saved.folder / "hf", _base(base, seed=0))


def test_a_run_goes_on_only_on_the_base_that_it_began_with(tmp_path: Path) -> None:
    base = _base(tmp_path / "base", seed=0)
    _run(tmp_path / "run", seed=0, base=base)
    assert resume(tmp_path / "run", {"": _learner(base, seed=3)})[0] == 1
    _others(base)
    with pytest.raises(SettingsError, match=r"base must hold the base weights of .*step_000001/hf"):
        resume(tmp_path / "run", {"": _learner(base, seed=3)})
