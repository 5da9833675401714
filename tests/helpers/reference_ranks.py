"""Run by `processes.measured_by`: one step of two ranks, to be held beside the reference step.

Usage: tests/helpers/reference_ranks.py WEIGHTS FOLDER, on each rank. Rank 0 writes
FOLDER/report.json: the samples of all ranks, how many each trained on, and the full gradient.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import selfplay
from selfplay.distributed import full_tensor, gather_objects
from tests.helpers.reference_step import RANKS, gradients_of, settings_of


def main(weights: Path, folder: Path) -> None:
    config = settings_of(weights, out=folder / "run", steps=1, **RANKS)
    with selfplay.start(config) as run:
        learner, world = run.parts.learner, run.parts.world
        with gradients_of(learner.model, learner.optimizer) as gradients:
            step = run.step()
        by_rank = gather_objects([asdict(sample) for sample in step.samples], world)
        gradient = {name: full_tensor(part).tolist() for name, part in gradients[0].items()}
        if world.rank == 0:
            report = {
                "samples": [sample for samples in by_rank for sample in samples],
                "num_samples": [len(samples) for samples in by_rank],
                "gradient": gradient,
            }
            (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
