"""One training step, verb by verb: play, credit, update, measure, push.

`take_step` calls them in this order. The table in docs/design.md lists the files that each uses.
Every rank must call each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, compress

from selfplay.advantages.advantages import CreditStats, compute_advantages, reward_samples
from selfplay.advantages.rewards import sample_name, with_rewards
from selfplay.advantages.sample import Sample
from selfplay.config import Config
from selfplay.data.seeds import named_seed
from selfplay.distributed import World, gather_objects, raise_on_all_ranks
from selfplay.engines.base import Sampling
from selfplay.errors import OwnFault, RunEnds, SettingsError
from selfplay.evaluation.held_out import validation
from selfplay.learner.batch import balance_tokens
from selfplay.learner.method import Method, checked_samples, hook_call
from selfplay.learner.rescore import Watched
from selfplay.learner.update import update_policy
from selfplay.metrics.observer import Step, TokenRecord
from selfplay.metrics.records import checked_state, logged
from selfplay.metrics.step import add_up, step_metrics
from selfplay.partners.opponents import pass_results
from selfplay.partners.partners import shared_out
from selfplay.rollout.driver import Rollout, first_turns, play_games
from selfplay.rollout.episode import limits_of
from selfplay.rollout.play import play_of
from selfplay.rollout.seating import self_play_games
from selfplay.step.ending import Ending, push_all
from selfplay.step.run import Batch, Policy, Run, UpdateResult

COUNTS = ("num_trained_tokens", "num_optimizer_steps", "num_skipped_steps")


def take_step(run: Run, step: int) -> Step:
    """Take the step after `step` finished ones: play, then update by GRPO (arXiv 2402.03300) with
    these differences:

    - All seats of a policy share one set of weights, and each sample trains the policy that sampled
      it. A group is (instance, seat, partner): the seats of one game are never each other's
      baseline.
    - Advantages are per token, so single turns can be rewarded or compared (branch points).
    - Groups without variance are dropped before the update if the baseline is the group's mean.
    - By default the loss is a mean over all trained tokens of all ranks (token_mean), not over
      sequences; the ratio's denominator is the engine's own log-prob of each sampled token; and the
      KL term is off.

    Raises RunEnds, on every rank, for a check that fails, after the trainer's state is saved: the
    state before the step if no weight has changed; otherwise the step is finished and logged first.
    """
    config, ending = run.config, Ending(run, step)
    with ending.before_weights_change():
        rollout = play(run, step, run.world.replica.share(config.rollout.instances))
        rollout = after_play(run, step, rollout, run.methods, [*config.further_instances])
        for policy in run.policies:
            pass_results(policy.opponents, step, rollout.episodes, run.world, policy.name)
        with run.timed("credit"), raise_on_all_ranks(run.world):
            rollout = replace(rollout, episodes=with_rewards(rollout.episodes, config.reward))
        batch = credit(run, rollout, step)
        updated = update(run, rollout, batch, step)
    num_done = step + 1
    ending.begin_save()  # the engine sleeps until the push
    for policy in run.policies:
        policy.partners.add_to_pool(num_done, policy.learner, policy.tokenizer)
    metrics = measure(run, rollout, batch, updated)
    with ending.after_weights_changed():
        metrics |= push(run, num_done)
        if evaluates_after(config, num_done):
            with run.timed("eval"):  # the validation games, also with each of `eval.partners`
                metrics |= validation(run.evaluation, run.fixed_partners)
    done = Step(
        num_done,
        rollout.episodes,
        [*chain(*batch.samples.values())],
        {"step": num_done, **metrics, **run.timed.lap()},
        batch.stats,
        updated.advantages,
        skipped=updated.skipped,
        complete=ending.failed is None,
        tokens=updated.tokens,
    )
    for observer in run.observers:
        with ending.after_weights_changed():
            observer.on_step(replace(done, policy=run.evaluation))
    ending.finish()
    return done


def evaluates_after(config: Config, num_done: int) -> bool:
    """Whether the validation games are played after `num_done` steps."""
    return config.eval.every > 0 and num_done % config.eval.every == 0


def play(run: Run, step: int, numbers: Sequence[int]) -> Rollout:
    """Play `rollout.group_size` games of each of the step's instances with these numbers."""
    config, first = run.config, run.policies[0]
    met = [policy for policy in run.policies if policy.meets(step)]
    partners = shared_out([one.partners.for_step(step, one.opponents) for one in met])
    # `raise_on_all_ranks` waits for the last rank's games, so that time counts as play.
    with run.timed("play"), raise_on_all_ranks(run.world):
        setups = self_play_games(
            run.stream.step(step, numbers),
            partners,
            step=step,
            game=config.game,
            rollout=config.rollout,
            seed=config.seed,
            cast=run.cast,
        )
        played = play_games(
            setups,
            first.engine,
            sampling=Sampling(config.rollout.temperature, first.rendering.stop_ids),
            limits=limits_of(config.rollout),
            play=play_of(config),
            versions={seated.model: step for seated in run.cast},
        )
    return Rollout(*played, trained=[one.name for one in run.policies if one.trains(step)])


def after_play(
    run: Run, step: int, rollout: Rollout, methods: Sequence[Method], further: list[int]
) -> Rollout:
    """The games after these methods, which run in order. `further` are the numbers of additional
    instances that they may play; each is removed when it is played."""
    for number, method in enumerate(methods):
        more = partial(play_more, run, step, methods[:number], further)
        with hook_call(method, run.world):
            rollout = method.after_play(rollout, more, config=run.config)
    return rollout


def play_more(
    run: Run, step: int, before: Sequence[Method], further: list[int], num: int
) -> Rollout:
    """Play this many of the step's `further` instances over all ranks, and pass the games to the
    methods `before`. Raises OwnFault for more than remain."""
    if not 0 <= num <= len(further):
        raise OwnFault(
            f"it may play {len(further)} more instances in this step, by more_instances of its "
            f"settings, got {num}"
        )
    numbers, further[:] = further[:num], further[num:]
    rollout = play(run, step, [numbers[i] for i in run.world.replica.share(num)])
    return after_play(run, step, rollout, before, further)


def credit(run: Run, rollout: Rollout, step: int) -> Batch:
    """Turn the games into samples with rewards, and rewards into advantages over all ranks' groups.

    Samples move between ranks until all have about the same number of tokens. Updates each policy's
    `baselines`, the state of `algorithm.advantage`. A policy that rests has no samples and no
    groups in the batch, but its baselines follow its games.
    """
    compared, config, stats = dict[str, list[Sample]](), run.config, CreditStats()
    with run.timed("credit"):
        for policy in run.policies:
            own, counted = reward_samples(
                rollout.episodes,
                algorithm=policy.config.algorithm,
                reward=config.reward,
                policy=policy.name,
            )
            for method in policy.learner.methods:
                with hook_call(method, run.world):
                    own = [*checked_samples(method.samples(own, rollout.episodes))]
            own, baselines = compute_advantages(
                own, policy.baselines, algorithm=policy.config.algorithm, world=run.world
            )
            policy.baselines.update(baselines)
            stats += counted if policy.trains(step) else CreditStats(rewards=counted.rewards)
            compared[policy.name] = balance_tokens(own if policy.trains(step) else [], run.world)
    return Batch(compared, stats)


def update(run: Run, rollout: Rollout, batch: Batch, step: int) -> UpdateResult:
    """Put the engines to sleep, then take each policy's optimizer steps.

    `update_policy` raises EngineDisagrees, before any weight of the policy changes, if the
    log-probs of engine and trainer differ by more than noise. A failure after another policy's
    weights have changed raises SettingsError.
    """
    logged, updated = logged_samples(run, rollout, step), UpdateResult()
    for policy in run.policies:
        with run.timed("sync_check"):
            check, seed = policy.sync_check, named_seed(run.config.seed, "sync check", step)
            check.keep_turns(  # their log-probs are compared after the push
                first_turns(rollout.episodes, check.num_turns, seed=seed, policy=policy.name)
            )
    with run.timed("sleep"):  # once every engine has scored its turns
        run.policies[0].engine.sleep()
    for number, policy in enumerate(run.policies):
        if number:  # only this one's moments stay on the GPU; a shared reference does not move
            with run.timed("sleep"):
                policy.engine.onload()
                run.policies[number - 1].engine.make_way()
        if not policy.trains(step):
            updated.metrics.update(named({"num_trained_tokens": 0.0}, policy))
            continue
        watched = Watched(logged)
        try:
            with run.timed("update"):
                metrics, skipped = update_policy(
                    policy.learner,
                    batch.samples[policy.name],
                    step=step,
                    config=policy.config,
                    max_mismatch=policy.sync_check.bound,
                    watched=watched,
                )
        except RunEnds as error:
            if not sums_of_policies(updated.metrics).get("num_optimizer_steps"):
                raise  # no weight has changed
            raise SettingsError(f"{error}; this step is not saved") from error
        updated.metrics.update(named(metrics, policy))
        updated.skipped.extend(skipped)
        updated.tokens.update(token_records(batch.samples[policy.name], watched, run.world))
        for of_rank in gather_objects(watched.advantages, run.world):
            updated.advantages.update(of_rank)
    updated.metrics.update(sums_of_policies(updated.metrics))
    return updated


def sums_of_policies(metrics: Mapping[str, float]) -> dict[str, float]:
    """What counts over all policies, under its plain name."""
    plain = {name: name.partition("/")[0] for name in metrics}
    return add_up({plain[name]: metrics[name]} for name in metrics if plain[name] in COUNTS)


def logged_samples(run: Run, rollout: Rollout, step: int) -> set[str]:
    """The names of the samples of all ranks' games that go to games.jsonl. Raises OwnFault, on
    every rank, for a game that cannot be written."""
    games = logged(rollout.episodes, step + 1, run.config.log_games_every)
    with raise_on_all_ranks(run.world):
        for game in games:
            checked_state(game)
    own = [sample_name(game, seat) for game in games for seat in range(len(game.transcripts))]
    return {name for of_rank in gather_objects(own, run.world) for name in of_rank}


def token_records(
    samples: Sequence[Sample], watched: Watched, world: World
) -> dict[str, TokenRecord]:
    """The records of the watched samples over all ranks, by name. Their log-probs are the engine's,
    even if a method has replaced them in the update."""
    own = {}
    for sample in samples:
        if sample.name in watched.seen:
            advantages, trainer = watched.seen[sample.name]
            engine = list(compress(sample.old_logprobs, sample.mask))
            mismatch = [one - other for one, other in zip(trainer, engine, strict=False)]
            ids = list(compress(sample.ids, sample.mask))
            own[sample.name] = TokenRecord(ids, engine, advantages, mismatch)
    return {name: one for of_rank in gather_objects(own, world) for name, one in of_rank.items()}


def measure(run: Run, rollout: Rollout, batch: Batch, updated: UpdateResult) -> dict[str, float]:
    """The metrics of the step over all ranks: games, groups, update, endpoints' usage.

    Restarts are counted since the last call, including the last push and evaluation."""
    usage = add_up(policy.partners.take_usage() for policy in run.policies)
    counted = updated.metrics | usage
    metrics = step_metrics(rollout.episodes, rollout.stats, batch.stats, counted, run.world)
    num_restarts = sum(policy.engine.take_num_restarts() for policy in run.policies)
    return metrics | run.changed | {"num_engine_restarts": num_restarts}


def push(run: Run, version: int) -> dict[str, float]:
    """Push each policy's new weights to its engine and compare their bits, then compare log-probs.

    Raises EngineLost or EngineDisagrees."""
    metrics = dict[str, float]()
    with run.timed("push"):
        push_all(run.policies, version)
    for policy in run.policies:
        with run.timed("sync_check"):
            metrics |= named(policy.sync_check.after_push(version=version), policy)
    return metrics


def named(metrics: Mapping[str, float], policy: Policy) -> dict[str, float]:
    """The policy's metrics by their names in metrics.jsonl: entropy/NAME, or entropy for a single
    policy."""
    return {f"{key}/{policy.name}" if policy.name else key: n for key, n in metrics.items()}
