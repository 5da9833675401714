"""Where a policy lies on disk, and whether it was trained on the same game."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from selfplay.checkpoint import policies
from selfplay.config import Config, GameConfig
from selfplay.config.settings import load
from selfplay.model.hub import check_weights, is_hub_name, local_folder

# What a run needed to train and an evaluation does not: a fixed number of ranks.
ALONE = ("parallel.tp=1", "parallel.fsdp=null")


@dataclass(frozen=True, slots=True)
class Source:
    """Where the policy lies: its Hugging Face folder, the folder reports go to, the run's settings
    (None outside a run)."""

    weights: Path
    home: Path
    settings: Path | None
    hub: str | None = None  # the hub's name of fetched weights, whose home is no place for reports


def find_source(checkpoint: Path, *, what: str = "--checkpoint") -> Source:
    """What --checkpoint or another argument `what` names: a run folder (its newest weights, in the
    final export or a checkpoint, else its warm start), a part of one, or any Hugging Face folder.

    A hub's name is fetched. Raises ValueError for a folder that is missing or holds no model; names
    the nearest that does.
    """
    name = str(checkpoint)
    if not checkpoint.is_dir() and is_hub_name(name):
        fetched = local_folder(name, what=what)
        check_weights(fetched, what=what)
        return Source(fetched, fetched, None, hub=name)
    if not checkpoint.is_dir():
        raise ValueError(
            f"{what} must be a run folder or a Hugging Face folder or name, got {checkpoint}"
            + nearest(checkpoint.name, _beside(checkpoint, lambda path: path.is_dir()))
        )
    if (checkpoint / "config.yaml").exists():
        parts = [*policies(checkpoint), checkpoint / "warm_start"]
        weights = next((part for part in parts if _is_model(part)), None)
        if weights is None:
            raise ValueError(
                f"{what}: the run {checkpoint} has no final/, no checkpoints/step_N/hf and "
                "no warm_start/ yet"
            )
        return Source(weights, checkpoint, checkpoint / "config.yaml")
    weights = checkpoint / "hf" if _is_model(checkpoint / "hf") else checkpoint
    if not (weights / "config.json").exists() and not _is_model(weights):
        raise ValueError(
            f"{what}: {checkpoint} holds neither a run (config.yaml) nor a Hugging Face "
            "model (config.json and *.safetensors)"
        )
    check_weights(weights, what=what)
    for run in (checkpoint.parent, checkpoint.parent.parent, checkpoint.parent.parent.parent):
        if (run / "config.yaml").exists():
            return Source(weights, run, run / "config.yaml")
    return Source(weights, checkpoint, None)


def check_same_game(
    source: Source,
    config: Config,
    *,
    what: str,
    played: Path | str,
    overrides: Sequence[str] = (),
) -> None:
    """Raise ValueError where the policy's run was of another game than `config`'s, told it in other
    texts, or let it write what is refused here.

    `played` is where `config` was read from; what `overrides` say as game.KEY=value is asked of all
    who meet. Nothing is known of weights outside a run. Of a run's settings only these keys are
    read: others may be older than this code.
    """
    if source.settings is None:
        return
    saved = yaml.safe_load(source.settings.read_text(encoding="utf-8")).get("game", {})
    keys = ("name", "brief", "messages", "private_reasoning")
    words = [f"{key}={json.dumps(saved[key])}" for key in keys if key in saved]
    asked = [word.removeprefix("game.") for word in overrides if word.startswith("game.")]
    own, here = load(GameConfig, None, [*words, *asked]), config.game
    rules = dict.fromkeys(("name", "brief", "messages"), "the same for all who meet")
    if own.private_reasoning:  # who never wrote any can play where it is allowed
        rules["private_reasoning"] = "true where one was trained with it"
    for key, rule in rules.items():
        values = [str(getattr(game, key)).lower() for game in (own, here)]
        if values[0] != values[1]:
            raise ValueError(
                f"{what}: game.{key} must be {rule}, got {values[0]} in {source.home} and "
                f"{values[1]} in {played}"
            )


def _is_model(folder: Path) -> bool:
    described = any((folder / name).exists() for name in ("config.json", "adapter_config.json"))
    return described and any(folder.glob("*.safetensors"))


def _beside(path: Path, wanted: Callable[[Path], bool]) -> list[str]:
    """Names of the wanted things in the folder where `path` should be."""
    home = path.parent
    return sorted(p.name for p in home.iterdir() if wanted(p)) if home.is_dir() else []


def nearest(got: str, valid: Sequence[str]) -> str:
    """The end of an error message: the valid word most like the one that was given, if any is."""
    near = difflib.get_close_matches(got, valid, n=1)
    return f"; nearest is {near[0]}" if near else ""
