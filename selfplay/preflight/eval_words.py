"""The command line of eval.py: its options, read without importing torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from selfplay.preflight.command_line import Words


def read_eval_words(words: Sequence[str] | None, about: str) -> argparse.Namespace:
    """Parse the command line, with `key=value` words anywhere (`overrides`). Ends the process after
    --help. Raises ValueError for words that cannot be used."""
    parser = Words(
        prog="eval.py",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="eval.py --checkpoint RUN_OR_FOLDER --games FILE|generated [options] [key=value ...]",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--checkpoint",
        type=Path,
        action="append",
        default=[],
        help="a run, a Hugging Face folder or name; with --partners may be repeated, one row each",
    )
    add("--games", required=True, help="'generated', a .parquet of instances or recorded .jsonl")
    add("--num", type=int, help="games (default: eval.final_games, or all of the file)")
    add("--partner", help="see docs/partners.md (default: self, or the run's if seats are unequal)")
    add(
        "--partners",
        type=split_list,
        default=[],
        help="cross-play: folders and players, comma-separated; without --checkpoint also the rows",
    )
    add(
        "--start",
        default="0",
        help="start with people's recorded moves: a number, a share or random",
    )
    add("--out", type=Path, help="folder to write to (default: RUN/eval_ and what was asked)")
    add(
        "--temperature",
        type=float,
        action="append",
        help="0 is greedy; may be repeated (default: rollout.temperature, as in training)",
    )
    add("--config", type=Path, help="settings file (default: the run's own)")
    args, rest = parser.parse_known_args(words)
    parser.check_settings(rest)
    args.overrides, args.temperature = rest, args.temperature or []
    if len(args.checkpoint) != 1 and not args.partners:
        raise ValueError(
            f"--checkpoint must be given once without --partners, got {len(args.checkpoint)}"
        )
    if args.partners and (args.partner or len(args.temperature) > 1):
        raise ValueError("--partners needs no --partner and at most one --temperature")
    if not all(t == 0 or 0.01 <= t <= 100 for t in args.temperature):
        raise ValueError(
            f"--temperature must be 0 (greedy) or from 0.01 to 100, got {args.temperature}"
        )
    return args


def split_list(text: str) -> list[str]:
    """The entries of a comma-separated list. A comma inside a script's options, as in
    scripted:honest:tell=top,slip=0.1, does not split."""
    entries: list[str] = []
    for piece in map(str.strip, text.split(",")):
        if entries and re.fullmatch(r"\w+=[^/]*", piece):
            entries[-1] += f",{piece}"
        else:
            entries.append(piece)
    return [entry for entry in entries if entry]
