"""A complete self-play GRPO loop by public parts, to copy and to change: games in an engine,
advantages, a packed update, a checked push.

    python examples/loop.py                         # the run of configs/tiny.yaml: three minutes
    python examples/loop.py steps=20 optim.lr=1e-4  # with other settings

It gives the numbers of `train.py` under the same settings: `tests/test_loop.py` compares the steps.
It is one process with the hf engine, which may be on a GPU. What `train.py` adds is around these
functions: ranks (distributed/), checkpoints (checkpoint.py), engines that can fail and SGLang
(weight_sync/, engines/sglang/), partners, methods such as a critic, held-out games, the run folder.

Shapes: M trained tokens of a packed row. Log-probs in nats."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

import selfplay
from selfplay.advantages.advantages import compute_advantages, reward_samples
from selfplay.advantages.rewards import with_rewards
from selfplay.advantages.sample import Sample
from selfplay.chat.rendering import Rendering, make_rendering
from selfplay.chat.tokenizer import load_tokenizer
from selfplay.config import Config, load_config
from selfplay.data.stream import generated_instances
from selfplay.distributed import World, clip_grad_norm, init_world
from selfplay.engines.base import Sampling
from selfplay.engines.hf import HFEngine
from selfplay.engines.weights import Weights
from selfplay.learner.batch import micro_batches, num_trained_tokens
from selfplay.learner.loss import clipped_surrogate, kl_losses
from selfplay.learner.optimizer import make_optimizer
from selfplay.learner.update import learning_rate, minibatches
from selfplay.model.policy import export, load_model, policy_logprobs
from selfplay.rollout.driver import play_games
from selfplay.rollout.episode import Episode, limits_of
from selfplay.rollout.seating import self_play_games, whole_cast

Metrics = dict[str, float]


class Loop:
    """The policy `model`, its `engine` with a copy of the weights, the optimizer, and for
    `algorithm.kl` a `reference` that stays as it is."""

    def __init__(self, config: Config, weights: Path, world: World) -> None:
        """`weights` is the Hugging Face folder that self-play starts from."""

        def load() -> Any:
            return load_model(str(weights), device=world.device, dtype=torch.float32).eval()

        self.config, self.world = config, world
        self.rendering: Rendering = make_rendering(load_tokenizer(weights))
        self.model, self.engine = load(), HFEngine(load(), max_batch=config.engine.max_batch)
        self.reference = load().requires_grad_(False) if config.algorithm.kl else None
        self.optimizer = make_optimizer(self.model, config.optim, seed=config.seed)
        self.baselines: Metrics = {}  # moving averages, if `algorithm.advantage` keeps any

    def steps(self) -> Iterator[Metrics]:
        """Take all steps; yields each one's numbers, named as in metrics.jsonl."""
        self.push(version=0)
        for step in range(self.config.steps):
            episodes = self.play(step)
            metrics = self.update(self.credit(episodes), step)
            self.push(version=step + 1)
            score = sum(episode.score for episode in episodes) / len(episodes)
            yield {"step": step + 1, "score": score, **metrics}

    def play(self, step: int) -> list[Episode]:
        """The step's games: `rollout.group_size` of each of `rollout.instances` instances, at once
        in the engine. Each draw has a seed by its step, instance, game, seat and turn."""
        config, rollout = self.config, self.config.rollout
        instances = generated_instances(step, range(rollout.instances), config)
        setups = self_play_games(
            instances,
            step=step,
            game=config.game,
            rollout=rollout,
            seed=config.seed,
            cast=whole_cast(self.rendering, config.game),
        )
        sampling = Sampling(rollout.temperature, self.rendering.stop_ids)
        episodes, _ = play_games(
            setups,
            self.engine,
            sampling=sampling,
            limits=limits_of(rollout),
            versions={"": step},  # a completion by older weights is an error
        )
        return episodes

    def credit(self, episodes: list[Episode]) -> list[Sample]:
        """A sample for each seat of each game: its exact tokens, with an advantage for each token
        that it sampled. A group is (instance, seat); one whose returns are equal is dropped."""
        config = self.config
        paid = with_rewards(episodes, config.reward)
        samples, _ = reward_samples(paid, algorithm=config.algorithm, reward=config.reward)
        samples, self.baselines = compute_advantages(
            samples, self.baselines, algorithm=config.algorithm, world=self.world
        )
        return samples

    def update(self, samples: list[Sample], step: int) -> Metrics:
        """Epochs of minibatches, one optimizer step each. Returns means over these steps, each over
        its trained tokens; the mismatch of engine and trainer is the first step's, because later
        the policy has moved."""
        config, optim = self.config, self.config.optim
        lr = learning_rate(step, optim, num_steps=config.steps)
        every: list[Metrics] = []
        for minibatch in minibatches(samples, step=step, config=config):
            if not (num_tokens := num_trained_tokens(minibatch)):
                continue  # all groups were dropped
            sums: Metrics = {}
            self.model.train()
            for _, batch in micro_batches(
                minibatch, self.world, budget=optim.tokens_per_microbatch
            ):
                losses_M, metrics_M = self.losses(batch)
                (losses_M.sum() / num_tokens).backward()
                for name, values_M in metrics_M.items():
                    sums[name] = sums.get(name, 0.0) + values_M.detach().double().sum().item()
            self.model.eval()
            norm = clip_grad_norm(self.model, optim.max_grad_norm, self.world)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.optimizer.zero_grad()
            means = {name: value / num_tokens for name, value in sums.items()}
            every.append({**means, "grad_norm": norm, "lr": lr})
        means = (
            {name: sum(one[name] for one in every) / len(every) for name in every[0]}
            if every
            else {}
        )
        first = {name: every[0][name] for name in ("mismatch_mean",) if every}
        return {**means, **first, "num_optimizer_steps": float(len(every))}

    def losses(self, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of each trained token [M] of a micro-batch, and metrics [M]. This is the place
        for another loss or another term."""
        algorithm, temperature = self.config.algorithm, self.config.rollout.temperature
        logprobs_M, entropies_M = policy_logprobs(
            self.model, batch.row, batch.targets_M, temperature=temperature
        )
        losses_M, metrics_M = clipped_surrogate(logprobs_M, batch, algorithm)
        metrics_M |= {"policy_loss": losses_M, "entropy": entropies_M}
        metrics_M["mismatch_mean"] = (logprobs_M - batch.old_logprobs_M).abs()
        if self.reference is not None:
            with torch.no_grad():
                reference_M, _ = policy_logprobs(
                    self.reference, batch.row, batch.targets_M, temperature=temperature
                )
            kl_M = kl_losses(logprobs_M, reference_M, batch, algorithm)
            losses_M = losses_M + algorithm.kl * kl_M
        return losses_M, metrics_M

    def push(self, *, version: int) -> None:
        """Copy the weights into the engine, and compare every bit."""
        self.engine.load(Weights(self.model, self.engine.dtype), version)
        compared = self.engine.compare(Weights(self.model, self.engine.dtype))
        if compared.num_different:
            raise RuntimeError(f"after push {version}: {compared} of the engine's weights")


def main(words: list[str]) -> None:
    config = load_config("tiny", ["out=runs/loop", *words])
    given = config.policies, config.methods, config.rollout.partners, config.rollout.play
    if given != ({}, {}, ("self",), "plain"):
        sys.exit(
            "loop.py: policies, methods, partners and rollout.play are train.py's, around this"
        )
    torch.set_num_threads(config.threads or torch.get_num_threads())
    # Random weights never agree: the first ones imitate scripted players. A Hugging Face folder of
    # your own serves as well.
    run = selfplay.train(replace(config, steps=0))
    loop = Loop(config, run.folder / "warm_start", init_world())
    for metrics in loop.steps():
        print(" ".join(f"{name} {value:.4g}" for name, value in metrics.items()), flush=True)
    export(loop.model, loop.rendering.tokenizer, run.folder / "loop")
    print(f"the policy is in {run.folder / 'loop'}")


if __name__ == "__main__":
    main(sys.argv[1:])
