"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2)."""

from __future__ import annotations

import math

from selfplay.advantages.advantages import CreditStats, reward_samples
from selfplay.advantages.rewards import with_rewards
from selfplay.config import Config
from selfplay.distributed import all_reduce_sum
from selfplay.learner.method import Method, More
from selfplay.methods.options import ResampleOptions
from selfplay.rollout.driver import Rollout


class Resample(Method):
    """Plays more instances to replace those whose groups have zero variance."""

    Options = ResampleOptions

    def after_play(self, rollout: Rollout, more: More, *, config: Config) -> Rollout:
        """The games, and games of more instances until as many groups of the policies that train
        have variance as the first round has such groups. All ranks play equally many rounds."""
        newest, num = rollout, config.rollout.instances
        num_left = self.options.instances
        num_wanted, num_useful = 0.0, 0.0
        while num_left:
            paid = with_rewards(newest.episodes, config.reward)
            own = CreditStats()
            for policy in newest.trained:
                algorithm = config.of_policy(policy).algorithm
                own += reward_samples(
                    paid, algorithm=algorithm, reward=config.reward, policy=policy
                )[1]
            counts = [float(own.num_groups), float(own.num_groups - own.num_zero_variance_groups)]
            num_groups, num_new = all_reduce_sum(counts, self.parts.learner.world)
            num_wanted, num_useful = num_wanted or num_groups, num_useful + num_new
            if num_useful >= num_wanted:
                break
            num_missing = math.ceil((num_wanted - num_useful) * num / num_wanted)
            num_more = min(num_missing, num_left)
            newest = more(num_more)
            rollout, num_left = rollout + newest, num_left - num_more
        return rollout
