"""A custom reward: the game's reward, and less for a seat that repeats itself.

    python -m selfplay.check examples/method/no_repeats.py:reward --config configs/tiny.yaml
    python train.py --config configs/tiny.yaml out=runs/no_repeats \
        reward.function=examples/method/no_repeats.py:reward reward.options.cost=0.1
"""


def reward(episode, options=None):
    """The game's rewards at its end, and -cost for each turn that repeats an earlier one."""
    cost = (options or {}).get("cost", 0.1)
    said, moves, seats = set(), [], range(len(episode.outcome.rewards))
    for turn in episode.turns:
        repeats = (turn.seat, turn.text) in said
        said.add((turn.seat, turn.text))
        moves.append([-cost if repeats and seat == turn.seat else 0.0 for seat in seats])
    return episode.outcome.rewards, moves
