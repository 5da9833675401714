"""Released weights take real steps: SmolLM2-135M-Instruct, its own tokenizer and template. So do
random weights with a released template, in seconds."""

import json
from pathlib import Path

import pytest

import train
from dialop.cli import main as dialop
from tests.helpers.chat_families import tokenizer_of
from tests.helpers.family_models import random_folder
from tests.helpers.real_models import check_two_steps, smollm2, two_steps

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.nightly
def test_smollm2_takes_two_steps_on_the_transformers_engine(tmp_path: Path) -> None:
    assert train.main(two_steps(tmp_path / "run")) == 0
    check_two_steps(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["own_game", pytest.param("own_game_lora", marks=pytest.mark.nightly)]
)
def test_an_instruct_model_learns_a_game_of_ones_own(name: str, tmp_path: Path) -> None:
    """The commands of docs/your_model.md: a new game, and the shipped settings with the words that
    make them small enough for a CPU. Adapters on the released model, all of a random one's weights
    without."""
    game, run = tmp_path / f"{name}_test.py", tmp_path / "run"
    if name == "own_game":
        tokenizer, model = tokenizer_of("qwen2.5"), tmp_path / "model"
        random_folder("llama", model, vocab_size=len(tokenizer), max_position_embeddings=4096)
        tokenizer.save_pretrained(model)
    else:
        model = smollm2()
    assert dialop(["new", str(game)]) == 0
    words = [
        *("--config", str(ROOT / "configs" / f"{name}.yaml"), f"out={run}", f"game.name={game}"),
        *(f"model.path={model}", "model.dtype=float32", "optim.master_dtype=float32"),
        *("device=cpu", "engine={kind: hf, sessions: false, burst_share: 0}", "steps=1"),
        *("warm_start.num_games=2", "warm_start.batch_size=2", "warm_start.warmup_steps=0"),
        *("methods.auxiliary_imitation.weight=1", "methods.auxiliary_imitation.games=1"),
        "rollout={instances: 1, group_size: 2, max_turns: 1, max_new_tokens: 8}",
        *("eval.talk_games=0", "eval.final_games=1", "log_games_every=1", "optim.warmup_steps=0"),
        "observers=[console]",
    ]
    assert train.main(words) == 0
    (line,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert line["num_generated_tokens"] > 0 and line["grad_norm"] > 0
    played = json.loads((run / "games.jsonl").read_text().splitlines()[0])
    assert "Each of you sees a number." in played["seats"][0]["system"]
    assert (run / "final" / "model.safetensors").is_file()
