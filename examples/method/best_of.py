"""A custom play: before each move of the policy, several moves are tried on copies of the game, and
the game continues with the move of the highest custom value.

    python -m selfplay.check examples/method/best_of.py:play rollout.options.tries=2
    python train.py --config configs/tiny.yaml out=runs/best_of \
        rollout.play=examples/method/best_of.py:play rollout.options.tries=4

The chosen moves train as if they had been sampled alone, so the update favours moves of high value,
like imitation of the best moves.
"""

from selfplay.engines.base import run_all


async def play(position, generate, tries: int = 4):
    """The game, with the best of `tries` sampled moves at each turn of the policy."""
    while position.ended is None:
        seat = position.setup.game.seat_to_move
        if position.setup.players[seat].transcript is None:  # a partner's turn
            await position.turn(generate)
            continue
        copies = [position.fork("try", len(position.turns), number) for number in range(tries)]
        await run_all(copy.turn(generate) for copy in copies)
        position = max(copies, key=value)
    return position.episode()


def value(position):
    """Legal moves before invalid ones, then by the value of the last proposal."""
    legal = bool(position.turns) and position.turns[-1].error is None
    return legal, position.setup.game.outcome().proposal_norm
