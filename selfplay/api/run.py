"""Runs from Python: an open run takes steps, a saved one is read.

Every error is an exception with a message of one line: SettingsError for invalid input, RunEnds for
a check that ends a run.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dialop.shown import error_text
from selfplay.api.step_settings import step_parts
from selfplay.apps.report.run_files import run_above
from selfplay.checkpoint import export_final
from selfplay.config import Config, load_config
from selfplay.config.load import load, override_words
from selfplay.config.own_code import changed_originals, copies_of
from selfplay.config.play import check_num_games, check_temperature
from selfplay.config.player_spec import CHECKPOINT, Spec, parse_shares
from selfplay.data.instances import HELD_OUT, evaluation_instances
from selfplay.distributed import World, close_world
from selfplay.engines.sglang.fast import early
from selfplay.errors import SettingsError
from selfplay.evaluation.evaluate import evaluate
from selfplay.evaluation.held_out import held_out, unchanged
from selfplay.evaluation.rows import named_rows
from selfplay.metrics.observer import Step
from selfplay.metrics.step_log import plain_json
from selfplay.partners.checkpoints import find_policies, find_source, nearest_beside
from selfplay.partners.updates import GivenWeights, PartnerUpdates
from selfplay.preflight.command_line import goes_on
from selfplay.preflight.run import check_run
from selfplay.setup import open_world, set_up
from selfplay.step import take_step
from selfplay.step.ending import check_place, save_and_sleep, saves_after, trainer_state
from selfplay.step.run import Run


@contextmanager
def outside_event_loop() -> Iterator[None]:
    """Let games run an event loop in this thread also in a notebook: Jupyter runs each cell inside
    its own loop, and Python allows only one."""
    loop = asyncio._get_running_loop()
    task = asyncio.current_task() if loop is not None else None
    if loop is None or task is None:
        yield
        return
    asyncio.tasks._leave_task(loop, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
        asyncio.tasks._enter_task(loop, task)


class SavedRun:
    """What a run has written to its `folder` so far; each property reads the files again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r})"

    @property
    def config(self) -> Config:
        """All settings."""
        return load(Config, self.folder / "config.yaml")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, one per finished step."""
        return self._records("metrics.jsonl")

    @property
    def games(self) -> list[dict[str, Any]]:
        """The lines of games.jsonl: every `log_games_every`-th training game in full."""
        return self._records("games.jsonl")

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The lines of groups.jsonl: all games of an instance of each `log_groups_every`-th step,
        with each seat's reward, return and advantage."""
        return self._records("groups.jsonl")

    @property
    def before(self) -> dict[str, Any] | None:
        """The held-out games before self-play, one row per kind of player; None if not played:
        "sampled", "greedy" and "sampled with PARTNER" for the policy, and "scripted:NAME" for each
        scripted baseline of the game."""
        return self._held_out("before")

    @property
    def after(self) -> dict[str, Any] | None:
        """The same held-out games after the last step."""
        return self._held_out("after")

    @property
    def policy(self) -> Path:
        """The Hugging Face folder of the newest saved weights. Raises SettingsError without one,
        and for a run with several policies."""
        return find_source(self.folder, what="policy").weights

    @property
    def policies(self) -> dict[str, Path]:
        """The same of each of several policies by name; of a single one by the name ""."""
        found = find_policies(self.folder, what="policies")
        return {name: source.weights for name, source in found.items()}

    def _records(self, name: str) -> list[dict[str, Any]]:
        """The complete lines of a file; a run in progress may be writing the last one."""
        path = self.folder / name
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        return [plain_json(line) for line in lines if line.endswith(b"\n")]

    def _held_out(self, stage: str) -> dict[str, Any] | None:
        path = self.folder / f"held_out_{stage}.json"
        return named_rows(json.loads(path.read_bytes())) if path.is_file() else None


class OpenRun(SavedRun):
    """A run with its engine and its learner in this process, until `close` or the end of `with`.

    `num_done` counts its finished steps, also from before a resume. It locks its folder.
    """

    def __init__(self, parts: Run, cleanup: ExitStack) -> None:
        super().__init__(parts.folder)
        self.num_done = self._num_saved = parts.first_step
        self._parts: Run | None = parts
        self._cleanup = cleanup
        self._ended_by: str | None = None  # why it takes no more steps

    @property
    def parts(self) -> Run:
        """The parts of a step: `parts.learner.model` is the policy, `parts.tokenizer` its
        tokenizer. Raises SettingsError if the run is closed."""
        if self._parts is None:
            raise SettingsError(f"{self.folder} is closed; start the run again to continue")
        return self._parts

    @outside_event_loop()
    def step(self, overrides: Mapping[str, Any] | None = None) -> Step:
        """Take the next step: play, credit, update, measure, push (`take_step`).

        `overrides` are settings of only this step by dotted key, from OF_A_STEP. Its line of
        metrics.jsonl has their numbers under these keys.

        Raises:
            SettingsError: for other overrides; or if the settings have no step left, an earlier
                call has ended the run, or a custom loss fails after some of the step's optimizer
                steps, which leaves the step unsaved.
            RunEnds: for a check that ends the run, after its state is saved; an OwnFault for
                custom code.
        """
        settings = self.parts.config
        if self.num_done >= settings.steps:
            raise SettingsError(
                f"steps must be above {self.num_done}, the finished steps of {self.folder}, to "
                f"take another step, got {settings.steps}"
            )
        with ExitStack() as inside:
            parts = self.parts
            if overrides:
                of_step = step_parts(parts, self.folder, overrides, self.num_done)
                parts = inside.enter_context(of_step)
            inside.enter_context(self._ending_at_an_error("step"))
            step = take_step(parts, self.num_done)
            self.num_done = step.number
            if saves_after(settings, step.number):
                self._num_saved = step.number
        return step

    @outside_event_loop()
    def update_partner(self, spec: str, weights: GivenWeights) -> None:
        """Give a training partner `checkpoint:PATH` other weights from the next step on: a model's
        folder, a run's, or tensors by their Hugging Face names. Under torchrun every rank must
        call, with tensors on rank 0.

        The weights are saved in the run's `partners/`, and the next checkpoint names them. A run
        that resumes starts with those of its checkpoint, so call again what came after it. Raises
        SettingsError for another partner, model or tokenizer, which does not end the run.
        """
        with refusing():
            updates, own = self._updates_of(spec)
            for each in updates:
                each.update(own, weights, self.num_done)

    def partner_weights(self, spec: str) -> Path:
        """The Hugging Face folder of a training partner's weights. Raises SettingsError as
        `update_partner`."""
        with refusing():
            (updates, *_), own = self._updates_of(spec)
        return updates.weights(own)

    def _updates_of(self, text: str) -> tuple[list[PartnerUpdates], Spec]:
        """The updates of the policies that have this partner, and its spec."""
        checkpoints = [
            (spec, policy.partners.updates)
            for policy in self.parts.policies
            for spec, _ in parse_shares(policy.config.rollout.partners)
            if spec.kind == CHECKPOINT
        ]
        found = [(spec, updates) for spec, updates in checkpoints if spec.text == text]
        if not found:
            known = ", ".join(spec.text for spec, _ in checkpoints) or "none"
            raise SettingsError(
                f"a partner that gets weights must be a checkpoint among {known}, got {text!r}"
            )
        return [updates for _, updates in found], found[0][0]

    @outside_event_loop()
    def evaluate(
        self, num: int | None = None, *, temperature: float | None = None
    ) -> dict[str, Any]:
        """Play the first `num` held-out games with the current policy; None means
        eval.final_games. `temperature` None samples as in training, 0 is greedy.

        Returns a row as in `before` and `after`. Raises SettingsError for an invalid number or
        temperature, which does not end the run.
        """
        with refusing():
            if num is not None:
                check_num_games(num, what="num")
            if temperature is not None:
                check_temperature(temperature, what="temperature")
        with self._ending_at_an_error("evaluate") as parts:
            settings = parts.config
            instances = evaluation_instances(
                HELD_OUT,
                num=num or settings.eval.final_games,
                game=settings.game,
                data=settings.data,
            )
            row = evaluate(
                instances,
                parts.evaluation,
                temperature=temperature,
                talk_games=settings.eval.talk_games,
            )
        record: dict[str, Any] = json.loads(json.dumps(asdict(row)))
        return record

    @property
    def takes_steps(self) -> bool:
        """Whether the run is open and no call has ended it."""
        return self._parts is not None and self._ended_by is None

    @outside_event_loop()
    def finish(self) -> None:
        """End the run now: play the held-out games, write the page, export the policy to `final/`.

        If the settings have steps left, a checkpoint is saved, and a later start takes them.
        """
        with self._ending_at_an_error("finish") as parts:
            check_place(parts)
            if self.num_done:
                held_out("after", parts.evaluation, parts.fixed_partners, folder=self.folder)
            else:
                unchanged(self.folder, parts.world)
            if self._num_saved != self.num_done:
                save_and_sleep(parts, self.num_done, trainer_state(parts))
            for observer in parts.observers:
                observer.close()
            for policy in parts.policies:
                policy.engine.sleep()  # for good
            check_place(parts)
            finals = {
                each.name: (each.learner, each.tokenizer, each.rendering.served)
                for each in parts.policies
            }
            export_final(parts.folder, finals, step=self.num_done)
            if parts.world.rank == 0:
                for name, (*_, served) in finals.items():
                    for line in served:
                        print(f"{parts.folder / 'final' / name}: {line}", flush=True)
            self._ended_by = "finish has ended it"

    def close(self) -> None:
        """Free the engine, the learner and their memory, and unlock the folder. Without `finish`,
        the steps after the last checkpoint are lost."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    @outside_event_loop()
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.takes_steps and kind is None:
            for observer in self.parts.observers:
                observer.close()
        self._parts = None
        self._cleanup.__exit__(kind, error, trace)

    @contextmanager
    def _ending_at_an_error(self, what: str) -> Iterator[Run]:
        """The parts, for a call that ends the run if it raises."""
        parts = self.parts
        if self._ended_by is not None:
            raise SettingsError(
                f"{self.folder} takes no more steps, because {self._ended_by}; close it and start "
                f"it again: {goes_on(self.folder, parts.config.save_every, 'a start')}"
            )
        try:
            yield parts
        except BaseException as error:
            # Only its name: its traceback would keep the step's memory alive.
            self._ended_by = f"{what} was ended by {type(error).__name__}"
            raise


Given = Config | str | Path | Mapping[str, Any]


@outside_event_loop()
def start(config: Given, overrides: Mapping[str, Any] | None = None, **more: Any) -> OpenRun:
    """Open the run in `config.out`: check everything, warm start, start the engine, play the
    held-out games before self-play; or continue after its last checkpoint.

    `config` is a file, the name of a shipped one, or a mapping of a file's values. `overrides` are
    values by dotted key, `more` by undotted key. Under torchrun every rank must call.

    Raises:
        SettingsError: for settings, files or a machine that cannot be used.
    """
    if not isinstance(config, Config):
        config = load_config(config, override_words(overrides, more))
    elif overrides or more:
        raise SettingsError("overrides need a file, a name or a mapping, got a Config")
    with ExitStack() as cleanup:
        with refusing():
            cleanup.callback(early.end)
            early.begin(config)
            rendering = check_run(config)
            world = join_world(config, cleanup)
        return OpenRun(set_up(config, world, cleanup, rendering), cleanup.pop_all())


def train(config: Given, overrides: Mapping[str, Any] | None = None, **more: Any) -> SavedRun:
    """Take all steps of the run that `start` opens with these arguments, and end it."""
    with start(config, overrides, **more) as run:
        while run.num_done < run.parts.config.steps:
            run.step()
        run.finish()
    return SavedRun(run.folder)


def load_run(folder: str | Path) -> SavedRun:
    """The run in a folder, to read. Raises SettingsError for a folder without a run."""
    if not isinstance(folder, str | Path) or not _holds_run(Path(folder)):
        near = nearest_beside(path := Path(str(folder)), _holds_run) or run_above(path)
        raise SettingsError(f"{folder} must be a run folder with a config.yaml{near}")
    if (home := copies_of(Path(folder) / "config.yaml")) and (line := changed_originals(home)):
        print(line, flush=True)
    return SavedRun(Path(folder))


def _holds_run(folder: Path) -> bool:
    """Whether a run has saved its settings here, as every start does before anything else."""
    return (folder / "config.yaml").is_file()


@contextmanager
def refusing() -> Iterator[None]:
    """Turn a ValueError or an OSError inside it into a SettingsError of one line."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise SettingsError(" ".join(error_text(error).split())) from error


def join_world(config: Config, cleanup: ExitStack) -> World:
    """Join the process groups until `cleanup`. After an error, one of several ranks stays in them,
    because others may still wait there."""
    world = open_world(config, cleanup)

    def leave(kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or world.world_size == 1:
            close_world(world)

    cleanup.push(leave)
    return world
