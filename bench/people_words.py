"""Measures what a warm start learns from people's games, from scripted ones, and from both.

    python -m bench.people_words optimization.jsonl --seeds 0 1 2 --out runs/people_words

For each source of games and each seed this trains the warm start of the given config on the CPU:
with people's games (of half of the boards, by `warm_start.recorded_share`), with as many games of
scripted players, or with half of each. `none` is the model as it is. Then it prints one row:

- the loss on people's moves on the first `--num` of the other boards, which no source has seen, in
  nats a token: over all moves and by kind of move; and on the scripted players' moves on generated
  held-out boards;
- sampled self-play on the same boards: the number of legal first tries, the measures of an
  evaluation, and how far its words are from people's (docs/metrics.md).

Seats write no private text, because people wrote none. --out gets `rows.jsonl`, the weights of each
warm start, and games to read. Rows that are there are not made again.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from bench.rows import keep, show
from dialop.kit import Played
from selfplay.chat.rendering import Rendering, make_rendering
from selfplay.config import Config, load_config
from selfplay.credit.advantages import imitation_samples
from selfplay.credit.sample import Sample, trained_stretches
from selfplay.data.instances import HELD_OUT, generated, imitated_people
from selfplay.distributed import World, close_world
from selfplay.evaluation.evaluate import EvaluationContext, play_instances, summarize
from selfplay.evaluation.report import Report, write_report
from selfplay.evaluation.word_drift import read_people, word_drift
from selfplay.learner.batch import micro_batches, split
from selfplay.metrics.run_folder import hold_run, open_run
from selfplay.model.policy import hidden_states, load_model
from selfplay.rollout.driver import play_scripted
from selfplay.rollout.episode import limits_of
from selfplay.rollout.seating import teacher_games
from selfplay.setup import first_weights, make_tokenizer, open_world
from selfplay.warm_start import TeacherSettings, people_samples
from selfplay.weight_sync.start import load_engine

SOURCES = ("none", "scripted", "people", "both")
SETTINGS = (
    *("engine.kind=hf", "device=cpu", "data.processes=1"),
    *("engine.sessions=false", "engine.prefill_graphs=false", "engine.burst_share=0"),
    *("game.private_reasoning=false", "warm_start.teachers=[honest]", "warm_start.batch_size=8"),
    *("warm_start.lr=2e-4", "warm_start.warmup_steps=2", "warm_start.epochs=1"),
    *("optim.tokens_per_microbatch=4096", "rollout.max_new_tokens=192"),
)
NUM_SCRIPTED = 8  # held-out scripted games whose loss is measured


def source_settings(source: str, recorded: Path, *, share: float, num_people: int) -> list[str]:
    """The settings of a source's warm start; all but `none` have about as many transcripts.

    `num_people` recorded games are below `share`. `both` has half of them and half as many scripted
    games as `scripted`.
    """
    people = {"none": 0.0, "scripted": 0.0, "people": 1.0, "both": 0.5}[source]
    scripted = {"none": 0.0, "scripted": 1.0, "people": 0.0, "both": 0.5}[source]
    settings = [f"warm_start.num_games={round(num_people * scripted)}"]
    if people:
        settings.append(f"warm_start.recorded={recorded}")
        settings.append(f"warm_start.recorded_share={share * people}")
    return settings


def split_boards(config: Config, recorded: Path) -> tuple[list[Played], list[Played]]:
    """The recorded games that a warm start imitates, and those it leaves."""
    kit, share = config.game.kit, config.warm_start.recorded_share
    imitated = imitated_people(config.game, config.data, recorded=str(recorded), share=share)
    boards = {kit.digest(game.instance) for game in imitated}
    games = kit.read_people(recorded)
    return imitated, [game for game in games if kit.digest(game.instance) not in boards]


@torch.no_grad()
def losses(
    model: PreTrainedModel, samples: Sequence[Sample], rendering: Rendering, *, budget: int
) -> dict[str, float]:
    """Mean nats per imitated token, over all moves (`all`) and by kind of move."""
    nats_by_kind: dict[str, list[float]] = defaultdict(list)
    by_name = {sample.name: sample for sample in samples}
    weight_VD = model.get_output_embeddings().weight
    plan = split(samples, budget=budget)
    for batch in micro_batches(samples, plan, device=model.device):
        hidden_MD = hidden_states(model, batch.row)
        for index, name in enumerate(batch.names):
            sample = by_name[name]
            targets = [t for t, m in zip(sample.ids, sample.mask, strict=True) if m]
            logprobs_MV = (hidden_MD[batch.sample_M == index] @ weight_VD.T).log_softmax(-1)
            nats = (-logprobs_MV[range(len(targets)), targets]).tolist()
            before = 0
            for start, end in trained_stretches(sample.mask):
                kind = move_kind(rendering.decode(sample.ids[start:end]))
                nats_by_kind[kind] += nats[before : before + end - start]
                before += end - start
    every = [value for values in nats_by_kind.values() for value in values]
    return {"all": sum(every) / len(every)} | {
        kind: sum(values) / len(values) for kind, values in sorted(nats_by_kind.items())
    }


def move_kind(text: str) -> str:
    """`message`, `proposal` or `answer`, by the move's tag."""
    if text.startswith("[message]"):
        return "message"
    return "proposal" if text.startswith("[propose]") else "answer"


def make_row(
    config: Config, recorded: Path, left: Sequence[Played], world: World, *, out: Path
) -> dict[str, Any]:
    """Train the warm start of these settings, if there is one, and measure its weights on these
    recorded games."""
    folder = Path(config.out)
    with ExitStack() as cleanup:
        cleanup.callback(hold_run(folder).close)
        open_run(folder, config)
        tokenizer = make_tokenizer(config, folder, world)
        rendering = make_rendering(tokenizer, template_kwargs=config.model.chat_template)
        weights = first_weights(config, folder, tokenizer, rendering, world)

        model = load_model(str(weights), device="cpu", dtype=torch.float32).eval()
        budget = config.optim.tokens_per_microbatch
        people = people_samples(TeacherSettings.of(config), rendering, left)
        found: dict[str, Any] = {
            f"people's {kind}": value
            for kind, value in losses(model, people, rendering, budget=budget).items()
        }
        boards = generated(HELD_OUT, game=config.game, seed=0, start=0, num=NUM_SCRIPTED, easy=True)
        setups = teacher_games(
            boards,
            teachers=config.warm_start.teachers,
            game=config.game,
            seed=config.seed,
            rendering=rendering,
        )
        scripted = imitation_samples(play_scripted(setups, limits=limits_of(config.rollout)))
        found["scripted all"] = losses(model, scripted, rendering, budget=budget)["all"]
        del model

        engine = load_engine(config, weights, world, cleanup=cleanup)
        context = EvaluationContext.of(config, engine, rendering, world)
        played = play_instances([game.instance for game in left], context)
        evaluation = summarize(played, context)
        games = list(played.games.values())
        found["legal first tries"] = sum(game.turns[0].error is None for game in games)
        found["games"] = len(games)
        found |= word_drift(games, read_people(str(recorded), config.game), world)
        report = Report("People's words", {"weights": folder.name}, {folder.name: evaluation})
        write_report(report, out / folder.name)
        score, low, high = evaluation.interval
        found |= {"score": score, "low": low, "high": high}
        return found | evaluation.measures


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recorded", type=Path, help="a .jsonl of recorded human games")
    parser.add_argument("--sources", nargs="+", default=list(SOURCES), choices=SOURCES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--num", type=int, default=16, help="boards to measure on")
    parser.add_argument("--config", type=Path, default=Path("configs/smollm2_135m.yaml"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("settings", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args(words)
    args.out.mkdir(parents=True, exist_ok=True)
    rows = args.out / "rows.jsonl"
    made = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
    common = [*SETTINGS, *args.settings]
    base = load_config(args.config, common)
    imitated, left = split_boards(base, args.recorded)
    share = base.warm_start.recorded_share
    world = open_world(base)
    for seed, source in product(args.seeds, args.sources):
        if any(row["source"] == source and row["seed"] == seed for row in made):
            continue
        own = source_settings(source, args.recorded, share=share, num_people=len(imitated))
        out = f"out={args.out / 'runs' / f'{source}_{seed}'}"
        config = load_config(args.config, [*common, *own, f"seed={seed}", out])
        row = {"source": source, "seed": seed}
        row |= make_row(config, args.recorded, left[: args.num], world, out=args.out)
        show(row)
        keep(row, rows)
    close_world(world)


if __name__ == "__main__":
    main()
