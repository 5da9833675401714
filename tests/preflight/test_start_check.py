"""Refusals before training: settings the model cannot meet, engine and trainer that differ."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer

from selfplay.chat.rendering import make_rendering
from selfplay.chat.tokenizer import train_tokenizer
from selfplay.config import Config, load_config
from selfplay.distributed import init_world
from selfplay.engines.hf import HFEngine
from selfplay.errors import SettingsError
from selfplay.learner.learner import Learner, make_learner
from selfplay.model.policy import load_model
from selfplay.preflight.model import StartCheck, check_model, reachable_vocab_size
from tests.helpers.family_models import random_folder
from tests.helpers.tiny_run import run_tiny, write_tiny

TOKENS = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mistral with a window of 5, a tokenizer of 300 tokens, 400 positions."""
    made = tmp_path_factory.mktemp("mistral")
    random_folder("mistral", made, vocab_size=TOKENS, max_position_embeddings=400)
    train_tokenizer(["a b c", "Entry 12: 3"] * 9, vocab_size=TOKENS).save_pretrained(made)
    return made


def config_of(folder: Path, *overrides: str) -> Config:
    words = [f"model.path={folder}", "model.scratch=", "rollout.max_game_tokens=300"]
    return load_config(write_tiny(folder / "run"), [*words, *overrides])


def parts(folder: Path) -> tuple[Learner, StartCheck]:
    config = config_of(folder)
    world, tokenizer = init_world(device="cpu"), AutoTokenizer.from_pretrained(folder)
    learner = make_learner(config, folder, world)
    start = StartCheck(
        tokenizer,
        AutoConfig.from_pretrained(folder),
        world,
        dtype=learner.compute_dtype,
        max_game_tokens=config.rollout.max_game_tokens,
        max_mismatch=config.engine.max_mismatch,
    )
    return learner, start


def test_trainer_engine_and_transformers_agree(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learner, start = parts(folder)
    assert start.compare(learner, HFEngine(learner.model), folder) == 1e-4
    message = capsys.readouterr().out
    assert "start check: trainer" in message and "engine" in message
    assert "288 tokens" in message  # 256 of the text and 32 that the engine samples


def test_weights_that_are_not_finite_are_named(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        SettingsError, match=r"weights must be finite, got .* in model\.norm\.weight"
    ):
        parts(tmp_path / "model")


def test_an_engine_with_other_weights_is_named(folder: Path) -> None:
    """One weight in a hundred is off by 5 %."""
    learner, start = parts(folder)
    other = load_model(str(folder), device="cpu", dtype=torch.float32).eval()
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight.flatten()[::100] *= 1.05
    start.sample(HFEngine(other))
    with pytest.raises(SettingsError, match=r"engine\.kind .*mistral"):
        start.compare(learner, None, folder)


def test_a_trainer_with_other_weights_is_named(folder: Path) -> None:
    learner, start = parts(folder)
    start.sample(HFEngine(load_model(str(folder), device="cpu", dtype=torch.float32).eval()))
    with torch.no_grad():
        learner.model.model.layers[1].mlp.down_proj.weight *= 1.02
    with pytest.raises(SettingsError, match="weights or their sharding"):
        start.compare(learner, None, folder)


def test_packed_attention_without_its_window_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import selfplay.model.attention as attention

    learner, start = parts(folder)
    start.sample(HFEngine(learner.model))
    padded = attention._padded
    monkeypatch.setattr(
        attention, "_padded", lambda *heads: padded(*heads[:3], replace(heads[3], window=None))
    )
    with pytest.raises(SettingsError, match="packed attention or logits"):
        start.compare(learner, None, folder)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["model.lora.targets=[q_proj, c_attn]"], "model.lora.targets"),
        (["rollout.max_game_tokens=401"], "rollout.max_game_tokens"),
        (["rollout.max_game_tokens=40"], "rollout.max_game_tokens"),
    ],
)
def test_what_the_model_lacks_is_refused_before_anything_costly(
    folder: Path, overrides: list[str], key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line with status 2, before the warm start has begun."""
    run = tmp_path / "run"
    words = [f"model.path={folder}", "model.scratch=", "rollout.max_game_tokens=300"]
    assert run_tiny(run, *words, *overrides) == 2
    message = capsys.readouterr().err
    assert key in message and message.count("\n") == 1
    assert not (run / "warm_start.jsonl").exists() and not (run / "warm_start").exists()


def test_more_tokens_than_embeddings_are_refused(folder: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    words = reachable_vocab_size(tokenizer)
    assert words == len(tokenizer)
    random_folder("llama", small, vocab_size=words - 1, max_position_embeddings=400)
    with pytest.raises(SettingsError, match=rf"model\.path .*{words} tokens, got {words - 1}"):
        check_model(
            config_of(small), tokenizer, make_rendering(tokenizer), init_world(device="cpu")
        )
    # A special token that no text can hold, such as Gemma-3's for images, does not count.
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    assert reachable_vocab_size(tokenizer) == words < len(tokenizer)


def test_a_refused_family_ends_in_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sinks = tmp_path / "sinks"
    random_folder("gpt_oss", sinks, vocab_size=TOKENS, max_position_embeddings=400)
    AutoTokenizer.from_pretrained(folder).save_pretrained(sinks)
    capsys.readouterr()
    words = [f"model.path={sinks}", "model.scratch=", "rollout.max_game_tokens=300"]
    assert run_tiny(tmp_path / "run", *words) == 2
    message = capsys.readouterr().err
    assert "gpt_oss" in message and "sinks" in message and message.count("\n") == 1
