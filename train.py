"""Train one policy in all seats to talk by playing with itself.

    python train.py --config configs/talk.yaml [key=value ...]
    torchrun --nproc-per-node 2 train.py --config configs/talk.yaml

One step: play games, compute advantages, update the policy, push its weights into the engine
(`selfplay/step/`). The same command in the same run folder continues from the last checkpoint.
In Python, use `selfplay.train` (docs/python.md).
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import selfplay  # noqa: F401  sets OpenMP's wait policy, which torch reads when it is imported
from dialop.shown import first_cause, own_place
from dialop.terminal import ENDING, Ended, open_terminal, show_error

PARSED = None
HERE = Path.cwd()  # the user's code may chdir


def stopped() -> str:
    """What the line of a run that Ctrl-C or a signal ends says of its next start."""
    if PARSED is None or PARSED[0].dry_run:
        return ""
    return goes_on(HERE / PARSED[1].out, PARSED[1].save_every)


if __name__ == "__main__":  # before the imports that need packages
    open_terminal("train.py", stopped=stopped)

# isort: split
from selfplay.engines.sglang.fast import early
from selfplay.preflight.command_line import goes_on, last_line, parse_train, refused, typed

if __name__ == "__main__":  # --help, --list and a typo are answered before torch is imported
    try:
        PARSED = parse_train(sys.argv[1:], __doc__ or "")
        if not PARSED[0].dry_run:
            if os.environ.get("RANK", "0") == "0":
                print(f"run {PARSED[1].out}: loading torch", flush=True)
            early.begin(PARSED[1])
    except (ValueError, OSError) as error:
        sys.exit(refused("train.py", error))

# isort: split
from torch.distributed.elastic.multiprocessing.errors import record

from dialop.game import GameError
from selfplay.api.run import start
from selfplay.apps.plan.dry_run import dry_run
from selfplay.apps.report import REPORT
from selfplay.atomic import REFUSALS
from selfplay.errors import OwnFault, RunEnds, SettingsError, own_fault
from selfplay.metrics.run_folder import holds_run
from selfplay.preflight.run import check_run


def ended_by_own(error: BaseException, folder: Path) -> int:
    """Print an error of the user's code as one line; returns the exit status."""
    show_error(typed("train.py"), error, folder if holds_run(folder) else None)
    return 1


def main(words: list[str] | None = None) -> int:
    """Start or resume a run, take its steps, and finish it. Returns the exit status."""
    try:
        args, config = PARSED or parse_train(words or [], __doc__ or "")
        if args.dry_run:
            dry_run(config, check_run(config, here=False), gpu_gb=args.gpu)
            return 0
    except (ValueError, OSError) as error:
        return refused("train.py", error)
    out, folder = Path(config.out), Path(config.out).absolute()  # the user's code may chdir
    stays = partial(goes_on, folder, config.save_every)
    try:
        with start(config) as run:
            while run.num_done < config.steps:
                run.step()  # play, credit, update, measure, push: `take_step` in selfplay/step/
            run.finish()  # held-out games again, report.html, the policy in final/
            if run.parts.world.rank == 0:
                print(last_line(out, page=out / REPORT), flush=True)
    except (SettingsError, RunEnds) as error:
        if isinstance(error, OwnFault) and own_place(first_cause(error)):
            return ended_by_own(error, folder)
        return refused("train.py", error, status=2 if isinstance(error, SettingsError) else 1)
    except (OSError, GameError) as error:
        lost = f"{folder} must stay in place during its run, got no such folder"
        gone = isinstance(error, FileNotFoundError) and not folder.is_dir()
        if isinstance(error, OSError) and error.errno not in REFUSALS and not gone:
            raise
        reason = RunEnds(lost if gone else f"{error}; {stays()}")
        return refused("train.py", reason, status=1)
    except SystemExit as left:
        if own_fault(left):
            return ended_by_own(left, folder)
        ended = next((number for number in ENDING if left.code == 128 + number), None)
        if ended is None or isinstance(left, Ended):
            raise
        reason = RunEnds(f"ended by {ended.name}; {stays()}")
        return refused("train.py", reason, status=128 + ended)
    except Exception as error:  # the user's code may raise anything
        if not own_place(error):
            raise
        return ended_by_own(error, folder)
    return 0


if __name__ == "__main__":
    sys.exit(record(main)())  # adds a failed rank's error to torchrun's summary
