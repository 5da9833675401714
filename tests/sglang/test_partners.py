"""A training run with the real engine and every kind of partner at the same time.

Frozen models answer from a thread, an endpoint over the network, while the engine's games go on.
"""

from __future__ import annotations

import pathlib

import pytest

from tests.helpers import processes
from tests.helpers.chat_server import Answer, chat_server
from tests.helpers.tiny_run import begin_warm, metrics_of, write_tiny

ROOT = pathlib.Path(__file__).resolve().parents[2]
STAND_INS = pathlib.Path(__file__).resolve().parent / "stand_ins"


@pytest.mark.nightly
def test_a_run_with_every_kind_of_partner(tmp_path: pathlib.Path) -> None:
    begin_warm(tmp_path / "run")
    warm = tmp_path / "frozen"
    warm.symlink_to(tmp_path / "run" / "warm_start")
    with chat_server(lambda body, number: Answer("[accept]", wait_s=0.05)) as server:
        partners = f"[self,pool,checkpoint:{warm},scripted:honest,endpoint:small@{server.url}]"
        run = processes.start(
            ROOT / "train.py",
            *("--config", str(write_tiny(tmp_path / "run")), f"out={tmp_path / 'run'}"),
            *("engine.kind=sglang", "engine.max_cache_tokens=16384", "steps=2", "save_every=1"),
            *(f"rollout.partners={partners}", "rollout.instances=10", "policy_pool.every=1"),
            "eval.final_games=4",
            path=(STAND_INS,),
        )
        output = run.communicate(timeout=processes.HANG_S)[0]
    assert run.returncode == 0, output
    lines = metrics_of(tmp_path / "run")
    assert [line["num_void"] for line in lines] == [0, 0]
    for line in lines:
        partner_kinds = {
            name.partition("/")[2].partition(":")[0] for name in line if "score/" in name
        }
        assert partner_kinds == {"self", "pool", "checkpoint", "scripted", "endpoint"}
        assert line["mismatch_mean"] < 1e-4, "only tokens of the policy's engine train"
    assert server.bodies
