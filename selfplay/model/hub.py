"""Finds and checks a model's folder: local, converted from a `.gguf` file, or from the Hugging Face
hub.

Reads no weights, only the headers of their files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError, safe_open

from dialop.specs import nearest
from selfplay.atomic import MANIFEST, damage
from selfplay.errors import SettingsError

SETTINGS = "selfplay.yaml"  # a policy's settings, written by `python -m selfplay.apps.publish`
WEIGHTS = "*.safetensors"
# The files of a model and its tokenizer, without pickles, code or a second copy of the weights.
FETCHED = [WEIGHTS, "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", SETTINGS]
NOT_FETCHED = ["*/*", "consolidated*"]
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
BASE = "base.json"  # in a folder of adapters: the place of the base weights, and their digest
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def local_folder(name_or_folder: str, *, what: str = "model.path", weights: bool = True) -> Path:
    """The folder itself, the folder converted from a `.gguf` file, or the local copy of the hub's
    ORG/NAME, converted or downloaded if necessary; without `weights` only its other files.

    Raises SettingsError, which begins with `what`, for a name of none of these kinds, for a model
    that the hub does not have, and if the hub cannot be reached.
    """
    folder = Path(name_or_folder)
    if folder.is_dir():
        return folder
    if folder.suffix == ".gguf" and folder.is_file():
        gguf = import_module("selfplay.extras.gguf")
        return Path(gguf.converted(folder, what=what))
    if not is_hub_name(name_or_folder):
        absent = "" if folder.exists() else ", which does not exist here"
        raise SettingsError(
            f"{what} must be a Hugging Face folder, a .gguf file or a hub name such as "
            f"Qwen/Qwen2.5-0.5B-Instruct, got {name_or_folder}{absent}"
            + nearest(name_or_folder, map(str, folder.parent.glob("*/")))
        )
    fetched = FETCHED if weights else [name for name in FETCHED if name != WEIGHTS]
    try:
        fetched_to = huggingface_hub.snapshot_download(
            name_or_folder, allow_patterns=fetched, ignore_patterns=NOT_FETCHED
        )
    except Exception as error:
        named = what if what.endswith(name_or_folder) else f"{what} {name_or_folder}"
        raise SettingsError(
            f"{named} is not a local folder and cannot be downloaded from the hub: {_why(error)}"
        ) from error
    return Path(fetched_to)


def _why(error: Exception) -> str:
    """Why a download failed, in a few words: the hub's own messages have several lines."""
    match error:
        case GatedRepoError():
            return "it is gated; accept its terms on its page, then run `hf auth login`"
        case RepositoryNotFoundError():
            return "the hub has no model of this name that your login may read"
        case LocalEntryNotFoundError() if constants.HF_HUB_OFFLINE:
            return "HF_HUB_OFFLINE is set, and there is no local copy"
        case LocalEntryNotFoundError():
            return f"{constants.ENDPOINT} cannot be reached, and there is no local copy"
    return " ".join(str(error).split())


def is_hub_name(name: str) -> bool:
    """Whether a name that is not a folder can be a hub name: ORG/NAME, not a `.gguf` file, and ORG
    is neither a local folder nor `runs`, which would mean a mistyped path."""
    known = bool(_HUB_NAME.fullmatch(name)) and not name.endswith(".gguf")
    return known and not name.startswith("runs/") and not Path(name).parent.exists()


def check_weights(folder: Path, *, what: str) -> None:
    """Raise SettingsError, which begins with `what`, unless the folder has a config.json and one
    set of readable, unchanged safetensors files."""
    if not any((folder / name).exists() for name in ("config.json", "adapter_config.json")):
        raise SettingsError(f"{what}: {folder} must hold config.json of a Hugging Face model")
    files = set(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files |= set(_shards(index, what=what).values())
    if not files:
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        remedy = "; save the model again with save_pretrained, which writes safetensors"
        content = f"{pickles[0]}, a pickle, which can run code{remedy}" if pickles else "none"
        raise SettingsError(f"{what}: {folder} must hold *.safetensors, got {content}")
    numbered = sorted(file.name for file in files if "-of-" in file.name)
    if numbered and not index.exists() and not (folder / "model.safetensors").exists():
        raise SettingsError(
            f"{what}: {folder} must hold {index.name} with parts such as {numbered[0]}, got none"
        )
    check_one_set(folder, what=what)
    for file in sorted(files):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise SettingsError(
                f"{what}: {file} is not a readable safetensors file: {error}"
            ) from error
    check_unchanged(folder, what=what)


def check_unchanged(folder: Path, *, what: str) -> None:
    """Raise SettingsError, which begins with `what`, if a folder of weights was written by a run
    and has changed since. Folders without a manifest are not read."""
    # A checkpoint's hf/ and policies/NAME/hf/ are in its manifest, final/NAME in that of final/.
    above = {"hf": 3}.get(folder.name, int(folder.parent.name in ("final", "final_adapters")))
    homes = [folder, *folder.parents[:above]]
    kept = [home for home in homes if (home / MANIFEST).is_file()]
    part = f"{folder.relative_to(kept[0]).as_posix()}/" if kept and kept[0] != folder else ""
    found = damage(kept[0], part) if kept else None
    if found is not None:
        raise SettingsError(
            f"{what}: {folder} must be undamaged, got {found}; restore it, or use a copy without "
            f"{MANIFEST} if the change is intended"
        )


def check_one_set(folder: Path, *, what: str) -> None:
    """Raise SettingsError, which begins with `what`, for a folder with two sets of weights:
    transformers, SGLang and our sharded loader might read different ones."""
    found = sorted(file.name for file in folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    adapters = folder / "adapter_config.json"
    if adapters.exists():
        found = [adapters.name, *(name for name in found if not name.startswith("adapter_"))]
    elif index.exists():
        single = "model.safetensors"
        listed = {file.name for file in _shards(index, what=what).values()}
        found = [index.name, *({single} & set(found) - listed)]
    if len(found) > 1:
        raise SettingsError(
            f"{what}: {folder} must hold one set of weights, got {found[0]} and {found[1]}; delete "
            "the unwanted one"
        )


def described_in(weights: Path) -> Path:
    """The folder with the model's config: the folder itself or, for adapters, that of their base.

    The base is identified by its digest. It is searched relative to the adapters' folder, which may
    have moved with it, then under its old path. Raises SettingsError if neither is the base.
    """
    adapters = weights / "adapter_config.json"
    if not adapters.exists():
        return weights
    named = Path(json.loads(adapters.read_text(encoding="utf-8"))["base_model_name_or_path"])
    if not (weights / BASE).exists():  # another program wrote the adapters
        return named
    base = json.loads((weights / BASE).read_text(encoding="utf-8"))
    for folder in (Path(os.path.normpath(weights.absolute() / base["folder"])), named):
        with suppress(OSError, ValueError):  # there is no base
            if weights_digest(folder) == base["sha256"]:
                return folder
    raise SettingsError(
        f"{weights} must have the base weights that its adapters were trained on, sha256 "
        f"{base['sha256'][:16]}…, at {named} or at {base['folder']} relative to it, got none or "
        "others; restore them, or use the final/ of the run, which holds both merged"
    )


def write_base(adapters: Path, base: Path, digest: str) -> None:
    """Record in a folder of adapters where `described_in` finds their base, whose weights had
    this `weights_digest` when they were loaded, or have it now if it is ""."""
    relative = os.path.relpath(base.absolute(), adapters.absolute())
    record = {"folder": relative, "sha256": digest or weights_digest(base)}
    (adapters / BASE).write_text(json.dumps(record), encoding="utf-8")


def check_base(adapters: Path, base: Path) -> None:
    """Raise SettingsError if the adapters in a folder were trained on other weights than `base`."""
    record = adapters / BASE
    if record.exists():
        expected = json.loads(record.read_text(encoding="utf-8"))["sha256"]
        check_digest(base, expected, what=f"base weights of {adapters}")


def check_digest(base: Path, expected: str, *, what: str) -> None:
    """Raise SettingsError, with `what` they must be, if the weights in a folder have another
    `weights_digest`."""
    if (got := weights_digest(base)) != expected:
        raise SettingsError(
            f"{base} must hold the {what}, sha256 {expected[:16]}…, got {got[:16]}…; restore them, "
            "or start a new run with out=FOLDER"
        )


def weights_digest(folder: Path) -> str:
    """The sha256 of a folder's config.json and weights, independent of the folder's name."""
    total = hashlib.sha256()
    for file in (folder / "config.json", *sorted(set(tensor_files(folder).values()))):
        total.update(file_digest(file))
    return total.hexdigest()


def file_digest(file: Path) -> bytes:
    """The sha256 of a file; it is read again only if its size or time has changed."""
    stat = file.stat()
    return _digest(file, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=256)
def _digest(file: Path, size: int, mtime_ns: int) -> bytes:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").digest()


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file of each tensor of a Hugging Face folder, by the tensor's name.

    Raises ValueError for a folder without safetensors, SettingsError for a folder with two sets.
    """
    check_one_set(folder, what="model.path")
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
