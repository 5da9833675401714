"""Two processes are one run: `torchrun` plays the same games and takes the same step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny_run import metrics_of, write_tiny

ROOT = Path(__file__).resolve().parents[1]
# Three instances over two ranks are uneven, and so are their micro-batches; the KL term and the
# replay must not notice.
SETTINGS = (
    "steps=2",
    "rollout.instances=3",
    "optim.tokens_per_microbatch=256",
    "algorithm.kl=0.1",
    "warm_start.replay=0.1",
    "warm_start.replay_games=3",
    "eval.every=2",
)


def run_on(num_ranks: int, folder: Path) -> None:
    """`torchrun --nproc-per-node num_ranks train.py …`, from the repository's root."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_ranks), "train.py", "--config", str(write_tiny(folder))]
    done = subprocess.run(
        [*command, f"out={folder}", *SETTINGS],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
def test_two_ranks_take_the_step_of_one(tmp_path: Path) -> None:
    """Rounding aside, everything is the same: the sums are cut differently over two ranks."""
    one, two = tmp_path / "one", tmp_path / "two"
    run_on(1, one)
    # Both start from one warm start, whose 100 steps would add up their rounding.
    two.mkdir()
    for name in ("tokenizer", "warm_start"):
        (two / name).symlink_to(one / name)
    run_on(2, two)

    alone, shared = metrics_of(one), metrics_of(two)
    assert [line["step"] for line in shared] == [1, 2]
    exact = ("score", "agreement", "errors", "words", "num_games", "num_groups", "flat_groups")
    for name in (*exact, "num_trained_tokens", "num_generated_tokens"):
        assert shared[0][name] == pytest.approx(alone[0][name], abs=1e-12), name
    assert shared[0].keys() == alone[0].keys()
    for name in ("policy_loss", "imitation_loss", "grad_norm", "entropy", "ratio_mean"):
        assert shared[0][name] == pytest.approx(alone[0][name], rel=1e-3, abs=1e-5), name
    assert shared[1]["kl_reference"] == pytest.approx(alone[1]["kl_reference"], rel=1e-2)
    assert all(line["gap_max"] < 1e-4 for line in shared), "each rank's engine got the new weights"
    assert shared[1]["eval_score"] == pytest.approx(alone[1]["eval_score"], abs=0.2)

    mine, yours = (load_file(run / "final" / "model.safetensors") for run in (one, two))
    assert mine.keys() == yours.keys()
    start = load_file(one / "warm_start" / "model.safetensors")
    moved, apart = (
        sum(float((other[name] - mine[name]).square().sum()) ** 0.5 for name in mine)
        for other in (start, yours)
    )
    assert apart < 0.01 * moved
    held_out = json.loads((two / "held_out_before.json").read_text())
    assert len(held_out["sampled"]["scores"]) == 8
