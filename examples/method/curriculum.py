"""Custom training instances: of any difficulty at first, then by the game's settings.

    python -m selfplay.check examples/method/curriculum.py:instances --config configs/tiny.yaml
    python train.py --config configs/tiny.yaml out=runs/curriculum \
        data.train=examples/method/curriculum.py:instances data.options.easy_steps=30
"""

from selfplay.data.seeds import named_seed


def instances(step, numbers, config, easy_steps: int = 20):
    """One instance per number; a number of a step has the same instance on every rank."""
    kit, options = config.game.kit, config.game.options
    if step < easy_steps:
        options = kit.easy(options)
    seed = named_seed(config.seed, "curriculum", step)
    return [one for n in numbers for one in kit.generate(options, seed=seed, start=n, num=1)]
