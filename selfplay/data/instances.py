"""Instance streams and named seeds. Instance i of a stream is the same whatever was drawn before.

An instance is of its game's own type. Knows no rules, no torch, no tokens.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from dialop.matching.starts import Entries
from selfplay.config import DataConfig, GameConfig
from selfplay.config.settings import SettingsError
from selfplay.data.seeds import named_seed
from selfplay.games import Recorded, kit_of

# Streams of generated instances never meet: each purpose has its own name in the seed.
TRAIN, VALIDATION, HELD_OUT = "train", "validation", "held-out"
TEACHERS, TOKENIZER = "teachers", "tokenizer"
T = TypeVar("T")
GENERATED = "generated"  # in place of a file's path


def generated(
    purpose: str,
    *,
    game: GameConfig,
    seed: int,
    start: int,
    num: int,
    processes: int = 1,
    easy: bool = False,
) -> list[Any]:
    """Instances start..start+num-1 of the stream that `purpose` and the run's seed name.

    `easy` keeps any instance the rules allow. Validation and held-out instances are the same for
    every run seed, and share none with any training stream.
    """
    fixed = purpose in (VALIDATION, HELD_OUT)
    stream_seed = named_seed("instances", None if fixed else seed, purpose)
    processes = 1 if num < 64 else processes
    if purpose == VALIDATION:  # asked for again and again
        return list(_kept(game, stream_seed, start, num, processes))
    return kit_of(game).generate(
        game, seed=stream_seed, start=start, num=num, processes=processes, easy=easy
    )


def kept_back(purpose: str, *, num: int, game: GameConfig, data: DataConfig) -> list[Any]:
    """The first `num` instances for VALIDATION or HELD_OUT, never trained on: drawn, or from the
    file that the settings name (all of it where it holds fewer)."""
    name, source = _source(data, purpose)
    if source == GENERATED:
        return generated(purpose, game=game, seed=0, start=0, num=num, processes=data.processes)
    return list(read_file(game, name, source)[:num])


def check_files(game: GameConfig, data: DataConfig) -> None:
    """Raises SettingsError for files of instances that are missing, empty or unreadable."""
    for purpose in (VALIDATION, HELD_OUT):
        name, source = _source(data, purpose)
        if source != GENERATED:
            read_file(game, name, source)
    if data.train != GENERATED:
        read_file(game, "data.train", data.train)
    if data.start.entries != 0:
        read_recorded(game, "data.start", data.train)


def _source(data: DataConfig, purpose: str) -> tuple[str, str]:
    """The key that says where these instances come from, and what it says."""
    if purpose == VALIDATION:
        return "data.validation", data.validation
    return "data.test", data.test


@lru_cache(maxsize=4)
def read_file(game: GameConfig, name: str, source: str) -> tuple[Any, ...]:
    """A file of instances. Raises SettingsError for one that is not there, cannot be read or holds
    none."""
    path = Path(source)
    if not path.is_file():
        raise SettingsError(f"{name} must be 'generated' or an existing file, got {path}")
    try:
        instances = tuple(kit_of(game).read(path, game))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{name}: {error}") from None
    if not instances:
        raise SettingsError(f"{name}: {path} holds no instances")
    return instances


@lru_cache(maxsize=4)
def read_recorded(game: GameConfig, name: str, source: str) -> tuple[Recorded, ...]:
    """A file's games to start from. Raises SettingsError for a file or a game without any."""
    try:
        return tuple(kit_of(game).read_recorded(Path(source)))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{name}: {error}") from None


def begun(game: Recorded, entries: Entries, *names: object) -> Any:
    """An instance of a recorded game that starts where `entries` says; a random start is the draw
    of these names."""
    return game.begun(entries, uniform=named_seed("start", *names) / 2**63)


@lru_cache(maxsize=1)
def _kept(game: GameConfig, seed: int, start: int, num: int, processes: int) -> tuple[Any, ...]:
    drawn = kit_of(game).generate(
        game, seed=seed, start=start, num=num, processes=processes, easy=False
    )
    return tuple(drawn)
