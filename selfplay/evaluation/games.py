"""Finds the games of an evaluation: held-out instances, a file of them, or recorded games.

Every mistake is a ValueError that names the argument, the rule, the value and the nearest valid
choice.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dialop.rows import read_records
from dialop.starts import Entries, checked_entries
from selfplay.config import Config
from selfplay.config.play import check_num_games
from selfplay.data.instances import GENERATED, HELD_OUT, continued, evaluation_instances
from selfplay.metrics.run_folder import IMITATED_BOARDS
from selfplay.partners.checkpoints import Source, nearest_beside

_SUFFIXES = (".parquet", ".jsonl")


@dataclass(frozen=True, slots=True)
class Games:
    """The instances to play. `records` holds people's games on the same instances, if any."""

    instances: Sequence[Any]
    records: Sequence[dict[str, Any]]


def find_games(
    games: str,
    num: int | None,
    config: Config,
    *,
    start: Entries | None = None,
    imitated: Collection[str] = (),
) -> Games:
    """The first `num` instances of the held-out stream or of a file.

    `num` None means `eval.final_games` of the stream, or the whole file. With `start` the games
    start after people's recorded first moves. Instances of a file whose digest is in `imitated` are
    left out.

    Raises:
        ValueError: for a missing or empty file, or if `num` exceeds the games in it.
        OSError: for a file that cannot be read.
    """
    if num is not None:
        check_num_games(num, what="--num")
    if games == GENERATED and start:
        raise ValueError("--start needs --games FILE.jsonl with recorded games, got generated")
    if games == GENERATED:
        num = num or config.eval.final_games
        return Games(
            evaluation_instances(HELD_OUT, num=num, game=config.game, data=config.data), []
        )
    path = Path(games)
    if not path.is_file():
        rule = f"--games must be '{GENERATED}' or a .parquet or .jsonl file, got {games}"
        if path.suffix in _SUFFIXES and not path.exists():
            rule = f"--games {games} does not exist"
        raise ValueError(rule + nearest_beside(path, lambda p: p.suffix in _SUFFIXES, GENERATED))
    kit = config.game.kit
    try:
        instances = kit.read(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"--games: {error}") from None
    if not instances:
        raise ValueError(f"--games: {path} holds no games")
    numbers = [i for i, one in enumerate(instances) if kit.digest(one) not in imitated]
    left_out = len(instances) - len(numbers)
    if not numbers:
        raise ValueError(
            f"--games: the policy's warm start imitated all {left_out} games of {path}"
        )
    if num is not None and num > len(numbers):
        rest = f" that its warm start did not imitate (it imitated {left_out})" if left_out else ""
        raise ValueError(
            f"--num must be at most {len(numbers)}, the games in {path}{rest}, got {num}"
        )
    numbers = numbers[:num]
    records = list(read_records(path)) if path.suffix == ".jsonl" and kit.PLAYED_BY_PEOPLE else []
    if start:
        recorded = kit.read_recorded(path)
        chosen = [continued(recorded[i], start, "evaluation", i) for i in numbers]
    else:
        chosen = [instances[i] for i in numbers]
    return Games(chosen, [records[i] for i in numbers] if records else [])


def imitated_boards(sources: Sequence[Source]) -> set[str]:
    """The digests of the recorded boards imitated in the warm starts of these policies."""
    files = {home / IMITATED_BOARDS for source in sources for home in (source.home, source.weights)}
    digests: set[str] = set()
    for file in filter(Path.is_file, files):
        try:
            digests |= set(json.loads(file.read_bytes()))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{file} must hold the digests of instances: {error!r}") from None
    return digests


def find_start(text: str) -> Entries:
    """The value of --start. Raises ValueError for an invalid one."""
    try:
        value: object = float(text) if "." in text else int(text)
    except ValueError:
        value = text
    try:
        return checked_entries(value)
    except ValueError as error:
        raise ValueError(f"--start: {error}") from None
