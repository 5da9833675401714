"""Play held-out games with a trained policy and say what it is worth, beside others on the same
instances.

    python eval.py --checkpoint runs/tiny --games generated --num 1024
    python eval.py --checkpoint runs/tiny/warm_start --games generated --temperature 0
    python eval.py --checkpoint HF_FOLDER_OR_NAME --config configs/qwen2.5_0.5b.yaml --out FOLDER \\
        --games generated --partner scripted:honest [key=value ...]
    python eval.py --checkpoint runs/a --checkpoint runs/b --partners scripted:honest,runs/c \\
        --games generated --num 256

Prints a table and three games to read, and writes them to `evaluation.json` and `evaluation.md`.
Settings are those of the run the checkpoint lies in, or of --config; key=value words win over both.
With --partners every checkpoint plays with itself, with the others and with each partner, in both
seats: the matrix goes to `crossplay.json` and `crossplay.md`.
Under `torchrun --nproc-per-node 2 -- eval.py …` the games are spread over the ranks (torchrun takes
--num for one of its own options without the two dashes).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from transformers import AutoConfig

from selfplay.chat.rendering import Rendering
from selfplay.colocation.start import load_engine
from selfplay.config import Config
from selfplay.config.player_spec import PERSON
from selfplay.config.settings import SettingsError, dump
from selfplay.distributed import World, close_world
from selfplay.evaluation.crossplay import Voice, play_matrix
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
    report_folder,
    usual_partner,
)
from selfplay.games import kit_of
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


def find_rendering(source: Source, config: Config, *, games: Games, world: World) -> Rendering:
    """The policy's tokenizer and chat template, after checking that it can read these boards.

    Raises ValueError for a tokenizer or template that cannot be used or prompts that leave no room.
    """
    rendering = read_rendering(config)
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
    """Such as "policy" (sampling as in training), "policy, greedy", "policy with scripted:honest,
    temperature 0.7"."""
    pair = "policy" if partner == "self" else f"policy with {partner}"
    if temperature == usual:
        return pair
    return f"{pair}, temperature {temperature:g}" if temperature else f"{pair}, greedy"


def play_all(
    asked: argparse.Namespace,
    config: Config,
    source: Source,
    *,
    games: Games,
    context: EvaluationContext,
) -> Page | None:
    """Play every row of the page; None on ranks other than the first."""
    rows = {}
    for temperature in asked.temperature:
        name = row_name(asked.partner, temperature, usual=config.rollout.temperature)
        rows[name] = evaluate(games.instances, context, temperature=temperature)
    if context.world.rank:
        return None
    if games.records:
        rows["people"] = evaluate_people(games.records, games.instances)
    for spec in kit_of(config.game).BASELINES:
        rows[spec] = evaluate_scripted(
            games.instances, spec=spec, game=config.game, rollout=config.rollout
        )
    facts = {
        "checkpoint": str(asked.checkpoint),
        "weights": str(source.weights),
        "games": asked.games,
        "num_games": len(games.instances),
        **kit_of(config.game).described(games.instances, config.game),
        "partner": asked.partner,
        "temperatures": asked.temperature,
        "engine": config.engine.kind,
    }
    if asked.start != "0":
        facts["start"] = asked.start
    return Page(title=f"Evaluation of {asked.checkpoint}", facts=facts, rows=rows)


def read_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line with `key=value` words in any place; raises ValueError for a word it does
    not know."""
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
        help="a run, a Hugging Face folder or name; with --partners a row, may be given again",
    )
    add("--games", required=True, help="'generated', a .parquet of instances or recorded .jsonl")
    add("--num", type=int, help="games (default: eval.final_games, or all of the file)")
    add("--partner", help="as in docs/partners.md (default: self, or the run's where seats differ)")
    add(
        "--partners",
        type=split_list,
        default=[],
        help="cross-play: folders and players by commas; without --checkpoint the rows, too",
    )
    add("--start", default="0", help="begin recorded games as people did: entries, random, share")
    add("--out", type=Path, help="folder to write to (default: RUN/eval_NAME)")
    add(
        "--temperature",
        type=float,
        action="append",
        help="0 is greedy; may be given again (default: rollout.temperature, as in training)",
    )
    add("--config", type=Path, help="settings file (default: the run's own)")
    asked, rest = parser.parse_known_args(words)
    known = [f"--{name}" for name in vars(asked)]
    for word in rest:
        if word.startswith("-") or "=" not in word:
            raise ValueError(f"unknown argument {word!r}{nearest(word, known)}")
    asked.overrides = rest
    if len(asked.checkpoint) != 1 and not asked.partners:
        raise ValueError(
            f"--checkpoint must be given once without --partners, got {len(asked.checkpoint)}"
        )
    return asked


def check_temperatures(temperatures: Sequence[float]) -> None:
    if not all(t == 0 or 0.01 <= t <= 100 for t in temperatures):
        raise ValueError(
            f"--temperature must be 0 (greedy) or from 0.01 to 100, got {list(temperatures)}"
        )


def cross_play(asked: argparse.Namespace) -> int:
    """Play the matrix of --partners; prints and writes it on the first rank."""
    try:
        if asked.partner or len(asked.temperature or []) > 1:
            raise ValueError("--partners needs no --partner and at most one --temperature")
        check_temperatures(asked.temperature or [])
        meeting = find_cross_play(
            asked.checkpoint, asked.partners, given=asked.config, overrides=asked.overrides
        )
        if asked.out is None and meeting.home is None:
            raise ValueError("--out is needed: none of the players lies in a folder to write to")
        asked.out = asked.out or Path(f"{meeting.home}/crossplay_{Path(asked.games).stem}")
        config = meeting.config
        check_folder(asked.out, what="--out")
        check_machine(config)
        for player in meeting.players:
            check_endpoint(player.spec, config, what="--partners")
        world = open_world(config)
        games = find_games(asked.games, asked.num, config, start=find_start(asked.start))
        voices = {}
        for player in meeting.players:
            if player.source is not None:
                own = find_config(player.source, meeting.settings, asked.overrides)
                rendering = find_rendering(player.source, own, games=games, world=world)
                voices[player.label] = Voice(own, rendering)
        asked.out.mkdir(parents=True, exist_ok=True)
    except (SettingsError, ValueError, OSError) as error:
        return refused("eval.py", error)
    weights = {p.label: str(p.source.weights) for p in meeting.players if p.source}
    for label, folder in weights.items() if world.rank == 0 else ():
        print(f"weights: {folder} ({label})")
    temperature = asked.temperature[0] if asked.temperature else config.rollout.temperature
    facts = {
        "games": asked.games,
        "num_games": len(games.instances),
        **kit_of(config.game).described(games.instances, config.game),
        "temperature": temperature,
        "players": weights,
    }
    try:
        matrix = play_matrix(
            meeting.players,
            meeting.rows,
            instances=games.instances,
            voices=voices,
            config=config,
            temperature=temperature,
            world=world,
            facts=facts,
        )
    except AllVoid as error:
        return refused("eval.py", error, status=1)
    if world.rank == 0:
        print(f"\n{matrix_text(matrix)}")
        for path in write_matrix(matrix, asked.out):
            print(path)
    close_world(world)
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """Everything that can be wrong with the question is found before the first weight is loaded."""
    try:
        asked = read_arguments(words)
    except ValueError as error:
        return refused("eval.py", error)
    return cross_play(asked) if asked.partners else one_policy(asked)


def one_policy(asked: argparse.Namespace) -> int:
    """Play one policy with itself or one partner, beside others on the same instances."""
    try:
        (asked.checkpoint,) = asked.checkpoint
        source = find_source(asked.checkpoint)
        config = find_config(source, asked.config, asked.overrides)
        asked.partner = asked.partner or usual_partner(config.game, config.rollout)
        played = asked.config or source.settings or source.home
        spec = find_partner(asked.partner, config, played=played, overrides=asked.overrides)
        asked.temperature = asked.temperature or [config.rollout.temperature]
        check_temperatures(asked.temperature)
        asked.out = asked.out or report_folder(source, asked.games, asked.partner)
        check_folder(asked.out, what="--out")
        check_machine(config)
        check_endpoint(spec, config, what="--partner")
        world = open_world(config)
        if asked.num is None and spec.kind == PERSON:
            asked.num = 1
        games = find_games(asked.games, asked.num, config, start=find_start(asked.start))
        rendering = find_rendering(source, config, games=games, world=world)
        if spec.kind == PERSON and world.world_size > 1:
            raise ValueError("--partner person needs one process, which the terminal belongs to")
        if world.rank == 0:
            print(f"weights: {source.weights}")
        partners = Partners([(spec, 1.0)], config, rendering=rendering, world=world)
        asked.out.mkdir(parents=True, exist_ok=True)
    except (SettingsError, ValueError, OSError) as error:
        return refused("eval.py", error)
    try:
        with ExitStack() as cleanup:
            cleanup.callback(partners.close)
            engine = load_engine(config, source.weights, world, cleanup=cleanup)
            page = play_all(
                asked,
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
    except AllVoid as error:
        return refused("eval.py", error, status=1)
    if page is not None:
        print(games_text(page.rows))
        print(table_text(page.rows))
        print(f"\nerrors a game by kind\n{errors_text(page.rows) or 'none'}\n")
        (asked.out / "config.yaml").write_text(dump(config), encoding="utf-8")
        for path in write_page(page, asked.out):
            print(path)
    close_world(world)
    return 0


if __name__ == "__main__":
    sys.exit(main())
