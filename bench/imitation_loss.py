"""Where an imitated player of drawn matching games fails: its loss by kind of line, and which line
of a plan names a reviewer again.

    python -m bench.imitation_loss runs/a/warm_start runs/b/warm_start --num 256

Each folder of weights lies in its run's folder. The games are brief, drawn, held-out ones. Figures
of a folder, a line each:

- loss: nats that the teachers' games cost, a token and by kind of line: of a message, of the
  private table, of a plan tried out, of a proposal (first, middle, last), an answer;
- taken: the share of probability that each line of a plan gives to reviewers who are taken, after
  the teachers' own lines and after lines that give the reviewers out at random;
- play: first proposals of games with itself, sampled and greedy: how many are legal, which line of
  the others first names a reviewer again, the worth of the legal ones over the best; then the
  games' agreement and score.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from dialop.matching.game import MatchingInstance
from dialop.matching.roster import display_names
from selfplay.chat.rendering import Rendering, make_rendering
from selfplay.config import Config, load_config
from selfplay.credit.advantages import imitation_samples
from selfplay.credit.sample import Sample, trained_stretches
from selfplay.data.instances import HELD_OUT, generated
from selfplay.engines.base import Sampling
from selfplay.engines.hf import HFEngine
from selfplay.learner.batch import micro_batches
from selfplay.model.policy import hidden_states, load_model
from selfplay.rollout.driver import play_games, play_scripted
from selfplay.rollout.episode import Episode, limits_of
from selfplay.rollout.seating import SELF_PLAY, evaluation_games, teacher_games

BUDGET = 65_536  # packed tokens a forward pass
NUM_PROBES = 128  # plans that are asked about taken reviewers
TAG = "[propose]\n"


class Examined:
    """One folder's model, with what it needs to read and speak."""

    def __init__(self, weights: Path, *, device: str) -> None:
        self.config = load_config(weights.parent / "config.yaml", ["engine.kind=hf"])
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(weights)
        self.rendering: Rendering = make_rendering(self.tokenizer)
        self.model: PreTrainedModel = load_model(
            str(weights), device=device, dtype=torch.float32
        ).eval()
        self.device = torch.device(device)

    @torch.no_grad()
    def logprobs(self, samples: Sequence[Sample]) -> Iterator[tuple[Sample, torch.Tensor]]:
        """Each sample with its log-probs [M, V] at its trained tokens."""
        by_name = {sample.name: sample for sample in samples}
        weight_VD = self.model.get_output_embeddings().weight
        for batch in micro_batches(samples, budget=BUDGET, device=self.device):
            row = (batch.ids_N, batch.positions_N, batch.cu_seqlens_S1, batch.max_seqlen)
            hidden_MD = hidden_states(self.model, *row, batch.predict_M)
            for place, name in enumerate(batch.names):
                mine_MD = hidden_MD[batch.sample_M == place].float()
                yield by_name[name], (mine_MD @ weight_VD.float().T).log_softmax(-1).cpu()


def kinds(text: str) -> Iterator[tuple[str, int, int]]:
    """The lines of a move: what each is, and its range of characters without its line end."""
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
        number[kind] += 1
        place = {1: "first", size: "last"}.get(number[kind], "middle")
        named = f"{kind} {place}" if kind in ("trial", "plan") else kind
        yield named, *match.span()


def turns(sample: Sample, rendering: Rendering) -> Iterator[tuple[int, str]]:
    """Where each imitated turn starts, and its text. Turns must have no detours."""
    for start, end in trained_stretches(sample.mask):
        yield start, rendering.decode(sample.ids[start:end])


def losses(examined: Examined, samples: Sequence[Sample]) -> dict[str, float]:
    """Nats a line, by kind; `token` is the mean over all trained tokens."""
    sums: dict[str, list[float]] = defaultdict(list)
    total, count = 0.0, 0
    for sample, logprobs_MV in examined.logprobs(samples):
        targets = [t for t, m in zip(sample.ids, sample.mask, strict=True) if m]
        nats = -logprobs_MV[range(len(targets)), targets]
        total, count = total + float(nats.sum()), count + len(targets)
        before = 0
        for _, text in turns(sample, examined.rendering):
            found = list(kinds(text))
            ranges = examined.rendering.token_ranges(text, [(a, b) for _, a, b in found])
            for (kind, _, _), (first, last) in zip(found, ranges, strict=True):
                sums[kind].append(float(nats[before + first : before + last].sum()))
            before += len(examined.rendering.action_ids(text))
    return {"token": total / count} | {k: float(np.mean(v)) for k, v in sums.items()}


def taken(
    examined: Examined, samples: Sequence[Sample], instance: MatchingInstance, *, part: str
) -> dict[str, list[float]]:
    """The mean share of probability on taken reviewers, line by line, in the plans of one part
    (`trial` or `plan`): after the teachers' lines and after random ones."""
    names, titles = display_names(instance.reviewers, instance.papers, brief=True)
    draw = random.Random(0)
    probes: dict[str, list[tuple[Sample, list[str]]]] = {"teachers": [], "random": []}
    for sample in samples:
        for start, text in turns(sample, examined.rendering):
            thought, tag, plan = text.partition(TAG)
            if not tag or len(probes["random"]) >= NUM_PROBES:
                continue
            table = "".join(re.findall(r"^[^\n:]*\n", thought, re.MULTILINE))
            given = thought[len(table) :] if part == "trial" else plan
            if not given:
                return {}
            own = [line.rpartition(": ")[2] for line in given.strip().split("\n")]
            for kind, chosen in (("teachers", own), ("random", draw.sample(names, len(names)))):
                lines = "\n".join(f"{t}: {n}" for t, n in zip(titles, chosen, strict=True))
                said = f"{table}{lines}\n{TAG}{plan}" if part == "trial" else thought + tag + lines
                ids = sample.ids[:start] + examined.rendering.action_ids(said)
                mask = [0] * start + [1] * (len(ids) - start)
                name = f"{kind} {len(probes[kind])}"
                probe = Sample(name, ids, mask, [0.0] * len(ids), [0.0] * len(ids))
                probes[kind].append((probe, [said, *chosen]))
    shares: dict[str, list[float]] = {}
    for kind, asked in probes.items():
        said_by = {probe.name: words for probe, words in asked}
        by_line: list[list[float]] = [[] for _ in titles]
        for probe, logprobs_MV in examined.logprobs([probe for probe, _ in asked]):
            said, *chosen = said_by[probe.name]
            at = (
                said.rindex(TAG) + len(TAG)
                if part == "plan"
                else len(said.split(titles[0] + ": ")[0])
            )
            for line, (title, name) in enumerate(zip(titles, chosen, strict=True)):
                end = at + len(f"{title}: {name}")
                [(_, last)] = examined.rendering.token_ranges(said, [(end - 1, end)])
                ids = [_last_token(examined, title, other) for other in names]
                p = logprobs_MV[last - 1, ids].softmax(-1)
                by_line[line].append(sum(float(p[names.index(n)]) for n in chosen[:line]))
                at = end + 1
        shares[kind] = [float(np.mean(line)) for line in by_line]
    return shares


def _last_token(examined: Examined, title: str, name: str) -> int:
    """The token that tells a line's reviewer: its name, or a whole line where that is one token."""
    return examined.rendering.action_ids(f"{title}: {name}")[-2]


def played(examined: Examined, instances: Sequence[Any], temperature: float) -> dict[str, Any]:
    """What became of first proposals and games when the model played itself."""
    config, rendering = examined.config, examined.rendering
    tables = evaluation_games(
        instances, partner=SELF_PLAY, game=config.game, rollout=config.rollout, rendering=rendering
    )
    sampling = Sampling(temperature=temperature, stop_ids=rendering.stop_ids)
    engine = HFEngine(examined.model, max_batch=512)
    episodes, _ = play_games(tables, engine, sampling=sampling, limits=limits_of(config.rollout))
    firsts, repeats, worth = 0, defaultdict(int), []
    for episode in episodes:
        turn = next((turn for turn in episode.turns if TAG in turn.text), None)
        if turn is None:
            continue
        firsts += 1
        chosen = re.findall(r": (\w+)", turn.text.rpartition(TAG)[2])
        again = next((i + 1 for i, n in enumerate(chosen) if n in chosen[:i]), None)
        if turn.action == "propose":
            worth.append(_worth(turn.text, episode, instances))
        else:
            repeats[again if again else "other"] += 1
    return {
        "games": len(episodes),
        "first proposals": firsts,
        "legal": len(worth) / max(1, firsts),
        "refused at line": dict(sorted(repeats.items(), key=str)),
        "worth": float(np.mean(worth)) if worth else 0.0,
        "agreement": float(np.mean([e.outcome.agreed for e in episodes])),
        "score": float(np.mean([e.outcome.score_norm for e in episodes])),
    }


def _worth(text: str, episode: Episode, instances: Sequence[Any]) -> float:
    instance = next(i for i in instances if i.key == episode.instance)
    names, titles = display_names(instance.reviewers, instance.papers, brief=True)
    pairs = re.findall(r"([^\n:]+): (\w+)", text.rpartition(TAG)[2])
    total = sum(instance.table[names.index(n)][titles.index(t)] for t, n in pairs)
    return float(total / instance.best)


def teachers_games(config: Config, rendering: Rendering, instances: Sequence[Any]) -> list[Sample]:
    """The teachers' transcripts of these instances, without slips and detours."""
    tables = teacher_games(
        instances,
        teachers=config.warm_start.teachers,
        game=config.game,
        seed=config.seed,
        rendering=rendering,
    )
    return imitation_samples(play_scripted(tables, limits=limits_of(config.rollout)))


def examine(
    weights: Path, *, num: int, device: str, temperatures: Sequence[float]
) -> dict[str, Any]:
    """All figures of one folder."""
    examined = Examined(weights, device=device)
    teachers = [re.sub(r",(slip|stray)=[\d.]+", "", t) for t in examined.config.warm_start.teachers]
    words = [f"warm_start.teachers={json.dumps(teachers)}", "engine.kind=hf"]
    clean = load_config(weights.parent / "config.yaml", words)
    instances = generated(HELD_OUT, game=clean.game, seed=clean.seed, start=0, num=num)
    samples = teachers_games(clean, examined.rendering, instances)
    found: dict[str, Any] = {"weights": str(weights), "loss": losses(examined, samples)}
    for part in ("trial", "plan"):
        found[f"taken in {part}"] = taken(examined, samples, instances[0], part=part)
    for temperature in temperatures:
        found[f"play at {temperature:g}"] = played(examined, instances, temperature)
    return found


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", type=Path, nargs="+", help="folders such as RUN/warm_start")
    parser.add_argument("--num", type=int, default=256, help="held-out instances")
    parser.add_argument("--temperature", type=float, action="append", help="default: 1 and 0")
    parser.add_argument("--out", type=Path, help="a .jsonl to append each folder's figures to")
    asked = parser.parse_args(words)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for weights in asked.weights:
        if not (weights.parent / "config.yaml").exists():
            sys.exit(f"bench.imitation_loss: {weights} must lie in a run's folder with config.yaml")
        temperatures = [1.0, 0.0] if asked.temperature is None else asked.temperature
        found = examine(weights, num=asked.num, device=device, temperatures=temperatures)
        for name, figures in found.items():
            print(name, json.dumps(figures, default=str))
        if asked.out:
            with asked.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
