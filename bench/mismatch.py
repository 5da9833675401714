"""Compares an SGLang engine's log-probs with the trainer's, by settings of the engine.

    python -m bench.mismatch runs/a/warm_start --num 64
    python -m bench.mismatch runs/a/warm_start --variants "engine.processes=4" "model.dtype=float32"

The folder of weights must lie in its run's folder; the trainer computes in the run's `model.dtype`.
Each variant is a list of engine settings, separated by "; ", that override the run's own. The
engine samples the first turn of both seats of scripted games after the true prefix (decoding), and
scores the scripted games' own turns (prefill). Each line has the mean |engine - trainer|, the KL of
the engine to the trainer (k3), the largest difference, in nats per token, and the share above 0.2.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from bench.imitation_loss import Examined, clean_games
from selfplay.config import load_config
from selfplay.credit.sample import Sample, trained_stretches
from selfplay.distributed import close_world, init_world
from selfplay.engines.base import Request, Sampling
from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.learner.batch import micro_batches, split
from selfplay.learner.mismatch import mismatch_values
from selfplay.model.policy import DTYPES, load_model, policy_logprobs
from selfplay.weight_sync.start import load_engine

BUDGET = 65_536  # packed tokens per forward pass
VARIANTS = [f"engine.server_args={{enable_fp32_lm_head: {value}}}" for value in ("false", "true")]


@torch.no_grad()
def told(model: torch.nn.Module, samples: Sequence[Sample], device: str) -> str:
    """The differences between the samples' log-probs and the model's own."""
    pairs = []
    for batch in micro_batches(samples, split(samples, budget=BUDGET), device=torch.device(device)):
        own_M, _ = policy_logprobs(model, batch.row, batch.targets_M, temperature=1.0)
        pairs.append((own_M.double(), batch.old_logprobs_M.double()))
    own_M, engine_M = (torch.cat(side) for side in zip(*pairs, strict=True))
    values, gap_M = mismatch_values(own_M, engine_M), (own_M - engine_M).abs()
    return (
        f"mean {values['mismatch_mean'].mean():.5f}, KL {values['mismatch_kl'].mean():.1e}, "
        f"largest {gap_M.max():.3f}, above 0.2 {(gap_M > 0.2).double().mean():.4f} "
        f"on {len(gap_M)} tokens"
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--num", type=int, default=64, help="scripted games")
    parser.add_argument("--variants", nargs="+", default=VARIANTS)
    asked = parser.parse_args(words)
    world = init_world()
    device, path = str(world.device), asked.weights.parent / "config.yaml"
    examined = Examined.load(asked.weights, device="cpu")
    config, stop_ids = examined.config, examined.rendering.stop_ids
    model = load_model(str(asked.weights), device=device, dtype=DTYPES[config.model.dtype]).eval()
    _, scripted = clean_games(config, examined.rendering, num=asked.num)
    starts = [next(trained_stretches(sample.mask))[0] for sample in scripted]
    requests = [
        Request(s.ids[:start], config.rollout.max_new_tokens, seed)
        for seed, (s, start) in enumerate(zip(scripted, starts, strict=True))
    ]
    for variant in asked.variants:
        given = load_config(path, ["engine.kind=sglang", *filter(None, variant.split("; "))])
        with ExitStack() as cleanup:
            engine = load_engine(given, asked.weights, world, cleanup=cleanup)
            assert isinstance(engine, SGLangEngine)
            said = engine.generate(requests, Sampling(1.0, stop_ids))
            scores = engine.begin_scoring([sample.ids for sample in scripted])()
        sampled = [
            Sample(
                f"{number}",
                [*request.prompt_ids, *turn.ids],
                [0] * len(request.prompt_ids) + [1] * len(turn.ids),
                [0.0] * len(request.prompt_ids) + turn.logprobs,
                [0.0] * (len(request.prompt_ids) + len(turn.ids)),
            )
            for number, (request, turn) in enumerate(zip(requests, said, strict=True))
        ]
        scored = [
            replace(sample, old_logprobs=[0.0, *score])
            for sample, score in zip(scripted, scores, strict=True)
        ]
        print(f"{variant}: sampled {told(model, sampled, device)}", flush=True)
        print(f"{variant}: scored {told(model, scored, device)}", flush=True)
    close_world(world)


if __name__ == "__main__":
    main()
