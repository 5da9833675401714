"""Saves the state of a run, repairs its folder, resumes it, exports the policy.

A checkpoint folder `checkpoints/step_N` holds `state/` (model, optimizer and the modules of
methods, sharded like the run and readable on any mesh), `hf/` (a Hugging Face folder) and
`progress.json`. With several policies the first two of each are in `policies/NAME`. With adapters
`state/` and `hf/` hold only the adapters: `hf/` is in peft's format and names the folder and the
digest of the base weights. A folder gets its final name only when it is complete; a damaged one is
never resumed from.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dialop.shown import error_line
from selfplay.atomic import (
    atomic_folder,
    clear_leftovers,
    damage,
    discard,
    filled,
    hidden,
    stands,
    take_name,
)
from selfplay.distributed import World, broadcast_object, gather_objects, on_first_rank
from selfplay.errors import SettingsError
from selfplay.learner.learner import Learner
from selfplay.learner.method import Trained
from selfplay.metrics.run_folder import FILES, FOLDERS
from selfplay.metrics.step_log import check_logs
from selfplay.model.hub import check_base
from selfplay.model.lora import export_adapters, is_adapter
from selfplay.model.policy import export

NUM_PARTS, PART_BYTES = 4, 2**26  # files of a rank's state that are written concurrently
SAVED = '"save_s"'  # in the metrics of steps with a part of a save; a second one ended the first

# A run in one process intentionally sets `no_dist`.
warnings.filterwarnings(
    "ignore", r"torch\.distributed is disabled, .* to (save|load) in a single process", UserWarning
)


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """A checkpoint with the learner but not yet the trainer state. Until `finish` its folder is
    hidden, and no run resumes from it."""

    run: Path
    step: int
    world: World

    @property
    def folder(self) -> Path:
        return self.run / "checkpoints" / f"step_{self.step:06d}"

    def finish(self, state: Mapping[str, Any], *, keep: int) -> Path:
        """Add the trainer state that the next step needs besides the learner: plain JSON values,
        the same on every rank. Then delete all but the newest `keep` checkpoints. Every rank must
        call."""
        progress = {"step": self.step, "ranks": self.world.world_size, "state": state}

        def write() -> None:
            (hidden(self.folder) / "progress.json").write_text(json.dumps(progress))

        on_first_rank(write, self.world)
        take_name(self.folder, self.world)
        on_first_rank(partial(keep_newest, self.run, keep), self.world)
        return self.folder


def begin_checkpoint(
    folder: Path,
    learners: Mapping[str, tuple[Learner, PreTrainedTokenizerBase | None]],
    *,
    step: int,
) -> OpenCheckpoint:
    """Write the learners, by policy name, after `step` finished steps; their tensors must not be
    offloaded. The engine is neither needed nor changed. Every rank must call.

    Without a tokenizer there is no `hf/`, and only `resume` can read the checkpoint.
    """
    ((learner, _), *_) = learners.values()
    world, opened = learner.world, OpenCheckpoint(folder, step, learner.world)
    with filled(opened.folder, world) as partial:
        for name, (learner, tokenizer) in learners.items():
            home = home_of(partial, name)
            with _stopped():
                dcp.save(
                    learner_state(learner),
                    storage_writer=_PartsWriter(home / "state", per_thread_copy_ahead=0),
                    no_dist=world.mesh is None,
                )
            if tokenizer is not None and (adapters := learner.adapters) is not None:
                export_adapters(learner.model, adapters, tokenizer, home / "hf", world=world)
            elif tokenizer is not None:
                export(learner.model, tokenizer, home / "hf", world=world)
    return opened


def home_of(checkpoint: Path, policy: str) -> Path:
    """The place of a policy in a checkpoint; a single policy has the name ""."""
    return checkpoint / "policies" / policy if policy else checkpoint


class _PartsWriter(dcp.FileSystemWriter):
    """Writes a rank's state as up to NUM_PARTS files concurrently, of at least PART_BYTES each,
    which is faster than one file. The threads of dcp's own writer would lose errors."""

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        sizes = {item.index: _num_bytes(item) for item in plan.items}
        num = min(NUM_PARTS, sum(sizes.values()) // PART_BYTES)
        if num < 2:
            return super().write_data(plan, planner)
        parts: list[list[WriteItem]] = [[] for _ in range(num)]
        loads = [0] * num
        for item in sorted(plan.items, key=lambda item: -sizes[item.index]):
            least = loads.index(min(loads))
            parts[least].append(item)
            loads[least] += sizes[item.index]
        write, prefix = super().write_data, plan.storage_data.prefix
        with ThreadPoolExecutor(num) as pool:
            written = [
                pool.submit(
                    write,
                    replace(
                        plan,
                        items=part,
                        storage_data=replace(plan.storage_data, prefix=f"{prefix}{number}_"),
                    ),
                    planner,
                )
                for number, part in enumerate(parts)
            ]
        every: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        every.set_result([result for part in written for result in part.result().wait()])
        return every


def _num_bytes(item: WriteItem) -> int:
    """The size in bytes of a rank's part of a tensor; 0 for other items."""
    if (tensor := item.tensor_data) is None:
        return 0
    return math.prod(tensor.chunk.sizes) * tensor.properties.dtype.itemsize


def keep_newest(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints of a run, and those that a monitor may go back
    to. Only one process may call."""
    saved = checkpoints(folder)
    best = state_of(saved[-1]).get("monitors", {}).get("best", ()) if saved[keep:] else ()
    for old in saved[:-keep]:
        if int(old.name[5:]) not in best:
            discard(old)


def damaged_saves(folder: Path, *, imitation: Path) -> dict[Path, str]:
    """The damaged checkpoints that `repair_folder` will rename in the folder of a run, with the
    damage. `imitation` is the folder of an unfinished warm start in it, which has its own
    checkpoints. Changes nothing.

    Raises SettingsError, which says what to do, for damage that cannot be repaired.
    """
    damaged = _damaged(folder)
    if not stands(folder / "warm_start"):
        damaged |= _damaged(imitation)
    for saved in checkpoints(folder):
        if saved not in damaged:
            check_name(saved)
    if whole := [saved for saved in checkpoints(folder) if saved not in damaged]:
        step = _progress(whole[-1] / "progress.json")["step"]
        check_logs(folder, after_step=step, num_lines=state_of(whole[-1]).get("num_lines", {}))
    for record in ("held_out_before.json", "held_out_after.json"):
        _check_record(folder / record)
    final, log = folder / "final", folder / "metrics.jsonl"
    if _lost_checkpoints(folder) and (stands(final) or log.read_text("utf-8").count(SAVED) > 1):
        has = [path.name for path in (final, log) if path.exists()]
        start = f" (model.path={final} starts from its policy)" * final.exists()
        raise SettingsError(
            f"{folder} holds what a run has trained ({', '.join(has)}) but no checkpoint to "
            f"continue from; restore a copy of one, start a new run with out=FOLDER{start}, or "
            f"delete {' and '.join(has)} to repeat the run"
        )
    for made in (folder / "tokenizer", folder / "random_start", folder / "warm_start"):
        found = damage(made) if made.exists() else None
        if found is not None:
            raise SettingsError(
                f"{made} must be undamaged, got {found}; delete it, and the run creates it again, "
                "or restore a copy"
            )
    return damaged


def state_of(checkpoint: Path) -> dict[str, Any]:
    """The trainer state of a checkpoint; {} if it has none."""
    state = _progress(checkpoint / "progress.json").get("state")
    return state if isinstance(state, dict) else {}


def of_policy(state: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A policy's part of a run's trainer state, as `Policy.state` of `step/run.py` made it; {} in
    place of what the state does not have."""
    # Before 2026-11-29 the only policy's state was not in `policies`, and `best` not in its
    # method's; partners and opponents were not in it until 2026-11-30.
    own: dict[str, Any] = state.get("policies", {"": state}).get(name, {})
    older = {key: state[key] for key in ("partners", "opponents") if not name and key in state}
    empty: dict[str, Any] = {
        key: {} for key in ("baselines", "sync_check", "partners", "opponents")
    }
    return {**empty, "methods": {"BestGames": {"best": own.get("best", [])}}, **older, **own}


def _check_record(path: Path) -> None:
    """Raise SettingsError if a file of held-out games does not hold rows."""
    try:
        rows = json.loads(path.read_bytes()) if path.exists() else {"": {}}
        if not any(isinstance(row, dict) for row in rows.values()):
            raise TypeError(f"it holds {rows!r:.40}")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise SettingsError(
            f"{path} must hold the rows of held-out games: {error!r}; restore the file, or delete "
            "it to continue without them"
        ) from None


def _lost_checkpoints(folder: Path) -> bool:
    """Whether a run has finished steps but no longer has any checkpoint."""
    log = folder / "metrics.jsonl"
    return not checkpoints(folder) and log.exists() and log.stat().st_size > 0


def _damaged(folder: Path) -> dict[Path, str]:
    """The checkpoints newer than the newest undamaged one, with their damage. Raises SettingsError
    if all are damaged."""
    saved, damaged = checkpoints(folder), dict[Path, str]()
    while saved and (found := damage(saved[-1])) is not None:
        damaged[saved.pop()] = found
    if damaged and not saved:
        raise _all_damaged(folder, damaged)
    return damaged


def _all_damaged(folder: Path, damaged: Mapping[Path, str]) -> SettingsError:
    got = "; ".join(f"{path.name}: {found}" for path, found in damaged.items())
    return SettingsError(
        f"{folder / 'checkpoints'} must hold an undamaged checkpoint, got {got}; "
        "restore a copy of one, or start a new run with out=FOLDER"
    )


def repair_folder(folder: Path, damaged: Mapping[Path, str], *, imitation: Path) -> None:
    """Make the folder of a run ready to resume: delete leftovers of killed processes, and rename
    each of `damaged_saves` to `damaged_step_N`, with a warning. Only one process may call."""
    clear_leftovers((folder,), FOLDERS, FILES)
    homes = (folder / "checkpoints", folder / "policy_pool", imitation / "checkpoints")
    clear_leftovers(homes, ("step_*",))
    if (folder / "warm_start").exists():
        discard(imitation)
    for path, found in damaged.items():
        set_aside(path, found)
    if _lost_checkpoints(folder):
        print(
            f"warning: {folder / 'checkpoints'} holds no checkpoint: the run starts again from its "
            "first step",
            file=sys.stderr,
        )


def set_aside(checkpoint: Path, found: str) -> None:
    """Rename a damaged checkpoint to `damaged_step_N`, or `damaged_step_N_2` and so on if that name
    is taken, with a warning."""
    aside, number = checkpoint.with_name(f"damaged_{checkpoint.name}"), 1
    while aside.exists():
        number += 1
        aside = aside.with_name(f"damaged_{checkpoint.name}_{number}")
    checkpoint.rename(aside)
    print(
        f"warning: checkpoint {checkpoint} is damaged: {found}; it is now {aside.name}, and the "
        "run continues from the previous one",
        file=sys.stderr,
    )


def resume(
    folder: Path, learners: Mapping[str, Learner], *, step: int | None = None
) -> tuple[int, dict[str, Any]]:
    """Load the newest checkpoint, or the one after `step` steps, into the learners, by policy name,
    in place. `repair_folder` has checked it; if a part of it still cannot be loaded, it is renamed
    like a damaged one. Every rank must call.

    Returns the number of finished steps and the trainer state; (0, {}) without a checkpoint. Raises
    SettingsError if none can be loaded, and for adapters that were trained on other base weights
    than the learner's.
    """
    damaged: dict[Path, str] = {}
    world = next(iter(learners.values())).world
    there = [each for each in checkpoints(folder) if step in (None, int(each.name[5:]))]
    for newest in broadcast_object(there, world)[::-1]:
        for name, learner in learners.items():
            if (adapters := learner.adapters) is not None:
                saved = home_of(newest, name) / "hf"
                on_first_rank(partial(check_base, saved, adapters.base), world)
        failed = ""
        try:
            for name, learner in learners.items():
                _fill(learner, home_of(newest, name) / "state")
            loaded = _trainer_state(newest, world)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except (Exception, CheckpointException) as error:  # noqa: BLE001 (damage raises anything)
            causes = [cause for cause, _ in getattr(error, "failures", {}).values()]
            failed = f"it cannot be loaded ({error_line((causes or [error])[0])[:200]})"
        failures = filter(None, gather_objects(failed, world))
        if (found := next(failures, None)) is None:
            for path, why in damaged.items():
                on_first_rank(partial(set_aside, path, why), world)
            return loaded
        damaged[newest] = found
    if damaged:
        raise _all_damaged(folder, damaged)
    return 0, {}


def _fill(learner: Learner, saved: Path) -> None:
    """Fill the learner from its state in a checkpoint. Raises any error that a damaged file causes;
    the learner is then partly filled."""
    state = learner_state(learner)
    with _stopped():
        dcp.load(state, checkpoint_id=saved, no_dist=learner.world.mesh is None)
    for weights, moments, part, options in _parts(learner):
        set_state_dict(
            part.module,
            part.optimizer,
            model_state_dict=state[weights],
            optim_state_dict=state[moments],
            options=options,
        )


def _trainer_state(checkpoint: Path, world: World) -> tuple[int, dict[str, Any]]:
    """The number of finished steps of a checkpoint, and its trainer state. Raises as `_fill`."""
    progress = _progress(checkpoint / "progress.json")
    trainer = progress["state"]
    for name, value in trainer.items():
        if not isinstance(value, list if name in ("best", "recent") else dict):
            raise TypeError(f"progress.json has {name} {value!r:.40}")
    ranks = world.world_size
    if world.rank == 0 and progress.get("ranks", ranks) != ranks:
        print(
            f"{checkpoint} continues on another number of ranks ({progress['ranks']} -> {ranks}); "
            "results no longer equal an uninterrupted run bit for bit",
            flush=True,
        )
    return progress["step"], trainer


def checkpoints(folder: Path) -> list[Path]:
    """A run's checkpoints, oldest first, including damaged ones."""
    saved = (folder / "checkpoints").glob("step_*")
    return sorted((p for p in saved if p.name[5:].isdecimal()), key=lambda p: int(p.name[5:]))


def check_name(checkpoint: Path) -> None:
    """Raise SettingsError if the checkpoint's step differs from its folder's name, as after a
    renaming. One without progress.json passes: `damage` finds it."""
    record = checkpoint / "progress.json"
    if record.exists() and (step := _progress(record)["step"]) != int(checkpoint.name[5:]):
        raise SettingsError(
            f"{checkpoint} must be named by its step, got a checkpoint of step {step}; nearest: "
            f"{checkpoint.name[:5]}{step:06d}"
        )


def policies(folder: Path, policy: str = "") -> list[Path]:
    """Folders of a run's trained policy, newest first: the `hf/` of its checkpoints and `final/`,
    or `final/POLICY` of one of several. They may not exist.

    A run that continues after its end keeps the earlier `final/`, so `final/` comes first only if
    no checkpoint has a later step. Raises SettingsError for a renamed checkpoint.
    """
    saved = checkpoints(folder)[::-1]
    for checkpoint in saved:
        check_name(checkpoint)
    final = folder / "final" / policy
    exports = [home_of(checkpoint, policy) / "hf" for checkpoint in saved]
    later = bool(saved) and int(saved[0].name[5:]) > step_of(final)
    return [*exports, final] if later else [final, *exports]


def served_by(final: Path) -> list[str]:
    """The notes for a server of a final export, one line each."""
    return [str(line) for line in _progress(final / "progress.json").get("served", ())]


def step_of(final: Path) -> int:
    """The number of finished steps of a final export; -1 if it is not recorded. Raises
    SettingsError for a record that cannot be read."""
    progress = final / "progress.json"
    return _progress(progress)["step"] if progress.exists() else -1


def _progress(path: Path) -> dict[str, Any]:
    """A record of finished steps, {"step": an integer, …}. Raises SettingsError if invalid."""
    try:
        progress = json.loads(path.read_bytes())
        if type(progress["step"]) is not int:
            raise TypeError(f"step is {progress['step']!r:.40}")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise SettingsError(
            f"{path} must hold the number of finished steps: {error!r}; restore the file"
        ) from None
    return dict(progress)


# A policy's learner, its tokenizer, and notes for its server.
Final = tuple[Learner, PreTrainedTokenizerBase, Sequence[str]]


def export_final(folder: Path, policies: Mapping[str, Final], *, step: int) -> None:
    """Export the policies by name after `step` steps to Hugging Face folders, adapters merged:
    `final/` for a single one, named "", else `final/NAME/`; with adapters also to
    `final_adapters/`, in peft's format. Every rank must call.

    Replaces earlier exports once the new ones are complete.
    """
    ((learner, *_), *_) = policies.values()
    world = learner.world
    with atomic_folder(folder / "final", world) as partial:
        for name, (learner, tokenizer, served) in policies.items():
            export(learner.model, tokenizer, partial / name, world=world, policy=learner.policy)
            if world.rank == 0:
                progress = json.dumps({"step": step, "served": served})
                (partial / name / "progress.json").write_text(progress)
    adapted = {name: one for name, (one, *_) in policies.items() if one.adapters is not None}
    if adapted:
        with atomic_folder(folder / "final_adapters", world) as partial:
            for name, learner in adapted.items():
                assert learner.adapters is not None
                tokenizer = policies[name][1]
                export_adapters(
                    learner.model, learner.adapters, tokenizer, partial / name, world=world
                )


def export_atomically(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    world: World,
    policy: str = "",
) -> None:
    """Write a Hugging Face folder that replaces an older one only when it is complete. Every rank
    must call, and returns once the folder exists."""
    with atomic_folder(folder, world) as partial:
        export(model, tokenizer, partial, world=world, policy=policy)


def export_once(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a Hugging Face folder from one process. If several processes write the same folder, the
    first to finish wins: a folder that an engine may be reading is never replaced."""
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}", dir=folder.parent) as home:
        partial = Path(home) / folder.name
        export(model, tokenizer, partial)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.exists():
                raise


@contextmanager
def _stopped() -> Iterator[None]:
    """Unwraps what ends the program, SIGTERM's exit or Ctrl-C: dcp wraps all errors in its own, and
    an interrupted writer raises another one in between."""
    try:
        yield
    except CheckpointException as wrapped:
        for failed, _ in wrapped.failures.values():
            error: BaseException | None = failed
            while error is not None:
                if isinstance(error, SystemExit | KeyboardInterrupt):
                    raise type(error)(*error.args) from None
                error = error.__context__
        raise


def _parts(learner: Learner) -> Iterator[tuple[str, str, Trained, StateDictOptions]]:
    """Each trained module: the names of its weights and moments in a state, itself, its options.

    With adapters the options leave out the frozen base weights, which are in the folder that the
    run started from.
    """
    adapted = learner.adapters is not None
    options = StateDictOptions(ignore_frozen_params=adapted, strict=not adapted)
    yield "model", "optimizer", Trained(learner.model, learner.optimizer), options
    for name, trained in learner.method_modules():
        yield name, f"{name}_optimizer", trained, StateDictOptions()


def learner_state(learner: Learner) -> dict[str, Any]:
    """The weights and moments of the policy and of the modules of methods: the content of a
    checkpoint, and the tensors that reading one fills."""
    state = dict[str, Any]()
    for weights, moments, part, options in _parts(learner):
        _begin_moments(part, options)
        state[weights], state[moments] = get_state_dict(
            part.module, part.optimizer, options=options
        )
    if kept := {name: each for method in learner.methods for name, each in method.kept.items()}:
        state["kept"] = kept
    if (adapters := learner.adapters) is not None:
        # Drops other policies' adapters, and the second name of a tied head, which torch keeps.
        own = {n: v for n, v in state["model"].items() if is_adapter(n, adapters.policy)}
        state["model"] = own
    return state


def _begin_moments(part: Trained, options: StateDictOptions) -> None:
    """Create the state of an optimizer that has taken no step, with step 0 and moments of 0.

    torch creates it by a step with gradients of 0, and counts that step: the bias correction of the
    moments would then be one step ahead, and a run would depend on when it is saved.
    """
    if not part.optimizer.state:
        get_state_dict(part.module, part.optimizer, options=options)
        for state in part.optimizer.state.values():
            state["step"] = 0 * state["step"]
