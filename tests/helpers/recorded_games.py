"""Instances that start in the middle of a recorded game, cut at any entry of its log."""

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any


def begun(game: str, record: Mapping[str, Any], num: int, *, key: str = "cut") -> Any:
    """The record's instance with its first `num` log entries as the opening, its end included."""
    module = importlib.import_module(f"dialop.{game}.recorded")
    board = module.instance_from_record(record, key=key)
    return replace(board, opening=tuple(module.moves_from_record(record, board)[:num]))
