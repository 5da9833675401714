"""Train one policy in all seats to talk by playing with itself.

    python train.py --config configs/tiny.yaml [key=value ...]
    torchrun --nproc-per-node 2 train.py --config configs/tiny.yaml

One step, top to bottom: take instances, play groups, rewards, log-probs, advantages, update, push
weights, sync check, evaluate, log, save. Starting again in the same run folder goes on where the
last checkpoint ended.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import selfplay  # noqa: F401  it sets how OpenMP waits, which torch reads when it is imported

# isort: split
from torch.distributed.elastic.multiprocessing.errors import record

from selfplay.apps.plan.dry_run import dry_run
from selfplay.apps.report.page import refresh_report
from selfplay.atomic import REFUSALS
from selfplay.checkpoint import finish, save_checkpoint
from selfplay.config import Config, load_config
from selfplay.credit.advantages import compute_advantages, reward_samples
from selfplay.credit.dynamic_sampling import Played, play_full
from selfplay.data.instances import check_files
from selfplay.distributed import World, close_world, gather_objects
from selfplay.engines.base import Sampling
from selfplay.errors import RunEnds, SettingsError
from selfplay.evaluation.drift_monitor import check_validation
from selfplay.evaluation.held_out import held_out, validation
from selfplay.learner.batch import balance_tokens
from selfplay.learner.policy_update import update_policy, update_reference
from selfplay.learner.recompute import recompute_logprobs
from selfplay.metrics.ending import save_on_end
from selfplay.metrics.step import step_metrics
from selfplay.metrics.step_log import Stopwatch
from selfplay.partners.judge import judge_interactivity
from selfplay.partners.partners import check_partners
from selfplay.preflight.run import Words, check_run, help_of, refused
from selfplay.rollout.driver import FinishedGames, first_turns, play_games
from selfplay.rollout.episode import limits_of
from selfplay.rollout.seating import check_players, self_play_games
from selfplay.setup import Run, open_world, set_up, trainer_state
from selfplay.warm_start import auxiliary_imitation
from selfplay.weight_sync.handover import sleep_engine


def train(config: Config, world: World, cleanup: ExitStack) -> None:
    """Set up the run, then alternate play and update.

    The method is GRPO (arXiv 2402.03300). What differs from the paper:

    - All seats of the policy share one set of weights. A group is (instance, seat, partner): the
      seats of one game share a reward, so they are never each other's baseline.
    - Advantages are per token, so single turns can be penalised or compared (branch points).
    - Groups without variance are dropped before the update.
    - The loss is a mean over all trained tokens of all ranks (token_mean), not over sequences.
    - The ratio's denominator is the engine's own log-prob of each sampled token.
    - The KL term is off by default.
    """
    run = set_up(config, world, cleanup)
    learner, engine, offload, timed = run.learner, run.engine, run.offload, Stopwatch()
    ending, sync_check, baselines = run.ending, run.sync_check, run.baselines

    def save(step: int, state: dict[str, Any]) -> None:
        sleep_engine(engine, offload, world)  # also onloads the offloaded tensors
        keep = config.keep_checkpoints
        save_checkpoint(run.folder, learner, run.tokenizer, step=step, state=state, keep=keep)

    if run.first_step >= config.steps and not world.rank:
        print(
            f"{run.folder} has made {run.first_step} steps, and steps is {config.steps}: nothing "
            "to train; raise steps, or begin another run with out=FOLDER",
            flush=True,
        )
    for step in range(run.first_step, config.steps):
        # If a check ends the run before the update, this saves the state before the step.
        save_before = partial(save, step, trainer_state(run, baselines))
        with timed("play"), save_on_end(save_before, step):
            episodes, rollout_stats = play_full(
                partial(play_places, run, step),
                num_instances=config.rollout.instances,
                algorithm=config.algorithm,
                reward=config.reward,
                world=world,
            )
            sync_check.before_update(first_turns(episodes, sync_check.num_turns))
        # The largest mismatch of engine and trainer log-probs that this update accepts.
        settings = replace(run.update_settings, max_mismatch=sync_check.bound)
        with timed("credit"):
            samples, credit_stats = reward_samples(
                episodes, algorithm=config.algorithm, reward=config.reward
            )
            spreads = gather_objects(run.stream.by_origin(credit_stats.reward_stds), world)
            run.stream.remember(spreads)  # for prioritized replay
            samples = balance_tokens(samples, world)
            auxiliary = auxiliary_imitation(run.teachers, run.rendering, step=step, world=world)
        with timed("sleep"):
            sleep_engine(engine, offload, world)
        with timed("logprobs"), save_on_end(save_before, step):
            samples, metrics = recompute_logprobs(learner, samples, settings=settings)
        with timed("advantages"):
            samples, baselines = compute_advantages(
                samples, baselines, algorithm=config.algorithm, world=world
            )
        with timed("update"), save_on_end(save_before, step):
            updated, skipped = update_policy(
                learner, samples, auxiliary, step=step, settings=settings
            )
            metrics |= updated
            metrics |= update_reference(learner, metrics, step=step, algorithm=config.algorithm)
        # The weights are updated: from here on a run ends only after the step is logged and saved.
        with timed("push"), ending.deferred():
            run.restarts.push(step + 1)
        with timed("sync_check"):
            metrics |= sync_check.after_push(version=step + 1)
        metrics |= run.partners.finish_step(step + 1, episodes, learner, run.tokenizer)
        metrics = step_metrics(episodes, rollout_stats, credit_stats, metrics, world)
        metrics["num_engine_restarts"] = run.restarts.take_num()
        with ending.deferred():
            run.watches.check(step + 1, metrics, skipped=skipped)
        evaluated = config.eval.every and (step + 1) % config.eval.every == 0
        if evaluated and not ending.error:
            with timed("eval"), ending.deferred():
                measured = validation(run.evaluation)
                metrics |= run.drift_monitor.measure(step + 1, measured)
                run.drift_monitor.check()
        run.journal.step(step + 1, metrics, episodes, timed)
        if evaluated:
            with timed("report"):
                refresh_report(run.folder, rank=world.rank)
        ends = ending.error is not None
        if (step + 1) % config.save_every == 0 or step + 1 == config.steps or ends:
            with timed("save"), ending.deferred():
                save(step + 1, trainer_state(run, baselines))
                if not ends:
                    run.restarts.push(step + 1)
        ending.raise_deferred(step + 1)

    run.journal.close()
    held_out("after", run.evaluation, folder=run.folder)
    refresh_report(run.folder, rank=world.rank)
    sleep_engine(engine, offload, world)
    finish(run.folder, learner, run.tokenizer, step=max(run.first_step, config.steps))


def play_places(run: Run, step: int, places: Sequence[int]) -> Played:
    """Play the games at these places of a step's batch. Every rank must call.

    If an engine fails, it is restarted and the unfinished games are played again from the start.
    """
    config, rendering = run.config, run.rendering
    instances, partners = run.stream.step(step, places), run.partners.for_step(step)
    finished = FinishedGames()
    sampling = Sampling(temperature=config.rollout.temperature, stop_ids=rendering.stop_ids)
    limits = limits_of(config.rollout)

    def attempt() -> Played:
        setups = self_play_games(
            instances,
            partners,
            step=step,
            game=config.game,
            rollout=config.rollout,
            seed=config.seed,
            rendering=rendering,
        )
        return play_games(
            setups, run.router, sampling=sampling, limits=limits, version=step, finished=finished
        )

    return judge_interactivity(run.restarts.retry(attempt), run.judge)


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    parser = Words(
        prog="train.py",
        usage="train.py --config FILE [key=value ...] [--dry-run [--gpu GB]]",
        description=__doc__,
        epilog=f"Every key, its type, default and meaning:\n\n{help_of(words)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", type=Path, help="a YAML file with what differs from the defaults"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that override the file's"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print settings, first prompt and memory by phase, and start nothing",
    )
    parser.add_argument(
        "--gpu", type=float, metavar="GB", help="with --dry-run: memory of one GPU, such as 80"
    )
    try:
        asked, rest = parser.parse_known_intermixed_args(words)
        parser.check_settings([*rest, *asked.overrides])
        if asked.config is None:
            raise ValueError("--config FILE is needed, such as --config tiny")
        config = load_config(asked.config, asked.overrides)
        if asked.gpu is not None and not asked.dry_run:
            raise ValueError("--gpu needs --dry-run")
        check_players(config)
        check_partners(config.rollout.partners, config.game, out=config.out)
        check_validation(config.eval, config.game, config.rollout, out=config.out)
        check_files(config.game, config.data)
        check_run(config, here=not asked.dry_run)
        if asked.dry_run:
            dry_run(config, gpu_gb=asked.gpu)
            return 0
        world = open_world(config)
    except (SettingsError, ValueError, OSError) as error:
        return refused("train.py", error)
    try:
        with ExitStack() as cleanup:
            train(config, world, cleanup)
    except (SettingsError, RunEnds) as error:
        return refused("train.py", error, status=2 if isinstance(error, SettingsError) else 1)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        what_stays = "what was saved before is whole, and the same command goes on from there"
        return refused("train.py", OSError(f"{error}; {what_stays}"), status=1)
    close_world(world)
    return 0


if __name__ == "__main__":
    sys.exit(record(main)())  # adds a failed rank's error to torchrun's summary
