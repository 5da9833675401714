"""The entropy bonus over listed moves: its gradient is that of the entropy of the turns played."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from selfplay.advantages.sample import Sample
from selfplay.config import load_config
from selfplay.league.legal_moves import LegalMoves
from selfplay.learner.batch import pack
from selfplay.learner.method import Parts, make_methods
from selfplay.model.policy import policy_logprobs
from tests.helpers.small_updates import change, learner_of
from tests.helpers.tiny_run import CPU, FORWARD, GRADIENT, LOGPROB, metrics_of, tiny_model
from tests.helpers.tolerance import assert_all_near, near
from tests.league.test_exploitability import GAME, SETTINGS, kuhn, rendering

OFF = ("algorithm.kl=0", "methods.kl_reference=off")


def method_of(model: PreTrainedModel, *words: str) -> LegalMoves:
    config = load_config(SETTINGS, [f"game.name={GAME}", *OFF, *words])
    (method,) = make_methods(Parts(config, learner_of(model), lambda: model, rendering()))
    assert isinstance(method, LegalMoves)
    return method


def met(method: LegalMoves, *sets: int) -> list[Sample]:
    """A sample for each of these sets, with a prompt and a move; then one whose turn comes after
    another text, such as an error's, which is no listed position."""
    prompts = [*method._moves]
    samples = []
    for number in sets:
        prompt, move = [*prompts[number]], method._moves[prompts[number]][1]
        ids = prompt + move
        mask = [0] * len(prompt) + [1] * len(move)
        samples.append(Sample(str(len(samples)), ids, mask, [0.0] * len(ids), [0.0] * len(ids)))
    ids = [5, *samples[0].ids]
    mask = [0, *samples[0].mask]
    return [*samples, Sample("other", ids, mask, [0.0] * len(ids), [0.0] * len(ids))]


def entropy_of(model: PreTrainedModel, method: LegalMoves, number: int) -> torch.Tensor:
    """The entropy of the moves of a set, by torch from the log-probs of whole texts."""
    prompt = [*method._moves][number]
    logs = []
    for move in method._moves[prompt]:
        ids, mask = [*prompt, *move], [0] * len(prompt) + [1] * len(move)
        sample = Sample("one", ids, mask, [0.0] * len(ids), [0.0] * len(ids))
        batch = pack([sample], device=CPU)
        logprobs_M, _ = policy_logprobs(model, batch.row, batch.targets_M, temperature=1.0)
        logs.append(logprobs_M.sum())
    q = torch.stack(logs).softmax(0)
    return -(q * q.log()).sum()


def test_its_gradient_is_that_of_the_entropy_of_the_turns_that_were_met() -> None:
    """Of three turns two are in one set; the weight is 0.7, and after half of `until` 0.35."""
    model = tiny_model()
    method = method_of(model, "methods.legal_moves={entropy: 0.7, until: 10}")
    _, metrics = method.prepare(met(method, 0, 5, 0), step=0, config=method.parts.config)
    mean = (2 * entropy_of(model, method, 0) + entropy_of(model, method, 5)) / 3
    assert metrics == {"legal_entropy": near(float(mean.detach()), FORWARD, scale=LOGPROB)}
    for step, weight in ((0, 0.7), (5, 0.35)):
        model.zero_grad()
        (weight * mean).backward(retain_graph=True)
        gradient = {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }
        twin: Any = tiny_model()
        method.parts.learner.model = twin
        (term,) = method.terms([], [], step=step)
        found, _ = change(twin, None, others=[term])
        assert_all_near(found, gradient, GRADIENT, held=1.0)
    assert method.terms([], [], step=10) == []


def test_without_a_listed_turn_there_is_no_term() -> None:
    model = tiny_model()
    method = method_of(model, "methods.legal_moves.entropy=0.7")
    _, metrics = method.prepare(met(method, 0)[1:], step=0, config=method.parts.config)
    assert metrics == {} and method.terms([], [], step=0) == []


def test_a_run_counts_every_turn_of_its_games() -> None:
    """In a run whose policy writes only moves the entropy over listed moves is no larger than that
    of two moves, and it is what the observer reads after the step before, up to the sample of
    turns."""
    run = kuhn("observers=[console, {exploitability: {every: 1}}]", *OFF, "methods.legal_moves=on")
    steps = metrics_of(run)
    for before, after in pairwise(steps):
        assert 0 < after["legal_entropy"] <= 0.6932
        assert after["legal_entropy"] == pytest.approx(before["observed/legal_entropy"], abs=0.05)
