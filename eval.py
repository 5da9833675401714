"""Evaluate a trained policy on held-out games, next to scripted players on the same instances.

    python eval.py runs/talk --games generated --num 1024
    python eval.py runs/talk/warm_start --games generated --temperature 0
    python eval.py ORG/NAME --games generated --num 64 [key=value ...]
    python eval.py FOLDER_OR_FILE.gguf --config configs/qwen2.5_0.5b.yaml \\
        --games generated --partner scripted:honest --out FOLDER
    python eval.py runs/a runs/b --partners scripted:honest,runs/c \\
        --games generated --num 256

Prints tables, and writes them with example games to `evaluation.md` and `evaluation.json`. The
settings come from the checkpoint's run or --config, else from the defaults (the full matching
game); key=value arguments override them.
With --partners every checkpoint plays with itself, with the other checkpoints and with each
partner, in both seats or roles, and the report begins with the matrix.
Under `torchrun --nproc-per-node 2 -- eval.py …` the games are spread over the ranks (without the
two dashes torchrun takes --num as its own option). In Python, use `selfplay.evaluate`
(docs/python.md).
"""

from __future__ import annotations

import sys

import selfplay  # noqa: F401  sets OpenMP's wait policy, which torch reads when it is imported
from dialop.terminal import open_terminal

if __name__ == "__main__":  # before the imports that need packages
    open_terminal("eval.py")

# isort: split
from selfplay.preflight.command_line import parse_eval, refused

PARSED = None
if __name__ == "__main__":  # --help and a typo are answered before torch is imported
    try:
        PARSED = parse_eval(sys.argv[1:], __doc__ or "")
    except ValueError as error:
        sys.exit(refused("eval.py", error))

# isort: split
from torch.distributed.elastic.multiprocessing.errors import record

from dialop.game import GameError
from selfplay.api.evaluation import evaluate_plan
from selfplay.errors import RunEnds, SettingsError


def main(words: list[str] | None = None) -> int:
    """Returns the exit status: 2 for invalid arguments, refused before weights are loaded."""
    try:
        plan = PARSED or parse_eval(words or [], __doc__ or "")
    except ValueError as error:
        return refused("eval.py", error)
    try:
        evaluated = evaluate_plan(plan)
    except (SettingsError, RunEnds, GameError) as error:
        return refused("eval.py", error, status=2 if isinstance(error, SettingsError) else 1)
    if evaluated.paths:
        print(evaluated, *evaluated.paths, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(record(main)())  # adds a failed rank's error to torchrun's summary
