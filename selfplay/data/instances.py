"""Instances by stream name and index, or from files.

Instance i of a stream depends only on the stream's seed, i and the game's settings, not on earlier
draws. Instances have their game's type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from glob import escape
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from dialop.modules import sha256_of
from dialop.people import PeoplesGame
from dialop.starts import Entries, RecordedGame
from selfplay.config import DataConfig, GameConfig
from selfplay.data.seeds import named_seed
from selfplay.errors import SettingsError

# The seed includes the purpose, so streams of generated instances never overlap.
TRAIN, VALIDATION, HELD_OUT = "train", "validation", "held-out"
TEACHERS, TOKENIZER = "teachers", "tokenizer"
T = TypeVar("T")
GENERATED = "generated"  # instead of the path of a file
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+(?<!\.jsonl)(?<!\.parquet)(/\w+)?")


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
    """Instances start..start+num-1 of the stream that `purpose` and the run's seed select.

    `easy` keeps every instance that the rules allow. Validation and held-out instances are the same
    for every run seed and drawn separately from all training streams; in a small game training may
    still draw equal ones.
    """
    fixed = purpose in (VALIDATION, HELD_OUT)
    stream_seed = named_seed("instances", None if fixed else seed, purpose)
    processes = 1 if num < 64 else processes
    options = game.kit.easy(game.options) if easy else game.options
    return game.kit.generate(options, seed=stream_seed, start=start, num=num, processes=processes)


def evaluation_instances(
    purpose: str, *, num: int, game: GameConfig, data: DataConfig
) -> tuple[Any, ...]:
    """The first `num` instances for VALIDATION or HELD_OUT: generated, or from the settings' file.

    A file with fewer instances gives all of them. Generated ones have separate streams.
    """
    name, source = _source(data, purpose)
    if source == GENERATED:
        return _held_out(purpose, num, game, data.processes)
    return read_file(game, name, source)[:num]


@lru_cache(maxsize=2)
def _held_out(purpose: str, num: int, game: GameConfig, processes: int) -> tuple[Any, ...]:
    return tuple(generated(purpose, game=game, seed=0, start=0, num=num, processes=processes))


def check_files(game: GameConfig, data: DataConfig) -> None:
    """Raise SettingsError for files of held-out instances that are missing, empty or unreadable,
    and for a training file whose games cannot be continued."""
    for purpose in (VALIDATION, HELD_OUT):
        name, source = _source(data, purpose)
        if source != GENERATED:
            read_file(game, name, source)
    if data.start != 0:
        read_recorded(game, "data.start", data.train)


def trained_on(game: GameConfig, data: DataConfig) -> list[str]:
    """Warnings for files of held-out instances that contain instances of the training file."""
    sources = [_source(data, purpose) for purpose in (VALIDATION, HELD_OUT)]
    files = [(name, source) for name, source in sources if source != GENERATED]
    if data.train_file is None or not files:
        return []
    trained = {game.kit.digest(one) for one in read_file(game, "data.train", data.train)}
    warnings = []
    for name, source in files:
        instances = read_file(game, name, source)
        if num := sum(game.kit.digest(one) in trained for one in instances):
            warnings.append(
                f"{num} of the {len(instances)} instances of {name} {source} are also in "
                f"data.train {data.train}: scores on them are not held-out scores"
            )
    return warnings


def _source(data: DataConfig, purpose: str) -> tuple[str, str]:
    """The settings key that names the source of these instances, and its value."""
    if purpose == VALIDATION:
        return "data.validation", data.validation
    return "data.test", data.test


def read_file(game: GameConfig, name: str, source: str) -> tuple[Any, ...]:
    """The instances of the file `source`, the value of the settings key `name`. It is read again
    only if it has changed.

    Raises:
        SettingsError: if the file is missing, unreadable or empty.
    """
    path = local_data(source, name)
    may_be_split = not path.suffix and len(path.parts) > 1 and path.parent.is_dir()
    if not path.exists() and not may_be_split:
        raise SettingsError(f"{name} must be 'generated' or an existing file, got {path}")
    return _instances(game, name, path, state_of(path))


def local_data(source: str, name: str) -> Path:
    """The path of a file or folder of data, downloaded if it is the hub's ORG/NAME or
    ORG/NAME/SPLIT. Raises SettingsError, which begins with the key `name`, if it cannot be."""
    if _HUB_NAME.fullmatch(source) and not Path(source).parent.exists():
        return Path(import_module("selfplay.extras.hub_data").downloaded(source, name))
    return Path(source)


def state_of(path: Path) -> tuple[tuple[Path, int, int], ...]:
    """Sizes and times of a file, or of the files in a folder or of FOLDER/SPLIT, to detect a
    change. Empty if they cannot be read; reading them then raises."""
    try:
        if path.is_file():  # asked before each read of a data set
            found: Iterable[Path] = [path]
        elif path.is_dir():
            found = path.rglob("*")
        else:
            split, above = f"{escape(path.name)}*", path.parent
            found = (*above.glob(split), *above.glob(f"*/{split}"))
        files = sorted(filter(Path.is_file, found))
        return tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    except OSError:
        return ()


def digest_of_data(source: str, name: str) -> str:
    """The sha256 of the file `source`, the value of the settings key `name`, or of the files in a
    folder or of FOLDER/SPLIT, in the order of their names. What `datasets` caches is no data.

    Raises SettingsError as `local_data`.
    """
    files = [file for file, *_ in state_of(local_data(source, name))]
    digests = [sha256_of(file) for file in files if not file.name.startswith("cache-")]
    return digests[0] if len(digests) == 1 else sha256("".join(digests).encode()).hexdigest()


@lru_cache(maxsize=4)
def _instances(game: GameConfig, name: str, path: Path, state: object) -> tuple[Any, ...]:
    instances = _read(game.kit.read, name, path, people=game.kit.PLAYED_BY_PEOPLE)
    if not instances:
        raise SettingsError(f"{name}: {path} contains no instances")
    return instances


def read_recorded(game: GameConfig, name: str, source: str) -> tuple[RecordedGame, ...]:
    """The recorded games of the file `source`, the value of the settings key `name`.

    Raises:
        SettingsError: if the file is unreadable or the game has no recordings.
    """
    return _recorded(game, name, Path(source), state_of(Path(source)))


@lru_cache(maxsize=4)
def _recorded(game: GameConfig, name: str, path: Path, state: object) -> tuple[RecordedGame, ...]:
    return _read(game.kit.read_recorded, name, path)


def _read(
    read: Callable[[Path], Iterable[T]], name: str, path: Path, *, people: bool = False
) -> tuple[T, ...]:
    """The items that `read` returns for a file. Raises SettingsError, which begins with `name`.
    `people` says that a .jsonl has people's games."""
    try:
        return tuple(read(path))
    except (OSError, ValueError) as error:
        recorded = people and path.suffix == ".jsonl"
        hint = "; a .jsonl is read as recorded games, a .parquet as instances" if recorded else ""
        raise SettingsError(f"{name}: {error}{hint}") from None


def imitated_people(
    game: GameConfig, data: DataConfig, *, recorded: str, share: float
) -> list[PeoplesGame]:
    """The recorded games of the file `recorded` that a warm start imitates: the fraction `share`,
    chosen by the digests of their instances, without instances of data.test and data.validation.

    Raises:
        SettingsError: if the file is unreadable, or no game is left.
    """
    name, kit = "warm_start.recorded", game.kit
    path = Path(recorded)
    if not path.is_file():
        raise SettingsError(f"{name} must be a .jsonl of recorded games, got {path}")
    games = _read(kit.read_people, name, path)
    evaluated = {
        kit.digest(instance)
        for key, source in (_source(data, purpose) for purpose in (VALIDATION, HELD_OUT))
        if source != GENERATED
        for instance in read_file(game, key, source)
    }
    drawn = [
        game
        for game in games
        if named_seed("recorded split", kit.digest(game.instance)) < share * 2**63
    ]
    imitated = [g for g in drawn if kit.digest(g.instance) not in evaluated]
    if not imitated:
        raise SettingsError(
            f"{name} must have games to imitate, got {path} with {len(games)} readable games: "
            f"recorded_share {share:g} selects {len(drawn)} of them, all on instances of data.test "
            "or data.validation"
        )
    return imitated


def continued(game: RecordedGame, entries: Entries, *names: object) -> Any:
    """An instance that continues a recorded game after `entries`.

    `names` seed the start if `entries` is "random".
    """
    return game.start_after(entries, uniform=named_seed("start", *names) / 2**63)
