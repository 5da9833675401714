"""Every aggregation, KL and entropy term equals a naive loop, however the batch is split."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from selfplay.credit.advantages import assign_advantages
from selfplay.credit.sample import Sample
from selfplay.learner.batch import split
from selfplay.learner.learner import UpdateSettings
from selfplay.learner.objective import Part
from selfplay.learner.policy_update import update_policy
from selfplay.learner.recompute import recompute_logprobs
from tests.helpers.small_updates import (
    assert_same,
    change,
    config_of,
    learner_of,
    settings_of,
    some_samples,
)
from tests.helpers.tiny_run import FORWARD, GRADIENT, LOGPROB, tiny_model
from tests.helpers.tolerance import near

LENGTH = "algorithm.constant_length=10"
TOKEN_IMPORTANCE = (
    *("algorithm.old_logprobs=recomputed", "algorithm.importance=token", "engine.max_mismatch=9"),
)
# The overrides of each variant. TRL computes those that tests/learner/test_trl_parity.py shows; the
# loop here has what TRL has not.
NAIVE = ("default", "k2", "k1_ratio")
VARIANTS = {
    "default": (),
    "sequence_mean": ("algorithm.aggregation=sequence_mean",),
    "constant": ("algorithm.aggregation=constant", LENGTH),
    "entropy": ("algorithm.entropy=0.3", "algorithm.aggregation=sequence_mean"),
    "k2": ("algorithm.kl=0.4", "algorithm.kl_estimator=k2"),
    "k1_ratio": ("algorithm.kl=0.4", "algorithm.kl_estimator=k1", "algorithm.kl_ratio=true"),
    "vespo": ("algorithm.loss=vespo", "algorithm.aggregation=sequence_mean"),
    "gspo": ("algorithm.loss=gspo", "algorithm.aggregation=sequence_mean"),
}


def naive_gradient(
    variant: str, model: PreTrainedModel, reference: PreTrainedModel, samples: list[Sample]
) -> dict[str, torch.Tensor]:
    """The formula, token by token, on the plain model's logits of one transcript at a time."""
    losses = []
    for sample in samples:
        logprobs_TV = model(torch.tensor([sample.ids])).logits[0].log_softmax(-1)
        with torch.no_grad():
            reference_TV = reference(torch.tensor([sample.ids])).logits[0].log_softmax(-1)
        for t in (t for t, trained in enumerate(sample.mask) if trained):
            logprob, advantage = logprobs_TV[t - 1, sample.ids[t]], sample.advantages[t]
            ratio = (logprob - sample.old_logprobs[t]).exp()
            k1 = logprob - reference_TV[t - 1, sample.ids[t]]
            kl = {"k2": 0.4 * 0.5 * k1**2, "k1_ratio": 0.4 * ratio * k1}.get(variant, 0.0)
            clipped = advantage * ratio.clamp(0.8, 1.2)
            losses.append(kl - torch.minimum(advantage * ratio, clipped))
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(torch.stack(losses).mean(), parameters)
    return dict(zip(names, gradients, strict=True))


def far_model() -> PreTrainedModel:
    return tiny_model(seed=3).requires_grad_(False)


@pytest.mark.parametrize(
    ("variant", "arch"), [("default", "llama"), *((v, "qwen2") for v in NAIVE)]
)
def test_the_gradient_is_that_of_the_naive_loop(variant: str, arch: str) -> None:
    model, reference = tiny_model(arch), far_model()
    samples = some_samples(model, num=5, shift=0.4)
    expected = naive_gradient(variant, model, reference, samples)
    held = reference if variant in ("k2", "k1_ratio") else None
    moved, metrics = change(model, [Part(samples, "surrogate")], *VARIANTS[variant], reference=held)
    assert_same({name: -delta for name, delta in moved.items()}, expected)
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
    assert metrics["grad_norm"] == near(norm, GRADIENT)
    assert 0 < metrics["clip_share"] < 1
    assert metrics["num_trained_tokens"] == sum(sum(s.mask) for s in samples)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_gradient_does_not_depend_on_the_micro_batches(variant: str) -> None:
    """Eight samples in one, two and eight micro-batches, and in another order."""
    samples = some_samples(tiny_model(), shift=0.4)
    part, settings = Part(samples, "surrogate"), VARIANTS[variant]
    held = far_model() if "algorithm.kl=0.4" in settings else None
    whole, metrics = change(tiny_model(), [part], *settings, reference=held)
    for budget, num_batches in ((176, 1), (100, 2), (16, 8)):
        assert len(split(samples, budget=budget)) == num_batches
        cut, same = change(
            tiny_model(),
            [Part(samples[::-1], "surrogate")],
            *settings,
            f"optim.tokens_per_microbatch={budget}",
            reference=held,
        )
        assert_same(cut, whole)
        assert same == near(metrics, GRADIENT, scale=LOGPROB)


def test_importance_weights_apply_to_the_policy_loss_alone() -> None:
    """Weight 0.5 on every token halves the gradient; entropy and token count stay."""
    samples = some_samples(tiny_model())
    halved = [replace(s, importance=[0.5 * m for m in s.mask]) for s in samples]
    whole, metrics = change(tiny_model(), [Part(samples, "surrogate")])
    half, same = change(tiny_model(), [Part(halved, "surrogate")])
    assert_same(half, {name: 0.5 * delta for name, delta in whole.items()})
    for name in ("entropy", "ratio_mean", "num_trained_tokens"):
        assert same[name] == near(metrics[name], FORWARD)


def test_rejected_tokens_stay_in_the_denominator() -> None:
    """Four of eight samples are rejected: the gradient is that of the others over all tokens."""
    samples = some_samples(tiny_model())
    some = [replace(s, importance=[0.0] * len(s.ids)) for s in samples[:4]] + samples[4:]
    kept, _ = change(tiny_model(), [Part(samples[4:], "surrogate")])
    got, metrics = change(tiny_model(), [Part(some, "surrogate")])
    num_all, num_kept = (sum(sum(s.mask) for s in part) for part in (samples, samples[4:]))
    assert_same(got, {name: delta * num_kept / num_all for name, delta in kept.items()})
    assert metrics["num_trained_tokens"] == num_kept


def test_no_step_is_taken_if_every_token_is_rejected() -> None:
    """Every token's ratio is outside of the bounds 0.999 and 1.001."""
    model = tiny_model()
    samples = some_samples(model, shift=0.5)
    off = [
        replace(s, old_logprobs=[p - 0.7 * m for p, m in zip(s.old_logprobs, s.mask, strict=True)])
        for s in samples
    ]
    bounds = ("algorithm.importance_low=0.999", "algorithm.importance_high=1.001")
    settings = settings_of(*TOKEN_IMPORTANCE, *bounds, "algorithm.entropy=0.1")
    learner = learner_of(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    recomputed, found = recompute_logprobs(learner, off, settings=settings)
    assert found["rejected_share"] == 1.0 and found["importance_mean"] == 0.0
    assert found["mismatch_mean"] > 0.2 and 0 < found["mismatch_ess"] < 1
    metrics, _ = update_policy(learner, recomputed, [], step=0, settings=settings)
    assert metrics == {"num_trained_tokens": 0.0, "num_optimizer_steps": 0.0}
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_importance_is_the_ratio_of_trainer_and_engine() -> None:
    model = tiny_model()
    samples = some_samples(model, num=3, shift=0.4)
    settings = settings_of(*TOKEN_IMPORTANCE)
    recomputed, _ = recompute_logprobs(learner_of(model), samples, settings=settings)
    for before, after in zip(samples, recomputed, strict=True):
        log_ratios = torch.tensor(after.old_logprobs) - torch.tensor(before.old_logprobs)
        expected = log_ratios.exp() * torch.tensor(before.mask)
        assert after.importance == near(expected.tolist(), FORWARD, scale=LOGPROB)


def test_kl_in_the_reward_penalizes_each_token_before_advantages() -> None:
    """Every token's reward loses 0.5 (log pi - log pi_ref); advantages use the rest."""
    model, reference = tiny_model(), far_model()
    names = ["algorithm.kl=0.5", "algorithm.kl_in=reward", "algorithm.kl_estimator=k1"]
    config = config_of(*names, "algorithm.method=dr_grpo")
    rewarded = [
        replace(s, group="g", rewards=[0.0] * (len(s.ids) - 1) + [float(i)])
        for i, s in enumerate(some_samples(model, num=3, shift=0.0))
    ]
    learner = learner_of(model, reference=reference, kl=0.5)
    penalized, found = recompute_logprobs(learner, rewarded, settings=UpdateSettings.of(config))
    totals = []
    for i, (before, after) in enumerate(zip(rewarded, penalized, strict=True)):
        with torch.no_grad():
            held_TV = reference(torch.tensor([before.ids])).logits[0].log_softmax(-1)
        total = float(i)
        for t, m in enumerate(before.mask):
            penalty = before.rewards[t] - after.rewards[t]
            k1 = before.old_logprobs[t] - float(held_TV[t - 1, before.ids[t]]) if m else 0.0
            assert penalty == near(0.5 * k1, FORWARD, scale=LOGPROB)
            total -= 0.5 * k1
        totals.append(total)
    assert found["kl_reference"] > 0.1
    credited = assign_advantages(penalized, algorithm=config.algorithm)
    mean = sum(totals) / 3
    assert [s.advantages[-1] for s in credited] == near(
        [t - mean for t in totals], FORWARD, scale=36 * LOGPROB
    )
    # The loss itself has no KL term then.
    _, metrics = change(model, [Part(credited, "surrogate")], *names, reference=reference)
    assert "kl_reference" not in metrics
