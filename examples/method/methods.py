"""Three custom methods, each a class with some of the six hooks of a method.

    python -m selfplay.check examples/method/methods.py:Forecast
    python train.py --config configs/tiny.yaml out=runs/forecast \
        methods.examples/method/methods.py:Forecast.lr=1.0e-3
"""

from dataclasses import dataclass, replace

import torch
from torch import nn

from selfplay.distributed import all_reduce_sum
from selfplay.learner.learner import autocast
from selfplay.learner.method import LossTerm, Method, Trained
from selfplay.learner.rescore import token_values
from selfplay.model.policy import hidden_states


class Forecast(Method):
    """A model next to the policy forecasts each seat's reward before each of its tokens, and the
    advantage is the reward minus the forecast. It learns from the groups that the advantage keeps;
    with algorithm.advantage=ema these are all. On one GPU or a CPU."""

    @dataclass(frozen=True)
    class Options:
        lr: float = 1e-4
        """learning rate of the second model"""

        def check(self, config):
            if config.parallel.tp > 1:
                raise ValueError(f"parallel.tp must be 1 with Forecast, got {config.parallel.tp}")

    def __init__(self, options, parts):
        super().__init__(options, parts)
        self.model = parts.load()  # sharded like the policy, with its first weights
        self.head = nn.Linear(self.model.config.hidden_size, 1, device=parts.learner.world.device)
        for parameter in self.head.parameters():  # nn.Linear draws them without a named seed
            nn.init.zeros_(parameter)
        module = nn.ModuleDict({"model": self.model, "head": self.head})
        optimizer = torch.optim.AdamW(module.parameters(), lr=options.lr)
        self.trained["forecast"] = Trained(module, optimizer)  # offloaded, clipped, saved

    def forecasts(self, learner, batch):
        with autocast(learner):
            hidden_MD = hidden_states(self.model, batch.row)
        return self.head(hidden_MD.float())[:, 0]

    def prepare(self, samples, *, step, config):
        learner = self.parts.learner
        values = token_values(
            learner, samples, lambda batch: self.forecasts(learner, batch), optim=config.optim
        )
        compared = []
        for sample, of_tokens in zip(samples, values, strict=True):
            reward = [sample.total_reward * m for m in sample.mask]
            advantages = [r - v for r, v in zip(reward, of_tokens, strict=True)]
            columns = sample.columns | {"reward": reward}
            compared.append(replace(sample, advantages=advantages, columns=columns))
        return compared, {}

    def terms(self, terms, minibatch, *, step):
        own = LossTerm(minibatch, self.loss, name="forecast", trains_policy=False)
        return [*terms, own]

    def loss(self, learner, batch):
        losses_M = (self.forecasts(learner, batch) - batch.columns["reward"]).square()
        return losses_M, {"forecast_loss": losses_M}


class UntilOneAgrees(Method):
    """Dynamic sampling: more instances until a game of the step ends in an agreement."""

    @dataclass(frozen=True)
    class Options:
        more_instances: int = 8
        """the most instances that a step may play in addition to rollout.instances"""

    def after_play(self, rollout, more, *, config):
        left = self.options.more_instances
        while left and not self.agreements(rollout):
            num = min(left, config.rollout.instances)
            rollout, left = rollout + more(num), left - num
        return rollout

    def agreements(self, rollout):
        """Over all ranks, because every rank must ask for the same number of instances."""
        own = sum(game.outcome.agreed for game in rollout.episodes)
        return all_reduce_sum([float(own)], self.parts.learner.world)[0]


class Short(Method):
    """Between play and update: leave out the seats that sampled more than `most` tokens."""

    @dataclass(frozen=True)
    class Options:
        most: int = 100

    def samples(self, samples, episodes):
        return [sample for sample in samples if sum(sample.mask) <= self.options.most]
