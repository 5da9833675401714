"""Each role has the same share of the loss, however few tokens its seats sample.

    python -m selfplay.check examples/method/equal_roles.py:EqualRoles
    python train.py --config configs/tiny_mediation.yaml out=runs/equal_roles \
        "methods={examples/method/equal_roles.py:EqualRoles: {}}"
"""

from dataclasses import replace

from selfplay.distributed import all_reduce_sum
from selfplay.learner.method import Method


class EqualRoles(Method):
    """Scales each sample's advantages by (all tokens / roles) / (tokens of its role). The loss is a
    mean over tokens, so each role's tokens then weigh 1 / roles in it."""

    def prepare(self, samples, *, step, config):
        roles = config.game.kit.ROLES
        names = [*dict.fromkeys(roles)]
        of = [roles[int(sample.seating.split()[1])] for sample in samples]  # "seat 0 beside NAME"
        own = [
            float(sum(sum(s.mask) for s, role in zip(samples, of, strict=True) if role == name))
            for name in names
        ]
        nums = dict(zip(names, all_reduce_sum(own, self.parts.learner.world), strict=True))
        present = [num for num in nums.values() if num]
        scaled = []
        for sample, role in zip(samples, of, strict=True):
            weight = sum(present) / len(present) / nums[role]
            advantages = [weight * advantage for advantage in sample.advantages]
            scaled.append(replace(sample, advantages=advantages))
        return scaled, {}
