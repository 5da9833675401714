"""The smallest model and the smallest run: two layers, a handful of games, seconds in all."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from selfplay.advantages.sample import Sample
from selfplay.config import ScratchConfig
from selfplay.learner.batch import pack
from selfplay.model.policy import policy_logprobs, scratch_model
from tests.helpers.shared_work import once
from tests.helpers.tolerance import tolerance

CPU = torch.device("cpu")
VOCAB = 300
LOGPROB = 10.0  # nats, what none of its tokens' log-probs exceeds by much
# Roundings on a number's way through `tiny_model`: the vocabulary's sum, the last norm, the head;
# in each of two layers two norms, two projections, scores, 36 positions, the MLP's two.
FORWARD = VOCAB + 2 * 32 + 2 * (2 * 32 + 2 * 32 + 8 + 36 + 32 + 48)
GRADIENT = 3 * FORWARD + 176  # back again, twice as long; a sum over the tokens of all samples
TINY = """
steps: 4
observers: [console]
save_every: 2
log_games_every: 1
log_groups_every: 3
threads: 1
device: cpu
game:
  options: {size: 2, p_observed: 0.5, scale: false, max_value: 10, keep: exactly_one, brief: true}
model:
  scratch: {width: 32, layers: 2, heads: 2, kv_heads: 2, mlp_width: 64, max_positions: 192,
            vocab_size: 400, tokenizer_games: 60}
warm_start: {num_games: 400, teachers: ["solo", "honest:tell=top"], batch_size: 8, epochs: 2,
             warmup_steps: 10, lr: 6.0e-3}
rollout: {instances: 4, group_size: 4, max_turns: 4, max_retries: 1, max_new_tokens: 24,
          max_game_tokens: 160}
optim: {lr: 1.0e-3, schedule: linear, tokens_per_microbatch: 1024}
eval: {every: 0, num_games: 8, final_games: 4, talk_games: 0}
"""
# What an engine and the trainer may differ by over one token in the tiny run.
RUN_FORWARD = 400 + 64 + 2 * (64 + 64 + 16 + 192 + 32 + 64)
RUN_GAP = tolerance(RUN_FORWARD, scale=LOGPROB)
RUN_STEP = 3 * RUN_FORWARD + 2_000  # a step's gradient, a sum over the tokens of 32 transcripts


def tiny_model(arch: str = "qwen2", *, seed: int = 0, vocab_size: int = VOCAB) -> PreTrainedModel:
    """Random weights, grouped key/value heads, as sure of itself as a trained model."""
    shape = ScratchConfig(
        arch=arch,
        width=32,
        layers=2,
        heads=4,
        kv_heads=2,
        mlp_width=48,
        max_positions=256,
        init_range=0.3,
    )
    return scratch_model(shape, vocab_size=vocab_size, seed=seed)


def trainer_logprobs(
    model: PreTrainedModel, samples: list[Sample], *, temperature: float
) -> torch.Tensor:
    """The trainer's log-probs of all trained tokens of one packed row, in order."""
    batch = pack(samples, device=CPU)
    with torch.no_grad():
        logprobs_M, _ = policy_logprobs(model, batch.row, batch.targets_M, temperature=temperature)
    return logprobs_M


def write_tiny(folder: Path) -> Path:
    """The run's settings as a file beside the run folder."""
    path = folder.parent / "tiny.yaml"
    if not path.exists():  # a test may have filled the disk
        path.write_text(TINY)
    return path


def run_tiny(folder: Path, *overrides: str) -> int:
    """Train in `folder`; the command's exit status."""
    import train

    return train.main(["--config", str(write_tiny(folder)), f"out={folder}", *overrides])


# A run under these settings may begin from a warm start that was made without them.
LATER = (
    *("steps=", "observers=", "save_every=", "log_", "keep_checkpoints=", "eval.", "policy_pool."),
    *("methods", "algorithm", "reward", "endpoint."),
    *("data.start", "data.train", "data.options", "engine.", "model.lora", "model.dtype"),
    *("optim.master_dtype", "monitors="),
    *("rollout.player", "rollout.partners", "rollout.opponents", "rollout.options", "rollout.play"),
    *("rollout.instances", "rollout.group_size", "rollout.max_turns"),
    *("optim.lr=", "optim.schedule=", "optim.final_share=", "optim.warmup_steps="),
    "optim.tokens_per_microbatch=",
)


def warm_started(*overrides: str) -> Path:
    """The finished run of no step from which runs under these settings begin. Only to read."""
    kept = tuple(sorted(word for word in overrides if not word.startswith(LATER)))

    def make(home: Path) -> None:
        assert run_tiny(home / "run", *kept, "steps=0", "eval.final_games=1") == 0

    return once(("warm start", TINY, kept), make) / "run"


def begin_warm(folder: Path, *overrides: str) -> None:
    """Put a finished warm start under these settings into the run folder, which is made here."""
    run = warm_started(*overrides)
    for part in ("tokenizer", "warm_start"):
        shutil.copytree(run / part, folder / part)
    shutil.copy(run / "warm_start.jsonl", folder)


def run_warm(folder: Path, *overrides: str) -> Path:
    """A whole run in a new folder, from the warm start that all runs with its settings share."""
    begin_warm(folder, *overrides)
    assert run_tiny(folder, *overrides) == 0
    return folder


def finished(*overrides: str) -> Path:
    """The folder of a finished run under these settings, made once in a test run. Only to read."""
    made = once(("run", TINY, overrides), lambda home: run_warm(home / "run", *overrides))
    return made / "run"


# Runs that keep more from step to step than weights: `test_resume` interrupts each of them, and the
# tests of a feature read the finished one.
LORA = ("model.lora.rank=4", "model.lora.alpha=8", "optim.lr=1.0e-2", "algorithm.kl=0.01")
PPO_RUN = (
    *("algorithm.advantage=ppo", "rollout.group_size=1", "rollout.instances=12"),
    *("algorithm.minibatches=2", "methods.ppo.warmup_steps=3", "methods.ppo.lr=1.0e-3"),
)
RUNS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "fixed partner": ("eval.every=2", "eval.partners=[warm_start,scripted:solo]"),
    # A third of the games beside itself; the second step may meet the first's weights.
    "pool": (
        *("rollout.partners=[self,pool*2]", "policy_pool.every=1", "rollout.instances=6"),
        *("steps=3", "save_every=1"),
    ),
    "league": (
        *("rollout.partners=[self,pool*2]", "policy_pool.every=1", "rollout.instances=6"),
        *("rollout.opponents=league", "rollout.options.members=2", "observers=[console,league]"),
        *("steps=3", "save_every=1"),
    ),
    "branches": (
        *("rollout.play=branches", "rollout.options.turns=first", "rollout.options.per_game=2"),
        *(
            "rollout.options.siblings=3",
            "rollout.options.continuations=2",
            "steps=2",
            "save_every=1",
        ),
    ),
    "recomputed": (
        *("optim.schedule=constant", "algorithm.kl=0.2"),
        "methods.recompute.importance=token",
        *("steps=5", "save_every=4"),
    ),
    "baselines": (
        *("algorithm.advantage=ema", "optim.schedule=constant"),
        *("reward={function: regret, error_penalty: 0.1}", "methods.best_games.weight=0.5"),
    ),
    # The reference moves before the last step, after which all but the first save are lost.
    "moving reference": (
        *("algorithm.kl=0.2", "methods.kl_reference.every=3", "optim.schedule=constant"),
        *("steps=5", "save_every=4"),
    ),
    "averaged adapters": (
        *LORA,
        "methods.kl_reference.average=0.25",
        "optim.schedule=constant",
    ),
    "critic": PPO_RUN,
    # With a reference and two optimizer steps a rollout.
    "adapters": (*LORA, "methods.recompute=on", "algorithm.minibatches=2"),
    "bf16": (
        *("model.dtype=bfloat16", "optim.master_dtype=bfloat16", "optim.schedule=constant"),
        *("engine.max_mismatch=1",),
    ),
}


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of an exported model."""
    return load_file(folder / "model.safetensors")


def same_weights(one: Path, other: Path) -> bool:
    """Whether two exported models are equal bit for bit."""
    mine, yours = weights_of(one), weights_of(other)
    return mine.keys() == yours.keys() and all(torch.equal(mine[n], yours[n]) for n in mine)


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what a clock decides (tokens_per_s ends in _s too)."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not name.endswith("_s")}
        for line in lines
    ]


def assert_same_run(one: Path, other: Path) -> None:
    """Metrics, games, weights of each policy and held-out results are the same, bit for bit."""
    assert metrics_of(one) == metrics_of(other)
    for name in ("games.jsonl", "groups.jsonl"):
        assert (one / name).read_text() == (other / name).read_text()
    finals = [file.parent for file in (one / "final").rglob("config.json")]
    assert finals and all(same_weights(each, other / each.relative_to(one)) for each in finals)
    held_out = [json.loads((run / "held_out_after.json").read_text()) for run in (one, other)]
    assert held_out[0] == held_out[1]


def begin_halfway(run: Path, folder: Path, *, lost: int = 1) -> None:
    """Copy a finished run without its newest checkpoints and its end; its logs are whole."""
    shutil.copytree(run, folder)
    newest = sorted((folder / "checkpoints").glob("step_*"))[-lost:]
    for gone in (*newest, folder / "final", folder / "final_adapters"):
        shutil.rmtree(gone, ignore_errors=True)
    (folder / "held_out_after.json").unlink()


def go_on_from(run: Path, folder: Path, *overrides: str, lost: int = 1) -> None:
    """Copy a finished run without its newest checkpoints and its end, and let it go on."""
    begin_halfway(run, folder, lost=lost)
    assert run_tiny(folder, *overrides) == 0
