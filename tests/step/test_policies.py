"""A step goes through its policies in order: each samples its seats, learns from its own samples
alone, gets its weights into its own engine, and is saved and resumed by its name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import selfplay
from selfplay.checkpoint import resume
from selfplay.engines.hf import HFEngine
from selfplay.errors import RunEnds
from selfplay.learner.learner import make_learner
from selfplay.partners.router import EngineRouter, Frozen
from selfplay.step import named
from selfplay.step.run import Policy, Run
from selfplay.weight_sync.offload import Offload
from selfplay.weight_sync.supervised import SupervisedPolicy
from tests.helpers.tiny_run import begin_warm, write_tiny

BY_SEAT = """
from selfplay.rollout.players import PolicyPlayer

class BySeat(PolicyPlayer):
    async def move(self, game, seat, observation, generate):
        if seat == 1:
            self._model = self.transcript.policy = "second"
        return await super().move(game, seat, observation, generate)
"""


def second_policy(run: Run) -> Policy:
    """A further policy with the first weights. Its engine answers in the first one's games."""
    (first,) = run.policies
    learner = make_learner(first.config, run.folder / "warm_start", run.world)
    own = HFEngine.around(learner.model, first.config.engine)
    engine = SupervisedPolicy(learner, own, Offload(learner, first.config.parallel))
    engine.push(0)
    frozen = {"second": Frozen(own, first.rendering.stop_ids)}
    first.engine._runner = EngineRouter(first.engine.engine, frozen=frozen, endpoints={})
    return replace(first, name="second", learner=learner, engine=engine, baselines={})


def test_two_policies_learn_each_from_its_own_seats(tmp_path: Path) -> None:
    folder, player = tmp_path / "run", tmp_path / "by_seat.py"
    player.write_text(BY_SEAT)
    begin_warm(folder)
    more = {"out": str(folder), "rollout.player": f"{player}:BySeat", "algorithm.advantage": "ema"}
    with selfplay.start(write_tiny(folder), more, observers=["console"], save_every=1) as run:
        parts = run.parts
        parts.policies.append(second := second_policy(parts))
        first = parts.policies[0]
        begun = [
            {n: p.clone() for n, p in one.learner.model.named_parameters()}
            for one in parts.policies
        ]
        step = run.step()
        assert {s.name[-6:]: s.policy for s in step.samples} == {"seat 0": "", "seat 1": "second"}
        assert {"entropy", "entropy/second"} <= step.metrics.keys()
        assert [*first.baselines] == ["seat 0"] and [*second.baselines] == ["seat 1"]
        for own, policy in zip(begun, parts.policies, strict=True):
            num = sum(sum(s.mask) for s in step.samples if s.policy == policy.name)
            (key,) = named({"num_trained_tokens": 0.0}, policy)
            assert step.metrics[key] == num > 0
            moved = dict(policy.learner.model.named_parameters())
            assert any(not torch.equal(own[name], moved[name]) for name in own)
        saved = folder / "checkpoints" / "step_000001"
        state = json.loads((saved / "progress.json").read_text())["state"]["policies"]
        assert state["second"]["baselines"] == second.baselines
        for policy in parts.policies:
            again = make_learner(policy.config, folder / "warm_start", parts.world)
            assert resume(folder, again, policy.name)[0] == 1
            pairs = zip(again.model.parameters(), policy.learner.model.parameters(), strict=True)
            assert all(torch.equal(*pair) for pair in pairs)
        second.engine.push(0)
        with pytest.raises(RunEnds, match="engine of second must use the weights of step 1, uses"):
            run.step()
