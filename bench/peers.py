"""Compares TRL's trainers with this project's update: same transcripts, same GPU, one run.

The transcripts equal those of bench.update --groups: groups share a prompt, the parts after it have
geometric lengths, and every second token of a part is sampled. Both take a full optimizer step of
GRPO: forward, backward, clipping, AdamW, at learning rate 0. TRL gets the transcripts through its
`rollout_func` (`env_mask` marks the sampled tokens); its padding and scoring of a rollout are not
counted. It runs with Liger's layers and its own fused log-probs, with the fastest of the --ways and
--batches. Weights are random and in the same dtype for both.

TRL's AsyncGRPOTrainer, which packs a trie of tokens and takes no Liger, gets the transcripts from a
stub in place of its vLLM worker; its pushes go nowhere. Its FlashAttention-3 comes from the Hub as
the step runs, so a kernel that is installed here stands in for it. Its packing is counted, as ours.

    python -m bench.peers                               one GPU, 0.5B and 7B
    python -m bench.peers --whole --shapes 0.5B         whole steps; needs SGLang
    python -m bench.peers --dry-run                     a tiny shape on a CPU

With --whole both take whole steps on the same instances: one answer of --own tokens to each real
8x8 prompt, the update, new weights in the engine. TRL generates with transformers on the same GPU,
as without vLLM; this project's step is train.py's loop (bench.loop).

A way of TRL is the attention of its model, as transformers names it; ":async" after the kernel
(flash_attention_4, varlen, sdpa) is AsyncGRPOTrainer. With --whole a colon and the way of
generation follow: "generate" (one padded batch), "continuous" (transformers' continuous batching:
TRL then casts the trained weights to bf16, and CUDA graphs are captured in each step) or "eager"
(the same without CUDA graphs). A case that fails is a row with its error.

Prints one JSON line per case: seconds of a step, transcript tokens/s (each transcript counts its
full prompt) and peak GiB; finally the speedup of this project's step over the fastest of each of
TRL's trainers.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import queue
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from bench.rows import SHAPES, count, group_arguments, keep

FLASH = "flash_attention_4"
ASYNC = "async"
WAYS = ["sdpa", FLASH, f"varlen:{ASYNC}", f"{FLASH}:{ASYNC}"]
WHOLE_WAYS = ["sdpa:generate", "sdpa:eager", f"{FLASH}:eager", f"{FLASH}:continuous"]
# The second word of a way: TRL's settings.
GENERATIONS: dict[str, dict[str, Any]] = {
    "": {},
    "generate": {},
    "continuous": {"use_transformers_continuous_batching": True},
    "eager": {
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": {"use_cuda_graph": False},
    },
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.5B", "7B"])
    group_arguments(parser, groups=16)
    parser.add_argument(
        "--budget", type=count, default=16_384, help="computed tokens of our passes"
    )
    parser.add_argument("--dry-run", action="store_true", help="run a tiny shape on the CPU")
    parser.add_argument("--batches", nargs="+", type=count, default=[4, 8, 16, 32], help="of TRL")
    parser.add_argument("--ways", nargs="+", help="of TRL; default: all")
    parser.add_argument("--steps", type=count, default=2, help="timed steps, after one for warm-up")
    parser.add_argument("--whole", action="store_true", help="whole steps with each one's engine")
    parser.add_argument("--attention", default="auto", help="of our engine, with --whole")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file, too")
    chosen = parser.parse_args()
    if chosen.dry_run:
        chosen.shapes, chosen.groups, chosen.prompt, chosen.own = ["tiny"], 2, 24, 12
        chosen.batches, chosen.budget = [4, 8], 2048
    ways = WHOLE_WAYS if chosen.whole else WAYS
    if chosen.dry_run:
        ways = ["sdpa:generate", "sdpa:eager"] if chosen.whole else ["sdpa", f"sdpa:{ASYNC}"]
    chosen.ways = chosen.ways or ways
    known = [*GENERATIONS][1:] if chosen.whole else [ASYNC]
    for way in chosen.ways:
        if (after := way.partition(":")[2]) and after not in known:
            parser.error(f"--ways {way}: after the colon comes one of {', '.join(known)}")
    return chosen


if __name__ == "__main__":  # --help and a mistake are answered before torch is imported
    arguments()

# isort: split
import numpy as np
import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
)
from transformers.integrations import flash_paged

from bench import loop
from bench.shapes import qwen2_config, random_model, save_random
from bench.update import peak_gib, restart_peak, synchronize, transcripts
from dialop.shown import error_line
from selfplay.advantages.sample import Sample
from selfplay.config import load_config
from selfplay.data.stream import TrainStream
from selfplay.distributed import World, close_world, init_world
from selfplay.learner.learner import Learner
from selfplay.learner.optimizer import make_optimizer
from selfplay.learner.update import update_policy
from selfplay.model import attention
from selfplay.model.policy import DTYPES, liger_is_here
from selfplay.setup import make_tokenizer


def is_large(name: str) -> bool:
    """Whether a shape needs bf16 masters and recomputed activations on one GPU."""
    return name == "7B"


def with_advantages(samples: list[Sample], vocab: int) -> list[Sample]:
    """The samples, each with a random advantage and the log-probs of a uniform policy."""
    drawn = []
    for sample in samples:
        advantage = Random(sample.name).gauss(0.0, 1.0)
        advantages = [advantage * sampled for sampled in sample.mask]
        old = [-math.log(vocab) * sampled for sampled in sample.mask]
        drawn.append(replace(sample, advantages=advantages, old_logprobs=old))
    return drawn


class StepTimes(TrainerCallback):
    """The seconds of TRL's steps, without the time in which it scores the given rollout."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._start, self.scoring_s = device, 0.0, 0.0
        self.seconds: list[float] = []
        self.ends: list[float] = []

    def _now(self) -> float:
        synchronize(self._device)
        return time.perf_counter()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start, self.scoring_s = self._now(), 0.0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(self._now())
        self.seconds.append(self.ends[-1] - self._start - self.scoring_s)

    def excluded(self, scoring: Any) -> Any:
        """The function `scoring`, wrapped so that its seconds are not counted."""

        def timed(*words: Any) -> Any:
            start = self._now()
            result = scoring(*words)
            self.scoring_s += self._now() - start
            return result

        return timed


class GivenSamples:
    """Stands in for the worker that samples from vLLM: these samples, several times."""

    def __init__(self, samples: Sequence[Sample], *, times: int) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        for number in range(times):
            for sample in samples:
                self.rollout_buffer.put(given(sample, number))

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def update_model_version(self, model_version: int) -> None: ...
    def check_health(self, stale_after_s: float) -> None: ...


def given(sample: Sample, number: int) -> Any:
    """The sample as AsyncGRPOTrainer reads it, in its `number`-th step."""
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    first = sample.mask.index(1)
    return RolloutSample(
        prompt=[],
        completion=[],
        input_ids=np.array(sample.ids),
        completion_mask=np.array(sample.mask),
        old_log_probs=np.array(sample.old_logprobs, np.float32),
        advantage=sample.advantages[first],
        model_version=number,
        group_id=int(sample.name.partition(".")[0]),
        metrics={},
    )


class Nowhere:
    """Stands in for the push to vLLM."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def send_weights(self, iterator: Any) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Attends:
    """Stands in for the module of FlashAttention-3."""

    attend: Callable[..., torch.Tensor]

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        softmax_scale: float,
        **_: Any,
    ) -> torch.Tensor:
        bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return self.attend(q, k, v, attention.Span(*bounds, scale=softmax_scale))


@dataclass(frozen=True, slots=True)
class Trl:
    """TRL's trainer on one shape, in one of the --ways and in passes of `batch` transcripts."""

    shape: str
    tokenizer: PreTrainedTokenizerBase
    world: World
    options: argparse.Namespace
    folder: Path

    def cases(
        self, one: Callable[..., dict[str, Any]], say: Callable[..., dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """The rows of `one` with each way and batch size that it can do."""
        rows = []
        for way, batch in product(self.options.ways, self.options.batches):
            case = {"way": way, "batch": batch}
            try:
                rows.append(say(one(**case) | case))
            except Exception as error:  # noqa: BLE001 — memory runs out, a kernel does not fit
                say({"who": "TRL", "shape": self.shape, **case, "error": error_line(error)})
        return rows

    def update(self, samples: list[Sample], *, way: str, batch: int) -> dict[str, Any]:
        """Its optimizer step on these samples, without generation and scoring."""
        groups: dict[str, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.name.partition(".")[0], []).append(sample)
        own = slice(self.options.prompt, None)
        if way.endswith(f":{ASYNC}"):
            in_order = [sample for group in groups.values() for sample in group]
            seconds = self._async_seconds(in_order, kernel=way.partition(":")[0], batch=batch)
            tokens = sum(len(s.ids) for s in samples)
            who = "TRL AsyncGRPOTrainer, a stub for vLLM, a local kernel for FlashAttention-3"
            return figures(who, self.shape, seconds, self.world, tokens_per_s=tokens)

        def rollout(prompts: list[str], _trainer: Any) -> dict[str, Any]:
            taken = [groups[p][prompts[:i].count(p)] for i, p in enumerate(prompts)]
            return {
                "prompt_ids": [s.ids[: own.start] for s in taken],
                "completion_ids": [s.ids[own] for s in taken],
                "logprobs": [s.old_logprobs[own] for s in taken],
                "env_mask": [s.mask[own] for s in taken],
                "name": [s.name for s in taken],
            }

        def reward(name: list[str], **_: Any) -> list[float]:
            return [Random(one).gauss(0.0, 1.0) for one in name]

        longest = max(len(s.ids) for s in samples) - own.start
        seconds = self._seconds(
            [*groups], longest, way=way, batch=batch, reward=reward, rollout=rollout
        )
        tokens = sum(len(s.ids) for s in samples)
        return figures("TRL", self.shape, seconds, self.world, tokens_per_s=tokens)

    def _async_seconds(self, samples: list[Sample], *, kernel: str, batch: int) -> float:
        """Median seconds between the ends of AsyncGRPOTrainer's steps on these samples, in passes
        of `batch`, with its trie's packing."""
        from trl.experimental.async_grpo import (
            AsyncGRPOConfig,
            AsyncGRPOTrainer,
            async_grpo_trainer,
            packing,
        )

        attend = {FLASH: attention._flash, "varlen": attention._varlen, "sdpa": attention._padded}
        packing._flash_attn = lambda: Attends(attend[kernel])  # type: ignore[assignment]
        restart_peak(self.world.device)
        cuda, large = self.world.device.type == "cuda", is_large(self.shape)
        if not cuda:  # it would ask for the GPU's name
            async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
        weights = self.folder / "weights"
        if not weights.exists():
            save_random(self.shape, weights, self.world.device)
        settings = AsyncGRPOConfig(
            output_dir=str(self.folder),
            dtype="bfloat16" if large else "float32",
            max_steps=self.options.steps + 2,
            token_budget=0,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=len(samples) // batch,
            num_generations=self.options.group_size,
            max_staleness=self.options.steps + 2,
            learning_rate=0.0,
            weight_decay=0.0,
            max_grad_norm=1.0,
            bf16=cuda,
            use_cpu=not cuda,
            gradient_checkpointing=large,
            logging_steps=1000,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        times = StepTimes(self.world.device)
        worker: Any = GivenSamples(samples, times=self.options.steps + 3)
        trainer = AsyncGRPOTrainer(
            model=str(weights),
            reward_funcs=lambda **_: [],
            args=settings,
            train_dataset=Dataset(InMemoryTable.from_pydict({"prompt": ["-"]}), fingerprint="-"),
            processing_class=self.tokenizer,
            rollout_worker=worker,
            weight_transfer=Nowhere(),
            callbacks=[times],
        )
        restart_peak(self.world.device)
        trainer.train()
        return median(end - start for start, end in pairwise(times.ends[1:]))

    def whole_step(self, prompts: list[str], *, way: str, batch: int) -> dict[str, Any]:
        """Its whole step with its own generation."""

        def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
            # Continuous batching returns partial results after its own error.
            assert len(completion_ids) == len(prompts) and all(completion_ids), "no answers"
            return [Random(f"{at} {prompt}").gauss(0.0, 1.0) for at, prompt in enumerate(prompts)]

        own = self.options.own
        seconds = self._seconds(prompts, own, way=way, batch=batch, reward=reward, rollout=None)
        tokens = len(prompts) * self.options.group_size * own
        return figures("TRL, whole step", self.shape, seconds, self.world, sampled_per_s=tokens)

    def _seconds(
        self,
        prompts: list[str],
        longest: int,
        *,
        way: str,
        batch: int,
        reward: Callable[..., list[float]],
        rollout: Callable[[list[str], Any], dict[str, Any]] | None,
    ) -> float:
        """Median seconds of a step with at most `longest` new tokens a transcript; with `rollout`
        without generation and scoring."""
        from trl import GRPOConfig, GRPOTrainer

        restart_peak(self.world.device)
        cuda, large = self.world.device.type == "cuda", is_large(self.shape)
        dtype = torch.bfloat16 if large else torch.float32
        kernel, _, generation = way.partition(":")
        settings = GRPOConfig(
            output_dir=str(self.folder),
            max_steps=self.options.steps + 1,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=len(prompts) * self.options.group_size // batch,
            num_generations=self.options.group_size,
            max_completion_length=longest,
            learning_rate=0.0,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            beta=0.0,
            temperature=1.0,
            loss_type="bnpo",
            bf16=cuda,
            use_cpu=not cuda,
            gradient_checkpointing=large,
            use_liger_kernel=cuda and liger_is_here(),
            logging_steps=1000,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **GENERATIONS[generation],
        )
        table = InMemoryTable.from_pydict({"prompt": prompts})
        times = StepTimes(self.world.device)
        trainer = GRPOTrainer(
            model=random_weights(self.shape, dtype, self.world, kernel),
            reward_funcs=reward,
            args=settings,
            # With an explicit name: Dataset.from_list pickles the table to make one, which fails
            # where dill cannot pickle pyarrow.
            train_dataset=Dataset(table, fingerprint=self.shape),
            processing_class=self.tokenizer,
            rollout_func=rollout,
            callbacks=[times],
        )
        if rollout is not None:
            trainer._generate_and_score_completions = times.excluded(  # type: ignore[method-assign]
                trainer._generate_and_score_completions
            )
        restart_peak(self.world.device)
        trainer.train()
        return median(times.seconds[1:])


def name_bounds() -> None:
    """Have continuous batching give an attention function its bounds by name. transformers 5.12
    gives them by place, where flash-attn-4 4.0.0b19 has another parameter."""
    load = flash_paged.lazy_import_paged_flash_attention
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")

    def loaded(implementation: str | None) -> tuple[Any, Any]:
        attend, with_cache = load(implementation)

        def named(q: Any, k: Any, v: Any, *bounds: Any, **others: Any) -> Any:
            return attend(q, k, v, **dict(zip(names, bounds, strict=True)), **others)

        return named, with_cache

    flash_paged.lazy_import_paged_flash_attention = loaded


def random_weights(name: str, dtype: torch.dtype, world: World, kernel: str) -> PreTrainedModel:
    """A plain transformers model of this shape."""
    config = qwen2_config(name)
    with torch.device(world.device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=kernel
        )
    return model


def our_step(
    name: str, samples: list[Sample], world: World, options: argparse.Namespace, *, share: bool,
    folder: Path,
) -> dict[str, Any]:  # fmt: skip
    """The measurements of this project's optimizer step."""
    restart_peak(world.device)  # frees the memory of the previous case
    large = is_large(name)
    config = load_config(
        None,
        [
            f"out={folder}",
            "model.scratch={max_positions: 8192}",
            "algorithm.kl=0",
            "optim={lr: 0.0, warmup_steps: 0, max_grad_norm: 1.0}",
            f"optim.share_prefixes={str(share).lower()}",
            f"optim.tokens_per_microbatch={options.budget}",
            f"optim.master_dtype={'bfloat16' if large else 'float32'}",
            f"parallel.checkpointing={'full' if large else 'none'}",
            f"model.dtype={'bfloat16' if world.device.type == 'cuda' else 'float32'}",
        ],
    )
    liger = config.model.liger and world.device.type == "cuda" and liger_is_here()
    model = random_model(
        name,
        world,
        master=DTYPES[config.optim.master_dtype],
        liger=liger,
        checkpointing=config.parallel.checkpointing,
    )
    optimizer = make_optimizer(model, config.optim)
    learner = Learner(model, optimizer, world, DTYPES[config.model.dtype])
    seconds: list[float] = []
    restart_peak(world.device)
    for step in range(options.steps + 1):
        synchronize(world.device)
        start = time.perf_counter()
        # The given log-probs are not an engine's.
        _, skipped = update_policy(learner, samples, step=step, config=config, max_mismatch=1000.0)
        assert not skipped, skipped
        synchronize(world.device)
        seconds.append(time.perf_counter() - start)
    tokens = sum(len(s.ids) for s in samples)
    row = figures("selfplay", name, median(seconds[1:]), world, tokens_per_s=tokens)
    return row | {"share_prefixes": share}


def figures(who: str, name: str, seconds: float, world: World, **tokens: int) -> dict[str, Any]:
    """A row; each keyword is a rate and the number of tokens in the seconds."""
    return {
        "who": who,
        "shape": name,
        "seconds": round(seconds, 3),
        **{rate: round(num / seconds) for rate, num in tokens.items()},
        "peak_gib": round(peak_gib(world.device), 1),
    }


def whole_steps(
    name: str, world: World, options: argparse.Namespace, folder: Path, say: Callable[..., Any]
) -> None:
    """Print both whole steps on the same prompts, and how many times as fast ours is."""
    words = ["--shape", name, "--games", str(options.groups * options.group_size)]
    words += ["--tries", "1", "--turn-tokens", str(options.own), "--attention", options.attention]
    if options.dry_run:
        words = ["--dry-run"]
    of_loop = loop.arguments(words)
    with ExitStack() as cleanup:
        row = loop.measure(of_loop, world, cleanup)
        gc.collect()
    tokens = float(str(row["num_generated_tokens"]))
    stages = {
        stage: round(float(str(row[f"{stage}_s"])), 3) for stage in ("step", "play", "update")
    }
    rate = round(tokens / stages["step"])
    say({"who": "selfplay, whole step", "shape": name, "sampled_per_s": rate, **stages})
    config = loop.settings(of_loop, folder, 1)
    tokenizer = make_tokenizer(config, folder, world)
    first = [
        config.game.kit.new_game(instance, config.game.options).prompt(0)
        for instance in TrainStream(config).step(1, range(config.rollout.instances))
    ]
    prompts = [f"{prompt.system}\n{prompt.user}" for prompt in first]
    trl = Trl(name, tokenizer, world, options, folder)
    theirs = [row["sampled_per_s"] for row in trl.cases(partial(trl.whole_step, prompts), say)]
    if theirs:
        say({"shape": name, "times_as_fast_as_TRL": round(rate / max(theirs), 2)})


def main() -> None:
    options = arguments()
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    name_bounds()
    world = init_world(1, device="cpu" if options.dry_run else None)

    def say(row: dict[str, Any]) -> dict[str, Any]:
        print(json.dumps(row), flush=True)
        keep(row, options.out)
        return row

    for name in options.shapes:
        if options.whole:
            with tempfile.TemporaryDirectory() as folder:
                whole_steps(name, world, options, Path(folder), say)
            continue
        vocab = SHAPES[name][5]
        samples = with_advantages(transcripts(options, vocab), vocab)
        with tempfile.TemporaryDirectory() as folder:
            ours = [
                say(our_step(name, samples, world, options, share=share, folder=Path(folder)))
                for share in (True, False)
            ]
            config = loop.settings(loop.arguments(["--dry-run"]), Path(folder), 1)
            trl = Trl(
                name, make_tokenizer(config, Path(folder), world), world, options, Path(folder)
            )
            theirs: dict[str, list[float]] = {}
            for row in trl.cases(partial(trl.update, samples), say):
                theirs.setdefault(row["way"].partition(":")[2], []).append(row["seconds"])
            for kind, seconds in theirs.items():
                times = round(min(seconds) / ours[0]["seconds"], 2)
                say({"shape": name, f"times_as_fast_as_TRL{'_' * bool(kind)}{kind}": times})
    close_world(world)


if __name__ == "__main__":
    main()
