"""Counts which rules an untrained model breaks, by the wording of the rules and by demonstrations.

    python -m bench.wordings --num 32 --temperature 1 0 --out runs/wordings

Plays a model with itself on the held-out boards of configs/smollm2_4x4.yaml, on this machine's CPU,
for each wording, number of demonstration games and temperature. Prints the table of an evaluation,
refused moves by kind, the share of games whose first try is legal, and the share of its text that
is copied (`copied`). --out gets `evaluation.md` with example games and `evaluation.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest.mock import patch

from dialop.matching import texts
from selfplay.config import load_config
from selfplay.data.instances import HELD_OUT, evaluation_instances
from selfplay.distributed import close_world
from selfplay.evaluation.evaluate import EvaluationContext, play_instances, summarize
from selfplay.evaluation.report import Report, report_text, write_report
from selfplay.model.hub import local_folder
from selfplay.preflight.run import read_rendering
from selfplay.rollout.episode import Episode
from selfplay.setup import open_world
from selfplay.weight_sync.start import load_engine

_GOAL = """\
You and a partner assign {size} reviewers to {size} papers, one reviewer to each paper. Every pair \
has a hidden value. You both score the total value of the assignment that you agree on, zero \
without an agreement. You see only some of the values, your partner sees others. {scale_rule}
"""
_PROPOSAL = """\
[propose]
Proposal:
{example}
"""
WORDINGS = {
    "shipped": texts.RULES,
    # Each move as an example that could be sent, without placeholders that could be copied.
    "examples": _GOAL
    + """
Write one move a turn. Begin it with its tag, in one of these four ways:

[message] Ava Li on BLEU is 40, Daniel Nguyen on GLUE is 75.

"""
    + _PROPOSAL
    + """
[accept]

[reject]

Answer a proposal with [accept] or [reject].{message_rule:.0}""",
    # The same, with the rule of the tag as the last words before the board.
    "tag last": _GOAL
    + """
Share your values with [message], then propose all papers:

"""
    + _PROPOSAL
    + """
Answer your partner's proposal with [accept] or [reject].

Every reply begins with [message], [propose], [accept] or [reject].{message_rule:.0}""",
}
SETTINGS = (
    *("engine.kind=hf", "device=cpu", "model.dtype=float32", "data.processes=1"),
    *("rollout.max_new_tokens=96", "rollout.max_game_tokens=4096"),
)
GRAM = 5  # words


def copied(games: Sequence[Episode]) -> float:
    """The share of 5-grams of words in the seats' tries that occur in the rules or demonstrations
    of the seat's prompt; 0 if no try has five words."""
    num_copied = num_all = 0
    for game in games:
        shown = [
            _grams("\n".join([prompt.system, *(text for pair in prompt.earlier for text in pair)]))
            for prompt in game.prompts
        ]
        for turn in game.turns:
            written = _grams(turn.text)
            num_all += len(written)
            num_copied += sum(gram in shown[turn.seat] for gram in written)
    return num_copied / max(1, num_all)


def _grams(text: str) -> list[tuple[str, ...]]:
    words = text.split()
    return [tuple(words[i : i + GRAM]) for i in range(len(words) - GRAM + 1)]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num", type=int, default=32, help="games in each row")
    parser.add_argument("--shown", type=int, nargs="+", default=[0, 1, 2], help="demonstrations")
    parser.add_argument("--wording", nargs="+", default=list(WORDINGS), choices=list(WORDINGS))
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0])
    parser.add_argument("--config", type=Path, default=Path("configs/smollm2_4x4.yaml"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("settings", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args(words)
    config = load_config(args.config, [*SETTINGS, *args.settings])
    rows, firsts = {}, []
    with ExitStack() as cleanup:
        world = open_world(config)
        rendering = read_rendering(config.model, config.game, seed=config.seed)
        engine = load_engine(config, local_folder(config.model.path or ""), world, cleanup=cleanup)
        instances = evaluation_instances(HELD_OUT, num=args.num, game=config.game, data=config.data)
        for temperature, name, shown in product(args.temperature, args.wording, args.shown):
            game = replace(config.game, demonstrations=shown)
            context = EvaluationContext.of(replace(config, game=game), engine, rendering, world)
            with patch.object(texts, "RULES", WORDINGS[name]):
                played = play_instances(instances, context, temperature=temperature)
                row = summarize(played, context)
            games = list(played.games.values())
            label = f"policy, {name}, {shown} shown, T {temperature:g}"
            rows[label] = row
            legal = sum(game.turns[0].error is None for game in games)
            firsts.append(f"{label}: first tries {legal} legal of {len(games)}")
            firsts[-1] += f", copied {copied(games):.2f}"
            report = Report("Wordings", {"model": config.model.path}, rows)
            print(*report_text(report).rsplit("\n\n", 2)[-2:], *firsts, sep="\n", flush=True)
            write_report(report, args.out)
            (args.out / "first_tries.txt").write_text("\n".join(firsts) + "\n")
    close_world(world)


if __name__ == "__main__":
    main()
