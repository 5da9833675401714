"""Shows where a policy trained by imitation fails on matching games.

    python -m bench.imitation_loss runs/a/warm_start runs/b/warm_start --num 256
    python -m bench.imitation_loss --train configs/scratch_h200.yaml --every 100 seed=11

Each folder of weights must lie in its run's folder. With --train the warm start of these settings
is made first, without an engine and without self-play. The games are generated held-out games in
the brief style. For each folder this prints one line each for:

- loss: nats per token on the teachers' games, and nats per line by kind of line: message, private
  table, trial plan and proposal (first, middle, last line), answer;
- taken: the probability that each line of a plan gives to reviewers that are already taken, after
  the teachers' own lines and after lines with random reviewers; with --train also the mean over
  lines, at regular intervals of optimizer steps;
- play: the first proposals in self-play, sampled and greedy: the share of legal ones, the line in
  which an illegal one first repeats a reviewer, and the value of legal ones as a share of the best;
  then the games' agreement and score.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedModel

from dialop.matching.game import MatchingInstance
from dialop.matching.roster import display_names
from selfplay.chat.rendering import Rendering, make_rendering
from selfplay.checkpoint import export_atomically
from selfplay.config import Config, load_config
from selfplay.credit.advantages import imitation_samples
from selfplay.credit.sample import Sample, trained_stretches
from selfplay.data.instances import HELD_OUT, generated
from selfplay.distributed import full_tensors
from selfplay.engines.base import Sampling
from selfplay.engines.hf import HFEngine
from selfplay.learner.batch import micro_batches, split
from selfplay.metrics.run_folder import hold_run, open_run
from selfplay.model.policy import hidden_states, load_model
from selfplay.rollout.driver import play_games, play_scripted
from selfplay.rollout.episode import Episode, limits_of
from selfplay.rollout.seating import SELF_PLAY, evaluation_games, teacher_games
from selfplay.setup import first_weights, make_learner, make_tokenizer, open_world
from selfplay.warm_start import warm_start

BUDGET = 65_536  # packed tokens per forward pass
NUM_PROBES = 128  # plans that are tested for taken reviewers
NUM_WATCHED = 24  # instances whose plans are tested during training
TAG = "[propose]\n"


@dataclass(frozen=True, slots=True)
class Examined:
    """A model with its run's settings and chat template."""

    config: Config
    rendering: Rendering
    model: PreTrainedModel

    @classmethod
    def load(cls, weights: Path, *, device: str) -> Examined:
        config = load_config(weights.parent / "config.yaml", ["engine.kind=hf"])
        rendering = make_rendering(
            AutoTokenizer.from_pretrained(weights), template_kwargs=config.model.chat_template
        )
        model = load_model(str(weights), device=device, dtype=torch.float32)
        return cls(config, rendering, model.eval())

    @property
    def device(self) -> torch.device:
        return self.model.device

    @torch.no_grad()
    def logprobs(self, samples: Sequence[Sample]) -> Iterator[tuple[Sample, torch.Tensor]]:
        """Each sample with its log-probs [M, V] at its trained tokens."""
        by_name = {sample.name: sample for sample in samples}
        weight_VD = self.model.get_output_embeddings().weight
        for batch in micro_batches(samples, split(samples, budget=BUDGET), device=self.device):
            hidden_MD = hidden_states(self.model, batch.row)
            for index, name in enumerate(batch.names):
                sample_MD = hidden_MD[batch.sample_M == index].float()
                yield by_name[name], (sample_MD @ weight_VD.float().T).log_softmax(-1).cpu()


def kinds(text: str) -> Iterator[tuple[str, int, int]]:
    """The lines of a move: the kind of each and its character range, without the line end."""
    thought, tag, _ = text.partition(TAG)
    if not tag:
        kind = "message" if text.startswith("[message]") else "answer"
        lines = [(kind, m) for m in re.finditer(r"[^\n]+", text)]
    else:
        lines = [("trial" if ": " in m[0] else "table", m) for m in re.finditer(r"[^\n]+", thought)]
        lines += [("plan", m) for m in re.finditer(r"[^\n]+", text) if m.start() >= len(thought)]
    number: dict[str, int] = defaultdict(int)
    size = sum(kind == "plan" for kind, _ in lines) - 1
    for kind, match in lines:
        if match[0] == TAG.strip():
            yield "tag", *match.span()
            continue
        number[kind] = number[kind] % max(size, 1) + 1
        position = {1: "first", size: "last"}.get(number[kind], "middle")
        yield f"{kind} {position}" if kind in ("trial", "plan") else kind, *match.span()


def turns(sample: Sample, rendering: Rendering) -> Iterator[tuple[int, str]]:
    """The start and text of each imitated turn. Turns must have no detours."""
    for start, end in trained_stretches(sample.mask):
        yield start, rendering.decode(sample.ids[start:end])


def losses(examined: Examined, samples: Sequence[Sample]) -> dict[str, float]:
    """Mean nats per line, by kind of line; `token` is the mean over all trained tokens."""
    sums: dict[str, list[float]] = defaultdict(list)
    total, count = 0.0, 0
    for sample, logprobs_MV in examined.logprobs(samples):
        targets = [t for t, m in zip(sample.ids, sample.mask, strict=True) if m]
        nats = -logprobs_MV[range(len(targets)), targets]
        total, count = total + float(nats.sum()), count + len(targets)
        before = 0
        for _, text in turns(sample, examined.rendering):
            lines = list(kinds(text))
            ranges = examined.rendering.token_ranges(text, [(a, b) for _, a, b in lines])
            for (kind, _, _), (first, last) in zip(lines, ranges, strict=True):
                sums[kind].append(float(nats[before + first : before + last].sum()))
            before += len(examined.rendering.action_ids(text))
    return {"token": total / count} | {k: float(np.mean(v)) for k, v in sums.items()}


def taken(
    examined: Examined, samples: Sequence[Sample], instance: MatchingInstance, *, part: str
) -> dict[str, list[float]]:
    """The mean probability of taken reviewers for each line of the plans of one part (`trial`, the
    first trial plan, or `plan`), after the teachers' lines and after random ones."""
    names, titles = display_names(instance.reviewers, instance.papers, brief=True)
    draw = random.Random(0)
    probes: dict[str, list[tuple[Sample, list[str]]]] = {"teachers": [], "random": []}
    for sample in samples:
        for start, text in turns(sample, examined.rendering):
            thought, tag, plan = text.partition(TAG)
            if not tag or len(probes["random"]) >= NUM_PROBES:
                continue
            table = "".join(re.findall(r"^[^\n:]+\n", thought, re.MULTILINE))
            before, given = (
                (table, thought[len(table) :]) if part == "trial" else (thought + tag, plan)
            )
            if not given:
                return {}
            own = [line.rpartition(": ")[2] for line in given.strip().split("\n")[: len(titles)]]
            for kind, chosen in (("teachers", own), ("random", draw.sample(names, len(names)))):
                lines = "\n".join(f"{t}: {n}" for t, n in zip(titles, chosen, strict=True))
                move = before + lines
                ids = sample.ids[:start] + examined.rendering.action_ids(move)
                mask = [0] * start + [1] * (len(ids) - start)
                name = f"{kind} {len(probes[kind])}"
                probe = Sample(name, ids, mask, [0.0] * len(ids), [0.0] * len(ids))
                probes[kind].append((probe, [move, before, *chosen]))
    shares: dict[str, list[float]] = {}
    for kind, probes_of_kind in probes.items():
        texts = {probe.name: words for probe, words in probes_of_kind}
        by_line: list[list[float]] = [[] for _ in titles]
        for probe, logprobs_MV in examined.logprobs([probe for probe, _ in probes_of_kind]):
            move, before, *chosen = texts[probe.name]
            at = len(before)
            for line, (title, name) in enumerate(zip(titles, chosen, strict=True)):
                end = at + len(f"{title}: {name}")
                [(_, last)] = examined.rendering.token_ranges(move, [(end - 1, end)])
                ids = [_last_token(examined, title, other) for other in names]
                p = logprobs_MV[last - 1, ids].softmax(-1)
                by_line[line].append(sum(float(p[names.index(n)]) for n in chosen[:line]))
                at = end + 1
        shares[kind] = [float(np.mean(line)) for line in by_line]
    return shares


def _last_token(examined: Examined, title: str, name: str) -> int:
    """The token of a line's reviewer: the name, or the full line if that is one token."""
    return examined.rendering.action_ids(f"{title}: {name}")[-2]


def played(examined: Examined, instances: Sequence[Any], temperature: float) -> dict[str, Any]:
    """Figures of the first proposals and the games in self-play."""
    config, rendering = examined.config, examined.rendering
    setups = evaluation_games(
        instances, partner=SELF_PLAY, game=config.game, rollout=config.rollout, rendering=rendering
    )
    sampling = Sampling(temperature=temperature, stop_ids=rendering.stop_ids)
    engine = HFEngine(examined.model, max_batch=512)
    episodes, _ = play_games(setups, engine, sampling=sampling, limits=limits_of(config.rollout))
    num_firsts, repeats, values = 0, defaultdict[int | str, int](int), []
    for episode in episodes:
        turn = next((turn for turn in episode.turns if TAG in turn.text), None)
        if turn is None:
            continue
        num_firsts += 1
        chosen = re.findall(r": (\w+)", turn.text.rpartition(TAG)[2])
        again = next((i + 1 for i, n in enumerate(chosen) if n in chosen[:i]), None)
        if turn.action == "propose":
            values.append(_value(turn.text, episode, instances))
        else:
            repeats[again if again else "other"] += 1
    return {
        "games": len(episodes),
        "first proposals": num_firsts,
        "legal": len(values) / max(1, num_firsts),
        "refused at line": dict(sorted(repeats.items(), key=str)),
        "value": float(np.mean(values)) if values else 0.0,
        "agreement": float(np.mean([e.outcome.agreed for e in episodes])),
        "score": float(np.mean([e.outcome.score_norm for e in episodes])),
    }


def _value(text: str, episode: Episode, instances: Sequence[Any]) -> float:
    """A legal proposal's value as a share of the best."""
    instance = next(i for i in instances if i.key == episode.instance)
    names, titles = display_names(instance.reviewers, instance.papers, brief=True)
    pairs = re.findall(r"([^\n:]+): (\w+)", text.rpartition(TAG)[2])
    total = sum(instance.table[names.index(n)][titles.index(t)] for t, n in pairs)
    return float(total / instance.best)


def clean_games(
    config: Config, rendering: Rendering, *, num: int
) -> tuple[list[MatchingInstance], list[Sample]]:
    """Held-out instances and the teachers' transcripts of them, without slips and detours."""
    instances = generated(HELD_OUT, game=config.game, seed=config.seed, start=0, num=num)
    setups = teacher_games(
        instances,
        teachers=[re.sub(r",(slip|stray)=[\d.]+", "", t) for t in config.warm_start.teachers],
        game=config.game,
        seed=config.seed,
        rendering=rendering,
    )
    return instances, imitation_samples(play_scripted(setups, limits=limits_of(config.rollout)))


def train(config: Config, *, every: int) -> Path:
    """Make the warm start of these settings in their run folder; returns the folder of its weights.

    Prints the mean probability of taken reviewers after random lines, over the lines after the
    first, every `every` optimizer steps.
    """
    folder, without = Path(config.out), replace(config.warm_start, num_games=0)
    with ExitStack() as cleanup:
        cleanup.callback(hold_run(folder).close)
        world = open_world(config)
        open_run(folder, config)
        tokenizer = make_tokenizer(config, folder, world)
        rendering = make_rendering(tokenizer, template_kwargs=config.model.chat_template)
        start = first_weights(
            replace(config, warm_start=without), folder, tokenizer, rendering, world
        )
        learner = make_learner(config, start, world, imitation=True)
        # The learner's weights may be sharded, so they are measured in a separate model.
        own = load_model(str(start), device=str(world.device), dtype=torch.float32).eval()
        examined = Examined(config, rendering, own)
        instances, samples = clean_games(config, rendering, num=NUM_WATCHED)

        def measure(step: int) -> None:
            if step % every == 0:
                named = own.state_dict()
                for name, tensor in full_tensors(learner.model):
                    named[name].copy_(tensor)
                shares = [
                    taken(examined, samples, instances[0], part=part).get("random", [])[1:]
                    for part in ("trial", "plan")
                ]
                trial, plan = (float(np.mean(share)) if share else None for share in shares)
                print(json.dumps({"step": step, "trial": trial, "plan": plan}), flush=True)

        warm_start(learner, config, rendering, folder=folder, after_step=measure)
        export_atomically(learner.model, tokenizer, folder / "warm_start", world=world)
    return folder / "warm_start"


def examine(
    weights: Path, *, num: int, device: str, temperatures: Sequence[float]
) -> dict[str, Any]:
    """All figures of one folder."""
    examined = Examined.load(weights, device=device)
    instances, samples = clean_games(examined.config, examined.rendering, num=num)
    figures: dict[str, Any] = {"weights": str(weights), "loss": losses(examined, samples)}
    for part in ("trial", "plan"):
        figures[f"taken in {part}"] = taken(examined, samples, instances[0], part=part)
    for temperature in temperatures:
        figures[f"play at {temperature:g}"] = played(examined, instances, temperature)
    return figures


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", nargs="*", help="folders such as RUN/warm_start, or key=value")
    parser.add_argument("--train", type=Path, metavar="CONFIG", help="make this warm start first")
    parser.add_argument("--every", type=int, default=100, help="optimizer steps between two lines")
    parser.add_argument("--num", type=int, default=256, help="number of held-out instances")
    parser.add_argument("--temperature", type=float, action="append", help="default: 1 and 0")
    parser.add_argument("--out", type=Path, help="append each folder's figures to this .jsonl file")
    args = parser.parse_args(words)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.train is None:
        folders = [Path(weights) for weights in args.weights]
    else:
        folders = [train(load_config(args.train, args.weights), every=args.every)]
    for weights in folders:
        if not (weights.parent / "config.yaml").exists():
            sys.exit(f"bench.imitation_loss: {weights} must lie in a run's folder with config.yaml")
        temperatures = [1.0, 0.0] if args.temperature is None else args.temperature
        figures = examine(weights, num=args.num, device=device, temperatures=temperatures)
        for name, values in figures.items():
            print(name, json.dumps(values, default=str))
        if args.out:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
