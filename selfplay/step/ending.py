"""The end of a step: what is saved, and when a failed check ends the run.

A checkpoint is started while the engine sleeps and finished once the step is recorded, so it needs
no further push and holds everything that the step has changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TextIO, cast

from selfplay.atomic import damage
from selfplay.checkpoint import OpenCheckpoint, begin_checkpoint, of_policy, resume
from selfplay.config import Config
from selfplay.distributed import on_first_rank, raise_on_all_ranks
from selfplay.errors import RunEnds, with_step
from selfplay.metrics.monitors import GoBack
from selfplay.metrics.run_folder import check_lock
from selfplay.step.run import Policy, Run


class Ending:
    """The two phases of the step after `step` finished ones. Every rank must enter each.

    A check that fails before the weights change ends the run at once, with the state before the
    step. A check that fails later ends it in `finish`, once the step is recorded and saved.
    """

    def __init__(self, run: Run, step: int) -> None:
        """Raises RunEnds, without a save, if the run's folder no longer belongs to this trainer."""
        check_place(run)
        self._run, self._step = run, step
        self._before = trainer_state(run)  # credit changes the baselines
        self._checkpoint: OpenCheckpoint | None = None
        self.failed: RunEnds | None = None  # the first check that failed after the change
        self._back: GoBack | None = None

    @contextmanager
    def before_weights_change(self) -> Iterator[None]:
        """A check that fails in this block raises RunEnds at once, after a save."""
        try:
            yield
        except RunEnds as error:
            save_and_sleep(self._run, self._step, self._before)
            raise with_step(error, self._step) from error

    def begin_save(self) -> None:
        """Write the learner, if a save is due, while the engine still sleeps."""
        if saves_after(self._run.config, self._step + 1):
            self._checkpoint = save_learner(self._run, self._step + 1)

    @contextmanager
    def after_weights_changed(self) -> Iterator[None]:
        """A check that fails ends this block, and `finish` raises the first one."""
        try:
            yield
        except GoBack as back:
            self._back = back
        except RunEnds as error:
            self.failed = self.failed or error

    def finish(self) -> None:
        """Save what the step and its observers have changed, or where a monitor asks for it the
        run's best policy in place of it; then raise the first failure."""
        run, num_done = self._run, self._step + 1
        if self._back is not None:
            with self.after_weights_changed():
                self._checkpoint = begin_from(run, self._back.best, num_done)
                push_all(run.policies, num_done)
        if self._checkpoint is not None:
            finish_checkpoint(run, self._checkpoint, trainer_state(run))
        elif self.failed is not None:
            save_and_sleep(run, num_done, trainer_state(run))
        if self.failed is not None:
            raise with_step(self.failed, num_done) from self.failed


def saves_after(config: Config, num_done: int) -> bool:
    """Whether a checkpoint is saved after `num_done` steps."""
    return num_done % config.save_every == 0 or num_done == config.steps


def check_place(run: Run) -> None:
    """Raise RunEnds, on every rank, if the run's folder no longer belongs to this trainer."""
    held = cast("TextIO", run.lock)  # None only on other ranks
    on_first_rank(partial(check_lock, run.folder, held), run.world)


def save_learner(run: Run, num_done: int) -> OpenCheckpoint:
    """Write the learner after `num_done` steps, while the engine sleeps; `finish` completes it."""
    check_place(run)
    with run.timed("save"):
        learners = {each.name: (each.learner, each.tokenizer) for each in run.policies}
        for policy in run.policies:
            policy.engine.onload()
        return begin_checkpoint(run.folder, learners, step=num_done)


def finish_checkpoint(run: Run, checkpoint: OpenCheckpoint, state: Mapping[str, Any]) -> None:
    """Complete the checkpoint. Its time counts in the next step, as this one's line is written."""
    with run.timed("save"):
        run.journal.sync()
        checkpoint.finish(state, keep=run.config.keep_checkpoints)


def begin_from(run: Run, best: int, num_done: int) -> OpenCheckpoint:
    """Put the policies as they were after `best` steps in place of those after `num_done`, and
    begin a checkpoint of them.

    Weights, optimizers, what methods keep and train, baselines, the pool and the results of
    opponents return. Noise floors, observers and partners' weights given from Python stay. The
    engines go to sleep. Raises RunEnds, with nothing changed, if that checkpoint is damaged.
    """
    folder = run.folder / "checkpoints" / f"step_{best:06d}"
    if found := on_first_rank(partial(damage, folder), run.world):
        raise RunEnds(f"{folder} must be undamaged, as `monitors` go back to it, got {found}")
    for policy in run.policies:
        policy.engine.sleep()
    learners = {policy.name: policy.learner for policy in run.policies}
    _, state = resume(run.folder, learners, step=best)
    for policy in run.policies:
        own = of_policy(state, policy.name)
        policy.restore(own | {"partners": {"pool": own["partners"]["pool"]}})
    return save_learner(run, num_done)


def push_all(policies: Sequence[Policy], version: int) -> None:
    """Push each policy's weights to its engine, which sleeps."""
    for policy in policies:  # the engines take the memory that all of them free
        policy.engine.make_way()
    for policy in policies:
        policy.engine.push(version)


def save_and_sleep(run: Run, num_done: int, state: Mapping[str, Any]) -> None:
    """Save the run after `num_done` steps; the engines go to sleep for good."""
    run.policies[0].engine.sleep()
    finish_checkpoint(run, save_learner(run, num_done), state)


def trainer_state(run: Run) -> dict[str, Any]:
    """The state besides the learners' that a checkpoint must hold to resume, as plain values.
    Raises OwnFault, on every rank, for an invalid state of custom code."""
    with raise_on_all_ranks(run.world):
        return {
            "policies": {policy.name: policy.state() for policy in run.policies},
            "num_lines": run.journal.num_lines,
            **({"overrides": run.overrides} if run.overrides else {}),
        } | {observer.key: observer.state() for observer in run.observers if observer.key}
