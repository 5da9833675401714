"""Every aggregation, KL and entropy term equals a naive loop, however the batch is split."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from selfplay.advantages.sample import Sample
from selfplay.distributed import init_world
from selfplay.learner.batch import micro_batches
from tests.helpers.small_updates import (
    assert_same,
    change,
    some_samples,
)
from tests.helpers.tiny_run import FORWARD, GRADIENT, LOGPROB, tiny_model
from tests.helpers.tolerance import near

# The overrides of each variant. TRL computes those that tests/learner/test_trl_parity.py shows; the
# loop here has what TRL has not.
NAIVE = ("default", "k2", "k1_ratio")
VARIANTS = {
    "default": (),
    "sequence_mean": ("algorithm.aggregation=sequence_mean",),
    "constant": ("algorithm.aggregation=10",),
    "entropy": ("algorithm.entropy=0.3", "algorithm.aggregation=sequence_mean"),
    "k2": ("algorithm.kl=0.4", "algorithm.kl_estimator=k2"),
    "k1_ratio": ("algorithm.kl=0.4", "algorithm.kl_estimator=k1_ratio"),
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
    moved, metrics = change(model, samples, *VARIANTS[variant], reference=held)
    assert_same({name: -delta for name, delta in moved.items()}, expected)
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
    assert metrics["grad_norm"] == near(norm, GRADIENT)
    assert 0 < metrics["clip_share"] < 1
    assert metrics["num_trained_tokens"] == sum(sum(s.mask) for s in samples)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_gradient_does_not_depend_on_the_micro_batches(variant: str) -> None:
    """Eight samples in one, two and eight micro-batches, and in another order."""
    samples = some_samples(tiny_model(), shift=0.4)
    settings = VARIANTS[variant]
    world = init_world(device="cpu")
    held = far_model() if "algorithm.kl=0.4" in settings else None
    whole, metrics = change(tiny_model(), samples, *settings, reference=held)
    for budget, num_batches in ((176, 1), (100, 2), (16, 8)):
        assert len(list(micro_batches(samples, world, budget=budget))) == num_batches
        cut, same = change(
            tiny_model(),
            samples[::-1],
            *settings,
            f"optim.tokens_per_microbatch={budget}",
            reference=held,
        )
        assert_same(cut, whole)
        assert same == near(metrics, GRADIENT, scale=LOGPROB)


def test_importance_weights_apply_to_the_policy_loss_alone() -> None:
    """Weight 0.5 on every token halves the gradient; entropy and token count stay."""
    samples = some_samples(tiny_model())
    halved = [replace(s, columns={"importance": [0.5 * m for m in s.mask]}) for s in samples]
    whole, metrics = change(tiny_model(), samples)
    half, same = change(tiny_model(), halved)
    assert_same(half, {name: 0.5 * delta for name, delta in whole.items()})
    for name in ("entropy", "ratio_mean", "num_trained_tokens"):
        assert same[name] == near(metrics[name], FORWARD)
