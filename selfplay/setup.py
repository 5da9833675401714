"""From settings to the parts of a run: tokenizer, first weights, engine, learner, partners.

GPU memory determines the order: the engine starts first and takes its share of the free memory,
then sleeps while the learner is created. It may start before the learner of a warm start
(`warm_start/beside.py`).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TextIO

import torch
from transformers import PreTrainedTokenizerBase

from selfplay.atomic import atomic_folder
from selfplay.chat.rendering import Rendering, make_rendering
from selfplay.chat.tokenizer import load_tokenizer
from selfplay.checkpoint import (
    checkpoints,
    damaged_saves,
    home_of,
    keep_newest,
    of_policy,
    repair_folder,
    resume,
    state_of,
    step_of,
)
from selfplay.config import Config
from selfplay.config.features import section_class
from selfplay.config.player_spec import parse_shares
from selfplay.data.stream import TrainStream
from selfplay.distributed import World, gather_objects, init_world, on_first_rank
from selfplay.engines.kinds import engine_kind
from selfplay.engines.sglang.processes import Signals
from selfplay.errors import SettingsError
from selfplay.evaluation.evaluate import EvaluationContext
from selfplay.evaluation.held_out import fixed_partners, held_out_at_start
from selfplay.learner.learner import Learner, make_learner
from selfplay.learner.method import check_methods, methods_of_games
from selfplay.metrics.monitors import Monitors
from selfplay.metrics.observers import Groups, make_observers
from selfplay.metrics.run_folder import (
    Opening,
    check_run_folder,
    hold_run,
    keep_code,
    lock_run,
    note_start,
    open_run,
)
from selfplay.metrics.step_log import Journal, Stopwatch
from selfplay.model.hub import check_base, check_digest
from selfplay.partners.endpoints import try_endpoints
from selfplay.partners.opponents import make_opponents
from selfplay.partners.partners import Partners
from selfplay.partners.pool import check_members
from selfplay.partners.router import Live
from selfplay.preflight.model import check_model
from selfplay.preflight.run import read_rendering, start_warnings
from selfplay.preflight.seats import who_plays
from selfplay.rollout.seating import Seated, pieces_of
from selfplay.step.ending import push_all, saves_after
from selfplay.step.run import Policy, Run
from selfplay.warm_start.beside import EngineBeside, fits_beside
from selfplay.warm_start.imitation import (
    first_folder,
    first_weights,
    progress_folder,
    scratch_tokenizer,
    tokenizer_folder,
)
from selfplay.weight_sync.offload import Offload
from selfplay.weight_sync.start import load_engine
from selfplay.weight_sync.supervised import Supervised, SupervisedPolicy, sleep_or_close
from selfplay.weight_sync.sync_check import SyncCheck


def open_world(config: Config, cleanup: ExitStack | None = None) -> World:
    """Set the number of threads, until `cleanup` if given, and join the process groups. Raises
    ValueError as `init_world` does."""
    if config.threads:
        if cleanup is not None:
            cleanup.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(config.threads)
    return init_world(
        config.parallel.tp,
        config.parallel.fsdp,
        engine_tp=config.engine.tp_size,
        device=None if config.device == "auto" else config.device,
        # A rank may wait this long for its engine before it joins the next collective.
        patience_s=config.engine.timeout_s,
    )


def set_up(
    config: Config, world: World, cleanup: ExitStack, checked: Rendering | None = None
) -> Run:
    """Create or resume the run in `config.out`: warm start, engines, learners, held-out games
    before the first step. `cleanup` closes everything that is started here. `checked` is the result
    of `check_run`; without it the model's tokenizer is read here. Every rank must call.

    Raises SettingsError for a folder, a model or a template that cannot be used.
    """
    # A step's games and samples stay until its end. By default Python collects garbage after 700
    # new objects, which takes nearly half of the time of credit assignment.
    cleanup.callback(gc.set_threshold, *gc.get_threshold())
    gc.set_threshold(20_000, 20, 20)
    signals = Signals()
    signals.take()
    cleanup.callback(signals.restore)
    if world.rank == 0 and (roles := who_plays(config)):
        print(f"who plays in training: {roles}", flush=True)
    home = _RunFolder(Path(config.out).absolute(), config, cleanup)
    folder = home.path
    on_first_rank(home.check, world)
    check_shared(folder, world)
    # An absolute path, in case custom code changes the working directory.
    config = replace(config, out=str(folder))
    stream = cleanup.enter_context(closing(TrainStream(config)))
    begun = [_Begun(name, config, home, world) for name in config.policy_names]
    first, *others = begun
    naming = section_class("policies").naming
    for each in begun:
        with naming(config, each.name):
            each.check(checked if each is first else None)
    on_first_rank(home.make_ready, world)  # nothing is written to the folder before this
    for each in begun:
        each.make_weights(cleanup)
    run_engines = engine_kind(config.engine.kind).parted([each.config.engine for each in begun])
    for each, engine in zip(begun, run_engines, strict=True):
        each.config = replace(each.config, engine=engine)
    if not config.policies:
        config = first.config
    for each in begun:
        each.add_partners(cleanup)
    of_seat = [{each.name: each for each in begun}[name] for name in config.policy_of_seat]
    starts = [(each.weights, each.partners) for each in of_seat]
    eval_partners = fixed_partners(config.eval, config.game, config.rollout, starts=starts)
    for each in begun:  # all engines start before any learner takes memory
        each.start_engine(cleanup)
    for each in begun:
        each.put_to_sleep()
    learners, offloads = list[Learner](), list[Offload]()
    for number, each in enumerate(begun):
        with naming(config, each.name):
            learners.append(each.make_learner(learners, begun[number + 1 :]))
        offloads.append(Offload(learners[-1], config.parallel, offloads))
    live = {each.name: Live(each.engine, each.rendering.stop_ids) for each in others}
    router = first.partners.routed(first.engine, *(each.partners for each in others), live=live)
    engines = [
        SupervisedPolicy(each.learner, each.engine, offload, name=each.name)
        for each, offload in zip(others, offloads[1:], strict=True)
    ]
    host = SupervisedPolicy(
        first.learner, first.engine, offloads[0], runner=router, name=first.name, beside=engines
    )
    cast = [Seated(one.name, one.rendering, "" if one is first else one.name) for one in of_seat]
    evaluation = EvaluationContext(
        config, host, first.rendering, world, first.partners.held_out_partner(), cast
    )
    first_step, state = resume(folder, {each.name: each.learner for each in begun})
    policies = [
        each.restored(state, own) for each, own in zip(begun, (host, *engines), strict=True)
    ]
    on_first_rank(partial(keep_newest, folder, config.keep_checkpoints), world)
    push_all(policies, first_step)
    if not home.over:
        note_start(folder, world.rank, getattr(first.engine, "start_s", {}))
    if 0 < first_step < config.steps and world.rank == 0:
        print(f"{folder} continues with step {first_step + 1} of {config.steps}", flush=True)
    if first_step >= max(config.steps, 1) and world.rank == 0:
        print(
            f"{folder} already has {first_step} of {config.steps} steps; increase steps to "
            "continue, or start a new run with out=FOLDER",
            flush=True,
        )
    held_out_at_start(first_step, config.steps, evaluation, eval_partners, folder=folder)
    pieces = pieces_of(cast)
    journal = Journal(
        folder,
        log_games_every=config.log_games_every,
        after_step=first_step,
        rank=world.rank,
        pieces=pieces,
        num_lines=state.get("num_lines"),
    )
    observers = make_observers(
        config,
        world,
        Monitors(config.monitors, rank=world.rank, saves=partial(saves_after, config)),
        Groups(config, world, journal, pieces),
        journal,
    )
    for observer in observers:
        observer.restore(state.get(observer.key, {}))
    return Run(
        config=config,
        folder=folder,
        world=world,
        stream=stream,
        policies=policies,
        cast=cast,
        evaluation=evaluation,
        fixed_partners=eval_partners,
        lock=home.lock,
        observers=observers,
        journal=journal,
        timed=Stopwatch(),
        first_step=first_step,
        methods=methods_of_games(config, [each.learner.methods for each in policies]),
    )


class _Begun:
    """A policy at the start of a run; each method makes the next of its parts. Every rank must call
    each."""

    def __init__(self, name: str, of_run: Config, run: _RunFolder, world: World) -> None:
        self.name, self.run, self.world = name, run, world
        self.config, owners = of_run.of_policy(name), of_run.policy_of_seat
        self.seats = [seat for seat, owner in enumerate(owners) if name and owner == name]
        own = of_run.policies.get(name)
        self.trains: Callable[[int], bool] = own.trains if own else lambda step: True
        beside = [each.trains for other, each in of_run.policies.items() if other != name]
        self.meets = lambda step: own is None or any(trains(step) for trains in beside)
        self.folder = run.home_of(name, self.config)  # of its tokenizer and its warm start

    def check(self, checked: Rendering | None) -> None:
        """Refuse settings, endpoints and models that cannot be used, before anything is written."""
        config, world = self.config, self.world
        if config.model.path is None:  # `checked` is a stand-in
            trained = on_first_rank(partial(self.run.tokenizer, config, self.folder), world)
            checked = make_rendering(trained, template_kwargs=config.model.chat_template)
        elif checked is None:
            checked = read_rendering(config.model, config.game, seed=config.seed)
        self.rendering, self.tokenizer = checked, checked.tokenizer
        on_first_rank(partial(check_methods, config, ask=True), world)
        on_first_rank(partial(try_endpoints, config), world)
        self.start_check = check_model(config, self.tokenizer, checked, world)
        self.start_check.policy = self.name

    def make_weights(self, cleanup: ExitStack) -> None:
        """The tokenizer and the first weights, by a warm start if there is one, and the engine's
        settings for them; perhaps the engine, too, which then sleeps."""
        config, world, folder = self.config, self.world, self.folder
        if config.model.path is None:
            self.tokenizer = make_tokenizer(config, folder, world, self.tokenizer)
            self.rendering = make_rendering(
                self.tokenizer, template_kwargs=config.model.chat_template
            )
        if world.rank == 0 and folder not in self.run.warned:
            self.run.warned.add(folder)
            warn_of_template(self.rendering, self.tokenizer.name_or_path, world)
            for why in start_warnings(config, self.rendering):
                print(f"warning: {why}", file=sys.stderr)
        own = () if folder == self.run.path else self.seats  # in the run's folder one for all
        beside = EngineBeside(config, world, cleanup, self.start_check.sample)
        beside.rewritten, beside.notes = self.rendering.rewritten, self.run.path / "code.txt"
        beside.starts = len(self.run.config.policy_names) == 1 and fits_beside(config, world)
        self.weights = first_weights(
            config, folder, self.tokenizer, self.rendering, world, seats=own, engine=beside
        )
        self.config, self.beside = beside.chosen(self.weights), beside.engine

    def add_partners(self, cleanup: ExitStack) -> None:
        """Load the partners of `rollout.partners`. With several policies they play this one's seats
        while the others train."""
        specs = [spec for spec, _ in parse_shares(self.config.rollout.partners)]
        self.partners = Partners(
            specs,
            self.config,
            rendering=self.rendering,
            world=self.world,
            policy=self.name,
            seats=self.seats,
        )
        cleanup.callback(self.partners.close)

    def start_engine(self, cleanup: ExitStack) -> None:
        """The engine, awake, with the first weights, unless it started beside the warm start; none
        yet if it shares the learner's."""
        if engine_kind(self.config.engine.kind).shares(self.world):
            return
        if self.beside is not None:
            self.engine = self.beside
            return
        self.engine = load_engine(self.config, self.weights, self.world, cleanup=cleanup)
        self.start_check.sample(Supervised(self.engine, self.world))

    def put_to_sleep(self) -> None:
        """Free the engine's memory for the learners. Does nothing for an engine that shares the
        learner's weights. One that cannot sleep is closed, and the first push starts it again."""
        if not engine_kind(self.config.engine.kind).shares(self.world):
            sleep_or_close(self.engine)

    def make_learner(self, before: Sequence[Learner], later: Sequence[_Begun]) -> Learner:
        """The learner, compared with the engine, which sleeps. `before` are the learners of
        the policies before it, `later` the policies after it."""
        config, world = self.config, self.world
        kind = engine_kind(config.engine.kind)
        self.learner = make_learner(
            config,
            self.weights,
            world,
            rendering=self.rendering,
            reader=self.partners.reader,
            name=self.name,
            seats=self.seats,
            beside=before,
            later={each.name: (each.config, each.weights) for each in later},
        )
        if kind.shares(world):
            own = {"policy": self.learner.policy} if self.learner.policy else {}
            self.engine = kind.around(self.learner.model, config.engine, **own)
        self.start_bound = self.start_check.compare(self.learner, self.engine, self.weights)
        return self.learner

    def restored(self, state: Mapping[str, Any], engine: SupervisedPolicy) -> Policy:
        """The policy as a checkpoint's trainer state has it."""
        own, config = of_policy(state, self.name), self.config
        sync_check = SyncCheck(self.learner, engine, config, start_bound=self.start_bound)
        sync_check.restore(own["sync_check"])
        policy = Policy(
            name=self.name,
            config=config,
            tokenizer=self.tokenizer,
            rendering=self.rendering,
            engine=engine,
            baselines={},
            learner=self.learner,
            sync_check=sync_check,
            partners=self.partners,
            opponents=make_opponents(config, {}),
            trains=self.trains,
            meets=self.meets,
        )
        policy.restore(own)
        return policy


@dataclass(slots=True)
class _RunFolder:
    """A run's folder at the start, on rank 0: first `check`, which changes nothing, then
    `make_ready`. Its `lock` is held until `cleanup`. It is `over` if the run had all its steps
    before this start, which then takes none: settings and code stay those of its policy."""

    path: Path
    config: Config
    cleanup: ExitStack
    lock: TextIO | None = None
    warned: set[Path] = field(default_factory=set)  # policies with the same folder are told once
    opening: Opening = field(init=False)
    damaged: dict[Path, dict[Path, str]] = field(init=False)
    over: bool = False

    def check(self) -> None:
        """Raise SettingsError for a folder that another process uses, that cannot be repaired, or
        that holds a run with other settings."""
        if (self.path / ".lock").exists():
            self.lock = lock_run(self.path)
            self.cleanup.callback(self.lock.close)
        self.damaged = {
            home: damaged_saves(home, imitation=progress_folder(home)) for home in self.homes()
        }
        self.opening = check_run_folder(self.path, self.config)
        done = step_of(self.path / "final" / self.config.policy_names[0])
        after = self.path / "held_out_after.json"
        self.over = done >= max(self.config.steps, 1) and after.exists()
        damaged = self.damaged[self.path]
        saved = [each for each in checkpoints(self.path) if each not in damaged]
        if not saved:
            return
        state = state_of(saved[-1])
        for name in self.config.policy_names:
            own, config = of_policy(state, name), self.config.of_policy(name)
            check_members(self.path, own["partners"].get("pool", []), name)
            base = first_folder(config, self.home_of(name, config))
            if config.model.lora is not None and base.exists():
                check_base(home_of(saved[-1], name) / "hf", base)
            if expected := own.get("reference"):
                check_digest(base, expected, what=f"reference of algorithm.kl at {saved[-1]}")

    def home_of(self, name: str, config: Config) -> Path:
        """Where the tokenizer and the warm start of a policy with these settings are: in the run's
        folder, unless its model or its warm start differs from the run's."""
        of_run = self.config
        same = (config.model.path, config.model.scratch, config.warm_start) == (
            of_run.model.path,
            of_run.model.scratch,
            of_run.warm_start,
        )
        return self.path if same else self.path / "policies" / name

    def homes(self) -> list[Path]:
        """The run's folder, then those of policies with their own model or warm start."""
        names = self.config.policy_names
        own = [self.home_of(name, self.config.of_policy(name)) for name in names]
        return [*dict.fromkeys((self.path, *own))]

    def tokenizer(self, config: Config, home: Path) -> PreTrainedTokenizerBase:
        """A scratch model's tokenizer: the saved one, or a new one."""
        saved = tokenizer_folder(config.model, home)
        kept = saved.exists() and not self.opening.anew
        return load_tokenizer(saved) if kept else scratch_tokenizer(config)

    def make_ready(self) -> None:
        """Write the settings and the code that runs, and repair leftovers of killed processes.
        Raises SettingsError if another process has started a run there since `check`."""
        if self.lock is None and (self.path / ".lock").exists():
            raise SettingsError(
                f"out: {self.path} was new, but another process has since started a run there; use "
                "another folder with out=FOLDER, or start again to continue that run"
            )
        self.lock = hold_run(self.path, self.lock)
        self.cleanup.callback(self.lock.close)
        if not self.over:
            open_run(self.opening)
        for home, damaged in self.damaged.items():
            repair_folder(home, damaged, imitation=progress_folder(home))
        if not self.over:
            keep_code(self.opening)


def check_shared(folder: Path, world: World) -> None:
    """Check that every rank sees rank 0's run folder, which passes weights between ranks. Rank 0
    briefly creates a file there, or in the nearest parent if the folder does not exist yet.

    Raises SettingsError on every rank if a host lacks the folder or has another one of that name.
    """
    if world.world_size == 1:
        return
    with ExitStack() as probe:

        def put() -> tuple[str, Path]:
            above = next(path for path in (folder, *folder.parents) if path.exists())
            file = probe.enter_context(NamedTemporaryFile(dir=above, prefix=".shared-"))
            return Path(file.name).name, folder.relative_to(above)

        name, rest = on_first_rank(put, world)
        above = Path(*folder.parts[: len(folder.parts) - len(rest.parts)])
        seen = gather_objects(above / rest == folder and (above / name).exists(), world)
    ranks_without = [rank for rank, sees in enumerate(seen) if not sees]
    if ranks_without:
        raise SettingsError(
            f"out must be a folder on storage that all hosts share, got {folder}, where ranks "
            f"{ranks_without} do not see a file of rank 0"
        )


def make_tokenizer(
    config: Config,
    folder: Path,
    world: World,
    trained: PreTrainedTokenizerBase | None = None,
) -> PreTrainedTokenizerBase:
    """A scratch model's tokenizer from the run folder, where it is saved (`trained`, or trained
    here) if it is missing."""
    saved = tokenizer_folder(config.model, folder)

    def make() -> None:
        if not saved.exists():
            with atomic_folder(saved) as partial_folder:
                (trained or scratch_tokenizer(config)).save_pretrained(partial_folder)

    on_first_rank(make, world)
    return load_tokenizer(saved)


def warn_of_template(rendering: Rendering, name: str, world: World) -> None:
    """Rank 0 prints if the chat template of `name` makes each turn a separate sequence, and warns
    about turn markers that any player can type and arguments that the template does not read."""
    if world.rank:
        return
    if rendering.rewritten:
        print(
            f"{name}: each turn is a separate sequence, with the template's rendering of the "
            f"conversation as its prompt (docs/chat_templates.md): {rendering.rewritten}",
            flush=True,
        )
    for line in rendering.served:
        print(f"{name}: {line}", flush=True)
    if rendering.typeable:
        print(
            f"warning: the chat template of {name} opens a turn with {rendering.typeable!r}, which "
            "is plain text: a message can forge a turn (docs/chat_templates.md)",
            file=sys.stderr,
        )
    if rendering.unread:
        print(
            f"warning: model.chat_template has arguments that the template of {name} does not "
            f"read: {rendering.unread}",
            file=sys.stderr,
        )
