"""SFT on one's own chats: a tiny model learns them by heart, alone or beside scripted games."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from selfplay.apps.report.page import run_charts
from selfplay.apps.report.run_files import read_run
from selfplay.chat.rendering import Rendering, make_rendering
from selfplay.config import Config, load_config
from selfplay.distributed import init_world
from selfplay.errors import SettingsError
from selfplay.learner.method import LossTerm
from selfplay.learner.update import optimizer_step
from selfplay.preflight.run import check_run
from selfplay.setup import make_tokenizer
from selfplay.warm_start.imitation import chat_samples, first_weights, scratch_tokenizer
from tests.helpers.interrupted import replaced
from tests.helpers.tiny_run import weights_of

SHAPE = "{width: 64, layers: 2, heads: 4, kv_heads: 4, mlp_width: 128, vocab_size: 400"
BASE = (
    f"model.scratch={SHAPE}, tokenizer_games: 20, max_positions: 256}}",
    "game={options: {size: 2, scale: false, brief: true}}",
    "rollout.max_game_tokens=256",
    "threads=1",
    "device=cpu",
)
WORDS = ("red", "blue", "green", "gold")


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Twenty chats; what is answered to a number follows from nothing but the chat itself."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"number {i}?"},
                {"role": "assistant", "content": f"{WORDS[i * i % 4]} {7 * i % 20}"},
                {"role": "user", "content": "and?"},
                {"role": "assistant", "content": WORDS[i // 5]},
            ]
        }
        for i in range(20)
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(chats: Path, *overrides: str) -> Config:
    return load_config(None, [*BASE, f"warm_start.chats={chats}", *overrides])


@pytest.fixture(scope="module")
def rendering() -> Rendering:
    return make_rendering(scratch_tokenizer(load_config(None, BASE)))


def imitated(run: Path, config: Config) -> Path:
    """The weights after the warm start of a run in this folder."""
    run.mkdir()
    world = init_world(device="cpu")
    tokenizer = make_tokenizer(config, run, world)
    return first_weights(config, run, tokenizer, make_rendering(tokenizer), world)


def share_by_heart(weights: Path, chats: Path) -> float:
    """The share of answers that transformers' greedy decoding writes word for word, each after the
    template's own prompt: after every right beginning the likeliest token is the right one."""
    model = AutoModelForCausalLM.from_pretrained(weights)
    tokenizer = AutoTokenizer.from_pretrained(weights)
    right = []
    for row in map(json.loads, chats.read_text().splitlines()):
        for number in (1, 3):
            prompt, whole = (
                tokenizer.apply_chat_template(
                    row["messages"][:end], add_generation_prompt=end == number, return_dict=False
                )
                for end in (number, number + 1)
            )
            likeliest = model(torch.tensor([whole])).logits[0, len(prompt) - 1 :].argmax(-1)
            answer = row["messages"][number]["content"] + "<|im_end|>"
            right.append(tokenizer.decode(likeliest).startswith(answer))
    return sum(right) / len(right)


HEART = "batch_size: 20, lr: 6.0e-3, warmup_steps: 10"


@pytest.mark.slow
def test_a_tiny_model_learns_twenty_chats_by_heart_and_its_adapters_alone_others(
    chats: Path, tmp_path: Path
) -> None:
    """The adapters are merged: only what they adapt has changed."""
    first = imitated(tmp_path / "full", settings(chats, f"warm_start={{{HEART}, epochs: 80}}"))
    assert share_by_heart(first, chats) == 1.0
    others = tmp_path / "others.jsonl"
    others.write_text(chats.read_text().replace("red", "new").replace("gold", "old"))
    lora = ("model.lora={rank: 16, alpha: 32}", f"warm_start={{{HEART}, epochs: 40, lora: true}}")
    model = ("model.scratch=null", f"model.path={first}")
    second = imitated(tmp_path / "lora", settings(others, *model, *lora))
    assert share_by_heart(first, others) == 0.5
    assert share_by_heart(second, others) == 1.0
    before, after = weights_of(first), weights_of(second)
    changed = {name for name in before if not before[name].equal(after[name])}
    assert changed == {name for name in before if "_proj.weight" in name}


def test_chats_come_once_a_pass_beside_the_games_that_are_not_first(
    chats: Path, tmp_path: Path
) -> None:
    """Two first games have 4 transcripts; two others and 20 chats have 24: 2 and 12 batches."""
    games = "num_games: 4, first_games: 2, first_teachers: [solo], keep: all"
    config = settings(chats, f"warm_start={{{games}, epochs: 2, batch_size: 4}}")
    steps: list[list[str]] = []

    def record(_: Any, learner: Any, terms: list[LossTerm], **__: Any) -> dict[str, float]:
        steps.append([sample.name for sample in terms[0].samples])
        named: Any = terms[0].objective
        assert named.keywords["chats"] == {f"{chats} line {i}" for i in range(1, 21)}
        return {"imitation_loss": 0.0}

    with replaced(optimizer_step, record):
        imitated(tmp_path / "run", config)
    from_file = [[name for name in step if name.startswith(str(chats))] for step in steps]
    assert len(steps) == 2 + 12 and not any(from_file[:2])
    for a_pass in (from_file[2:8], from_file[8:]):
        assert sorted(name for step in a_pass for name in step) == sorted(
            f"{chats} line {i}" for i in range(1, 21)
        )


def test_chats_that_are_too_long_are_counted_once_and_left_out(
    chats: Path, rendering: Rendering, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = chat_samples(settings(chats), rendering, rank=0)
    assert capsys.readouterr().out == f"warm start: 20 chats of {chats}\n"
    lengths = sorted(len(sample.ids) for sample in samples)
    num = sum(length > lengths[10] for length in lengths)
    config = settings(chats, f"rollout.max_game_tokens={lengths[10]}")
    assert len(chat_samples(config, rendering, rank=0)) == 20 - num and 0 < num < 10
    line = f"{20 - num} chats of {chats}; {num} left out, longer than rollout.max_game_tokens "
    line += f"{lengths[10]}, the longest with {lengths[-1]} tokens\n"
    assert capsys.readouterr().out == f"warm start: {line}"
    chat_samples(config, rendering, rank=1)
    assert capsys.readouterr().out == ""
    none = settings(chats, "rollout.max_game_tokens=20")
    with pytest.raises(SettingsError, match=r"must be large enough for a chat of .*, got 20; the"):
        chat_samples(none, rendering, rank=0)


def test_bad_chats_are_refused_before_a_run_creates_anything(chats: Path, tmp_path: Path) -> None:
    chats.write_text(chats.read_text() + '{"messages": [{"role": "bot", "content": "hi"}]}\n')
    config = settings(chats, f"out={tmp_path / 'run'}")
    with pytest.raises(SettingsError, match=r"line 21: the role of message 0 .*, got 'bot'$"):
        check_run(config)
    assert not (tmp_path / "run").exists()


def test_imitation_alone_says_what_it_made(
    chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SFT alone: 20 chats twice in batches of 4 are 10 optimizer steps, and no game is played
    again after a self-play of no step."""
    run = tmp_path / "run"
    words = [*BASE, f"warm_start.chats={chats}", "warm_start={batch_size: 4, epochs: 2}"]
    words += ["steps=0", "observers=[console]", "eval.final_games=2", f"out={run}"]
    words += ["rollout={max_turns: 2, max_new_tokens: 16}"]  # of a policy that knows no move
    (tmp_path / "empty.yaml").write_text("{}")
    assert train.main(["--config", str(tmp_path / "empty.yaml"), *words]) == 0
    said = capsys.readouterr().out
    lines = [json.loads(line) for line in (run / "warm_start.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 11))
    loss = f"with a loss of {lines[-1]['imitation_loss']:.3f} nats per token"
    assert f"the warm start is finished {loss}; the policy is in {run / 'warm_start'}" in said
    assert "self-play made no step" in said and said.count("playing 2 held-out games") == 1
    digest = hashlib.sha256(chats.read_bytes()).hexdigest()
    assert f"warm_start.chats {chats} sha256 {digest}\n" in (run / "code.txt").read_text()
    modes = {path.stat().st_mode & 0o777 for path in (run / "final").iterdir()}
    assert len(modes) == 1, "weights are as readable as their config"
    before, after = (run / f"held_out_{stage}.json" for stage in ("before", "after"))
    assert before.read_text() == after.read_text()
    assert [chart.title for chart in run_charts(read_run(run))] == ["Warm-start loss"]
