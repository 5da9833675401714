"""A custom player: the policy with a hint about the number of words before each turn.

    python -m selfplay.check examples/method/reminded.py:Reminded
    python train.py --config configs/tiny.yaml out=runs/reminded warm_start.num_games=0 \
        rollout.player=examples/method/reminded.py:Reminded
"""

from selfplay.rollout.players import PolicyPlayer

HINT = "(Use at most ten words.)"


class Reminded(PolicyPlayer):
    """Reads a hint after each observation; only the sampled tokens train, never the hint."""

    async def move(self, game, seat, observation, generate):
        read = "\n".join(filter(None, (observation, HINT)))
        return await super().move(game, seat, read, generate)
