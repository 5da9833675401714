"""Samples with made-up advantages, and one plain gradient step on them whose change can be read."""

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel

from selfplay.advantages.sample import Sample
from selfplay.config import Config, load_config
from selfplay.distributed import init_world
from selfplay.learner.learner import Learner
from selfplay.learner.method import LossTerm, Parts, make_methods
from selfplay.learner.update import imitation, optimizer_step, surrogate_term
from selfplay.methods.ppo import PPO
from tests.helpers.tiny_run import GRADIENT, VOCAB, trainer_logprobs
from tests.helpers.tolerance import assert_all_near

FREE = 1e6  # a bound on the gradient's norm that never binds
CRITIC = ("algorithm.advantage=ppo",)


def config_of(*overrides: str) -> Config:
    free = ["model.scratch={}", "rollout.max_game_tokens=1000", f"optim.max_grad_norm={FREE}"]
    return load_config(None, [*free, *overrides])


def learner_of(model: PreTrainedModel, *, reference: PreTrainedModel | None = None) -> Learner:
    """Plain gradient descent: with rate 1 the change of the parameters is minus the gradient."""
    return Learner(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        world=init_world(device="cpu"),
        compute_dtype=torch.float32,
        reference=reference,
    )


def learner_with(config: Config, model: PreTrainedModel) -> Learner:
    """A learner with the methods of the settings."""
    learner = learner_of(model)
    learner.methods = make_methods(Parts(config, learner, lambda: model))
    return learner


def ppo_of(
    learner: Learner, backbone: PreTrainedModel, *overrides: str, plain: float | None = None
) -> PPO:
    """The learner's method PPO, whose critic has this backbone; `plain` is the rate of plain
    gradient descent in place of AdamW."""
    (method,) = make_methods(Parts(config_of(*CRITIC, *overrides), learner, lambda: backbone))
    assert isinstance(method, PPO)
    if plain is not None:
        critic = method.trained["critic"]
        critic.optimizer = torch.optim.SGD(critic.module.parameters(), lr=plain)
    learner.methods = [method]
    return method


def some_samples(model: PreTrainedModel, num: int = 8, *, shift: float = 0.1) -> list[Sample]:
    """8 to 36 tokens each, with gaps in the mask; old log-probs lie off by up to `shift`."""
    rng = random.Random(0)
    samples = []
    for index in range(num):
        ids = [rng.randrange(VOCAB) for _ in range(8 + 4 * index)]
        mask = [0, 0, 0, *(int(rng.random() < 0.5) for _ in ids[4:]), 1]
        sample = Sample(f"sample {index}", ids, mask, [0.0] * len(ids), [0.0] * len(ids))
        true = iter(trainer_logprobs(model, [sample], temperature=1.0).tolist())
        old = [next(true) + rng.uniform(-shift, shift) if m else 0.0 for m in mask]
        advantage = rng.uniform(-2, 2)
        samples.append(replace(sample, old_logprobs=old, advantages=[advantage * m for m in mask]))
    return samples


def rewarded(samples: Sequence[Sample]) -> list[Sample]:
    """The samples with a random reward at the last token, which is trained."""
    rng = random.Random(1)
    return [replace(s, returns=[rng.uniform(0, 1)] * len(s.ids)) for s in samples]


def group_samples(model: PreTrainedModel) -> list[Sample]:
    """Two groups that share a prompt of 24 tokens, and a branch that shares a turn besides; old
    log-probs lie off by up to 0.1, and each last token has a reward."""
    rng = random.Random(0)

    def draw(num: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(num)]

    prompts, turn = (draw(24), draw(24)), draw(5)
    samples = []
    for index, own in enumerate([draw(7), draw(9), turn + draw(6), turn + draw(4), draw(8)]):
        ids = prompts[index == 4] + own
        mask = [0] * 24 + [1] * (len(own) - 3) + [0, 0, 1]
        sample = Sample(f"{index}", ids, mask, [0.0] * len(ids), [0.0] * len(ids))
        true = iter(trainer_logprobs(model, [sample], temperature=1.0).tolist())
        old = [next(true) + rng.uniform(-0.1, 0.1) if m else 0.0 for m in mask]
        advantage = rng.uniform(-2, 2)
        reward = rng.uniform(0, 1)
        advantages = [advantage * m for m in mask]
        returns = [reward] * len(ids)
        samples.append(replace(sample, old_logprobs=old, advantages=advantages, returns=returns))
    return samples


def taught(samples: Sequence[Sample], weight: float = 1.0) -> LossTerm:
    """The imitation loss of these samples."""
    return LossTerm(samples, imitation, weight, "imitation")


def change(
    model: PreTrainedModel,
    played: Sequence[Sample] | None,
    *overrides: str,
    others: Sequence[LossTerm] = (),
    reference: PreTrainedModel | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Minus the gradient of one update on the policy's loss of the samples `played` and on other
    terms, and its metrics."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    learner, config = learner_of(model, reference=reference), config_of(*overrides)
    own = [] if played is None else [surrogate_term(played, config)]
    metrics = optimizer_step(learner, [*own, *others], lr=1.0, config=config)
    return {name: p.detach() - before[name] for name, p in model.named_parameters()}, metrics


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Two gradients read off weights of at most 2 as a difference."""
    assert_all_near(one, other, GRADIENT, held=2.0)


def batch_of(old_M: torch.Tensor, advantages_M: torch.Tensor, sample_M: Any = None) -> Any:
    """What the losses read of a micro-batch: by default its tokens are of one sample."""
    sample_M = torch.zeros(len(old_M), dtype=torch.long) if sample_M is None else sample_M
    return SimpleNamespace(old_logprobs_M=old_M, advantages_M=advantages_M, sample_M=sample_M)
