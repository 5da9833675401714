"""Evaluate a trained policy on held-out games, next to scripted players on the same instances.

    python eval.py runs/talk --games generated --num 1024
    python eval.py runs/talk/warm_start --games generated --temperature 0
    python eval.py ORG/NAME --games generated --num 64 [key=value ...]
    python eval.py FOLDER_OR_FILE.gguf --config configs/qwen2.5_0.5b.yaml \\
        --games generated --partner scripted:honest --out FOLDER
    python eval.py runs/a runs/b --partners scripted:honest,runs/c \\
        --games generated --num 256

Prints tables, and writes them with example games to `evaluation.md` and `evaluation.json`. The
settings are those of the checkpoint's run or of --config, else the defaults, which are the full
matching game; key=value words override them.
With --partners every checkpoint plays with itself, with the other checkpoints and with each
partner, in both seats, and the report begins with the matrix.
Under `torchrun --nproc-per-node 2 -- eval.py …` the games are spread over the ranks (without the
two dashes torchrun takes --num for its own option).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import selfplay  # noqa: F401  it sets how OpenMP waits, which torch reads when it is imported
from dialop.terminal import open_terminal
from selfplay.preflight.command_line import parse_eval, refused

PARSED = None
if __name__ == "__main__":  # --help and a typo are answered before torch is imported
    open_terminal("eval.py")
    try:
        PARSED = parse_eval(sys.argv[1:], __doc__ or "")
    except ValueError as error:
        sys.exit(refused("eval.py", error))

# isort: split
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import AutoConfig

from dialop.game import MachineError
from selfplay.atomic import write_atomically
from selfplay.chat.rendering import Rendering
from selfplay.config import Config
from selfplay.config.text import dump
from selfplay.distributed import World, close_world
from selfplay.errors import RunEnds, SettingsError
from selfplay.evaluation.evaluate import (
    AllVoid,
    check_room,
    evaluate_people,
    evaluate_scripted,
    play_matches,
)
from selfplay.evaluation.games import Games, find_games, find_start, imitated_boards
from selfplay.evaluation.plan import EvalPlan, find_config, plan_evaluation
from selfplay.evaluation.report import Report, markdown, write_report
from selfplay.model.hub import described_in
from selfplay.preflight.run import check_endpoint, check_folder, check_machine, read_rendering
from selfplay.preflight.small_copy import check_copy
from selfplay.setup import open_world, warn_of_template


def main(words: list[str] | None = None) -> int:
    """Returns the exit status: 2 for bad arguments, which are found before weights are loaded."""
    try:
        args = PARSED or parse_eval(words or [], __doc__ or "")
        options = options_of(args)
        plan = plan_evaluation(
            args.runs,
            args.partners,
            partner=args.partner,
            games=args.games,
            temperatures=args.temperature,
            out=args.out,
            given=args.config,
            overrides=args.overrides,
            options=[f"{name}={value}" for name, values in options.items() for value in values],
        )
        config = plan.config
        check_folder(plan.out, what="--out")
        check_machine(config.device, config.engine)
        for player in plan.players:
            what = "--partners" if plan.rows else "--partner"
            check_endpoint(player.spec, config.endpoint, what=what)
        world = open_world(config)
        games = find_games(
            args.games,
            args.num,
            game=config.game,
            data=config.data,
            eval_settings=config.eval,
            start=find_start(args.start),
            imitated=imitated_boards([p.source for p in plan.players if p.source is not None]),
        )
        # Scored before hours of play, so that a record that cannot be read ends nothing later.
        people = (
            evaluate_people(games.records, games.instances, config.game) if games.records else None
        )
        policies = find_policies(plan, args.overrides, games, world)
    except (ValueError, OSError) as error:
        return refused("eval.py", error)
    try:
        rows = play_matches(plan, instances=games.instances, policies=policies, world=world)
    except (SettingsError, AllVoid, RunEnds, MachineError) as error:
        return refused("eval.py", error, status=2 if isinstance(error, SettingsError) else 1)
    if world.rank == 0:
        if people is not None:
            rows["people"] = people
        for spec in config.game.kit.BASELINES:
            rows[spec] = evaluate_scripted(
                games.instances, spec=spec, game=config.game, rollout=config.rollout
            )
        title = "Cross-play" if plan.rows else f"Evaluation of {args.runs[0]}"
        matrix = (plan.rows, plan.columns) if plan.rows else None
        report = Report(title, facts_of(args, plan, games), rows, matrix)
        try:
            paths = write_report(report, plan.out)
            write_atomically(plan.out / "config.yaml", dump(config))
        except OSError as error:
            print(markdown(report, games=False), flush=True)
            return refused("eval.py", OSError(f"{error}; the tables are printed alone"), status=1)
        print(markdown(report, games=False), *paths, sep="\n")
    close_world(world)
    return 0


def find_policies(
    plan: EvalPlan, overrides: Sequence[str], games: Games, world: World
) -> dict[str, tuple[Config, Rendering]]:
    """The settings and the rendering of each policy, by label. Raises ValueError for a model that
    the engine cannot play, and for games whose prompts leave no room for a reply."""
    policies = {}
    for player in plan.players:
        if player.source is None:
            continue
        weights = player.source.weights
        config = find_config(player.source, plan.settings, overrides)
        rendering = read_rendering(config.model, config.game, seed=config.seed)
        warn_of_template(rendering, str(weights), world)
        described = AutoConfig.from_pretrained(described_in(weights))
        # A run checked its family before it trained. SGLang has families of its own.
        if player.source.settings is None and config.engine.kind == "hf":
            why = check_copy(described, engine=True)
            if why is not None:
                raise ValueError(
                    f"{weights} is a {described.model_type}, which engine.kind=hf cannot play: "
                    f"{why}; engine.kind=sglang may support it"
                )
        check_room(
            games.instances,
            rendering=rendering,
            game=config.game,
            rollout=config.rollout,
            max_positions=getattr(described.get_text_config(), "max_position_embeddings", None),
        )
        policies[player.label] = config, rendering
        if world.rank == 0:
            print(f"weights: {weights}" + (f" ({player.label})" if plan.rows else ""))
    return policies


def options_of(args: argparse.Namespace) -> dict[str, list[str]]:
    """The options that change the result, for the name of its folder."""
    options = {
        "config": [args.config.stem] if args.config else [],
        "num": [] if args.num is None else [str(args.num)],
        "start": [args.start] if args.start != "0" else [],
    }
    return options | {"temperature": [f"{t:g}" for t in args.temperature]}


def facts_of(args: argparse.Namespace, plan: EvalPlan, games: Games) -> dict[str, Any]:
    """What the report says above its tables."""
    weights = {p.label: str(p.source.weights) for p in plan.players if p.source}
    own = {
        "checkpoint": str(args.runs[0]) if args.runs else None,
        "weights": next(iter(weights.values()), None),
        "partner": plan.matches[0].other.spec.text,
    }
    facts = {
        **({"players": weights} if plan.rows else own),
        "games": args.games,
        "num_games": len(games.instances),
        **plan.config.game.kit.described(games.instances, plan.config.game.options),
        "temperatures": sorted({match.temperature for match in plan.matches}, reverse=True),
        "engine": plan.config.engine.kind,
        "config": args.config.name if args.config else None,
        "start": args.start if args.start != "0" else None,
        "overrides": args.overrides or None,
    }
    return {name: fact for name, fact in facts.items() if fact is not None}


if __name__ == "__main__":
    sys.exit(record(main)())  # torchrun's summary then tells how a rank ended
