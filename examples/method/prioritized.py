"""Custom opponents: self-play at first, then half of the games with an earlier policy, drawn more
often if the policy scored worse against it (prioritized fictitious self-play, as in AlphaStar's
league, doi.org/10.1038/s41586-019-1724-z).

    python -m selfplay.check examples/method/prioritized.py:Prioritized rollout.partners=[self,pool]
    python train.py --config configs/tiny.yaml out=runs/prioritized rollout.partners=[self,pool] \
        rollout.opponents=examples/method/prioritized.py:Prioritized rollout.options.alone=20
"""

from dataclasses import dataclass

from selfplay.data.seeds import named_seed, pick
from selfplay.partners.opponents import Opponents


class Prioritized(Opponents):
    @dataclass(frozen=True)
    class Options:
        alone: int = 10  # steps of self-play before the first step with the pool

    def __init__(self, config):
        super().__init__(config)
        if "pool" not in [text.partition("*")[0] for text in config.rollout.partners]:
            raise ValueError("rollout.partners must have pool, whose members are drawn")
        self.scores = {}  # the policy's mean score with each member in its last games

    def draw(self, step, members):
        if step < self.options.alone:
            return {"self": 1.0}
        weights = [(1 - self.scores.get(name, 0.0)) ** 2 + 1e-3 for name in members]
        member = pick(members, weights, named_seed(self.config.seed, "prioritized", step))
        return {"self": 0.5, member: 0.5}

    def played(self, step, results):
        self.scores |= {name: one.score for name, one in results.items() if name != "self"}

    def state(self):
        return self.scores

    def restore(self, state):
        self.scores = dict(state)
