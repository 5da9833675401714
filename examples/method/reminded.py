"""A player of your own: the policy, told before each turn how many words to use.

    python -m selfplay.check examples/method/reminded.py:Reminded
    python train.py --config configs/tiny.yaml out=runs/reminded warm_start.num_games=0 \
        rollout.player=examples/method/reminded.py:Reminded
"""

from selfplay.rollout.players import PolicyPlayer

HINT = "(Use at most ten words.)"


class Reminded(PolicyPlayer):
    """Reads a hint after each observation; the hint never trains, what the policy samples does."""

    async def move(self, game, seat, observation, generate):
        told = "\n".join(text for text in (observation, HINT) if text)
        return await super().move(game, seat, told, generate)
