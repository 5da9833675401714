"""Train one policy in both seats to talk by playing with itself.

    python train.py --config configs/tiny.yaml [key=value ...]
    torchrun --nproc-per-node 2 train.py --config configs/tiny.yaml

One step, top to bottom: take instances, play groups, rewards, score, advantages, update, push
weights, log, evaluate, save. Starting again in the same run folder goes on where the last
checkpoint ended.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from selfplay.checkpoint import finish, resume, save_checkpoint
from selfplay.colocation.handover import sleep_engine, sync_and_wake
from selfplay.colocation.sync_check import NUM_TURNS, SyncCheck, saved_first
from selfplay.config import Config, load_config
from selfplay.config.settings import SettingsError, describe
from selfplay.credit.advantages import reward_samples
from selfplay.credit.compare import compute_advantages
from selfplay.credit.dynamic_sampling import Played, play_full
from selfplay.data.instances import check_files
from selfplay.data.stream import TrainStream
from selfplay.distributed import World, close_world, gather_objects, on_first_rank
from selfplay.engines.base import Sampling
from selfplay.evaluation.drift_monitor import (
    DriftMonitor,
    LanguageDrift,
    check_watch,
    make_drift_monitor,
)
from selfplay.evaluation.held_out import EvaluationContext, held_out, held_out_at_start, validation
from selfplay.learner.batch import share_by_tokens
from selfplay.learner.mismatch import EngineDisagrees
from selfplay.learner.policy_update import update_policy
from selfplay.learner.recompute import recompute_logprobs
from selfplay.learner.reference import update_reference
from selfplay.metrics.journal import Journal
from selfplay.metrics.log import Stopwatch, open_run
from selfplay.metrics.run_lock import hold_run
from selfplay.metrics.step import step_metrics
from selfplay.partners.judge import judge_interactivity, make_judge
from selfplay.partners.partners import Partners, check_partners, make_partners
from selfplay.preflight.model import check_model
from selfplay.preflight.run import Words, check_run, refused
from selfplay.rollout import driver as rollout
from selfplay.rollout.episode import limits_of
from selfplay.rollout.seating import check_players, self_play_games
from selfplay.setup import (
    check_shared,
    first_weights,
    make_learner,
    make_offload,
    make_own_critic,
    make_tokenizer,
    open_world,
    read_template,
    share_policy,
    shares_policy,
    start_engine,
)
from selfplay.warm_start import auxiliary_imitation


def train(config: Config, world: World, cleanup: ExitStack) -> None:
    """The whole run: its parts, then one screen of loop."""
    folder = Path(config.out)
    on_first_rank(lambda: cleanup.callback(hold_run(folder).close), world)
    on_first_rank(partial(open_run, folder, config), world)
    check_shared(folder, world)
    stream = cleanup.enter_context(closing(TrainStream(config)))
    tokenizer = make_tokenizer(config, folder, world)
    rendering = read_template(config, tokenizer, world)
    start = check_model(config, tokenizer, rendering, world)
    weights = first_weights(config, folder, tokenizer, rendering, world)
    partners = make_partners(config, rendering, world, cleanup=cleanup)
    drift_monitor = make_drift_monitor(config, weights, partners)
    engine = start_engine(config, weights, world, listen=start.listen, cleanup=cleanup)
    learner = make_learner(config, weights, world, reference=config.algorithm.kl > 0)
    learner.critic = make_own_critic(config, weights, learner)
    engine = share_policy(config, learner) if shares_policy(config, world) else engine
    start.compare(learner, engine, weights)
    voices = partners.beside(engine)
    context = EvaluationContext(voices, partners.usual(), rendering, world)
    offload = make_offload(config, learner)
    sampling = Sampling(temperature=config.rollout.temperature, stop_ids=rendering.stop_ids)
    limits, judge = limits_of(config), make_judge(config, world, cleanup=cleanup)
    first_step, state = resume(folder, learner)
    baselines: dict[str, float] = state.get("baselines", {})
    partners.begin(state.get("partners", {}), learner, tokenizer)
    stream.restore(state.get("edge", []))
    sync_and_wake(learner, engine, offload, version=first_step, config=config)
    held_out_at_start(first_step, config, context=context, folder=folder)
    drift_monitor.begin(state.get("guard", {}), first_step, context)
    journal, watch = Journal(folder, config, after_step=first_step, rank=world.rank), Stopwatch()
    check = SyncCheck(learner, engine, config=config)
    save = partial(save_checkpoint, folder, learner, tokenizer, keep=config.keep_checkpoints)

    def play(step: int, places: Sequence[int]) -> Played:
        instances, for_step = stream.step(step, places), partners.for_step(step)
        tables = self_play_games(instances, for_step, step=step, config=config, rendering=rendering)
        run = rollout.run(tables, voices, sampling=sampling, limits=limits, version=step)
        return judge_interactivity(run, judge)

    for step in range(first_step, config.steps):
        save_before = partial(
            save, step=step, state=_carried(baselines, stream, partners, drift_monitor)
        )
        with watch("play"):
            episodes, played = play_full(partial(play, step), config=config, world=world)
            check.listen(rollout.first_turns(episodes, NUM_TURNS))
        with watch("credit"):
            samples, credited = reward_samples(
                episodes, algorithm=config.algorithm, reward=config.reward
            )
            stream.remember(gather_objects(stream.spreads(credited.spreads), world))
            mine = share_by_tokens(samples, world)
            auxiliary = auxiliary_imitation(config, rendering, step=step, world=world)
        with watch("sleep"):
            sleep_engine(engine, offload, world)
        with watch("score"), saved_first(save_before, step):
            mine, scored = recompute_logprobs(learner, mine, config=config)
            mine, baselines = compute_advantages(mine, baselines, config=config, world=world)
        with watch("update"), saved_first(save_before, step):
            learnt = scored | update_policy(learner, mine, auxiliary, step=step, config=config)
            learnt |= update_reference(learner, learnt, step=step, config=config)
        with watch("push"), check.put_off():
            sync_and_wake(learner, engine, offload, version=step + 1, config=config)
        with watch("gate"):
            learnt |= check.after_push(version=step + 1)
        learnt |= partners.finish_step(step + 1, episodes, learner, tokenizer)
        metrics = step_metrics(episodes, played, credited, learnt, world)
        if config.eval.every and (step + 1) % config.eval.every == 0 and check.trouble is None:
            with watch("eval"):
                metrics |= drift_monitor.watch(step + 1, validation(config, context))
        journal.step(step + 1, metrics, episodes, watch)
        last = (
            step + 1 == config.steps or drift_monitor.stops(step + 1) or check.trouble is not None
        )
        if (step + 1) % config.save_every == 0 or last:
            with watch("save"), check.put_off():
                sleep_engine(engine, offload, world)
                save(step=step + 1, state=_carried(baselines, stream, partners, drift_monitor))
                sync_and_wake(learner, engine, offload, version=step + 1, config=config)
        check.hold(step + 1)
        drift_monitor.hold(step + 1)

    journal.close()
    held_out("after", config, context=context, folder=folder)
    sleep_engine(engine, offload, world)
    finish(folder, learner, tokenizer, step=max(first_step, config.steps))


def _carried(
    baselines: dict[str, float],
    stream: TrainStream,
    partners: Partners,
    drift_monitor: DriftMonitor,
) -> dict[str, Any]:
    """What the next step needs beside the learner, as plain values for a checkpoint."""
    state = {"baselines": baselines, "edge": stream.state()}
    return state | {"partners": partners.state(), "guard": drift_monitor.state()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Words(
        prog="train.py",
        description=__doc__,
        epilog="Every key, its type, default and meaning:\n\n" + describe(Config),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", required=True, type=Path, help="a YAML file with what differs from the defaults"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that win over the file's"
    )
    try:
        asked = parser.parse_args(arguments)
        config = load_config(asked.config, asked.overrides)
        check_players(config)
        check_partners(config)
        check_watch(config)
        check_files(config)
        check_run(config)
        world = open_world(config)
    except (SettingsError, ValueError, OSError) as error:
        return refused("train.py", error)
    try:
        with ExitStack() as cleanup:
            train(config, world, cleanup)
    except (SettingsError, LanguageDrift, EngineDisagrees) as error:
        return refused("train.py", error, status=2 if isinstance(error, SettingsError) else 1)
    close_world(world)
    return 0


if __name__ == "__main__":
    sys.exit(main())
