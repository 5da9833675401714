"""The entropy and the KL over listed moves: their gradients are those of the turns played."""

from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from selfplay.advantages.sample import Sample
from selfplay.config import load_config
from selfplay.errors import OwnFault
from selfplay.league.legal_moves import LegalMoves
from selfplay.learner.batch import pack
from selfplay.learner.method import Parts, check_methods, make_methods
from selfplay.model.policy import policy_logprobs
from tests.helpers.changed_games import changed
from tests.helpers.small_updates import change, learner_of
from tests.helpers.tiny_run import CPU, FORWARD, GRADIENT, LOGPROB, metrics_of, tiny_model
from tests.helpers.tolerance import assert_all_near, near
from tests.league.test_exploitability import GAME, SETTINGS, kuhn, rendering

OFF = ("algorithm.kl=0", "methods.kl_reference=off")


def method_of(model: PreTrainedModel, *words: str) -> LegalMoves:
    config = load_config(SETTINGS, [f"game.name={GAME}", *OFF, *words])
    learner = learner_of(model)
    learner.methods = make_methods(Parts(config, learner, lambda: model, rendering()))
    method = learner.methods[-1]
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


def logs_of(model: PreTrainedModel, method: LegalMoves, number: int) -> torch.Tensor:
    """The normalised log-probs of the moves of a set, by torch from those of whole texts."""
    prompt = [*method._moves][number]
    logs = []
    for move in method._moves[prompt]:
        ids, mask = [*prompt, *move], [0] * len(prompt) + [1] * len(move)
        sample = Sample("one", ids, mask, [0.0] * len(ids), [0.0] * len(ids))
        batch = pack([sample], device=CPU)
        logprobs_M, _ = policy_logprobs(model, batch.row, batch.targets_M, temperature=1.0)
        logs.append(logprobs_M.sum())
    return torch.stack(logs).log_softmax(0)


def entropy_of(model: PreTrainedModel, method: LegalMoves, number: int) -> torch.Tensor:
    logs = logs_of(model, method, number)
    return -(logs.exp() * logs).sum()


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


MOVING = "methods={kl_reference: {every: 3}, legal_moves: {entropy: ENTROPY, kl: 0.4}}"


def test_the_gradient_with_a_kl_is_that_of_its_formula() -> None:
    """The reference has other weights than the policy: the fixed one of algorithm.kl, and the
    policy of the start as the one that moves each three steps. Of three turns two are in one set.
    The loss is 0.4 KL - 0.2 H."""
    for moving in (False, True):
        model, start = tiny_model(seed=1), tiny_model()
        words = MOVING.replace("ENTROPY", "0.2")
        fixed = ("algorithm.kl=0.1", "methods.legal_moves={entropy: 0.2, kl: 0.4}")
        method = method_of(start if moving else model, *([words] if moving else fixed))
        learner: Any = method.parts.learner
        if moving:  # the policy has moved on from the reference
            start.load_state_dict(model.state_dict())
            model, start = start, tiny_model()
        else:
            learner.reference = start
        _, metrics = method.prepare(met(method, 0, 5, 0), step=1, config=method.parts.config)
        kls = []
        for number in (0, 5):
            logs = logs_of(model, method, number)
            kls.append((logs.exp() * (logs - logs_of(start, method, number).detach())).sum())
        kl = (2 * kls[0] + kls[1]) / 3
        mean = (2 * entropy_of(model, method, 0) + entropy_of(model, method, 5)) / 3
        assert metrics["legal_kl"] == near(float(kl.detach()), FORWARD, scale=LOGPROB)
        assert metrics["legal_kl"] > 0.001
        model.zero_grad()
        (0.2 * mean - 0.4 * kl).backward()  # type: ignore[no-untyped-call]
        expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        twin: Any = tiny_model(seed=1)
        learner.model = twin
        (term,) = method.terms([], [], step=1)
        found, _ = change(twin, None, others=[term])
        assert_all_near(found, expected, GRADIENT, held=1.0)


def test_at_the_reference_the_kl_and_its_gradient_are_0() -> None:
    """A reference that has just moved is the policy."""
    model = tiny_model()
    method = method_of(model, MOVING.replace("ENTROPY", "0"))
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.01
    before, samples = model.state_dict(), met(method, 0, 5)
    mover, config = method.parts.learner.methods[0], method.parts.config
    mover.prepare(samples, step=2, config=config)
    assert method.prepare(samples, step=2, config=config)[1]["legal_kl"] > 1e-6
    mover.prepare(samples, step=3, config=config)
    assert method.prepare(samples, step=3, config=config)[1]["legal_kl"] == 0.0
    assert all(weight.equal(before[name]) for name, weight in model.state_dict().items())
    (term,) = method.terms([], [], step=3)
    assert {value for sample in term.samples for value in sample.columns["legal_move"]} == {0.0}


def test_beside_uniform_play_the_kl_is_the_log_of_the_number_of_moves_minus_the_entropy() -> None:
    """So 0.3 of it and 0.3 of the entropy have the same gradient: log 2 - H for two moves."""
    model = tiny_model()
    method = method_of(model, MOVING.replace("ENTROPY", "0"))
    alone = method_of(model, "methods.legal_moves.entropy=0.4")
    samples, slopes = met(method, 0, 5), []
    for each in (method, alone):
        each.prepare(samples, step=0, config=each.parts.config)
        if each is method:
            each._held = [torch.full((2,), -log(2), dtype=torch.float64)] * 2
        (term,) = each.terms([], [], step=0)
        slopes.append([sample.columns["legal_move"][0] for sample in term.samples])
    assert slopes[0] == pytest.approx(slopes[1], rel=1e-9, abs=1e-12)
    entropy = float((entropy_of(model, method, 0) + entropy_of(model, method, 5)).detach()) / 2
    logs = [logs_of(model, method, number).detach().double() for number in (0, 5)]
    kl = sum(float((each.exp() * (each + log(2))).sum()) for each in logs) / 2
    assert kl == near(log(2) - entropy, FORWARD, scale=LOGPROB)
    assert any(abs(slope) > 1e-4 for slope in slopes[0])


@pytest.mark.parametrize(
    ("given", "entropy"), [("{}", 0.1), ("{kl: 0.3}", 0.0), ("{kl: 0.3, entropy: 0.2}", 0.2)]
)
def test_a_kl_alone_has_no_bonus_beside_it(given: str, entropy: float) -> None:
    words = ["algorithm.kl=0.1", f"methods={{legal_moves: {given}}}"]
    config = load_config("configs/tiny.yaml", words)
    assert config.methods["legal_moves"].entropy == entropy


def test_a_wrong_list_of_moves_is_refused_before_a_start_writes_anything(tmp_path: Path) -> None:
    game = changed(tmp_path, "kuhn", {'("[pass]", "[bet]")\n': '("[pass]", "[raise]")\n'})
    config = load_config(SETTINGS, [f"game.name={game}", f"out={tmp_path / 'run'}"])
    with pytest.raises(OwnFault, match=r"methods legal_moves: .*'.raise.'"):
        check_methods(config, ask=False)


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
