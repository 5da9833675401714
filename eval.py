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
partner, in both seats; the matrix goes to `crossplay.json` and `crossplay.md`.
Under `torchrun --nproc-per-node 2 -- eval.py …` the games are spread over the ranks (without the
two dashes torchrun takes --num for its own option).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record
from transformers import AutoConfig

from selfplay.chat.rendering import Rendering
from selfplay.colocation.start import load_engine
from selfplay.config import Config
from selfplay.config.player_spec import PERSON
from selfplay.config.settings import SettingsError, dump
from selfplay.data.instances import GENERATED
from selfplay.distributed import World, close_world
from selfplay.evaluation.crossplay import MatrixPolicy, play_matrix
from selfplay.evaluation.crossplay_report import matrix_text, write_matrix
from selfplay.evaluation.crossplay_sources import find_cross_play, split_list
from selfplay.evaluation.evaluate import (
    AllVoid,
    EvaluationContext,
    check_room,
    evaluate,
    evaluate_people,
    evaluate_scripted,
)
from selfplay.evaluation.report import Page, errors_text, games_text, table_text, write_page
from selfplay.evaluation.sources import (
    Games,
    find_config,
    find_games,
    find_partner,
    find_start,
    imitated_boards,
    report_folder,
    usual_partner,
)
from selfplay.games import kit_of
from selfplay.metrics.ending import RunEnds
from selfplay.model.policy import described_in
from selfplay.partners.checkpoints import Source, find_source, nearest
from selfplay.partners.partners import Partners
from selfplay.preflight.run import (
    Words,
    check_endpoint,
    check_folder,
    check_machine,
    read_rendering,
    refused,
)
from selfplay.setup import open_world, warn_forgeable


def games_of(args: argparse.Namespace, config: Config, sources: Sequence[Source]) -> Games:
    """The games that --games, --num and --start name, without boards that these policies imitated;
    says how many those are."""
    imitated = imitated_boards(sources)
    games = find_games(
        args.games,
        args.num,
        game=config.game,
        data=config.data,
        eval_settings=config.eval,
        start=find_start(args.start),
        imitated=imitated,
    )
    if imitated and args.games != GENERATED:
        print(f"boards that a warm start imitated are left out of {args.games}", file=sys.stderr)
    return games


def find_rendering(source: Source, config: Config, *, games: Games, world: World) -> Rendering:
    """The policy's tokenizer and chat template.

    Raises ValueError for a tokenizer or template that cannot be used, and for games whose prompts
    leave no room for a reply.
    """
    rendering = read_rendering(config.model, config.game, seed=config.seed)
    warn_forgeable(rendering, str(source.weights), world)
    text = AutoConfig.from_pretrained(described_in(source.weights)).get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    check_room(
        games.instances,
        rendering=rendering,
        game=config.game,
        rollout=config.rollout,
        max_positions=positions,
    )
    return rendering


def row_name(partner: str, temperature: float, *, usual: float) -> str:
    """The name of a row, such as "policy" (sampling as in training), "policy, greedy" or "policy
    with scripted:honest, temperature 0.7"."""
    pair = "policy" if partner == "self" else f"policy with {partner}"
    if temperature == usual:
        return pair
    return f"{pair}, temperature {temperature:g}" if temperature else f"{pair}, greedy"


def play_all(
    args: argparse.Namespace,
    config: Config,
    source: Source,
    *,
    games: Games,
    context: EvaluationContext,
) -> Page | None:
    """Play every row of the page; None on ranks other than 0."""
    rows = {}
    for temperature in args.temperature:
        name = row_name(args.partner, temperature, usual=config.rollout.temperature)
        rows[name] = evaluate(games.instances, context, temperature=temperature)
    if context.world.rank:
        return None
    if games.records:
        rows["people"] = evaluate_people(games.records, games.instances, config.game)
    for spec in kit_of(config.game).BASELINES:
        rows[spec] = evaluate_scripted(
            games.instances, spec=spec, game=config.game, rollout=config.rollout
        )
    facts = {
        "checkpoint": str(args.checkpoint),
        "weights": str(source.weights),
        "games": args.games,
        "num_games": len(games.instances),
        **kit_of(config.game).described(games.instances, config.game),
        "partner": args.partner,
        "temperatures": args.temperature,
        "engine": config.engine.kind,
    }
    if args.start != "0":
        facts["start"] = args.start
    return Page(title=f"Evaluation of {args.checkpoint}", facts=facts, rows=rows)


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
    add("--out", type=Path, help="folder to write to (default: RUN/eval_NAME)")
    add(
        "--temperature",
        type=float,
        action="append",
        help="0 is greedy; may be repeated (default: rollout.temperature, as in training)",
    )
    add("--config", type=Path, help="settings file (default: the run's own)")
    args, rest = parser.parse_known_args(words)
    known = [f"--{name}" for name in vars(args)]
    for word in rest:
        if word.startswith("-") or "=" not in word:
            raise ValueError(f"unknown argument {word!r}{nearest(word, known)}")
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


def cross_play(args: argparse.Namespace) -> int:
    """Play the matrix of --partners; rank 0 prints and writes it."""
    try:
        if args.partner or len(args.temperature or []) > 1:
            raise ValueError("--partners needs no --partner and at most one --temperature")
        check_temperatures(args.temperature or [])
        setup = find_cross_play(
            args.checkpoint, args.partners, given=args.config, overrides=args.overrides
        )
        if args.out is None and setup.home is None:
            raise ValueError("--out is needed: none of the players lies in a folder to write to")
        args.out = args.out or Path(f"{setup.home}/crossplay_{Path(args.games).stem}")
        config = setup.config
        check_folder(args.out, what="--out")
        check_machine(config.device, config.engine)
        for player in setup.players:
            check_endpoint(player.spec, config.endpoint, what="--partners")
        world = open_world(config)
        own_sources = [player.source for player in setup.players if player.source is not None]
        games = games_of(args, config, own_sources)
        policies = {}
        for player in setup.players:
            if player.source is not None:
                own = find_config(player.source, setup.settings, args.overrides)
                rendering = find_rendering(player.source, own, games=games, world=world)
                policies[player.label] = MatrixPolicy(own, rendering)
        args.out.mkdir(parents=True, exist_ok=True)
    except (SettingsError, ValueError, OSError) as error:
        return refused("eval.py", error)
    weights = {p.label: str(p.source.weights) for p in setup.players if p.source}
    for label, folder in weights.items() if world.rank == 0 else ():
        print(f"weights: {folder} ({label})")
    temperature = args.temperature[0] if args.temperature else config.rollout.temperature
    facts = {
        "games": args.games,
        "num_games": len(games.instances),
        **kit_of(config.game).described(games.instances, config.game),
        "temperature": temperature,
        "players": weights,
    }
    try:
        matrix = play_matrix(
            setup.players,
            setup.rows,
            instances=games.instances,
            policies=policies,
            game=config.game,
            rollout=config.rollout,
            temperature=temperature,
            world=world,
            facts=facts,
        )
    except (AllVoid, RunEnds) as error:
        return refused("eval.py", error, status=1)
    if world.rank == 0:
        print(f"\n{matrix_text(matrix)}")
        for path in write_matrix(matrix, args.out):
            print(path)
    close_world(world)
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 for bad arguments, which are found before weights are loaded."""
    try:
        args = read_arguments(words)
    except ValueError as error:
        return refused("eval.py", error)
    return cross_play(args) if args.partners else one_policy(args)


def one_policy(args: argparse.Namespace) -> int:
    """Play one policy with itself or one partner, and the baselines on the same instances."""
    try:
        (args.checkpoint,) = args.checkpoint
        source = find_source(args.checkpoint)
        config = find_config(source, args.config, args.overrides)
        args.partner = args.partner or usual_partner(config.game, config.rollout)
        played = args.config or source.settings or source.home
        spec = find_partner(args.partner, config.game, played=played, overrides=args.overrides)
        args.temperature = args.temperature or [config.rollout.temperature]
        check_temperatures(args.temperature)
        args.out = args.out or report_folder(source, args.games, args.partner)
        check_folder(args.out, what="--out")
        check_machine(config.device, config.engine)
        check_endpoint(spec, config.endpoint, what="--partner")
        world = open_world(config)
        if args.num is None and spec.kind == PERSON:
            args.num = 1
        games = games_of(args, config, [source])
        rendering = find_rendering(source, config, games=games, world=world)
        if spec.kind == PERSON and world.world_size > 1:
            raise ValueError("--partner person needs one process, which the terminal belongs to")
        if world.rank == 0:
            print(f"weights: {source.weights}")
        partners = Partners([(spec, 1.0)], config, rendering=rendering, world=world)
        args.out.mkdir(parents=True, exist_ok=True)
    except (SettingsError, ValueError, OSError) as error:
        return refused("eval.py", error)
    try:
        with ExitStack() as cleanup:
            cleanup.callback(partners.close)
            engine = load_engine(config, source.weights, world, cleanup=cleanup)
            page = play_all(
                args,
                config,
                source,
                games=games,
                context=EvaluationContext.of(
                    config,
                    partners.beside(engine),
                    rendering=rendering,
                    world=world,
                    partner=partners.for_step(0)[0][0],
                ),
            )
    except (AllVoid, RunEnds) as error:
        return refused("eval.py", error, status=1)
    if page is not None:
        print(games_text(page.rows))
        print(table_text(page.rows))
        print(f"\nerrors per game by kind\n{errors_text(page.rows) or 'none'}\n")
        (args.out / "config.yaml").write_text(dump(config), encoding="utf-8")
        for path in write_page(page, args.out):
            print(path)
    close_world(world)
    return 0


if __name__ == "__main__":
    sys.exit(record(main)())  # torchrun's summary then tells how a rank ended
