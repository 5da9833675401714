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
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

VARIANTS = [f"engine.server_args={{enable_fp32_lm_head: {value}}}" for value in ("false", "true")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", type=Path)
    parser.add_argument("--num", type=int, default=64, help="scripted games")
    parser.add_argument("--variants", nargs="+", default=VARIANTS)
    return parser.parse_args()


if __name__ == "__main__":  # --help and a mistake are answered before torch is imported
    arguments()

# isort: split
import torch

from selfplay.advantages.advantages import imitation_samples
from selfplay.advantages.sample import Sample, trained_stretches
from selfplay.chat.rendering import Rendering, make_rendering
from selfplay.chat.tokenizer import load_tokenizer
from selfplay.config import Config, load_config
from selfplay.data.instances import HELD_OUT, generated
from selfplay.distributed import close_world, init_world
from selfplay.engines.base import Request, Sampling
from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.learner.batch import micro_batches
from selfplay.learner.rescore import mismatch_values
from selfplay.model.policy import DTYPES, end_ids, load_model, policy_logprobs
from selfplay.rollout.driver import play_scripted
from selfplay.rollout.episode import limits_of
from selfplay.rollout.seating import teacher_games
from selfplay.weight_sync.start import load_engine

BUDGET = 16_384  # packed tokens per forward pass


@torch.no_grad()
def both_logprobs(
    model: torch.nn.Module, samples: Sequence[Sample], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's own log-probs of the trained tokens [M] and the samples', in doubles."""
    pairs = []
    for _, batch in micro_batches(samples, init_world(device=device.type), budget=BUDGET):
        own_M, _ = policy_logprobs(model, batch.row, batch.targets_M, temperature=1.0)
        pairs.append((own_M.double(), batch.old_logprobs_M.double()))
    own_M, engine_M = (torch.cat(side) for side in zip(*pairs, strict=True))
    return own_M, engine_M


def told(model: torch.nn.Module, samples: Sequence[Sample], device: torch.device) -> str:
    """The differences between the samples' log-probs and the model's own."""
    own_M, engine_M = both_logprobs(model, samples, device)
    values, gap_M = mismatch_values(own_M, engine_M), (own_M - engine_M).abs()
    return (
        f"mean {values['mismatch_mean'].mean():.5f}, KL {values['mismatch_kl'].mean():.1e}, "
        f"largest {gap_M.max():.3f}, above 0.2 {(gap_M > 0.2).double().mean():.4f} "
        f"on {len(gap_M)} tokens"
    )


def clean_games(config: Config, rendering: Rendering, *, num: int) -> list[Sample]:
    """The teachers' transcripts of held-out games, without slips and detours."""
    instances = generated(HELD_OUT, game=config.game, seed=config.seed, start=0, num=num)
    setups = teacher_games(
        instances,
        teachers=[re.sub(r",(slip|stray)=[\d.]+", "", t) for t in config.warm_start.teachers],
        game=config.game,
        seed=config.seed,
        rendering=rendering,
    )
    return imitation_samples(play_scripted(setups, limits=limits_of(config.rollout)))


def main() -> None:
    asked = arguments()
    world = init_world()
    path = asked.weights.parent / "config.yaml"
    config = load_config(path)
    rendering = make_rendering(
        load_tokenizer(asked.weights),
        template_kwargs=config.model.chat_template,
        ends=end_ids(asked.weights),
    )
    dtype = DTYPES[config.model.dtype]
    model = load_model(str(asked.weights), device=str(world.device), dtype=dtype).eval()
    scripted = clean_games(config, rendering, num=asked.num)
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
            said = engine.generate(requests, Sampling(1.0, rendering.stop_ids))
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
        print(f"{variant}: sampled {told(model, sampled, world.device)}", flush=True)
        print(f"{variant}: scored {told(model, scored, world.device)}", flush=True)
    close_world(world)


if __name__ == "__main__":
    main()
