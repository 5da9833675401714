"""A custom observer: numbers in metrics.jsonl and on the page, here the longest message of each
step in words, and the number of messages longer than its setting.

    python -m selfplay.check examples/observer/lengths.py:Lengths
    python train.py --config configs/tiny.yaml out=runs/lengths \
        'observers=[console, page, {examples/observer/lengths.py:Lengths: {most: 5}}]' \
        'monitors=[warn if observed/longest > 20 over 5]'
"""

from dataclasses import dataclass

from selfplay.distributed import gather_objects
from selfplay.metrics.observer import Observer


class Lengths(Observer):
    """Words that the policy's seats write in a turn. A resumed run keeps the record."""

    @dataclass(frozen=True)
    class Options:
        most: int = 10
        """the most words of a message that is not long"""

    record = 0

    def on_step(self, step):
        own = [len(turn.text.split()) for game in step.episodes for turn in game.turns]
        words = [num for rank in gather_objects(own, self.world) for num in rank]
        self.record = max([self.record, *words])
        return {
            "longest": max(words, default=0),
            "long": sum(num > self.options.most for num in words),
            "record": self.record,
        }

    def state(self):
        return {"record": self.record}

    def restore(self, state):
        self.record = state.get("record", 0)
