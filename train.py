"""Train one policy in all seats to talk by playing with itself.

    python train.py --config configs/talk.yaml [key=value ...]
    torchrun --nproc-per-node 2 train.py --config configs/talk.yaml

One step: play games, turn them into advantages, update the policy, push its weights into the engine
(`selfplay/step.py`). Starting again in the same run folder goes on where the last checkpoint ended.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial

import selfplay  # noqa: F401  it sets how OpenMP waits, which torch reads when it is imported
from dialop.terminal import open_terminal
from selfplay.preflight.command_line import last_line, parse_train, refused

PARSED = None
if __name__ == "__main__":  # --help, --list and a typo are answered before torch is imported
    open_terminal("train.py", stopped="the same command goes on from what was saved")
    try:
        PARSED = parse_train(sys.argv[1:], __doc__ or "")
    except ValueError as error:
        sys.exit(refused("train.py", error))

# isort: split
from torch.distributed.elastic.multiprocessing.errors import record

from dialop.game import MachineError
from selfplay.apps.plan.dry_run import dry_run
from selfplay.apps.report import REPORT, refresh_report
from selfplay.atomic import REFUSALS
from selfplay.config import Config
from selfplay.distributed import World, close_world
from selfplay.errors import Ending, RunEnds, SettingsError
from selfplay.evaluation.held_out import held_out
from selfplay.preflight.run import check_run
from selfplay.setup import open_world, set_up
from selfplay.step import (
    credit,
    evaluate,
    export_final,
    log_groups,
    measure,
    play,
    push,
    save_and_sleep,
    save_learner,
    trainer_state,
    update,
)


def train(config: Config, world: World, cleanup: ExitStack) -> None:
    """Set up the run, then alternate play and update by GRPO (arXiv 2402.03300) with differences:

    - All seats of the policy share one set of weights. A group is (instance, seat, partner): the
      seats of one game share a reward, so they are never each other's baseline.
    - Advantages are per token, so single turns can be penalised or compared (branch points).
    - Groups without variance are dropped before the update.
    - By default the loss is a mean over all trained tokens of all ranks (token_mean), not over
      sequences; the ratio's denominator is the engine's own log-prob of each sampled token; and the
      KL term is off.
    """
    run, ending = set_up(config, world, cleanup), Ending()
    for step in range(run.first_step, config.steps):
        with ending.before_update(partial(save_and_sleep, run, step, trainer_state(run)), step):
            rollout = play(run, step)
            batch = credit(run, rollout)
            learnt, skipped = update(run, rollout, batch, step)
        # The weights have changed; the engine sleeps until the push.
        num_done = step + 1
        saves = num_done % config.save_every == 0 or num_done == config.steps
        checkpoint = save_learner(run, num_done) if saves else None
        run.partners.add_to_pool(num_done, run.learner, run.tokenizer)
        metrics = measure(run, rollout, batch, learnt)
        evaluates = config.eval.every > 0 and num_done % config.eval.every == 0
        with ending.after_update():
            metrics |= push(run, num_done)
            if evaluates:
                metrics |= evaluate(run)
            run.monitors.check(num_done, metrics, skipped)
        log_groups(run, rollout, batch, num_done)
        run.journal.step(num_done, metrics, rollout.episodes, run.timed)
        if evaluates or saves:
            refresh_report(run.folder, rank=world.rank, min_age_s=30.0)
        if checkpoint is not None:
            checkpoint.finish(trainer_state(run), keep=config.keep_checkpoints)
        elif ending.error is not None:
            save_and_sleep(run, num_done, trainer_state(run))
        ending.raise_kept(num_done)

    run.journal.close()
    held_out("after", run.evaluation, folder=run.folder)
    refresh_report(run.folder, rank=world.rank)
    export_final(run)
    if world.rank == 0:
        print(last_line(run.folder, page=run.folder / REPORT), flush=True)


def main(words: list[str] | None = None) -> int:
    try:
        asked, config = PARSED or parse_train(words or [], __doc__ or "")
        check_run(config, here=not asked.dry_run)
        if asked.dry_run:
            dry_run(config, gpu_gb=asked.gpu)
            return 0
        world = open_world(config)
    except (ValueError, OSError) as error:
        return refused("train.py", error)
    try:
        with ExitStack() as cleanup:
            train(config, world, cleanup)
    except (SettingsError, RunEnds) as error:
        return refused("train.py", error, status=2 if isinstance(error, SettingsError) else 1)
    except (OSError, MachineError) as error:
        if isinstance(error, OSError) and error.errno not in REFUSALS:
            raise
        stays = "what was saved before is complete, and the same command goes on from there"
        return refused("train.py", RunEnds(f"{error}; {stays}"), status=1)
    close_world(world)
    return 0


if __name__ == "__main__":
    sys.exit(record(main)())  # adds a failed rank's error to torchrun's summary
