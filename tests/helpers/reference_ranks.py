"""Run by `ranks.py`: one step of two ranks, to be held beside the reference step."""

from dataclasses import asdict
from pathlib import Path

import selfplay
from selfplay.distributed import full_tensor, gather_objects
from tests.helpers.reference_step import RANKS, gradients_of, settings_of


def one_step(weights: str, *, folder: Path) -> dict[str, object]:
    """The samples of all ranks, how many each trained on, and the full gradient."""
    config = settings_of(Path(weights), out=folder / "run", steps=1, **RANKS)
    with selfplay.start(config) as run:
        learner, world = run.parts.learner, run.parts.world
        with gradients_of(learner.model, learner.optimizer) as gradients:
            step = run.step()
        by_rank = gather_objects([asdict(sample) for sample in step.samples], world)
        return {
            "samples": [sample for samples in by_rank for sample in samples],
            "num_samples": [len(samples) for samples in by_rank],
            "gradient": {name: full_tensor(part).tolist() for name, part in gradients[0].items()},
        }
