"""Runs of train.py on GPUs that lose their engine, their trainer, or a GPU, and end as they should.

Every wait has a limit.
"""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.gpu import small
from tests.helpers import processes

HERE = Path(__file__).resolve().parent
EACH = ("save_every=1",)
TWO = "policies={first: {seats: [0]}, second: {seats: [1]}}"
GIB = 2**30


@pytest.mark.parametrize(
    ("how", "words"), [("play", ()), ("stop", ()), ("play", (TWO,))], ids=["play", "stop", "second"]
)
def test_an_engine_that_dies_or_hangs_in_play_is_restarted_with_as_large_a_cache(
    how: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    """Games that had ended are not played again. The trainer holds a fifth of the GPU that was free
    when the engine first started; the cache would lose as much. Of two policies the second one's
    engine is restarted alone."""
    folder = tmp_path / "run"
    process = small.launch(folder, *EACH, "steps=3", "engine.timeout_s=45", *words, killed=how)
    output, status = small.ended(process)
    assert status == 0, output[-6000:]
    marks = processes.marks(output)
    assert "killed" in marks and marks["held"]["bytes"] > 10 * GIB
    assert 0 < marks["played again"]["games"] < 8 * 4
    *others, first, again = (int(num) for num in re.findall(r"cache of (\d+) tokens", output))
    print(f"cache of {first} tokens, then {again}")
    assert 0.98 * first < again <= first and len(others) == len(words)
    lines = small.steps_of(folder, 3)
    assert [line["num_engine_restarts"] for line in lines] == [0, 1, 0]
    cause = {"play": "engine died during generation", "stop": "no answer within 45 s"}[how]
    assert re.search(rf"engine failure 1 of 3 in a row, rank 0: the .*{cause}", output)
    assert not words or "restarting the engine of second\n" in output


def test_a_trainer_killed_in_a_push_leaves_nothing_and_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = small.launch(folder, *EACH, "steps=3", killed="push")
    processes.read_until(process, "engine up")
    everyone = processes.tree(process)
    assert small.ended(process)[1] == -signal.SIGKILL
    assert len(everyone) >= 3
    assert processes.left(everyone, limit_s=10) == []
    began_s = time.perf_counter()
    while small.used_bytes(everyone) and time.perf_counter() - began_s < 10:
        time.sleep(0.1)
    assert small.used_bytes(everyone) == 0
    assert [step.name for step in (folder / "checkpoints").glob("step_*")] == ["step_000001"]
    output = small.run(folder, *EACH, "steps=3")
    assert output.count("engine up") == 1
    small.steps_of(folder, 3)
    assert (folder / "final" / "config.json").exists()


@pytest.mark.two_gpus
def test_a_run_goes_on_over_other_gpus_and_meshes(tmp_path: Path) -> None:
    """Two GPUs that share the parameters, one, two that divide each layer and share one engine, and
    two as before."""
    folder = tmp_path / "run"
    divided = ("parallel.tp=2", "engine.tp_size=2")
    for num_steps, num_gpus, mesh in ((1, 2, ()), (2, 0, ()), (3, 2, divided), (4, 2, ())):
        output = small.run(folder, *EACH, f"steps={num_steps}", *mesh, num=num_gpus)
        assert small.steps_of(folder, num_steps)[-1]["sync_check_mismatch"] < 0.03
        assert (folder / "checkpoints" / f"step_{num_steps:06d}" / "progress.json").exists()
        assert ("continues with another way of computing" in output) == (num_steps > 2)


@pytest.mark.four_gpus
def test_a_run_over_four_gpus_goes_on_over_two_and_over_four_with_the_same_bits(
    tmp_path: Path,
) -> None:
    """What a step leaves is read and written again by the mesh of the next step, with nothing
    trained in between: weights and moments are the same bits."""
    folder = tmp_path / "run"
    for num_steps, num_gpus, following in ((1, 4, 2), (2, 2, 4), (3, 4, 4)):
        small.run(folder, *EACH, f"steps={num_steps}", num=num_gpus)
        assert small.steps_of(folder, num_steps)[-1]["sync_check_mismatch"] < 0.03
        name = f"step_{num_steps:06d}"
        tp = 2 if num_steps == 3 else 1
        to = tmp_path / name
        words = (str(folder), str(to), f"parallel.tp={tp}", f"engine.tp_size={tp}")
        process = processes.start(HERE / "resave.py", *words, torchrun=following)
        output, status = small.ended(process)
        assert status == 0, output[-6000:]
        before, after = (saved(place / "checkpoints" / name / "state") for place in (folder, to))
        assert before.keys() == after.keys()
        assert sum("exp_avg" in key for key in before) > 40
        assert [key for key in before if not torch.equal(before[key], after[key])] == []


def saved(state: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, by its path in the saved state."""
    whole = state.parent / "whole.pt"
    dcp_to_torch_save(state, whole)
    found: dict[str, torch.Tensor] = {}

    def walk(part: Any, path: str) -> None:
        if isinstance(part, torch.Tensor):
            found[path] = part
        elif isinstance(part, dict):
            for key, value in part.items():
                walk(value, f"{path}/{key}")

    walk(torch.load(whole, weights_only=False), "")
    return found
