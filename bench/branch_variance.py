"""Compares the noise of the policy gradient with and without branch points, per generated token.

    python -m bench.branch_variance --config configs/tiny_long.yaml --run runs/tiny_long --steps 64
    python -m bench.branch_variance --run runs/tiny_long --setting 'groups:' \\
        --setting 'all turns: rollout.branch.turns=all rollout.group_size=1'

Each setting plays `--steps` steps of new instances with the same frozen weights. g_r is the
gradient of step r's policy loss without KL and clipping. With mean gradient m over R steps, the
noise is V = sum |g_r - m|^2 / (R - 1) and the signal is S = |m|^2 - V / R, which removes the bias
of |m|^2. V / S does not depend on the scale of the loss and falls as 1 / tokens. Settings of
different size are therefore compared by V / S times the generated tokens of a step: the number of
tokens at which signal and noise are equal. The last column is this number divided by that of the
first setting, with a 95 % interval from a jackknife over blocks of steps (nan: too few steps to
tell whether there is a signal).

Before that, a table compares the errors of two advantage estimates: the group's and the branch's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from selfplay.chat.rendering import make_rendering
from selfplay.config import Config, load_config
from selfplay.credit.advantages import assign_advantages, reward_samples
from selfplay.credit.rewards import seat_reward
from selfplay.credit.sample import Sample
from selfplay.data.stream import TrainStream
from selfplay.distributed import init_world
from selfplay.engines.base import Sampling
from selfplay.engines.hf import HFEngine
from selfplay.learner.batch import micro_batches, num_trained_tokens, split
from selfplay.learner.learner import Learner, TokenMeans, UpdateSettings
from selfplay.learner.objective import Part, part_loss
from selfplay.metrics.console import progress
from selfplay.rollout.branches import siblings_of
from selfplay.rollout.driver import play_games
from selfplay.rollout.episode import BranchPoint, Episode, limits_of
from selfplay.rollout.seating import self_play_games
from selfplay.setup import make_learner

SETTINGS = (
    "groups:",
    "decisions, 4 siblings: rollout.branch.turns=decisions rollout.instances=9",
    "all turns, 4 siblings: rollout.branch.turns=all rollout.group_size=1 rollout.instances=20",
    "first turn, 4 siblings: rollout.branch.turns=first rollout.group_size=4 rollout.instances=8",
    "all turns, 2 siblings, 2 continuations: rollout.branch.turns=all rollout.branch.siblings=2 "
    "rollout.branch.continuations=2 rollout.group_size=1 rollout.instances=28",
)
NUM_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class Measured:
    """One setting's gradients [R, P], and its sampled and trained tokens per step."""

    name: str
    gradients_RP: torch.Tensor
    num_generated: float
    num_trained: float


def main() -> None:
    """Measure all settings and print one row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="configs/tiny_long.yaml", help="the run's settings")
    parser.add_argument("--run", required=True, type=Path, help="the run folder with its weights")
    parser.add_argument("--weights", default="warm_start", help="warm_start or final")
    parser.add_argument("--steps", type=int, default=64, help="number of gradients per setting")
    parser.add_argument(
        "--instances", type=int, default=32, help="instances of the first table; 0 skips it"
    )
    parser.add_argument(
        "--setting", action="append", help="'name: overrides'; the others compare to the first"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.instances:
        for line in turn_table(args):
            print(line)
        print()
    rows = []
    for text in (args.setting or SETTINGS) if args.steps else ():
        name, _, overrides = text.partition(":")
        config = load_config(args.config, ["algorithm.kl=0.0", "device=cpu", *overrides.split()])
        rows.append(measure(name, config, args.run, weights=args.weights, num_steps=args.steps))
    if not rows:
        return
    print("| setting | generated tokens | trained | V / S | tokens x V / S | ratio [95 %] |")
    print("|---|--:|--:|--:|--:|--:|")
    for row in rows:
        print(shown(row, against=rows[0]))


def measure(name: str, config: Config, run: Path, *, weights: str, num_steps: int) -> Measured:
    """The gradients of `num_steps` steps, all with the run's unchanged weights."""
    play_step, learner = player(config, run / weights)
    gradients, num_generated, num_trained = [], 0, 0
    for step in progress(range(num_steps), name):
        episodes, num_tokens = play_step(step)
        samples, _ = reward_samples(episodes, algorithm=config.algorithm, reward=config.reward)
        samples = assign_advantages(samples, algorithm=config.algorithm)
        num_generated += num_tokens
        num_trained += num_trained_tokens(samples)
        gradients.append(gradient(learner, samples, config=config))
    return Measured(
        name, torch.stack(gradients), num_generated / num_steps, num_trained / num_steps
    )


def player(
    config: Config, weights: Path
) -> tuple[Callable[[int], tuple[list[Episode], int]], Learner]:
    """The learner, and a function that plays a step with its policy: from the step's number to the
    episodes and their number of sampled tokens."""
    world = init_world(1, device="cpu")
    rendering = make_rendering(
        AutoTokenizer.from_pretrained(weights), template_kwargs=config.model.chat_template
    )
    learner = make_learner(config, weights, world)
    engine = HFEngine(learner.model, max_batch=config.engine.max_batch)
    sampling = Sampling(temperature=config.rollout.temperature, stop_ids=rendering.stop_ids)
    stream = TrainStream(config)

    def play_step(step: int) -> tuple[list[Episode], int]:
        instances = stream.step(step, range(config.rollout.instances))
        setups = self_play_games(
            instances,
            step=step,
            game=config.game,
            rollout=config.rollout,
            seed=config.seed,
            rendering=rendering,
        )
        episodes, stats = play_games(
            setups, engine, sampling=sampling, limits=limits_of(config.rollout)
        )
        return episodes, stats.num_generated_tokens

    return play_step, learner


def turn_table(args: argparse.Namespace) -> list[str]:
    """The first table: mean square errors of both advantage estimates, by kind of turn."""
    forked = "rollout.branch.turns=all rollout.branch.siblings=12 rollout.branch.continuations=3"
    config = load_config(
        args.config, ["device=cpu", "algorithm.kl=0.0", "rollout.instances=1", *forked.split()]
    )
    play_step, _ = player(config, args.run / args.weights)
    squares: dict[str, list[tuple[float, float, float]]] = {}
    for step in progress(range(args.instances), "turns"):
        episodes, _ = play_step(step)
        for episode in episodes:
            others = [e for e in episodes if e is not episode]
            for point in episode.branches:
                kind = episode.turns[point.turn].action or "refused"
                errors = turn_errors(episode, point, others, config=config)
                squares.setdefault(kind, []).append(errors)
                squares.setdefault("all", []).append(errors)
    lines = [
        "| turn | number | mean square of A | error by group | error by branch | ratio |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for kind, errors_of_kind in sorted(squares.items(), key=lambda item: -len(item[1])):
        columns = zip(*errors_of_kind, strict=True)
        truth, group, branch = (float(np.mean(column)) for column in columns)
        ratio = f"{branch / group:.2f}" if group > 0 else "–"
        num = len(errors_of_kind)
        lines.append(f"| {kind} | {num} | {truth:.5f} | {group:.5f} | {branch:.5f} | {ratio} |")
    return lines


def turn_errors(
    episode: Episode, point: BranchPoint, others: Sequence[Episode], *, config: Config
) -> tuple[float, float, float]:
    """Unbiased estimates, for one turn, of A^2 and of the square errors of the group's and the
    branch's estimate of A."""

    def reward(game: Episode) -> float:
        return seat_reward(game, point.seat, config=config.reward)

    own, *siblings = siblings_of(episode, point)
    firsts = [reward(continuations[0]) for continuations in siblings]
    # A turn that ends its game has no other continuation; its reward is its exact value.
    more = [reward(continuation) for continuation in own[1:]] or [reward(episode)] * 2
    true = [value - float(np.mean(firsts[3 + 4 * i : 7 + 4 * i])) for i, value in enumerate(more)]
    by_group = reward(episode) - float(np.mean([reward(other) for other in others]))
    by_branch = reward(episode) - float(np.mean(firsts[:3]))
    return (
        true[0] * true[1],
        (by_group - true[0]) * (by_group - true[1]),
        (by_branch - true[0]) * (by_branch - true[1]),
    )


def gradient(learner: Learner, samples: Sequence[Sample], *, config: Config) -> torch.Tensor:
    """The policy loss's gradient over all parameters [P], a mean over trained tokens."""
    part, total = Part(samples, "surrogate"), num_trained_tokens(samples)
    budget = config.optim.tokens_per_microbatch
    learner.model.train()
    for batch in micro_batches(samples, split(samples, budget=budget), device=torch.device("cpu")):
        settings, tally = UpdateSettings.of(config), TokenMeans(learner.world)
        losses_M = part_loss(learner, part, batch, settings=settings, tally=tally)
        (losses_M.sum() / total).backward()
    grads = [p.grad.flatten() for p in learner.model.parameters() if p.grad is not None]
    flat_P = torch.cat(grads).clone()
    learner.model.zero_grad(set_to_none=True)
    return flat_P


def noise_and_signal(gram_RR: np.ndarray, picks: np.ndarray) -> tuple[float, float]:
    """V and S of the picked steps, from the inner products of the gradients [R, R]."""
    num, inner_RR = len(picks), gram_RR[np.ix_(picks, picks)]
    mean_square = float(inner_RR.sum()) / num**2
    noise = (float(np.trace(inner_RR)) - num * mean_square) / (num - 1)
    return noise, mean_square - noise / num


def shown(row: Measured, *, against: Measured) -> str:
    """One line of the second table."""
    gram_RR, base_gram_RR = gram(row), gram(against)
    every = np.arange(min(len(gram_RR), len(base_gram_RR)))
    noise, signal = noise_and_signal(gram_RR, every)
    scale = row.num_generated / against.num_generated

    def log_ratio(picks: np.ndarray) -> float:
        cost, base_cost = (
            np.divide(*noise_and_signal(inner_RR, picks)) for inner_RR in (gram_RR, base_gram_RR)
        )
        return float(np.log(scale * max(cost, 0.0) / base_cost))

    left_out = [log_ratio(np.delete(every, block)) for block in np.array_split(every, NUM_BLOCKS)]
    spread = float(np.std(left_out)) * (NUM_BLOCKS - 1) ** 0.5
    low, middle, high = (np.exp(log_ratio(every) + z * spread) for z in (-1.96, 0.0, 1.96))
    return (
        f"| {row.name} | {row.num_generated:,.0f} | {row.num_trained:,.0f} "
        f"| {noise / signal:.2f} | {row.num_generated * noise / signal:,.0f} "
        f"| {middle:.2f} [{low:.2f}, {high:.2f}] |"
    )


def gram(row: Measured) -> np.ndarray:
    """The inner products of the steps' gradients [R, R]."""
    gradients_RP = row.gradients_RP.double()
    return (gradients_RP @ gradients_RP.T).numpy()


if __name__ == "__main__":
    main()
