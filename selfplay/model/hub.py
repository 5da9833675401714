"""Model folders: found on this machine or fetched from the Hugging Face hub, and checked before
anything is made of them. Reads no weights, only the tables of contents of their files.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from selfplay.config.settings import SettingsError

# What a model and its tokenizer are read from; no pickles, no code, no second copy of the weights.
FETCHED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
NOT_FETCHED = ["*/*", "consolidated*"]
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def local_folder(name_or_folder: str, *, what: str = "model.path") -> Path:
    """The folder itself, or the hub's files of the name ORG/NAME on this machine, fetched if need
    be.

    Raises SettingsError that begins with `what` for a name of neither and where the hub has no such
    model or cannot be reached.
    """
    folder = Path(name_or_folder)
    if folder.is_dir():
        return folder
    if not is_hub_name(name_or_folder):
        raise SettingsError(
            f"{what} must be a Hugging Face folder or a hub's name such as "
            f"Qwen/Qwen2.5-0.5B-Instruct, got {name_or_folder}"
        )
    try:
        return Path(
            snapshot_download(name_or_folder, allow_patterns=FETCHED, ignore_patterns=NOT_FETCHED)
        )
    except Exception as error:
        raise SettingsError(
            f"{what} {name_or_folder} is no folder here and cannot be had from the hub: {error}"
        ) from error


def is_hub_name(name: str) -> bool:
    """Whether a name that is no folder can be the hub's: ORG/NAME, and no folder ORG is here, in
    which case a path was mistyped."""
    return bool(_HUB_NAME.fullmatch(name)) and not Path(name).parent.exists()


def check_weights(folder: Path, *, what: str) -> None:
    """Raise SettingsError that begins with `what` for a folder without config.json and whole
    safetensors files."""
    if not any((folder / name).exists() for name in ("config.json", "adapter_config.json")):
        raise SettingsError(f"{what}: {folder} must hold config.json of a Hugging Face model")
    files = set(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files |= set(_shards(index, what=what).values())
    if not files:
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        remedy = "; save the model again with save_pretrained, which writes safetensors"
        seen = f"{pickles[0]}, a pickle, which can run code{remedy}" if pickles else "none"
        raise SettingsError(f"{what}: {folder} must hold *.safetensors, got {seen}")
    for file in sorted(files):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise SettingsError(f"{what}: {file} is no whole safetensors file: {error}") from error


def tensor_files(folder: Path) -> dict[str, Path]:
    """Where each tensor of a Hugging Face folder lies."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return _shards(index, what="model.path")
    single = folder / "model.safetensors"
    if not single.exists():
        raise ValueError(f"model.path must hold safetensors to be loaded in shards, got {folder}")
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def _shards(index: Path, *, what: str) -> dict[str, Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: index.parent / file for name, file in weight_map.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise SettingsError(f"{what}: {index} must hold a weight_map: {error!r}") from error
