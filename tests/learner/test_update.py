"""One optimizer step: its metrics, its terms, what ends it, and the rates of all steps."""

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from selfplay.advantages.sample import Sample
from selfplay.config import OptimConfig
from selfplay.distributed import init_world, shard
from selfplay.errors import OwnFault, SettingsError
from selfplay.learner.batch import DUMMY, pack
from selfplay.learner.learner import RECOMPUTED
from selfplay.learner.method import LossTerm
from selfplay.learner.update import (
    NonFinite,
    imitation,
    learning_rate,
    minibatches,
    update_policy,
)
from tests.helpers.small_updates import (
    assert_same,
    change,
    config_of,
    learner_of,
    some_samples,
    taught,
)
from tests.helpers.tiny_run import (
    CPU,
    FORWARD,
    LOGPROB,
    VOCAB,
    tiny_model,
    trainer_logprobs,
)
from tests.helpers.tolerance import near


def updated(model: PreTrainedModel, samples: list[Sample], *overrides: str) -> dict[str, float]:
    """The metrics of an update; the samples' old log-probs are made up, so any mismatch passes."""
    metrics, skipped = update_policy(
        learner_of(model), samples, step=0, config=config_of(*overrides), max_mismatch=9.0
    )
    assert not skipped
    return metrics


def as_taught(samples: list[Sample]) -> list[Sample]:
    """The same tokens as a teacher's, each with weight 1."""
    return [replace(s, advantages=[float(m) for m in s.mask]) for s in samples]


def test_metrics_are_means_over_trained_tokens() -> None:
    model = tiny_model()
    samples = some_samples(model, shift=1.0)
    _, metrics = change(tiny_model(), samples)
    new = trainer_logprobs(model, samples, temperature=1.0)
    old = pack(samples, device=CPU).old_logprobs_M
    assert metrics["mismatch_mean"] == near(float((new - old).abs().mean()), FORWARD, scale=LOGPROB)
    assert metrics["mismatch_max"] == near(float((new - old).abs().max()), FORWARD, scale=LOGPROB)
    assert metrics["ratio_mean"] == near(float((new - old).exp().mean()), FORWARD, scale=LOGPROB)
    kl = float(((new - old).expm1() - (new - old)).mean())  # not that of the other direction
    assert metrics["mismatch_kl"] == near(kl, FORWARD, scale=LOGPROB)
    assert 0 < metrics["entropy"] < math.log(VOCAB)


def test_minibatches_divide_a_rollout_and_epochs_repeat_it() -> None:
    """At learning rate 0 the means over all epochs are those of the rollout."""
    model = tiny_model()
    samples = some_samples(model)
    epochs, halves = "algorithm.epochs=3", "algorithm.minibatches=4"
    whole, again, cut = (
        updated(model, samples, "optim.lr=0.0", *more) for more in ((), (epochs,), (epochs, halves))
    )
    assert again["entropy"] == near(whole["entropy"], FORWARD, scale=LOGPROB)
    assert (whole["num_optimizer_steps"], cut["num_optimizer_steps"]) == (1, 12)
    assert cut["num_trained_tokens"] == whole["num_trained_tokens"]


def test_every_epoch_and_step_cuts_minibatches_of_its_own() -> None:
    """Each epoch is a permutation of the rollout; none repeats another's order."""
    samples = some_samples(tiny_model())
    config = config_of("algorithm.minibatches=2", "algorithm.epochs=2")
    orders = []
    for step in (0, 1):
        cut = list(minibatches(samples, step=step, config=config))
        orders += [[s.name for s in cut[i] + cut[i + 1]] for i in (0, 2)]
    assert all(sorted(order) == [s.name for s in samples] for order in orders)
    assert len({tuple(order) for order in orders}) == 4


def test_the_mismatch_of_a_rollout_is_that_of_its_first_optimizer_step() -> None:
    """It is measured before any weight changes, on the first minibatch."""
    model = tiny_model()
    samples = some_samples(model)
    config = ("algorithm.minibatches=2", "optim.lr=0.0")
    gaps = []
    for half in minibatches(samples, step=0, config=config_of(*config)):
        old_M = pack(half, device=CPU).old_logprobs_M
        gaps.append(float((trainer_logprobs(model, half, temperature=1.0) - old_M).abs().mean()))
    found = updated(model, samples, *config)["mismatch_mean"]
    assert found == near(gaps[0], FORWARD, scale=LOGPROB)
    assert abs(gaps[0] - gaps[1]) > 1e-3, "the halves cannot be told apart"


def test_the_schedules_rate_is_that_of_the_optimizer() -> None:
    """A quarter of the rate in the first of four steps of warm-up moves as that rate alone does."""
    samples = some_samples(tiny_model())

    def weights(*rate: str) -> torch.Tensor:
        updated(model := tiny_model(), samples, *rate)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    warming = weights("optim.lr=0.8", "optim.warmup_steps=4")
    assert torch.equal(warming, weights("optim.lr=0.2"))
    assert not torch.equal(warming, weights("optim.lr=0.8"))


def test_an_empty_mini_batch_is_no_optimizer_step() -> None:
    model = tiny_model()
    samples = some_samples(model)[:3]
    metrics = updated(model, samples, "algorithm.minibatches=8")
    assert metrics["num_optimizer_steps"] == 3
    assert metrics["num_trained_tokens"] == sum(sum(s.mask) for s in samples)


def test_a_step_without_samples_changes_nothing() -> None:
    """As after a rollout in which every group has zero variance."""
    moved, metrics = change(tiny_model(), [])
    assert metrics == {}
    assert not any(delta.any() for delta in moved.values())


def test_a_loss_that_is_not_finite_names_its_sample_and_takes_no_step() -> None:
    model = tiny_model()
    samples = some_samples(model)
    bad = samples[5]
    samples[5] = replace(
        bad,
        old_logprobs=[math.nan if m else 0.0 for m in bad.mask],
        advantages=[-1.0 * m for m in bad.mask],
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(NonFinite, match=r"sample 5"):
        change(model, samples, "optim.tokens_per_microbatch=64")
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


# A loss of one's own that passes the check before a run, which calls it with few tokens, and what
# it does in a step.
IN_A_STEP = {
    "losses_M = losses_M[1:]": r"losses_M must have the shape \[M\] of logprobs_M, .* got \(\d+,\)",
    "losses_M = losses_M.detach()": "its losses must depend on logprobs_M, got no gradient",
    "losses_M = losses_M.to('meta')": "losses_M must be on cpu, got meta",
    "batch.advantages_M.zero_()": "it must not change its batch",
    "batch.advantages_M.data.zero_()": "it must not change its batch",
    "logprobs_M.data.mul_(2.0)": "it must not change its batch",
    "batch.old_logprobs_M.numpy()[:] = 0.0": "it must not change its batch",
    "batch.row.ids_N.data.zero_()": "it must not change its batch",
    "batch.columns['importance'] = logprobs_M": "it must not change its batch",
    "metrics['lr'] = logprobs_M": "metrics must have new names, got 'lr'",
    "metrics['words'] = logprobs_M": "metrics must have new names, got 'words'",
    "sys.exit(0)": r"own.*\.py:\d+ loss: SystemExit: 0",
    "metrics = algorithm.options['x']": r"own.*\.py:\d+ loss: KeyError: 'x'",
    "torch.set_default_dtype(torch.float64)": "custom code must not change torch.set_default_d",
    "torch.set_grad_enabled(False)": "custom code must not change torch.set_grad_enabled",
}


@pytest.mark.parametrize("line", IN_A_STEP)
@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_loss_of_ones_own_that_fails_in_a_step_is_named_before_its_weights_change(
    line: str, num_steps: int, tmp_path: Path
) -> None:
    """In the second optimizer step the first has changed them, and nothing is saved."""
    own = tmp_path / f"own_{tmp_path.name}.py"
    own.write_text(
        "import sys, torch\ncalls = []\n"
        "def loss(logprobs_M, batch, algorithm):\n"
        "    losses_M, metrics = -batch.advantages_M * logprobs_M, {}\n"
        "    calls.append(1)\n"
        f"    if len(calls) == {num_steps}:\n"
        f"        {line}\n"
        "    return losses_M, metrics\n"
    )
    model = tiny_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    words = (f"algorithm.loss={own}:loss", f"algorithm.minibatches={num_steps}")
    kind = OwnFault if num_steps == 1 else SettingsError
    try:
        with pytest.raises(kind, match=rf"^algorithm.loss {own}:loss: {IN_A_STEP[line]}") as ended:
            updated(model, some_samples(model), *words)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
    assert re.search(rf"{own.name}:\d+", str(ended.value)), "the line in the file"
    same = all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert same is (num_steps == 1)
    assert str(ended.value).endswith("this step is not saved") is (num_steps == 2)


def test_imitation_ignores_the_rollouts_temperature() -> None:
    samples = as_taught(some_samples(tiny_model()))
    model = tiny_model()
    expected = -trainer_logprobs(model, samples, temperature=1.0).mean()
    _, metrics = change(model, None, "rollout.temperature=0.5", others=[taught(samples)])
    assert metrics["imitation_loss"] == near(float(expected), FORWARD, scale=LOGPROB)


def test_the_loss_of_chats_is_a_mean_over_their_own_tokens() -> None:
    """In micro-batches of one sample; it changes no gradient."""
    model = tiny_model()
    samples = as_taught(some_samples(model, 4))
    chats = frozenset(sample.name for sample in samples[1:3])
    term = LossTerm(samples, partial(imitation, chats=chats))
    _, metrics = change(model, None, "optim.tokens_per_microbatch=16", others=[term])
    expected = -trainer_logprobs(tiny_model(), samples[1:3], temperature=1.0).mean()
    assert metrics["imitation_loss_chats"] == near(float(expected), FORWARD, scale=LOGPROB)
    assert metrics["imitation_loss_chats"] != metrics["imitation_loss"]


def test_terms_add_up_each_over_its_own_tokens() -> None:
    """An auxiliary imitation loss of weight 0.25 adds a quarter of its mean gradient."""
    played = some_samples(tiny_model())[:5]
    lesson = as_taught(some_samples(tiny_model())[5:])
    alone, _ = change(tiny_model(), played)
    replay, _ = change(tiny_model(), None, others=[taught(lesson)])
    both, metrics = change(tiny_model(), played, others=[taught(lesson, 0.25)])
    assert_same(both, {name: alone[name] + 0.25 * replay[name] for name in alone})
    assert {"policy_loss", "imitation_loss"} <= metrics.keys()


def test_a_dummy_micro_batch_has_no_weight() -> None:
    """That of a rank with fewer micro-batches has no KL term either. Here its token counts in the
    denominator; on a rank it does not."""
    reference = tiny_model(seed=1).requires_grad_(False)
    samples = some_samples(tiny_model())[2:]
    num_trained = sum(sum(s.mask) for s in samples)
    settings = ("algorithm.kl=0.5", "optim.tokens_per_microbatch=16")
    alone, metrics = change(tiny_model(), samples, *settings, reference=reference)
    filled, same = change(tiny_model(), [*samples, DUMMY], *settings, reference=reference)
    share = num_trained / (num_trained + 1)
    assert_same(filled, {name: share * delta for name, delta in alone.items()})
    for name in ("kl_reference", "entropy", "mismatch_max", "policy_loss"):
        assert same[name] == near(metrics[name], FORWARD)


@pytest.mark.parametrize(("checkpointing", "passes"), [("none", 2), ("half", 3), ("full", 4)])
def test_recomputed_layers_run_twice_and_change_nothing(checkpointing: str, passes: int) -> None:
    """Of two layers, none, the first or both run their forward pass again in the backward pass."""
    world = init_world(device="cpu")
    model = shard(tiny_model(), world, recompute=RECOMPUTED[checkpointing])
    ran: list[int] = []
    for number, layer in enumerate(model.base_model.layers):
        layer.input_layernorm.register_forward_hook(lambda *_, n=number: ran.append(n))
    samples = some_samples(tiny_model())
    metrics = updated(model, samples)
    assert len(ran) == passes and set(ran) == {0, 1}
    plain = tiny_model()
    assert metrics == updated(plain, samples)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_learning_rates_by_hand() -> None:
    def rates(schedule: Any, final_share: float = 0.0) -> list[float]:
        shape = {"schedule": schedule, "final_share": final_share}
        optim = OptimConfig(lr=8.0, warmup_steps=2, **shape)
        return [learning_rate(step, optim, num_steps=6) for step in range(6)]

    assert rates("constant") == [4, 8, 8, 8, 8, 8]
    assert rates("linear") == [4, 8, 8, 6, 4, 2]
    assert rates("linear", 0.5) == [4, 8, 8, 7, 6, 5]
    assert rates("cosine") == pytest.approx(
        [4, 8, 8, 4 + 4 / math.sqrt(2), 4, 4 - 4 / math.sqrt(2)]
    )
