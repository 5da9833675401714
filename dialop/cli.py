"""The commands of `python -m dialop`.

JSON lines go to standard output, everything else to standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TextIO

from dialop.checks import check_kit
from dialop.game import Game
from dialop.kit import SWITCHES, Kit, games, load_kit
from dialop.rows import read_records
from dialop.shown import printable

_EPILOG = """examples:
  python -m dialop generate --game matching --num 1000 --size 8 --seed 7 --out games.parquet
  python -m dialop generate --game matching --help
  python -m dialop replay optimization.jsonl
  echo '{"seat": 0, "text": "[message] Hello"}' \\
      | python -m dialop step --instances games.parquet --index 0
  python -m dialop generate --game collab --num 100 --max-value 10 --out tasks.parquet
  python -m dialop check my_game.py
"""


_GAME_HELP = "a game of this package, a module such as my_package.my_game, or a .py file"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    0 is success, 1 means that a rescored game differs from its record, 2 means bad input.
    """
    commands = {"generate": _generate, "replay": _replay, "step": _step, "check": _check}
    try:
        args = _parser(load_kit(_game_of(argv))).parse_args(argv)
        return commands[args.command](args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _game_of(argv: Sequence[str] | None) -> str:
    """The name given by --game; `generate` and `step` take this game's options."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--game", nargs="?")
    return parser.parse_known_args(argv)[0].game or "matching"


def _parser(kit: Kit) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dialop",
        description="Generate instances, rescore recorded games, play a game by hand.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    make = commands.add_parser(
        "generate",
        help="generate random instances and write them as parquet",
        description="Generate random instances. Each depends only on the seed and its index. The "
        f"options below are those of --game {kit.name}.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    make.add_argument("--game", default="matching", help=_GAME_HELP)
    make.add_argument("--num", type=int, required=True, help="number of instances")
    make.add_argument("--out", type=Path, required=True, help="the .parquet file to write")
    make.add_argument("--seed", type=int, default=0, help="seed of the stream")
    make.add_argument("--start", type=int, default=0, help="index of the first instance")
    make.add_argument("--processes", type=int, default=1, help="number of worker processes")
    _add_options(make, kit, play=False)

    again = commands.add_parser(
        "replay",
        help="rescore recorded games from their text",
        description="Print one JSON line for each recorded game: its score from the text of the "
        "accepted proposal, the best score, and whether both equal the recorded ones. The exit "
        "status is 1 unless all do.",
    )
    again.add_argument("file", type=Path, help="recorded games, one JSON object per line")

    step = commands.add_parser(
        "step",
        help="play one game by JSON lines",
        description='Read moves like {"seat": 0, "text": "[message] Hello"} from standard input '
        "and answer each line with one JSON line.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    step.add_argument("--game", default="matching", help=_GAME_HELP)
    step.add_argument("--instances", type=Path, required=True, help=".parquet or recorded .jsonl")
    step.add_argument("--index", type=int, default=0, help="index of the instance, from 0")
    _add_options(step, kit, play=True)
    step.add_argument("--prompts", action="store_true", help="print all prompts to standard error")

    check = commands.add_parser(
        "check",
        help="check that a game keeps the promises of the interface",
        description="Check a game: its seeding, clones, refusals, views, outcome, states, texts. "
        "Prints one line for each check; the exit status is 1 if one fails.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    check.add_argument("game", help=_GAME_HELP)
    check.add_argument("--seed", type=int, default=0, help="seed of the instances")
    return parser


def _add_options(parser: argparse.ArgumentParser, kit: Kit, *, play: bool) -> None:
    """Add the game's own options: those of how it is played, or those of its instances."""
    for each in fields(kit.Options):
        rules = each.metadata
        if "sentence" not in rules or rules["play"] != play:
            continue
        is_bool = isinstance(each.default, bool)
        how = (
            {"action": argparse.BooleanOptionalAction} if is_bool else {"type": type(each.default)}
        )
        if rules["choices"]:
            how["choices"] = rules["choices"]
        name = "--" + each.name.replace("_", "-")
        parser.add_argument(name, default=each.default, help=rules["sentence"], **how)


def _options(kit: Kit, args: argparse.Namespace) -> Any:
    """The game's options from the arguments. Raises ValueError for a value out of bounds."""
    names = {each.name for each in fields(kit.Options)}
    return kit.Options(**{name: value for name, value in vars(args).items() if name in names})


def _generate(args: argparse.Namespace) -> int:
    kit = load_kit(args.game)
    begin_s = time.perf_counter()
    instances = kit.generate(
        _options(kit, args),
        seed=args.seed,
        start=args.start,
        num=args.num,
        processes=args.processes,
    )
    wall_s = time.perf_counter() - begin_s
    kit.write(args.out, instances)
    print(f"{len(instances)} instances in {wall_s:.1f} s: {args.out}", file=sys.stderr)
    if figures := kit.figures(instances):
        print(figures, file=sys.stderr)
    return 0


def _replay(args: argparse.Namespace) -> int:
    lines = []
    kits = [load_kit(name) for name in games()]
    for index, record in enumerate(read_records(args.file)):
        # If no game knows the record, matching refuses it with an error that names the fields.
        kit = next((kit for kit in kits if kit.is_record(record)), load_kit("matching"))
        lines.append(kit.replay(record, index=index))
    if not lines:
        raise ValueError(f"{args.file} holds no games")
    for line in lines:
        print(json.dumps(line))
    num_agree = sum(line["agrees"] for line in lines)
    print(f"{num_agree} of {len(lines)} games agree", file=sys.stderr)
    return 0 if num_agree == len(lines) else 1


def _step(args: argparse.Namespace) -> int:
    kit = load_kit(args.game)
    instances = kit.read(args.instances)
    if not instances:
        raise ValueError(f"{args.instances} holds no instances")
    if not 0 <= args.index < len(instances):
        raise ValueError(f"--index must be 0 to {len(instances) - 1}, got {args.index}")
    game = kit.new_game(instances[args.index], _options(kit, args))
    if args.prompts:
        for seat in range(game.num_seats):
            prompt = game.prompt(seat)
            shown = printable(f"{prompt.system}\n\n{prompt.user}")
            print(f"--- seat {seat}\n{shown}", file=sys.stderr)
    answer_lines(game, sys.stdin.buffer, out=sys.stdout)
    return 0


def _check(args: argparse.Namespace) -> int:
    kit = load_kit(args.game)
    options = kit.Options()
    results = check_kit(kit, options, seed=args.seed)
    # Repeat the checks with each switch that many games have; show only failures.
    for name in SWITCHES[1:]:
        if hasattr(options, name):
            other = replace(options, **{name: not getattr(options, name)})
            failed = (r for r in check_kit(kit, other, seed=args.seed) if r.problem)
            results += [replace(r, name=f"{r.name} with {name}") for r in failed]
    for result in results:
        print(result.line())
    num_failed = sum(bool(result.problem) for result in results)
    print(f"{kit.name}: {num_failed} of {len(results)} checks failed", file=sys.stderr)
    return 1 if num_failed else 0


def answer_lines(game: Game, lines: Iterable[bytes], *, out: TextIO) -> None:
    """Try each line as a move and print one JSON line for it; an invalid line gets an error."""
    for line in lines:
        observations = ("",) * game.num_seats
        try:
            seat, text = _read_move(line, num_seats=game.num_seats)
        except ValueError as problem:
            error: str | None = f"Error: {problem}"
        else:
            step = game.step(seat, text)
            error, observations = step.error, step.observations
        outcome = game.outcome()
        answer = {
            "seat_to_move": game.seat_to_move,
            "error": error,
            "over": outcome.over,
            "agreed": outcome.agreed,
            "score": outcome.score,
            "score_norm": outcome.score_norm,
            "observations": list(observations),
        }
        print(json.dumps(answer), file=out, flush=True)


def _read_move(line: bytes, *, num_seats: int) -> tuple[int, str]:
    """The seat and text of a line. Raises ValueError for an invalid line and says why."""
    shape = '{"seat": 0, "text": "..."}'
    try:
        move: Any = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(f"the line is not JSON; write {shape}") from None
    if not isinstance(move, dict):
        raise ValueError(f"the line is not a JSON object; write {shape}")
    seat, text = move.get("seat"), move.get("text")
    if isinstance(seat, bool) or not isinstance(seat, int) or not 0 <= seat < num_seats:
        raise ValueError(f'"seat" must be 0 to {num_seats - 1}, got {_shown(seat)}')
    if not isinstance(text, str):
        raise ValueError(f'"text" must be a string, got {_shown(text)}')
    return seat, text


def _shown(value: Any) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= 40 else shown[:39] + "…"
