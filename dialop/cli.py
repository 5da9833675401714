"""The commands of `python -m dialop`.

JSON lines go to standard output, everything else to standard error.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any, NoReturn

from dialop import __version__, scaffold
from dialop.checks import NUM_INSTANCES, check_kit
from dialop.kit import SWITCHES, Kit, check_options, games, load_kit
from dialop.rows import read_records
from dialop.shown import error_text, printable
from dialop.specs import choices

_EPILOG = """examples:
  python -m dialop new my_game.py
  python -m dialop check my_game.py
  python -m dialop generate --game matching --num 1000 --size 8 --seed 7 --out games.parquet
  python -m dialop generate --game matching --help
  python -m dialop replay optimization.jsonl
  python -m dialop generate --game collab --num 100 --max-value 10 --out tasks.parquet
"""


_OWN_WORDS = ("game", "num", "out", "seed", "start", "processes")  # not options of a game
_GAME_HELP = "a game of this package, a module such as my_package.my_game, or a .py file"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    0 is success, 1 means that a rescored game differs from its record, 2 means invalid input.
    """
    commands = {"new": _new, "check": _check, "generate": _generate, "replay": _replay}
    try:
        args = _parser(load_kit(_game_of(argv))).parse_args(argv)
        return commands[args.command](args)
    except (ValueError, OSError) as error:
        print(f"error: {error_text(error).replace('game.name', 'the game', 1)}", file=sys.stderr)
        return 2


def _game_of(argv: Sequence[str] | None) -> str:
    """The game given to --game or `check`; the command takes this game's options."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("command", nargs="?")
    parser.add_argument("checked", nargs="?")
    parser.add_argument("--game", nargs="?")
    parser.add_argument("--seed", nargs="?")
    given = parser.parse_known_args(argv)[0]
    return (given.checked if given.command == "check" else given.game) or "matching"


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _parser(kit: Kit) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m dialop",
        description="Start a game, check it, generate instances, rescore recorded games.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dialop {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    new = commands.add_parser(
        "new",
        help="write a small game that passes the checks, as a starting point, and its settings",
        description="Write a small game that passes `check`, with every part that a game needs, "
        "and next to it a .yaml file to train it on a CPU.",
    )
    new.add_argument("file", type=Path, help="the .py file to write; it must not exist")

    make = commands.add_parser(
        "generate",
        help="generate random instances and write them as parquet",
        description="Generate random instances. Each depends only on the seed and its index. The "
        f"last options below belong to --game {kit.name}.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    make.add_argument("--game", default="matching", help=_GAME_HELP)
    make.add_argument("--num", type=int, required=True, help="number of instances")
    make.add_argument("--out", type=Path, required=True, help="the .parquet file to write")
    make.add_argument("--seed", type=int, default=0, help="seed of the stream")
    make.add_argument("--start", type=int, default=0, help="index of the first instance")
    make.add_argument("--processes", type=int, default=1, help="number of worker processes")
    _add_options(make, kit)

    again = commands.add_parser(
        "replay",
        help="rescore recorded games from their text",
        description="Print one JSON line for each recorded game: its score from the text of the "
        "accepted proposal, the best score, and whether both equal the recorded scores. The exit "
        "status is 1 if any differs.",
    )
    again.add_argument("file", type=Path, help="recorded games, one JSON object per line")

    check = commands.add_parser(
        "check",
        help="check that a game keeps the promises of the interface",
        description="Check a game: its seeding, clones, invalid moves, views, outcome, states, "
        "texts. Prints one line per check; the exit status is 1 if one fails. The game's options "
        f"come after GAME; the last options below belong to {kit.name}.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    check.add_argument("game", help=_GAME_HELP)
    check.add_argument("--seed", type=int, default=0, help="seed of the instances")
    _add_options(check, kit, play=True)
    return parser


def _add_options(parser: argparse.ArgumentParser, kit: Kit, *, play: bool = False) -> None:
    """Add the game's options for instances; with `play` also its options of play."""
    kind: Any = kit.Options
    valid = choices(kind)
    for each in _offered(kit):
        if each.metadata.get("play") and not play:
            continue
        how: dict[str, Any] = {"type": type(each.default), "choices": valid.get(each.name)}
        if isinstance(each.default, bool):
            how = {"action": argparse.BooleanOptionalAction}
        name = "--" + each.name.replace("_", "-")
        described = each.metadata.get("description") or " "  # argparse shows no default without it
        low, high = each.metadata.get("ge"), each.metadata.get("le")
        if low is not None and high is not None:
            described = f"{described}, {low} to {high}".strip(" ,")
        parser.add_argument(name, default=each.default, help=described, **how)


def _offered(kit: Kit) -> list[Field[Any]]:
    """The fields of the game's options that the command line can set."""
    plain = (bool, int, float, str)
    every = fields(kit.Options)
    return [one for one in every if type(one.default) in plain and one.name not in _OWN_WORDS]


def _options(kit: Kit, args: argparse.Namespace) -> Any:
    """The game's options from the arguments. Raises ValueError for an invalid value."""
    given = {each.name: getattr(args, each.name, each.default) for each in _offered(kit)}
    options = kit.Options(**given)
    check_options(options)
    return options


def _new(args: argparse.Namespace) -> int:
    file: Path = args.file
    if file.suffix != ".py" or not file.stem.isidentifier():
        near = re.sub(r"\W", "_", f"_{file.stem}" if file.stem[:1].isdigit() else file.stem)
        raise ValueError(
            f"the file must be a .py file that Python can import, got {file}; nearest is {near}.py"
        )
    if importlib.util.find_spec(file.stem) is not None and not file.exists():
        raise ValueError(f"the file must have a unique module name, got {file}")
    settings = file.with_suffix(".yaml")
    if not file.parent.is_dir():
        raise ValueError(f"the file must be in an existing folder, got {file}")
    for path in (file, settings):
        if path.exists():
            raise ValueError(f"the file must not exist, got {path}")
    game = Path(scaffold.__file__)
    words = {"MODULE": str(file), "SETTINGS": str(settings), "STEM": file.stem}
    text = game.with_suffix(".yaml").read_text(encoding="utf-8")
    settings.write_text(re.sub("|".join(words), lambda found: words[found[0]], text), "utf-8")
    file.write_text(game.read_text(encoding="utf-8"), encoding="utf-8")
    python = sys.orig_argv[0]
    print(f"{file}: edit this game; to check it: {python} -m dialop check {file}", file=sys.stderr)
    print(f"{settings}: to train it: {python} train.py --config {settings}", file=sys.stderr)
    return 0


def _generate(args: argparse.Namespace) -> int:
    kit, begin_s = load_kit(args.game), time.perf_counter()
    instances = kit.generate(
        _options(kit, args),
        seed=args.seed,
        start=args.start,
        num=args.num,
        processes=args.processes,
    )
    wall_s = time.perf_counter() - begin_s
    old = ", which replaces an older file" * args.out.is_file()
    kit.write(args.out, instances)
    print(f"{len(instances)} instances in {wall_s:.1f} s: {args.out}{old}", file=sys.stderr)
    return 0


def _replay(args: argparse.Namespace) -> int:
    lines, kits = [], [load_kit(name) for name in games()]
    for index, record in enumerate(read_records(args.file)):
        # If no game recognizes the record, matching rejects it with an error that names the fields.
        kit = next((kit for kit in kits if kit.is_record(record)), load_kit("matching"))
        lines.append(kit.replay(record, index=index))
    if not lines:
        raise ValueError(f"{args.file} has no games")
    for line in lines:
        print(json.dumps(line))
    num_agree = sum(line["agrees"] for line in lines)
    print(f"{num_agree} of {len(lines)} games agree", file=sys.stderr)
    return 0 if num_agree == len(lines) else 1


def _check(args: argparse.Namespace) -> int:
    kit = load_kit(args.game)
    options = _options(kit, args)
    results = check_kit(kit, options, seed=args.seed)
    # Repeat the checks with each common switch inverted; show only new failures.
    for name in SWITCHES[1:]:
        if hasattr(options, name):
            other = replace(options, **{name: not getattr(options, name)})
            failed = (r for r in check_kit(kit, other, seed=args.seed) if r.problem)
            known = {result.rule for result in results}
            named = (replace(r, name=f"{r.name} with {name}") for r in failed)
            results += [result for result in named if result.rule not in known]
    for result in results:
        print(printable(result.line()))
    counts = Counter(result.line().partition(f" {result.name}: ")[0] for result in results)
    told = ", ".join(f"{n} {k}" for k, n in counts.items())
    print(f"{kit.name}: {told} on {NUM_INSTANCES} instances; --seed draws others", file=sys.stderr)
    return int("FAILED" in counts)
