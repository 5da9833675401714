"""PPO's critic: its values, its gradients, resuming, two ranks."""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import compress
from statistics import fmean, pvariance
from typing import Any

import pytest
import torch

from selfplay.advantages.sample import Sample
from selfplay.distributed import init_world
from selfplay.errors import SettingsError
from selfplay.learner.batch import pack
from selfplay.learner.learner import Learner
from selfplay.learner.method import Method, check_methods
from selfplay.learner.update import optimizer_step, surrogate_term, update_policy
from selfplay.methods.ppo import PPO, VALUE_WEIGHT, clipped_value_loss, whitened
from tests.helpers.processes import two_ranks
from tests.helpers.small_updates import (
    CRITIC,
    assert_same,
    change,
    config_of,
    group_samples,
    learner_of,
    ppo_of,
    rewarded,
    some_samples,
)
from tests.helpers.tiny_run import (
    CPU,
    FORWARD,
    GRADIENT,
    LOGPROB,
    tiny_model,
)
from tests.helpers.tolerance import assert_near, near, tolerance


def test_a_value_is_clipped_by_hand() -> None:
    """Old value 0.5, clip 0.2, return 1. A value of 0.6 is within the clip. One of 0.9 is clipped
    to 0.7, which has the larger error, (0.7 - 1)^2 / 2, and no gradient. One of 0.1 is clipped to
    0.3, but has the larger error itself."""
    values = torch.tensor([0.6, 0.9, 0.1], requires_grad=True)
    losses, cut = clipped_value_loss(values, torch.full((3,), 0.5), torch.ones(3), clip=0.2)
    assert losses.tolist() == pytest.approx([0.08, 0.045, 0.405])
    assert cut.tolist() == [0.0, 1.0, 0.0]
    losses.sum().backward()
    assert values.grad.tolist() == pytest.approx([-0.4, 0.0, -0.9])
    free, cut = clipped_value_loss(values, torch.full((3,), 0.5), torch.ones(3), clip=0.0)
    assert free.tolist() == pytest.approx([0.08, 0.005, 0.405]) and not cut.any()


def a_critic(*overrides: str) -> tuple[Learner, PPO]:
    """A learner whose critic has a nonzero head and plain gradient descent."""
    learner, generator = learner_of(tiny_model()), torch.Generator().manual_seed(5)
    critic = ppo_of(learner, tiny_model(seed=3), *overrides, plain=1.0)
    with torch.no_grad():
        critic.head.weight.copy_(0.2 * torch.randn(critic.head.weight.shape, generator=generator))
        critic.head.bias.fill_(0.1)
    return learner, critic


def valued_by(critic: Method, samples: Sequence[Sample], *overrides: str) -> list[Sample]:
    config = config_of(*CRITIC, *overrides)
    return [*critic.prepare(samples, step=0, config=config)[0]]


def naive_values(critic: PPO, sample: Sample) -> list[float]:
    """The head on the plain backbone's hidden state before each trained token of one transcript."""
    with torch.no_grad():
        hidden = critic.backbone.base_model(torch.tensor([sample.ids])).last_hidden_state[0]
        values = hidden @ critic.head.weight[0] + critic.head.bias
    return [float(values[t - 1]) for t, trained in enumerate(sample.mask) if trained]


def test_a_new_critic_returns_zero() -> None:
    learner = learner_of(tiny_model())
    critic = ppo_of(learner, tiny_model(seed=3))
    assert not critic.values(learner, pack(some_samples(tiny_model()), device=CPU)).any()


def test_advantages_are_gae_and_whitened() -> None:
    """GAE's equation 16, then mean 0 and variance 1 over all trained tokens."""
    (_, critic), samples = a_critic(), rewarded(some_samples(tiny_model()))
    valued, found = critic.prepare(samples, step=0, config=config_of(*CRITIC))
    assert [[*compress(s.columns["values"], s.mask)] for s in valued] == [
        near(naive_values(critic, s), FORWARD) for s in samples
    ]
    assert [s.columns["returns"][-1] for s in valued] == pytest.approx(
        [s.returns[-1] for s in samples]
    )
    flat = [a for s in valued for a, m in zip(s.advantages, s.mask, strict=True) if m]
    assert fmean(flat) == near(0.0, 176)
    assert pvariance(flat) == near(1.0, 176)
    returns, values = (
        [x for s in valued for x in compress(s.columns[name], s.mask)]
        for name in ("returns", "values")
    )
    left = [g - v for g, v in zip(returns, values, strict=True)]
    # Whitening keeps the advantages' order and ratios of differences: they are returns - values.
    mean, std = fmean(left), pvariance(left) ** 0.5
    assert flat == near([(a - mean) / std for a in left], 176)
    assert found["return_mean"] == pytest.approx(fmean(returns))
    assert found["explained_variance"] == pytest.approx(1 - pvariance(left) / pvariance(returns))


def test_equal_advantages_become_zero() -> None:
    sample = Sample("a", [7, 7, 7], [0, 1, 1], [0.0] * 3, [0.0, 0.4, 0.4])
    assert whitened([sample], init_world(device="cpu"))[0].advantages == [0.0, 0.0, 0.0]


def valued_samples() -> list[Sample]:
    samples = rewarded(some_samples(tiny_model()))
    return valued_by(a_critic()[1], samples)


def changes(
    samples: Sequence[Sample], *overrides: str, step: int = 0
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, float]]:
    """The changes of policy and critic in one optimizer step, and its metrics."""
    (learner, critic), config = a_critic(*overrides), config_of(*CRITIC, *overrides)
    modules = (learner.model, critic.trained["critic"].module)
    before = [{n: p.detach().clone() for n, p in m.named_parameters()} for m in modules]
    critic.restore({"num_steps": step + 1})  # as prepare leaves it
    terms = critic.terms([surrogate_term(samples, config)], samples, step=step)
    metrics = optimizer_step(learner, terms, lr=1.0, config=config)
    of_policy, of_critic = (
        {name: p.detach() - was[name] for name, p in module.named_parameters()}
        for module, was in zip(modules, before, strict=True)
    )
    return of_policy, of_critic, metrics


def test_shared_prefixes_change_neither_values_nor_the_update() -> None:
    """A group's prompt is computed once, or in each sample: the same values, returns, gradients."""
    samples = group_samples(tiny_model())
    assert pack(samples, device=CPU).row.prefixes is not None
    valued, updated = [], []
    for share in ("true", "false"):
        setting = f"optim.share_prefixes={share}"
        valued.append(valued_by(a_critic()[1], samples, setting))
        updated.append(changes(valued[0], setting))
    for shared, alone in zip(*valued, strict=True):
        assert shared.columns["values"] == near(alone.columns["values"], FORWARD)
        assert shared.advantages == near(alone.advantages, FORWARD, scale=8.0)
    for shared_change, alone_change in zip(updated[0][:2], updated[1][:2], strict=True):
        assert max(value.abs().max().item() for value in shared_change.values()) > 1e-3
        assert_same(shared_change, alone_change)


def test_the_critics_gradient_is_that_of_the_naive_loop() -> None:
    """VALUE_WEIGHT times the mean over trained tokens of half the squared error, also where the
    policy's loss is a mean over samples."""
    samples = valued_samples()
    _, owner = a_critic()
    backbone, head = owner.backbone, owner.head
    total = torch.zeros(())
    for sample in samples:
        hidden = backbone.base_model(torch.tensor([sample.ids])).last_hidden_state[0]
        for t, trained in enumerate(sample.mask):
            if trained:
                total = total + 0.5 * (head(hidden[t - 1])[0] - sample.columns["returns"][t]) ** 2
    loss = VALUE_WEIGHT * total / sum(sum(s.mask) for s in samples)
    loss.backward()
    by_sample = changes(samples, "methods.ppo.clip=0", "algorithm.aggregation=sequence_mean")[1]
    policy, critic, metrics = changes(samples, "methods.ppo.clip=0")
    for name, parameter in owner.trained["critic"].module.named_parameters():
        assert_near(critic[name], -parameter.grad, GRADIENT, held=2.0, what=name)
        assert torch.equal(critic[name], by_sample[name])
    count = sum(sum(s.mask) for s in samples)
    assert metrics["num_trained_tokens"] == count
    assert metrics["value_loss"] == near(loss.item() / VALUE_WEIGHT, FORWARD)
    without = change(tiny_model(), samples)[0]
    assert all(torch.equal(policy[name], without[name]) for name in policy)


def test_during_the_warm_up_only_the_critic_changes() -> None:
    samples = valued_samples()
    for step, warming_up in ((1, True), (2, False)):
        policy, critic, metrics = changes(samples, "methods.ppo.warmup_steps=2", step=step)
        assert any(delta.any() for delta in policy.values()) is not warming_up
        assert critic["head.weight"].any()
        assert (metrics["lr"] == 0.0) is warming_up
        assert ("policy_loss" in metrics) is not warming_up


def test_the_warm_up_counts_the_policys_own_updates() -> None:
    """Of the steps 6, 7 and 11, between which it rests and the run is resumed, two are warm-up."""
    samples, numbers = rewarded(some_samples(tiny_model())), []
    state: dict[str, Any] = {}
    for step in (5, 6, 10):
        _, critic = a_critic("methods.ppo.warmup_steps=2")
        critic.restore(state)
        critic.prepare(samples, step=step, config=config_of(*CRITIC))
        own = surrogate_term(samples, config_of(*CRITIC))
        numbers.append(len(critic.terms([own], samples, step=step)))
        state = critic.state()
    assert numbers == [1, 1, 2]


def test_a_later_loss_may_not_train_the_policy_in_the_warm_up() -> None:
    for order, refused in ((("ppo", "best_games"), True), (("best_games", "ppo"), False)):
        of = {"ppo": "{warmup_steps: 2}", "best_games": "{weight: 0.1}"}
        words = ", ".join(f"{name}: {of[name]}" for name in order)
        config = config_of("algorithm.advantage=ppo", f"methods={{{words}}}")
        with pytest.raises(SettingsError) if refused else nullcontext() as error:
            check_methods(config, ask=False)
        if error:
            assert str(error.value) == (
                "methods must have best_games before ppo, or its loss would train the policy in "
                "the critic's warm-up, got ppo, best_games"
            )


def test_a_critic_learns_the_returns_of_a_repeated_rollout() -> None:
    model = tiny_model()
    learner = learner_of(model)
    samples = rewarded(some_samples(model))
    settings = ("methods.ppo.lam=1", "methods.ppo.clip=0", "methods.ppo.warmup_steps=30")
    config = config_of(*CRITIC, *settings)
    ppo_of(learner, tiny_model(seed=3), *settings, "methods.ppo.lr=3e-3")
    metrics = [
        update_policy(learner, samples, step=n, config=config, max_mismatch=1.0)[0]
        for n in range(30)
    ]
    assert metrics[0]["explained_variance"] == pytest.approx(0.0)
    assert metrics[-1]["explained_variance"] > 0.8
    assert metrics[-1]["value_loss"] < 0.1 * metrics[0]["value_loss"]


def test_two_ranks_compute_the_update_of_one() -> None:
    """Whitening, values, gradients of policy, backbone and head."""
    report = two_ranks("critic")
    assert report["moved"] > 0.05
    for name in ("weights", "advantages", "metrics"):
        assert report[name] < tolerance(3 * GRADIENT, scale=LOGPROB), (name, report)
