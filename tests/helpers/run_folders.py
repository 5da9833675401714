"""Run folders as a run leaves them, in a second: of scripted games, or with random weights. A game
as a line of games.jsonl."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from selfplay.chat.rendering import make_rendering
from selfplay.config import Config, load_config
from selfplay.config.text import dump
from selfplay.distributed import init_world
from selfplay.engines.hf import HFEngine
from selfplay.evaluation.evaluate import EvaluationContext, evaluate_scripted
from selfplay.evaluation.report import rows_json
from selfplay.learner.learner import make_learner
from selfplay.model.policy import export, scratch_model
from selfplay.setup import make_tokenizer
from selfplay.warm_start.imitation import scratch_tokenizer
from selfplay.weight_sync.supervised import Supervised

SETTINGS = """
steps: 12
game: {options: {size: 3, scale: true, max_value: 50}}
model: {scratch: {width: 32, max_positions: 4096}}
"""


def settings(folder: Path, *overrides: str) -> Config:
    path = folder.parent / "settings.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(SETTINGS)
    return load_config(path, [f"out={folder}", *overrides])


def untrained_run(folder: Path, text: str) -> Path:
    """A run with these settings, also in given.yaml, whose policy has random weights."""
    folder.mkdir(parents=True)
    (folder / "given.yaml").write_text(text)
    config = load_config(folder / "given.yaml", [f"out={folder}"])
    (folder / "config.yaml").write_text(dump(config))
    tokenizer = scratch_tokenizer(config)
    assert config.model.scratch is not None
    shape = replace(config.model.scratch, init_range=0.1)
    model = scratch_model(shape, seed=0, vocab_size=len(tokenizer))
    export(model, tokenizer, folder / "final")
    return folder


def bare_weights(folder: Path) -> Path:
    """A new folder that looks like a model's, with one number."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file({"weight": np.zeros(1)}, folder / "model.safetensors")
    return folder


def context_of(run: Path) -> EvaluationContext:
    """What the run evaluates its final policy with."""
    config, world = load_config(run / "config.yaml"), init_world(device="cpu")
    rendering = make_rendering(make_tokenizer(config, run, world))
    engine = HFEngine(make_learner(config, run / "final", world).model)
    return EvaluationContext(config, Supervised(engine, world), rendering, world)


def evaluated(out: Path) -> dict[str, Any]:
    """The page that eval.py has written to this folder."""
    page: dict[str, Any] = json.loads((out / "evaluation.json").read_text(encoding="utf-8"))
    return page


def write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_run(folder: Path, *overrides: str, num_games: int = 12) -> Path:
    """A run whose policy plans alone before self-play and is honest after it."""
    config = settings(folder, *overrides)
    instances = config.game.kit.generate(config.game.options, seed=5, start=0, num=num_games)
    rows = {
        spec: evaluate_scripted(instances, spec=spec, game=config.game, rollout=config.rollout)
        for spec in ("solo", "honest", "random", "honest:slip=0.3")
    }
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump(config))
    before = {"sampled": rows["solo"], "scripted:random": rows["random"]}
    after = {"sampled": rows["honest"], "scripted:random": rows["random"]}
    for stage, held_out in (("before", before), ("after", after)):
        (folder / f"held_out_{stage}.json").write_text(json.dumps(rows_json(held_out)))
    steps = [step_line(step) for step in range(1, config.steps + 1)]
    write_lines(folder / "metrics.jsonl", steps)
    slips = rows["honest:slip=0.3"].games
    write_lines(folder / "games.jsonl", [{**game, "step": i + 1} for i, game in enumerate(slips)])
    return folder


def step_line(step: int) -> dict[str, Any]:
    """A step's metrics; every fourth step has an evaluation."""
    score = 1 - 0.5 / step
    line: dict[str, Any] = {"step": step, "score": score, "messages": 0.1 * step}
    line |= {"errors_no_tag": 1 / step}
    line |= {"play_s": 2.0, "update_s": 1.0, "step_s": 3.5, "entropy": 1.0, "honesty": None}
    if step % 4 == 0:
        line |= {"eval_score": score, "eval_score_low": score - 0.1, "eval_score_high": score + 0.1}
    return line


def turn(seat: int, text: str, error: str | None = None) -> dict[str, Any]:
    """A turn as a line of games.jsonl holds it."""
    return {"seat": seat, "text": text, "error": error, "observations": ["", ""], "trained": True}


def record() -> dict[str, Any]:
    """A 2 by 2 game with one refused move, as it comes back from a line of games.jsonl."""
    game = {
        "step": 40,
        "instance": "g12",
        "episode": 3,
        "score_norm": 0.97,
        "agreed": True,
        "ended": "finished",
        "seats": [
            {"player": "policy", "system": "Match them.", "user": "  A B\nX 4 .\nY . 7"},
            {"player": "scripted:honest", "system": "Match them.", "user": "  A B\nX . 2"},
        ],
        "turns": [
            turn(0, "[message] X A 4"),
            turn(1, "[propose] X", "Error: one line a paper."),
            turn(1, "[propose]\nProposal:\nA: X"),
            turn(0, "[accept]"),
        ],
        "facts": {"best": 11.0, "solo_0": 0.7},
    }
    return json.loads(json.dumps(game))
