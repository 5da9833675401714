"""Turns a published or generated data set into collab instances in three splits (a command).

    python -m selfplay.extras.prepare --dataset rows.jsonl --out data/math
    python -m selfplay.extras.prepare \\
        --dataset collabllm/collabllm-multiturn-medium --out data/text
    python -m selfplay.extras.prepare \\
        --dataset reasoning_gym:chain_sum:max_terms=3 --limit 5000 --out data/sums

Writes train.parquet, validation.parquet and test.parquet for the settings `data.train`,
`data.validation` and `data.test`. Each task is in exactly one split. A task's split does not depend
on the order of the rows.
"""

from __future__ import annotations

from dialop.terminal import open_terminal

if __name__ == "__main__":  # before the imports that need packages
    open_terminal("selfplay.extras.prepare")

# isort: split

import argparse
import hashlib
import importlib
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dialop import __version__
from dialop.collab.kit import write
from dialop.collab.task import TASKS, CollabInstance
from dialop.rows import read_rows
from dialop.shown import error_text
from selfplay.extras.gym_tasks import NUM_TASKS, PREFIX, rows_of_gym
from selfplay.extras.published import instances_of

SPLITS = ("train", "validation", "test")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, or 2 after an error message about an invalid data set."""
    parser = argparse.ArgumentParser(
        prog="python -m selfplay.extras.prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"selfplay {__version__}")
    add(
        "--dataset",
        required=True,
        help="a .jsonl or .parquet file, a hub id OWNER/NAME, or reasoning_gym:NAME:option=value,…",
    )
    add("--out", type=Path, required=True, help="folder for the three files")
    add(
        "--task",
        choices=TASKS,
        help="task type of all rows (default: inferred from each row, docs/collab_data.md)",
    )
    add("--validation", type=float, default=0.1, help="fraction of the tasks (default: 0.1)")
    add("--test", type=float, default=0.1, help="fraction of the tasks (default: 0.1)")
    add("--seed", type=int, default=0, help="seed of splits and generated tasks (default: 0)")
    add("--limit", type=int, help="largest number of tasks to use (generated: 5000)")
    args = parser.parse_args(words)
    try:
        if Path(args.dataset).resolve() in [(args.out / f"{n}.parquet").resolve() for n in SPLITS]:
            raise ValueError(f"--out must not replace --dataset, got {args.out}; use another")
        if args.dataset.startswith(PREFIX):
            spec, num = args.dataset.removeprefix(PREFIX), args.limit or NUM_TASKS
            rows = rows_of_gym(spec, num=num, seed=args.seed)
        else:
            rows = rows_of(args.dataset)
        if not rows:
            raise ValueError(f"--dataset {args.dataset} contains no rows")
        instances = instances_of(rows, name=Path(args.dataset).stem, task=args.task)
        parts = split(
            instances[: args.limit],
            validation=args.validation,
            test=args.test,
            seed=args.seed,
        )
        replace_splits(args.out, parts)
        for name, part in parts.items():
            kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(i.task for i in part).items())
            print(f"{args.out / f'{name}.parquet'}: {len(part)} tasks ({kinds})")
    except (ValueError, OSError) as error:
        print(f"error: {error_text(error)}", file=sys.stderr)
        return 2
    return 0


def replace_splits(folder: Path, parts: Mapping[str, Sequence[CollabInstance]]) -> None:
    """Write each split to `folder`, and no new one before all earlier ones are gone: splits of two
    seeds have tasks in common. A failed write leaves the earlier ones."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder, prefix=".new-") as aside:
        for name, part in parts.items():
            write(Path(aside) / f"{name}.parquet", part)
        for name in parts:
            (folder / f"{name}.parquet").unlink(missing_ok=True)
        for name in parts:
            (Path(aside) / f"{name}.parquet").rename(folder / f"{name}.parquet")


def rows_of(dataset: str) -> list[tuple[str, dict[str, Any]]]:
    """The rows of a file or a Hugging Face data set as pairs (location, row).

    The location is the file and line, or the split and index, for error messages.

    Raises:
        ValueError: if `dataset` is neither a file nor a hub id, if it cannot be read, or if it is a
            hub id and the `datasets` package is not installed.
    """
    path = Path(dataset)
    if path.is_file():
        return list(read_rows(path))
    if path.exists() or not _HUB_ID.fullmatch(dataset) or path.suffix in (".json", ".jsonl"):
        raise ValueError(f"--dataset must be a file or a hub id OWNER/NAME, got {dataset}")
    try:
        package: Any = importlib.import_module("datasets")
    except ModuleNotFoundError:
        raise ValueError(
            f"--dataset {dataset} is not a local file, and a hub id needs the package datasets: "
            "pip install datasets, or download one of its .parquet files and pass its path"
        ) from None
    try:
        loaded = package.load_dataset(dataset)
    except OSError as error:  # unknown id, or no connection to the hub
        raise ValueError(
            f"--dataset {dataset} could not be fetched from the hub: {error}"
        ) from None
    return [
        (f"{dataset} {part} row {number}", dict(row))
        for part in loaded
        for number, row in enumerate(loaded[part])
    ]


def split(
    instances: Sequence[CollabInstance], *, validation: float, test: float, seed: int
) -> dict[str, list[CollabInstance]]:
    """The tasks of each split, in the order of a seeded hash of their goals.

    Each split gets at least one task.

    Raises:
        ValueError: for fractions outside (0, 1), or too few tasks for three splits.
    """
    for name, share in (("--validation", validation), ("--test", test)):
        if not 0 < share < 1:
            raise ValueError(f"{name} must be between 0 and 1, got {share}")
    total = len(instances)
    num_test, num_validation = (max(1, round(share * total)) for share in (test, validation))
    if num_test + num_validation >= total:
        raise ValueError(
            f"--validation and --test must leave a task to train on, got {num_validation} "
            f"and {num_test} of {total} tasks"
        )
    order = sorted(instances, key=lambda instance: _hash("split", seed, instance.goal))
    num_held_out = num_test + num_validation
    parts = order[num_held_out:], order[num_test:num_held_out], order[:num_test]
    return dict(zip(SPLITS, parts, strict=True))


def _hash(*names: object) -> bytes:
    return hashlib.blake2b(repr(names).encode(), digest_size=8).digest()


if __name__ == "__main__":
    sys.exit(main())
