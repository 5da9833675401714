"""The real engine and its partners: a frozen checkpoint's own engine, lost and started again, and a
training run with every kind of partner at the same time.

Frozen models answer from a thread, an endpoint over the network, while the engine's games go on.
"""

from __future__ import annotations

import os
import pathlib
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch

import selfplay
from selfplay.distributed import init_world
from selfplay.engines.base import Completion, Generate, Request, Sampling
from selfplay.engines.hf import HFEngine
from selfplay.engines.sglang.event_loop import EngineLoop
from selfplay.model.policy import load_model
from selfplay.partners.router import EngineRouter, Frozen
from selfplay.weight_sync.supervised import Supervised
from tests.helpers import processes
from tests.helpers.chat_server import Answer, chat_server
from tests.helpers.tiny_run import begin_warm, finished, metrics_of, warm_started, write_tiny
from tests.sglang.tiny import ENGINE, STOP, build, save, scheduler, start, worst_mismatch

ROOT = pathlib.Path(__file__).resolve().parents[2]
STAND_INS = pathlib.Path(__file__).resolve().parent / "stand_ins"


def test_a_partner_s_engine_that_dies_in_a_game_is_started_again_and_a_hang_ends_at_the_time_out(
    tmp_path: pathlib.Path,
) -> None:
    """The partner has the weights of the policy, which plays in transformers: so its greedy answer
    is the policy's. Then it stops, and is closed with requests that it never read."""
    policy, own = HFEngine(build()), Request([5, 6, 7, 8], 6, 0)
    with closing(start(save(tmp_path), alone=True)) as partner:
        router = EngineRouter(policy, frozen={"x": Frozen(partner, (STOP,))}, endpoints={})
        supervised = Supervised(policy, init_world(1, 1, device="cpu"), runner=router)
        deaths: Iterator[Any] = iter(partner._loop.children[:1])

        async def game(generate: Generate) -> list[Completion]:
            before = await generate(replace(own, model="x"))
            for process in deaths:  # in the first attempt
                process.kill()
                process.join()
            return [before, await generate(replace(own, model="x")), await generate(own)]

        ((before, after, policy_s),) = supervised.run_games([game], Sampling(0.0, (STOP,)))
        assert before.ids == after.ids == policy_s.ids and not partner.lost

        partner._loop.timeout_s = 3.0
        os.kill(scheduler(partner), signal.SIGSTOP)
        for told in (r"no answer within 3 s .*: 3 requests", "silent for 3 s"):
            with pytest.raises(RuntimeError, match=told):
                partner.generate_batch([own] * 3, Sampling(1.0, ()))


def test_a_partner_s_engine_takes_weights_from_python_and_has_them_again_after_it_died(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineLoop, "of_policies", [])  # without the engine that other files share
    begin_warm(folder := tmp_path / "run")
    spec, given = f"checkpoint:{warm_started() / 'warm_start'}", finished() / "final"
    settings = {
        "out": str(folder),
        "rollout.partners": ["self", spec],
        "engine.kind": "sglang",
        "engine.fast": ENGINE["fast"],
        "engine.max_cache_tokens": 16384,
    }
    with selfplay.start(write_tiny(folder), settings, steps=1) as run:
        frozen = run.parts.policies[0].partners._frozen.engines[spec]
        engine: Any = frozen.engine
        assert engine is not run.parts.policies[0].engine.engine
        run.update_partner(spec, given)
        for dies in (False, True):
            if dies:
                os.kill(scheduler(engine), signal.SIGKILL)
                with pytest.raises(RuntimeError, match="exit code -9"):
                    engine.generate_batch([Request([5, 6, 7, 8], 6, 0)], Sampling(1.0, ()))
                frozen.restart()
            [answer] = engine.generate_batch([Request([5, 6, 7, 8], 6, 0)], Sampling(1.0, ()))
            model = load_model(str(given), device="cpu", dtype=torch.float32).eval()
            assert worst_mismatch(model, [5, 6, 7, 8], answer) < 1e-4
        run.step()


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
