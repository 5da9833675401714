"""Data sets of the Hugging Face hub, by their names."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub

from dialop.shown import error_line
from selfplay.errors import SettingsError

FETCHED = ["*.parquet", "*.jsonl"]


def downloaded(name: str, key: str) -> Path:
    """The local copy of the data set ORG/NAME, or of its split ORG/NAME/SPLIT; downloaded if
    necessary.

    Raises SettingsError, which begins with the setting's key, if there is none to be had.
    """
    org, of, *split = name.split("/")
    try:
        folder = huggingface_hub.snapshot_download(
            f"{org}/{of}", repo_type="dataset", allow_patterns=FETCHED
        )
    except Exception as error:
        raise SettingsError(
            f"{key} {name} is neither here nor a data set that the hub gives: {error_line(error)}"
        ) from error
    return Path(folder, *split)
