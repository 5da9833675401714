"""One run of train.py with the real engine that loses it, is killed and is resumed."""

from __future__ import annotations

import json
import pathlib
import shutil

import pytest

import eval as evaluation
from tests.helpers import processes
from tests.helpers.engine_runs import *  # noqa: F403
from tests.helpers.engine_runs import ROOT, Interrupted, interrupt
from tests.helpers.real_models import check_two_steps, two_steps
from tests.helpers.tiny_run import finished
from tests.vllm.tiny import RUN_HEADS

HERE = pathlib.Path(__file__).resolve().parent
SETTINGS = (*RUN_HEADS, "engine.kind=vllm")


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    folder = tmp_path_factory.mktemp("runs") / "run"
    return interrupt(HERE / "interrupted.py", folder, *SETTINGS, engine="VLLM", path=(HERE,))


@pytest.fixture
def num_processes() -> int:
    """The trainer and the engine's."""
    return 2


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
