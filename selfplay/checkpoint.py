"""Writing a run's state so that nothing written is lost, and reading it back exactly.

A checkpoint folder `checkpoints/step_N` holds `state/` (model, optimizer, critic and a reference
that moves, sharded as the run was and readable on any mesh), `hf/` (an ordinary Hugging Face
folder) and `progress.json`. With adapters both hold them alone: `hf/` is in peft's format and names
the folder of the weights they belong to. It gets its name only when it is complete.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfplay.distributed import World, barrier
from selfplay.learner.learner import Learner
from selfplay.model.lora import export_adapters, is_adapter
from selfplay.model.policy import export


def save_checkpoint(
    folder: Path,
    learner: Learner,
    tokenizer: PreTrainedTokenizerBase,
    *,
    step: int,
    keep: int,
    state: Mapping[str, Any],
) -> Path:
    """Write the state after `step` finished steps; the newest `keep` checkpoints stay.

    `state` is what else the next step needs and every rank holds alike, as plain JSON values.
    """
    world = learner.world
    final = folder / "checkpoints" / f"step_{step:06d}"
    partial = final.with_name(f".{final.name}")
    if world.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    barrier(world)
    with _single_process_is_meant():
        dcp.save(_state(learner), checkpoint_id=partial / "state", no_dist=world.mesh is None)
    if learner.adapters is None:
        export(learner.model, tokenizer, partial / "hf", world=world)
    else:
        _export_adapters(learner, tokenizer, partial / "hf")
    if world.rank == 0:
        progress = {"step": step, "kl": learner.kl, "state": state}
        (partial / "progress.json").write_text(json.dumps(progress))
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    barrier(world)
    return final


def resume(folder: Path, learner: Learner) -> tuple[int, dict[str, Any]]:
    """Read the newest checkpoint into the learner, in place.

    Returns the number of finished steps and what was carried; 0 and nothing without a checkpoint.
    """
    found = checkpoints(folder)
    if not found:
        return 0, {}
    state = _state(learner)
    with _single_process_is_meant():
        dcp.load(state, checkpoint_id=found[-1] / "state", no_dist=learner.world.mesh is None)
    set_state_dict(
        learner.model,
        learner.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=_options(learner),
    )
    if "reference" in state:
        assert learner.reference is not None
        set_model_state_dict(learner.reference, state["reference"])
    if learner.critic is not None:
        set_state_dict(
            learner.critic.module,
            learner.critic.optimizer,
            model_state_dict=state["critic"],
            optim_state_dict=state["critic_optimizer"],
        )
    progress = json.loads((found[-1] / "progress.json").read_text())
    learner.kl = progress["kl"]
    return progress["step"], progress["state"]


def checkpoints(folder: Path) -> list[Path]:
    """A run's complete checkpoints, oldest first."""
    return sorted(p.parent for p in (folder / "checkpoints").glob("step_*/progress.json"))


def policies(folder: Path) -> list[Path]:
    """Where a run's trained policies would lie, the newest first: its checkpoints' `hf/`, and
    `final/` before or behind them.

    A finished run that goes on keeps the `final/` of its shorter self, so that one is first only if
    it says that no checkpoint is of a later step.
    """
    saved = checkpoints(folder)[::-1]
    final, parts = folder / "final", [checkpoint / "hf" for checkpoint in saved]
    later = bool(saved) and _step(saved[0]) > _step(final)
    return [*parts, final] if later else [final, *parts]


def _step(part: Path) -> int:
    """The finished steps of a checkpoint or a final export; -1 for one that does not say."""
    progress = part / "progress.json"
    return int(json.loads(progress.read_text())["step"]) if progress.exists() else -1


def finish(
    folder: Path, learner: Learner, tokenizer: PreTrainedTokenizerBase, *, step: int
) -> None:
    """The policy after `step` steps as an ordinary Hugging Face folder, `final/`, adapters merged;
    these stand in peft's format in `final_adapters/`, too.

    Those of an earlier end are replaced when they are complete.
    """
    with _replacing(folder / "final", learner.world) as partial:
        export(learner.model, tokenizer, partial, world=learner.world)
        if learner.world.rank == 0:
            (partial / "progress.json").write_text(json.dumps({"step": step}))
    if learner.adapters is not None:
        with _replacing(folder / "final_adapters", learner.world) as partial:
            _export_adapters(learner, tokenizer, partial)


def export_atomically(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, *, world: World
) -> None:
    """Write a Hugging Face folder that gets its name only when it is complete, in place of one that
    had it. Every rank must call and leaves when the folder is there."""
    with _replacing(folder, world) as partial:
        export(model, tokenizer, partial, world=world)


def export_once(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """The same by one rank alone, in place of nothing: of several processes the first that ends
    gives the folder its name, and nobody writes over what an engine may be reading."""
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}", dir=folder.parent) as place:
        partial = Path(place) / folder.name
        export(model, tokenizer, partial)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.exists():
                raise


@contextmanager
def _replacing(folder: Path, world: World) -> Iterator[Path]:
    """A folder to fill, which gets the name `folder` at the end, in place of one that had it. Every
    rank must enter and leaves when the folder is there."""
    partial, writes = folder.with_name(f".{folder.name}"), world.rank == 0
    if writes:
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was stopped while it wrote
    barrier(world)
    yield partial
    if writes:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was ahead when it was stopped
        partial.rename(folder)
    barrier(world)


def _export_adapters(learner: Learner, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    assert learner.adapters is not None
    export_adapters(learner.model, learner.adapters, folder, world=learner.world)
    if learner.world.rank == 0 and tokenizer is not None:
        tokenizer.save_pretrained(folder)


@contextmanager
def _single_process_is_meant() -> Iterator[None]:
    """Without a mesh `no_dist` is asked for on purpose, and torch warns that it takes it so."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore",
            message=r"torch\.distributed is disabled, .* to (save|load) in a single process",
            category=UserWarning,
        )
        yield


def _options(learner: Learner) -> StateDictOptions:
    """Beside adapters the frozen weights are no state: they stand where the run began."""
    adapted = learner.adapters is not None
    return StateDictOptions(ignore_frozen_params=adapted, strict=not adapted)


def _state(learner: Learner) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(
        learner.model, learner.optimizer, options=_options(learner)
    )
    if learner.adapters is not None:  # a tied head has a second name that torch does not know of
        model_state = {n: value for n, value in model_state.items() if is_adapter(n)}
    state = {"model": model_state, "optimizer": optimizer_state}
    if learner.reference is not None and learner.reference_moves:
        state["reference"] = get_model_state_dict(learner.reference)
    if learner.critic is not None:
        critic_state, optimizer_state = get_state_dict(
            learner.critic.module, learner.critic.optimizer
        )
        state |= {"critic": critic_state, "critic_optimizer": optimizer_state}
    return state
