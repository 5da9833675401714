"""The commands of `python -m dialop`.

JSON lines go to standard output, everything else to standard error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from dialop.collab import store
from dialop.collab.game import CollabGame
from dialop.collab.numbers import hidden_number
from dialop.collab.task import CollabOptions
from dialop.game import Game
from dialop.matching.board import MatchingInstance, MatchingOptions
from dialop.matching.game import new_game
from dialop.matching.generate import KEEPS, MatchingRecipe, generate_many
from dialop.matching.recorded import replay
from dialop.matching.store import read_instances, write_instances
from dialop.rows import read_records
from dialop.shown import printable

GAMES = ("matching", "collab")

_EPILOG = """examples:
  python -m dialop generate --game matching --num 1000 --size 8 --seed 7 --out games.parquet
  python -m dialop replay optimization.jsonl
  echo '{"seat": 0, "text": "[message] Hello"}' \\
      | python -m dialop step --instances games.parquet --index 0
  python -m dialop generate --game collab --num 100 --max-value 10 --out tasks.parquet
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    0 is success, 1 means that a rescored game differs from its record, 2 means bad input.
    """
    args = _parser().parse_args(argv)
    commands = {"generate": _generate, "replay": _replay, "step": _step}
    try:
        return commands[args.command](args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dialop",
        description="Generate instances, rescore recorded games of matching, play a game by hand.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    defaults = MatchingRecipe()

    make = commands.add_parser(
        "generate",
        help="generate random instances and write them as parquet",
        description="Generate random instances. Each depends only on the seed and its index.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    make.add_argument("--game", choices=GAMES, default="matching", help="which game")
    make.add_argument("--num", type=int, required=True, help="number of instances")
    make.add_argument("--out", type=Path, required=True, help="the .parquet file to write")
    make.add_argument("--seed", type=int, default=0, help="seed of the stream")
    make.add_argument("--start", type=int, default=0, help="index of the first instance")
    make.add_argument("--processes", type=int, default=1, help="number of worker processes")
    make.add_argument("--size", type=int, default=defaults.size, help="number of reviewers, 2 to 8")
    make.add_argument(
        "--p-observed",
        type=float,
        default=defaults.p_observed,
        help="probability that a seat sees a cell",
    )
    make.add_argument(
        "--scale",
        action=argparse.BooleanOptionalAction,
        default=defaults.scale,
        help="multiply each seat's values by a hidden factor from 1 to 10",
    )
    make.add_argument(
        "--max-value", type=int, default=defaults.max_value, help="all values are below this"
    )
    make.add_argument(
        "--hardness",
        type=float,
        default=defaults.hardness,
        help="keep a table if solo value x hardness < best value",
    )
    make.add_argument(
        "--keep", choices=KEEPS, default=defaults.keep, help="seats for which that must hold"
    )
    make.add_argument(
        "--max-tables",
        type=int,
        default=defaults.max_tables,
        help="most tables to reject for one instance",
    )

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
    step.add_argument("--game", choices=GAMES, default="matching", help="which game")
    step.add_argument("--instances", type=Path, required=True, help=".parquet or recorded .jsonl")
    step.add_argument("--index", type=int, default=0, help="index of the instance, from 0")
    step.add_argument("--brief", action="store_true", help="use the short texts for tiny models")
    step.add_argument("--no-messages", action="store_true", help="refuse [message] moves")
    step.add_argument(
        "--private-reasoning", action="store_true", help="allow private text before the tag"
    )
    step.add_argument("--prompts", action="store_true", help="print both prompts to standard error")
    return parser


def _generate(args: argparse.Namespace) -> int:
    if args.game == "collab":
        return _generate_numbers(args)
    recipe = MatchingRecipe(
        size=args.size,
        p_observed=args.p_observed,
        scale=args.scale,
        max_value=args.max_value,
        hardness=args.hardness,
        keep=args.keep,
        max_tables=args.max_tables,
    )
    begin_s = time.perf_counter()
    instances = generate_many(
        recipe, seed=args.seed, num=args.num, start=args.start, processes=args.processes
    )
    wall_s = time.perf_counter() - begin_s
    write_instances(args.out, instances)
    print(f"{len(instances)} instances in {wall_s:.1f} s: {args.out}", file=sys.stderr)
    if instances:
        print(_figures(instances), file=sys.stderr)
    return 0


def _generate_numbers(args: argparse.Namespace) -> int:
    """Generate hidden-number tasks. Of the options for boards, only --max-value applies."""
    if args.max_value < 2:
        raise ValueError(f"--max-value must be at least 2, got {args.max_value}")
    tasks = [
        hidden_number(seed=args.seed, index=index, max_value=args.max_value)
        for index in range(args.start, args.start + args.num)
    ]
    store.write_instances(args.out, tasks)
    print(f"{len(tasks)} tasks: {args.out}", file=sys.stderr)
    return 0


def _figures(instances: Sequence[MatchingInstance]) -> str:
    """One line of mean reference values of the instances, to check what was generated."""
    solo = [instance.norm(value) for instance in instances for value in instance.solo]
    better = [instance.norm(max(instance.solo)) for instance in instances]
    num_visible = [sum(map(sum, mask)) for instance in instances for mask in instance.masks]
    best = [float(instance.best) for instance in instances]
    return (
        f"best {statistics.fmean(best):.1f}, solo plan {statistics.fmean(solo):.3f}, "
        f"better solo plan {statistics.fmean(better):.3f}, "
        f"cells a seat sees {statistics.fmean(num_visible):.1f}"
    )


def _replay(args: argparse.Namespace) -> int:
    lines = [replay(record, index=i) for i, record in enumerate(read_records(args.file))]
    if not lines:
        raise ValueError(f"{args.file} holds no games")
    for line in lines:
        print(json.dumps(line))
    num_agree = sum(line["agrees"] for line in lines)
    print(f"{num_agree} of {len(lines)} games agree", file=sys.stderr)
    return 0 if num_agree == len(lines) else 1


def _step(args: argparse.Namespace) -> int:
    collab = args.game == "collab"
    read: Callable[[Path], Sequence[Any]] = store.read_instances if collab else read_instances
    instances = read(args.instances)
    if not instances:
        raise ValueError(f"{args.instances} holds no instances")
    if not 0 <= args.index < len(instances):
        raise ValueError(f"--index must be 0 to {len(instances) - 1}, got {args.index}")
    if collab and args.no_messages:
        raise ValueError("--no-messages cannot be used with collab, which needs messages")
    reasoning = args.private_reasoning
    game: Game
    if collab:
        options = CollabOptions(brief=args.brief, private_reasoning=reasoning)
        game = CollabGame(instances[args.index], options)
    else:
        game = new_game(
            instances[args.index],
            MatchingOptions(
                messages=not args.no_messages, brief=args.brief, private_reasoning=reasoning
            ),
        )
    if args.prompts:
        for seat in range(game.num_seats):
            prompt = game.prompt(seat)
            shown = printable(f"{prompt.system}\n\n{prompt.user}")
            print(f"--- seat {seat}\n{shown}", file=sys.stderr)
    answer_lines(game, sys.stdin.buffer, out=sys.stdout)
    return 0


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
        raise ValueError(f"the line is no JSON; write {shape}") from None
    if not isinstance(move, dict):
        raise ValueError(f"the line is no JSON object; write {shape}")
    seat, text = move.get("seat"), move.get("text")
    if isinstance(seat, bool) or not isinstance(seat, int) or not 0 <= seat < num_seats:
        raise ValueError(f'"seat" must be 0 to {num_seats - 1}, got {_shown(seat)}')
    if not isinstance(text, str):
        raise ValueError(f'"text" must be a string, got {_shown(text)}')
    return seat, text


def _shown(value: Any) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= 40 else shown[:39] + "…"
