"""Reads a run's newest checkpoint on this mesh and writes it again: `torchrun … resave.py RUN TO
[KEY=VALUE …]`. Nothing is trained in between."""

from __future__ import annotations

import sys
from pathlib import Path

from selfplay.checkpoint import begin_checkpoint, resume
from selfplay.config import load_config
from selfplay.distributed import close_world
from selfplay.learner.learner import make_learner
from selfplay.setup import open_world


def main() -> None:
    run, to = Path(sys.argv[1]), Path(sys.argv[2])
    config = load_config(run / "config.yaml", sys.argv[3:])
    world = open_world(config)
    learner = make_learner(config, run / "warm_start", world)
    step, state = resume(run, {"": learner})
    begin_checkpoint(to, {"": (learner, None)}, step=step).finish(state, keep=1)
    close_world(world)


if __name__ == "__main__":
    main()
