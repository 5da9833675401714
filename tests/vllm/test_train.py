"""One run of train.py with the real engine that loses it, is killed and is resumed."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import eval as evaluation
from tests.helpers import processes
from tests.helpers.real_models import check_two_steps, two_steps
from tests.helpers.tiny_run import begin_warm, finished, metrics_of, weights_of, write_tiny
from tests.vllm.tiny import RUN_HEADS

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
SETTINGS = (*RUN_HEADS, "engine.kind=vllm", "algorithm.epochs=10", "save_every=1")
KILLED_IN, LAST_STEP = 2, 3


@dataclass(frozen=True)
class Interrupted:
    """What the run printed until SIGKILL ended it, and what that left."""

    folder: pathlib.Path
    output: str
    num_processes: int
    left: list[Any]


def words_of(folder: pathlib.Path) -> tuple[str, ...]:
    return ("--config", str(write_tiny(folder)), f"out={folder}", *SETTINGS)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interrupted]:
    """The engine's process is stopped in the first update. In the second one it is stopped again
    and the trainer is killed."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    begin_warm(folder, *RUN_HEADS)
    process = processes.start(HERE / "interrupted.py", *words_of(folder), "steps=1000000")
    try:
        output = processes.read_until(process, f'MARK update {{"step": {KILLED_IN - 1}}}')
        everyone = processes.tree(process)
        for child in everyone:
            if child.name().startswith("VLLM"):
                child.suspend()
    finally:
        process.kill()
    left = processes.left(everyone)
    process.communicate(timeout=processes.HANG_S)
    yield Interrupted(folder, output, len(everyone), left)


def test_an_engine_that_hangs_in_an_update_is_restarted(interrupted: Interrupted) -> None:
    output = interrupted.output
    assert output.count("engine up") == 2
    assert "gave no answer within 5 s during a weight push" in output
    assert "engine failure 1 of 3 in a row, rank 0" in output
    (line,) = metrics_of(interrupted.folder)  # it is written before the step's push
    assert line["num_engine_restarts"] == 0 and line["num_games"] == 16


def test_a_trainer_killed_in_an_update_leaves_no_process_though_its_engine_is_stopped(
    interrupted: Interrupted,
) -> None:
    assert interrupted.num_processes >= 2
    assert interrupted.left == []


def test_the_killed_run_is_resumed_by_two_ranks_with_an_engine_each(
    interrupted: Interrupted,
) -> None:
    """Each step ran once, engine and trainer agreed in it, and the weights moved."""
    folder = interrupted.folder
    ranks = processes.start(
        ROOT / "train.py", *words_of(folder), f"steps={LAST_STEP}", forked=2, path=(HERE,)
    )
    try:
        output = processes.read_until(ranks, "engine up")
        everyone = processes.tree(ranks)
        output += ranks.communicate(timeout=processes.HANG_S)[0]
    finally:
        ranks.kill()
    assert ranks.returncode == 0, output
    assert output.count("engine up") == 2
    lines = metrics_of(folder)
    assert [line["step"] for line in lines] == list(range(1, LAST_STEP + 1))
    assert lines[0]["num_trained_tokens"] > 0
    for line in lines:
        assert line["num_games"] == 16 and line["sync_check_mismatch"] < 1e-4
        if line["num_trained_tokens"] > 0:
            assert line["mismatch_mean"] < 1e-4 and line["mismatch_max"] < 1e-3
    before, after = weights_of(folder / "warm_start"), weights_of(folder / "final")
    assert before.keys() == after.keys()
    assert all((after[name] - before[name]).abs().max() > 1e-3 for name in before)
    assert processes.left(everyone) == []


def test_eval_plays_the_hf_engine_s_greedy_games(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The policy beside a partner with its weights, which has an engine of its own: the scores
    and every other number of the games that transformers played."""
    run = finished(*RUN_HEADS, "steps=0", "eval.final_games=16")
    shutil.copytree(run / "final", tmp_path / "partner")
    words = [str(run), "--partners", str(tmp_path / "partner"), "--games", "generated"]
    words += ["--temperature", "0", "--out"]
    for kind in ("hf", "vllm"):
        assert evaluation.main([*words, str(tmp_path / kind), f"engine.kind={kind}"]) == 0
    assert capfd.readouterr().out.count("engine up") == 2
    hf, page = (json.loads((tmp_path / k / "evaluation.json").read_text()) for k in ("hf", "vllm"))
    assert page["engine"] == "vllm" and page["rows"] == hf["rows"]
    greedy = json.loads((run / "held_out_after.json").read_text())["greedy"]
    played = [row["scores"] for name, row in page["rows"].items() if "partner" in name]
    assert played == [greedy["scores"]] * 2


@pytest.mark.nightly
def test_smollm2_takes_two_steps(tmp_path: pathlib.Path) -> None:
    """Released weights with their own tokenizer and template."""
    words = two_steps(tmp_path / "run", "engine.kind=vllm")
    process = processes.start(ROOT / "train.py", *words)
    output, _ = process.communicate(timeout=processes.HANG_S)
    assert process.returncode == 0, output[-4000:]
    check_two_steps(tmp_path / "run")
