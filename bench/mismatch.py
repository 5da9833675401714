"""Compares an SGLang engine's log-probs with the trainer's, by settings of the engine.

    python -m bench.mismatch runs/a/warm_start --num 64
    python -m bench.mismatch runs/a/warm_start --variants "{}" "processes=4" "dtype=float32"

The folder of weights must lie in its run's folder; both sides compute in the run's `model.dtype`.
Each variant starts an engine with arguments of `SGLangEngine` (`{name: value}` or `name=value`). It
samples the first turn of both seats of scripted games after the true prefix (decoding), and scores
the scripted games' own turns (prefill). One line each: the mean |engine - trainer|, the engine's
KL to the trainer (k3), the largest difference, in nats a token, and the share above 0.2.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import yaml

from bench.imitation_loss import Examined, clean_games
from selfplay.credit.sample import Sample, trained_stretches
from selfplay.engines.base import Request, Sampling
from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.learner.batch import micro_batches
from selfplay.learner.mismatch import mismatch_values
from selfplay.model.policy import DTYPES, load_model, policy_logprobs

BUDGET = 65_536  # packed tokens per forward pass
VARIANTS = ("enable_fp32_lm_head=false", "enable_fp32_lm_head=true")
ENGINE = ("processes", "dtype", "attention_backend", "deterministic")  # the rest is SGLang's


@torch.no_grad()
def told(model: torch.nn.Module, samples: Sequence[Sample], device: str) -> str:
    """The differences between the samples' log-probs and the model's own."""
    pairs = []
    for batch in micro_batches(samples, budget=BUDGET, device=torch.device(device)):
        own_M, _ = policy_logprobs(model, batch.row, batch.targets_M, temperature=1.0)
        pairs.append((own_M.double(), batch.old_logprobs_M.double()))
    own_M, engine_M = (torch.cat(side) for side in zip(*pairs, strict=True))
    values, gap_M = mismatch_values(own_M, engine_M), (own_M - engine_M).abs()
    return (
        f"mean {values['mismatch_mean'].mean():.5f}, KL {values['mismatch_kl'].mean():.1e}, largest "
        f"{gap_M.max():.3f}, above 0.2 {(gap_M > 0.2).double().mean():.4f} on {len(gap_M)} tokens"
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--num", type=int, default=64, help="scripted games")
    parser.add_argument("--variants", nargs="+", default=VARIANTS)
    asked = parser.parse_args(words)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    examined = Examined.load(asked.weights, device="cpu")
    config, stop_ids = examined.config, examined.rendering.stop_ids
    model = load_model(str(asked.weights), device=device, dtype=DTYPES[config.model.dtype]).eval()
    _, scripted = clean_games(config, examined.rendering, num=asked.num)
    for variant in asked.variants:
        given = dict([variant.split("=", 1)]) if "=" in variant else yaml.safe_load(variant)
        given = {name: yaml.safe_load(str(value)) for name, value in given.items()}
        options = {"dtype": config.model.dtype, "processes": 1}
        options |= {name: value for name, value in given.items() if name in ENGINE}
        server = {name: value for name, value in given.items() if name not in ENGINE}
        engine = SGLangEngine(
            str(asked.weights),
            device=device,
            max_running_requests=512,
            server_args=server,
            **options,
        )
        starts = [next(trained_stretches(sample.mask))[0] for sample in scripted]
        requests = [
            Request(s.ids[:start], config.rollout.max_new_tokens, seed)
            for seed, (s, start) in enumerate(zip(scripted, starts, strict=True))
        ]
        sampled = [
            Sample(
                f"{number}",
                [*request.prompt_ids, *said.ids],
                [0] * len(request.prompt_ids) + [1] * len(said.ids),
                [0.0] * len(request.prompt_ids) + said.logprobs,
                [0.0] * (len(request.prompt_ids) + len(said.ids)),
            )
            for number, (request, said) in enumerate(
                zip(requests, engine.generate(requests, Sampling(1.0, stop_ids)), strict=True)
            )
        ]
        scores = engine.begin_scoring([sample.ids for sample in scripted])()
        scored = [
            replace(sample, old_logprobs=[0.0, *score])
            for sample, score in zip(scripted, scores, strict=True)
        ]
        print(f"{variant}: sampled {told(model, sampled, device)}", flush=True)
        print(f"{variant}: scored {told(model, scored, device)}", flush=True)
        engine.close()


if __name__ == "__main__":
    main()
