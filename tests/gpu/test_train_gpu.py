"""train.py itself on GPUs: steps of self-play with SGLang engines on every mesh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A head is 64 wide: the engine's kernels know no narrower one than 32, and none of 24.
CONFIG = """
steps: 2
save_every: 2
game:
  options: {size: 2, p_observed: 0.5, scale: false, max_value: 10, keep: exactly_one, brief: true}
model:
  dtype: bfloat16
  scratch: {width: 256, layers: 2, heads: 4, kv_heads: 2, mlp_width: 512, max_positions: 256,
            vocab_size: 512, tokenizer_games: 60, init_range: 0.04}
warm_start: {num_games: 2000, teachers: ["solo", "honest:tell=top"], batch_size: 32, lr: 1.0e-3}
rollout: {instances: 8, group_size: 4, max_turns: 6, max_retries: 1, max_new_tokens: 32,
          max_game_tokens: 192}
algorithm: {kl: 0.03}
optim: {lr: 1.0e-4, tokens_per_microbatch: 4096}
engine: {kind: sglang, attention: triton, mem_fraction: 0.2, max_batch: 64}
parallel: {offload: optimizer}
eval: {final_games: 16}
"""
AWAY = "parallel.offload=all"
MESHES = [
    pytest.param(1, 1, 1, [], id="1", marks=pytest.mark.one_gpu),
    pytest.param(2, 1, 1, [AWAY], id="fsdp2, two engines", marks=pytest.mark.two_gpus),
    pytest.param(2, 2, 2, [], id="tp2, one wide engine", marks=pytest.mark.two_gpus),
    pytest.param(4, 2, 2, [], id="fsdp2 x tp2, two wide engines", marks=pytest.mark.four_gpus),
]


@pytest.mark.parametrize(("num", "tp", "engine_tp", "more"), MESHES)
def test_a_run_trains_pushes_and_ends_on_each_mesh(
    num: int, tp: int, engine_tp: int, more: list[str], tmp_path: Path
) -> None:
    """The engine's log-probs are the trainer's in the first step and after each push."""
    config, out = tmp_path / "run.yaml", tmp_path / "run"
    config.write_text(CONFIG)
    settings = [f"out={out}", f"parallel.tp={tp}", f"engine.tp_size={engine_tp}", *more]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num)]
    done = subprocess.run(
        [sys.executable, *(launch if num > 1 else []), "train.py", "--config", config, *settings],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    steps: list[dict[str, Any]] = [
        json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()
    ]
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["num_games"] == 8 * 4
        assert AWAY in more or step["sync_check_mismatch"] < 0.03
        assert step["mismatch_mean"] < 0.03
        assert step["mismatch_kl"] < 0.01
        assert step["num_trained_tokens"] > 0
    assert (out / "final" / "config.json").exists()
    assert (out / "checkpoints" / "step_000002" / "progress.json").exists()
