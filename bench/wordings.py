"""Counts which rules an untrained model breaks, by the wording of the rules and by demonstrations.

    python -m bench.wordings models/SmolLM2-135M-Instruct.Q4_1.gguf --num 64

Plays sampled games of one model with itself on held-out 4x4 boards in English, with each wording of
WORDINGS and with 0, 1 and 2 demonstration games. Prints one row each: tokens of the system prompt,
the share of games whose first move is legal, refused moves a game by kind, agreement, score, true
statements, and the share of first moves that repeat a demonstration's first line.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import numpy as np

from dialop.matching import texts
from selfplay.colocation.start import load_engine
from selfplay.config import load_config
from selfplay.data.instances import HELD_OUT, generated
from selfplay.distributed import close_world
from selfplay.evaluation.evaluate import EvaluationContext, play_instances, summarize
from selfplay.model.hub import local_folder
from selfplay.preflight.run import read_rendering
from selfplay.setup import open_world

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
    # Each move as an example that could be sent, and no placeholder that could be copied.
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
KINDS = ("no_tag", "unknown_tag", "empty", "bad_proposal", "must_answer", "nothing_pending")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a Hugging Face id, a folder or a .gguf file")
    parser.add_argument("--num", type=int, default=64, help="games in each row")
    parser.add_argument("--shown", type=int, nargs="+", default=[0, 1, 2], help="demonstrations")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args(words)
    config = load_config(
        None,
        [
            *("game.size=4", f"model.path={args.model}", "engine.kind=hf"),
            *("rollout.max_turns=8", "rollout.max_retries=1", "rollout.max_new_tokens=128"),
            *("rollout.max_game_tokens=4096", *args.settings),
        ],
    )
    columns = ["tokens", "first move legal", *(k.replace("_", " ") for k in KINDS), "cut off"]
    columns += ["agreement", "score", "true statements", "first line copied"]
    print(
        f"| wording | demonstrations | {' | '.join(columns)} |\n|---|{'--:|' * (1 + len(columns))}"
    )
    with ExitStack() as cleanup:
        world = open_world(config)
        rendering = read_rendering(config.model, config.game, seed=config.seed)
        engine = load_engine(config, local_folder(args.model), world, cleanup=cleanup)
        instances = generated(HELD_OUT, game=config.game, seed=0, start=0, num=args.num)
        for name, rules in WORDINGS.items():
            for shown in args.shown:
                game = replace(config.game, demonstrations=shown)
                max_batch = config.engine.max_batch
                context = EvaluationContext(
                    engine, rendering, world, game, config.rollout, max_batch
                )
                with patch.object(texts, "RULES", rules):
                    played = play_instances(instances, context)
                    measures = summarize(played, context).measures
                games = list(played.games.values())
                prompt = games[0].prompts[0]
                tokens = len(rendering.action_ids(prompt.system)) - 1
                openers = {text.split("\n")[0] for _, text in prompt.earlier}
                openers |= {text.split("\n")[0] for g in games for _, text in g.prompts[1].earlier}
                first = [game.turns[0] for game in games]
                row = [float(np.mean([turn.error is None for turn in first]))]
                row += [measures.get(f"errors_{kind}", 0.0) for kind in (*KINDS, "cut_off")]
                row += [measures.get(k, 0.0) for k in ("agreement", "score", "honesty")]
                row += [float(np.mean([t.text.split("\n")[0] in openers for t in first]))]
                cells = " | ".join(f"{value:.2f}" for value in row)
                print(f"| {name} | {shown} | {tokens} | {cells} |", flush=True)
    close_world(world)


if __name__ == "__main__":
    main()
