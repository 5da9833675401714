"""Evaluate a trained policy on held-out games, next to scripted players on the same instances.

    python eval.py --checkpoint runs/tiny --games generated --num 1024
    python eval.py --checkpoint runs/tiny/warm_start --games generated --temperature 0
    python eval.py --checkpoint ORG/NAME --games generated --num 64 [key=value ...]
    python eval.py --checkpoint FOLDER_OR_FILE.gguf --config configs/qwen2.5_0.5b.yaml \\
        --games generated --partner scripted:honest --out FOLDER
    python eval.py --checkpoint runs/a --checkpoint runs/b --partners scripted:honest,runs/c \\
        --games generated --num 256

Prints a table and example games, and writes them to `evaluation.json` and `evaluation.md`. The
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
from pathlib import Path
from typing import Any

import selfplay  # noqa: F401  it sets how OpenMP waits, which torch reads when it is imported

# isort: split
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import AutoConfig

from selfplay.atomic import write_atomically
from selfplay.chat.rendering import Rendering
from selfplay.config import Config, DataConfig, EvalConfig, GameConfig
from selfplay.config.player_spec import PERSON
from selfplay.config.text import dump
from selfplay.data.instances import GENERATED
from selfplay.distributed import World, close_world
from selfplay.errors import RunEnds, SettingsError
from selfplay.evaluation.evaluate import AllVoid, check_room, evaluate_people, evaluate_scripted
from selfplay.evaluation.matrix import MatrixPolicy, play_matches
from selfplay.evaluation.question import (
    Games,
    Question,
    cross_play,
    find_config,
    find_games,
    find_start,
    imitated_boards,
    one_policy,
    split_list,
)
from selfplay.evaluation.report import Report, report_text, write_report
from selfplay.model.policy import described_in
from selfplay.partners.checkpoints import Source
from selfplay.preflight.command_line import Words, refused
from selfplay.preflight.run import check_endpoint, check_folder, check_machine, read_rendering
from selfplay.preflight.small_copy import check_copy
from selfplay.setup import open_world, warn_of_template


def games_of(
    args: argparse.Namespace,
    game: GameConfig,
    data: DataConfig,
    eval_settings: EvalConfig,
    sources: Sequence[Source],
) -> Games:
    """The games that --games, --num and --start name, without boards that these policies imitated;
    says how many those are."""
    imitated = imitated_boards(sources)
    games = find_games(
        args.games,
        args.num,
        game=game,
        data=data,
        eval_settings=eval_settings,
        start=find_start(args.start),
        imitated=imitated,
    )
    if imitated and args.games != GENERATED:
        print(f"boards that a warm start imitated are left out of {args.games}", file=sys.stderr)
    return games


def find_rendering(source: Source, config: Config, *, games: Games, world: World) -> Rendering:
    """The policy's tokenizer and chat template.

    Raises ValueError for a tokenizer or template that cannot be used, for a model that the engine
    cannot play, and for games whose prompts leave no room for a reply.
    """
    rendering = read_rendering(config.model, config.game, seed=config.seed)
    warn_of_template(rendering, str(source.weights), world)
    described = AutoConfig.from_pretrained(described_in(source.weights))
    # A run checked its family before it trained. SGLang has families of its own.
    if source.settings is None and config.engine.kind == "hf":
        why = check_copy(described, engine=True)
        if why is not None:
            raise ValueError(
                f"{source.weights} is a {described.model_type}, which engine.kind=hf cannot play: "
                f"{why}; engine.kind=sglang may support it"
            )
    positions = getattr(described.get_text_config(), "max_position_embeddings", None)
    check_room(
        games.instances,
        rendering=rendering,
        game=config.game,
        rollout=config.rollout,
        max_positions=positions,
    )
    return rendering


def read_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, with `key=value` words anywhere. Raises ValueError for an unknown
    word."""
    parser = Words(
        prog="eval.py",
        description=__doc__,
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
    args.overrides = rest
    if len(args.checkpoint) != 1 and not args.partners:
        raise ValueError(
            f"--checkpoint must be given once without --partners, got {len(args.checkpoint)}"
        )
    return args


def check_temperatures(temperatures: Sequence[float]) -> None:
    if not all(t == 0 or 0.01 <= t <= 100 for t in temperatures):
        raise ValueError(
            f"--temperature must be 0 (greedy) or from 0.01 to 100, got {list(temperatures)}"
        )


def options_of(args: argparse.Namespace) -> list[str]:
    """The options that change the result, as words for the name of its folder."""
    words = [f"config={args.config.stem}"] if args.config else []
    words += [f"num={args.num}"] if args.num is not None else []
    words += [f"start={args.start}"] if args.start != "0" else []
    return words + [f"temperature={t:g}" for t in args.temperature or []]


def read_question(args: argparse.Namespace) -> Question:
    """Who plays whom. Raises ValueError for players or settings that cannot be used here."""
    temperatures = args.temperature or []
    check_temperatures(temperatures)
    if not args.partners:
        question = one_policy(
            *args.checkpoint,
            partner=args.partner,
            games=args.games,
            temperatures=temperatures,
            given=args.config,
            overrides=args.overrides,
            options=options_of(args),
        )
    elif args.partner or len(temperatures) > 1:
        raise ValueError("--partners needs no --partner and at most one --temperature")
    else:
        question = cross_play(
            args.checkpoint,
            args.partners,
            games=args.games,
            out=args.out,
            temperatures=temperatures,
            given=args.config,
            overrides=args.overrides,
            options=options_of(args),
        )
    config = question.config
    check_folder(args.out or question.out, what="--out")
    check_machine(config.device, config.engine)
    for player in question.players:
        check_endpoint(
            player.spec, config.endpoint, what="--partners" if args.partners else "--partner"
        )
    return question


def facts_of(args: argparse.Namespace, question: Question, games: Games) -> dict[str, Any]:
    """What the report says above its tables."""
    weights = {p.label: str(p.source.weights) for p in question.players if p.source}
    facts = {
        "games": args.games,
        "num_games": len(games.instances),
        **question.config.game.kit.described(games.instances, question.config.game.rules()),
        "temperatures": sorted({match.temperature for match in question.matches}, reverse=True),
        "engine": question.config.engine.kind,
    }
    if args.config is not None:
        facts["config"] = args.config.name
    if args.start != "0":
        facts["start"] = args.start
    if args.overrides:
        facts["overrides"] = args.overrides
    if question.rows:
        return {"players": weights, **facts}
    partner = question.matches[0].other.spec.text
    (own,) = weights.values()
    return {"checkpoint": str(args.checkpoint[0]), "weights": own, "partner": partner, **facts}


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 for bad arguments, which are found before weights are loaded."""
    try:
        args = read_arguments(words)
        question = read_question(args)
        config, out = question.config, args.out or question.out
        world = open_world(config)
        person = any(player.spec.kind == PERSON for player in question.players)
        if person and world.world_size > 1:
            raise ValueError("--partner person needs one process, because it uses the terminal")
        if args.num is None and person:
            args.num = 1
        sources = {p.label: p.source for p in question.players if p.source is not None}
        games = games_of(args, config.game, config.data, config.eval, list(sources.values()))
        # Scored before hours of play, so that a record that cannot be read ends nothing later.
        people = (
            evaluate_people(games.records, games.instances, config.game) if games.records else None
        )
        policies = {}
        for label, source in sources.items():
            own = find_config(source, question.settings, args.overrides)
            rendering = find_rendering(source, own, games=games, world=world)
            policies[label] = MatrixPolicy(own, rendering)
            if world.rank == 0:
                print(f"weights: {source.weights}" + (f" ({label})" if question.rows else ""))
    except (SettingsError, ValueError, OSError) as error:
        return refused("eval.py", error)
    try:
        rows = play_matches(question, instances=games.instances, policies=policies, world=world)
    except (SettingsError, AllVoid, RunEnds) as error:
        return refused("eval.py", error, status=2 if isinstance(error, SettingsError) else 1)
    if world.rank == 0:
        if people is not None:
            rows["people"] = people
        for spec in config.game.kit.BASELINES:
            rows[spec] = evaluate_scripted(
                games.instances, spec=spec, game=config.game, rollout=config.rollout
            )
        title = "Cross-play" if question.rows else f"Evaluation of {args.checkpoint[0]}"
        matrix = (question.rows, question.columns) if question.rows else None
        report = Report(title, facts_of(args, question, games), rows, matrix)
        print(report_text(report))
        paths = write_report(report, out)
        write_atomically(out / "config.yaml", dump(config))
        print(*paths, sep="\n")
    close_world(world)
    return 0


if __name__ == "__main__":
    sys.exit(record(main)())  # torchrun's summary then tells how a rank ended
