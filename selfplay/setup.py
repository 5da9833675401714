"""From settings to the parts of a run: tokenizer, first weights, engine, learner, partners.

GPU memory determines the order: the engine starts first and takes its share of the free memory,
then sleeps while the learner is created.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TextIO

import torch
from transformers import PreTrainedTokenizerBase

from selfplay.atomic import atomic_folder
from selfplay.chat.rendering import Rendering, make_rendering
from selfplay.chat.tokenizer import load_tokenizer
from selfplay.checkpoint import (
    checkpoints,
    damaged_saves,
    keep_newest,
    repair_folder,
    resume,
    state_of,
)
from selfplay.config import Config
from selfplay.config.player_spec import Spec, parse_shares
from selfplay.data.stream import TrainStream
from selfplay.distributed import World, gather_objects, init_world, on_first_rank
from selfplay.engines.base import Engine
from selfplay.engines.kinds import engine_kind
from selfplay.engines.sglang.processes import Signals
from selfplay.errors import SettingsError
from selfplay.evaluation.evaluate import EvaluationContext
from selfplay.evaluation.held_out import fixed_partners, held_out_at_start
from selfplay.learner.learner import Learner, make_learner
from selfplay.learner.method import Ask, check_methods
from selfplay.metrics.monitors import Monitors
from selfplay.metrics.observers import Groups, make_observers
from selfplay.metrics.run_folder import (
    Opening,
    check_run_folder,
    hold_run,
    keep_code,
    lock_run,
    open_run,
)
from selfplay.metrics.step_log import Journal, Stopwatch
from selfplay.model.hub import check_base
from selfplay.partners.endpoints import try_endpoints
from selfplay.partners.opponents import make_opponents
from selfplay.partners.partners import Partners
from selfplay.partners.pool import check_members
from selfplay.preflight.model import StartCheck, check_model
from selfplay.preflight.run import read_rendering, start_warnings
from selfplay.rollout.seat_rules import who_plays
from selfplay.step.run import Policy, Run
from selfplay.warm_start.imitation import (
    first_folder,
    first_weights,
    progress_folder,
    scratch_tokenizer,
    tokenizer_folder,
)
from selfplay.weight_sync.offload import Offload
from selfplay.weight_sync.start import choose_engine, load_engine
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
    """Create or resume the run in `config.out`: warm start, engine, learner, held-out games before
    the first step. `cleanup` closes everything that is started here. `checked` is the result of
    `check_run`; without it the model's tokenizer is read here. Every rank must call.

    Raises SettingsError for a folder, a model or a template that cannot be used.
    """
    # A step's games and samples stay until its end. By default Python collects garbage after 700
    # new objects, which takes nearly half of the time of credit assignment.
    cleanup.callback(gc.set_threshold, *gc.get_threshold())
    gc.set_threshold(20_000, 20, 20)
    signals = Signals()
    signals.take()
    cleanup.callback(signals.restore)
    if world.rank == 0 and (roles := who_plays(config.game, config.rollout)):
        print(f"who plays in training: {roles}", flush=True)
    home = _RunFolder(Path(config.out).absolute(), config, cleanup)
    folder = home.path
    on_first_rank(home.check, world)
    check_shared(folder, world)
    # An absolute path, in case custom code changes the working directory.
    config = replace(config, out=str(folder))
    stream = cleanup.enter_context(closing(TrainStream(config)))
    if config.model.path is None:  # `checked` is a stand-in
        trained = on_first_rank(home.tokenizer, world)
        checked = make_rendering(trained, template_kwargs=config.model.chat_template)
    elif checked is None:
        checked = read_rendering(config.model, config.game, seed=config.seed)
    rendering, tokenizer = checked, checked.tokenizer
    on_first_rank(partial(check_methods, config, ask=True), world)
    on_first_rank(partial(try_endpoints, config), world)
    start_check = check_model(config, tokenizer, rendering, world)
    on_first_rank(home.make_ready, world)  # nothing is written to the folder before this
    if config.model.path is None:
        tokenizer = make_tokenizer(config, folder, world, tokenizer)
        rendering = make_rendering(tokenizer, template_kwargs=config.model.chat_template)
    warn_of_template(rendering, tokenizer.name_or_path, world)
    if world.rank == 0:
        for why in start_warnings(config, rendering):
            print(f"warning: {why}", file=sys.stderr)
    weights = first_weights(config, folder, tokenizer, rendering, world)
    config, chosen = choose_engine(
        config, weights, world, rewritten=rendering.rewritten, notes=folder / "code.txt"
    )
    specs = [spec for spec, _ in parse_shares(config.rollout.partners)]
    partners = Partners(specs, config, rendering=rendering, world=world)
    cleanup.callback(partners.close)
    eval_partners = fixed_partners(
        config.eval, config.game, config.rollout, weights=weights, partners=partners
    )
    own, learner, start_bound = _start_models(
        config, weights, world, rendering, start_check, cleanup, partners.reader
    )
    offload = Offload(learner, config.parallel)
    engine = SupervisedPolicy(learner, own, offload, runner=partners.routed(own))
    evaluation = EvaluationContext(config, engine, rendering, world, partners.held_out_partner())
    first_step, state = resume(folder, learner)
    # Before 2026-11-29 a policy's state was not in `policies`, and `best` not in its method's.
    of_policy = state.get("policies", {"": state})[""]
    on_first_rank(partial(keep_newest, folder, config.keep_checkpoints), world)
    of_methods = of_policy.get("methods", {"BestGames": {"best": of_policy.get("best", [])}})
    for method in learner.methods:
        method.restore(of_methods.get(type(method).__name__, {}))
    partners.restore(state.get("partners", {}), learner, tokenizer)
    opponents = make_opponents(config, state.get("opponents", {}))
    sync_check = SyncCheck(
        learner,
        engine,
        config=chosen,
        start_bound=start_bound,
        optim=config.optim,
        offloaded=config.parallel.offload == "all",
    )
    sync_check.restore(of_policy.get("sync_check", {}))
    policy = Policy(
        name="",
        config=config,
        tokenizer=tokenizer,
        rendering=rendering,
        engine=engine,
        baselines=of_policy.get("baselines", {}),
        learner=learner,
        sync_check=sync_check,
    )
    engine.push(first_step)
    if first_step >= max(config.steps, 1) and world.rank == 0:
        print(
            f"{folder} already has {first_step} of {config.steps} steps; increase steps to "
            "continue, or start a new run with out=FOLDER",
            flush=True,
        )
    held_out_at_start(first_step, config.steps, evaluation, eval_partners, folder=folder)
    journal = Journal(
        folder,
        log_games_every=config.log_games_every,
        after_step=first_step,
        rank=world.rank,
        pieces=rendering.pieces,
        num_lines=state.get("num_lines"),
    )
    observers = make_observers(
        config,
        world,
        Monitors(config.monitors, rank=world.rank),
        Groups(config, world, journal, rendering.pieces),
        journal,
    )
    for observer in observers:
        observer.restore(state.get(observer.key, {}))
    return Run(
        config=config,
        folder=folder,
        world=world,
        stream=stream,
        partners=partners,
        opponents=opponents,
        policies=[policy],
        evaluation=evaluation,
        fixed_partners=eval_partners,
        lock=home.lock,
        observers=observers,
        journal=journal,
        timed=Stopwatch(),
        first_step=first_step,
    )


@dataclass(slots=True)
class _RunFolder:
    """A run's folder at the start, on rank 0: first `check`, which changes nothing, then
    `make_ready`. Its `lock` is held until `cleanup`."""

    path: Path
    config: Config
    cleanup: ExitStack
    lock: TextIO | None = None
    opening: Opening = field(init=False)
    damaged: dict[Path, str] = field(init=False)

    def check(self) -> None:
        """Raise SettingsError for a folder that another process uses, that cannot be repaired, or
        that holds a run with other settings."""
        if (self.path / ".lock").exists():
            self.lock = lock_run(self.path)
            self.cleanup.callback(self.lock.close)
        self.damaged = damaged_saves(self.path, imitation=progress_folder(self.path))
        self.opening = check_run_folder(self.path, self.config)
        saved = [each for each in checkpoints(self.path) if each not in self.damaged]
        if not saved:
            return
        check_members(self.path, state_of(saved[-1]).get("partners", {}).get("pool", []))
        if self.config.model.lora is not None:
            base = first_folder(self.config, self.path)
            if base.exists():
                check_base(saved[-1] / "hf", base)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The scratch model's tokenizer: the saved one, or a new one."""
        saved = tokenizer_folder(self.config.model, self.path)
        kept = saved.exists() and not self.opening.anew
        return load_tokenizer(saved) if kept else scratch_tokenizer(self.config)

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
        open_run(self.opening)
        repair_folder(self.path, self.damaged, imitation=progress_folder(self.path))
        keep_code(self.opening)


def _start_models(
    config: Config,
    weights: Path,
    world: World,
    rendering: Rendering,
    start_check: StartCheck,
    cleanup: ExitStack,
    reader: Callable[[Spec], Ask],
) -> tuple[Engine, Learner, float]:
    """This rank's sleeping engine and the learner, both with the first weights and checked, and the
    start check's bound on their mismatch."""
    kind = engine_kind(config.engine.kind)
    make = partial(make_learner, config, weights, world, rendering=rendering, reader=reader)
    if kind.shares(world):
        learner = make()
        engine = kind.around(learner.model, config.engine)
    else:
        # The engine starts before the learner, because it takes a share of the free memory.
        engine = load_engine(config, weights, world, cleanup=cleanup)
        start_check.sample(Supervised(engine, world))
        sleep_or_close(engine)
        kernels = config.engine.kernels
        learner = make(as_engine=import_module(kernels).compute_as_engine if kernels else None)
    return engine, learner, start_check.compare(learner, engine, weights)


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
