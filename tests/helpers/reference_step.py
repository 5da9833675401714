"""The step of examples/one_step.py under more settings, and a real step to hold beside it.

Each advantage, loss, schedule and branch is written anew here, as plainly as possible.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import selfplay
from examples.one_step import (
    Position,
    Sample,
    begin,
    clipped_surrogate,
    grpo,
    pay_outcome,
    play,
    policy_logprobs,
    turn,
)
from selfplay.chat.rendering import Rendering
from selfplay.config import COMPARED_IN_GROUPS, AlgorithmConfig, Config, load_config
from selfplay.data.stream import TrainStream
from selfplay.metrics.observer import Step
from selfplay.step import take_step
from selfplay.step.run import Run
from tests.helpers.shared_work import once

Gradients = list[dict[str, Tensor]]

# A game with three seats, a tool, rewards of single moves, and a policy of one layer that makes
# legal moves, wrong ones and some that are refused.
GAME = {"name": "tests.helpers.three_rooms", "options": {"brief": True}}
ROOMS: dict[str, Any] = {
    "game": GAME,
    "device": "cpu",
    "threads": 1,
    "log_groups_every": 0,
    "observers": ["console"],
    "rollout": {"max_game_tokens": 128, "max_new_tokens": 16, "max_turns": 8, "max_retries": 1},
    "eval": {"final_games": 1, "talk_games": 0},
}
SCRATCH: dict[str, Any] = {
    "width": 16,
    "layers": 1,
    "heads": 2,
    "kv_heads": 2,
    "mlp_width": 32,
    "max_positions": 256,
    "vocab_size": 320,
    "tokenizer_games": 60,
}
IMITATION: dict[str, Any] = {
    "num_games": 300,
    "teachers": ["clerk", "calculator", "guesser"],
    "batch_size": 16,
    "epochs": 3,
    "optimizer": "muon",
    "lr": 1e-2,
    "warmup_steps": 5,
}


RANKS = {"rollout__instances": 4, "rollout__group_size": 4, "algorithm__advantage": "rloo"}


def first_weights() -> Path:
    """The folder of a policy that has imitated the game's scripts, made once in a test run."""

    def make(home: Path) -> None:
        settings = {**ROOMS, "model": {"scratch": SCRATCH}, "warm_start": IMITATION}
        selfplay.start(settings, out=str(home / "run"), steps=0).close()

    return once(("reference step", SCRATCH, IMITATION), make) / "run" / "warm_start"


def settings_of(weights: Path | None = None, **overrides: object) -> Config:
    """The settings of a run from these weights, with values by dotted keys (`__` for a dot)."""
    words = [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()]
    return load_config({**ROOMS, "model": {"path": str(weights or first_weights())}}, words)


def plain_model() -> PreTrainedModel:
    """The first weights as transformers computes with them, without the trainer's attention."""
    model = AutoModelForCausalLM.from_pretrained(first_weights(), dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None  # a sampled padding token is a token
    return model


# --- the real step --------------------------------------------------------------------------------


@contextmanager
def gradients_of(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> Iterator[Gradients]:
    """What each optimizer step inside the block is given, clipped, by the parameters' names."""
    found: Gradients = []

    def keep(*_: object) -> None:
        named = model.named_parameters()
        if gradients := {n: p.grad.clone() for n, p in named if p.grad is not None}:
            found.append(gradients)

    hook = optimizer.register_step_pre_hook(keep)
    yield found
    hook.remove()


class Real:
    """An open run, whose steps begin anew from its first weights under other settings."""

    def __init__(self, run: Run) -> None:
        self.model, self.rendering = run.learner.model, run.policies[0].rendering
        self._run, self._first = run, copy.deepcopy(run.learner.model.state_dict())

    def begin(self, config: Config, step: int, baselines: Mapping[str, float]) -> None:
        """Go back to the first weights, as the run after `step` steps."""
        (policy,) = self._run.policies
        optimizer = policy.learner.optimizer
        self.model.load_state_dict(self._first)
        optimizer.state.clear()
        policy.engine.push(step)
        stream = TrainStream(config)
        policies = [replace(policy, config=config, baselines=dict(baselines))]
        self._run = replace(self._run, config=config, stream=stream, policies=policies)

    def step(self, number: int) -> tuple[Step, Gradients]:
        """The step after `number` steps, and the gradients of its optimizer steps."""
        with gradients_of(self.model, self._run.learner.optimizer) as gradients:
            return take_step(self._run, number), gradients


@contextmanager
def real_run(out: Path) -> Iterator[Real]:
    """An open run with a reference policy for a KL term."""
    with selfplay.start(settings_of(out=out, algorithm__kl=0.1)) as run:
        yield Real(run.parts)


# --- advantages: baselines and divisors, by their names in the settings ---------------------------


def turns_of(sample: Sample) -> list[list[float]]:
    """The returns of each turn: of the tokens of one stretch of the mask."""
    returns_T = [*accumulate(sample.rewards[::-1])][::-1]
    stretches: list[list[float]] = []
    for at, trained in enumerate(sample.mask):
        if trained:
            if at == 0 or not sample.mask[at - 1]:
                stretches.append([])
            stretches[-1].append(returns_T[at])
    return stretches


def mean_of(sample: Sample) -> float:
    return float(sample.returns().mean())


def around_mean(group: Sequence[Sample]) -> float:
    """The deviation of a group's returns from its mean, of equal weight for each sample."""
    mean = np.mean([mean_of(s) for s in group])
    return float(np.sqrt(np.mean([((s.returns() - mean) ** 2).mean() for s in group])))


def other_turns(sample: Sample, group: Sequence[Sample]) -> list[float]:
    """For each turn the mean return of the same turn of the others, or all they have."""
    others = [s for s in group if s is not sample] or [sample]
    found = []
    for number in range(len(turns_of(sample))):
        same = [np.mean(turns_of(s)[number]) for s in others if len(turns_of(s)) > number]
        found.append(float(np.mean(same or [mean_of(s) for s in others])))
    return found


def around_turns(group: Sequence[Sample]) -> float:
    squares = []
    for sample in group:
        pairs = zip(turns_of(sample), other_turns(sample, group), strict=True)
        squares.append(np.mean([(np.mean(turn) - baseline) ** 2 for turn, baseline in pairs]))
    return float(np.sqrt(np.mean(squares)))


def with_advantages(
    samples: Sequence[Sample], algorithm: AlgorithmConfig, state: dict[str, float]
) -> list[Sample]:
    """The samples that train, with advantages; `state` are the moving averages of `ema`."""
    name, eps = algorithm.advantage, algorithm.advantage_eps
    if name == "grpo":
        return grpo(samples, algorithm)
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    ordered = [sample for group in groups.values() for sample in group]
    everything = np.concatenate([s.returns() for s in ordered])
    seats = {s.name: f"seat {s.name.partition(' seat ')[2]}" for s in ordered}
    before, kept = dict(state), []
    if name == "ema":
        for seat in sorted(set(seats.values())):
            mean = float(np.mean([mean_of(s) for s in ordered if seats[s.name] == seat]))
            state[seat] = 0.8 * before[seat] + 0.2 * mean if seat in before else mean
            before.setdefault(seat, mean)
    for sample in ordered:
        group = groups[sample.group]
        means, num = [mean_of(s) for s in group], len(turns_of(sample))
        divisor = 1.0
        if name == "turns":
            baselines, divisor = other_turns(sample, group), around_turns(group) + eps
        elif name == "reinforce_pp":
            baselines, divisor = [float(everything.mean())] * num, float(everything.std()) + eps
        elif name == "ema":
            baselines = [before[seats[sample.name]]] * num
        elif name == "rloo" and len(group) > 1:
            baselines = [(sum(means) - mean_of(sample)) / (len(group) - 1)] * num
        else:
            baselines = [float(np.mean(means))] * num
        deviation = around_turns(group) if name == "turns" else around_mean(group)
        if name in COMPARED_IN_GROUPS and deviation < 1e-9:
            continue
        pairs = zip(turns_of(sample), baselines, strict=True)
        advantages_K = iter([(g - b) / divisor for turn_K, b in pairs for g in turn_K])
        sample.advantages = [float(next(advantages_K)) if m else 0.0 for m in sample.mask]
        kept.append(sample)
    return kept


# --- losses and the schedule ----------------------------------------------------------------------

Loss = Callable[[Tensor, Sample, AlgorithmConfig], Tensor]


def loss_of(algorithm: AlgorithmConfig, reference: PreTrainedModel, temperature: float) -> Loss:
    """The loss of these settings; its KL term is to the first weights."""
    name = algorithm.loss
    if (name, algorithm.dual_clip, algorithm.kl) == ("clip", 0.0, 0.0):
        return clipped_surrogate

    def loss(logprobs_K: Tensor, sample: Sample, algorithm: AlgorithmConfig) -> Tensor:
        old_K, advantages_K = (
            logprobs_K.new_tensor(sample.trained(values))
            for values in (sample.old_logprobs, sample.advantages)
        )
        losses = []
        log_ratios_K = logprobs_K - old_K
        mean_log_ratio = log_ratios_K.detach().mean()
        for k, advantage in enumerate(advantages_K.tolist()):
            ratio = log_ratios_K[k].exp()
            if name == "gspo":  # the value of the sequence's ratio, the gradient of the token's
                ratio = (mean_log_ratio + logprobs_K[k] - logprobs_K[k].detach()).exp()
            near = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
            if name in ("clip", "gspo"):
                gain = torch.minimum(ratio * advantage, near * advantage)
                if algorithm.dual_clip and advantage < 0:
                    gain = gain.clamp(min=algorithm.dual_clip * advantage)
            elif name == "cispo":
                gain = near.detach() * advantage * logprobs_K[k]
            else:
                gain = advantage * logprobs_K[k]
            losses.append(-gain)
        losses_K = torch.stack(losses)
        if algorithm.kl:
            with torch.no_grad():
                reference_K = policy_logprobs(reference, sample, temperature)
            gap_K = reference_K - logprobs_K
            losses_K = losses_K + algorithm.kl * (gap_K.exp() - gap_K - 1)
        return losses_K

    return loss


def learning_rate(step: int, config: Config) -> float:
    optim = config.optim
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    done = (step - optim.warmup_steps) / (config.steps - optim.warmup_steps)
    left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    floor = 0.0 if optim.schedule == "constant" else optim.final_share
    return optim.lr * (floor + (1 - floor) * left[optim.schedule])


# --- branches -------------------------------------------------------------------------------------


def fork(position: Position, *names: object) -> Position:
    twin = replace(copy.copy(position), game=position.game.clone())
    twin.samples, twin.unread, twin.tries = copy.deepcopy(
        (position.samples, position.unread, position.tries)
    )
    twin.names = (*position.names, *names)
    return twin


def branched_samples(
    engine: PreTrainedModel, rendering: Rendering, config: Config, step: int
) -> tuple[list[Position], list[Sample]]:
    """The games of a step, and their samples: of each game without its branch points, then of every
    sibling turn and of what followed it."""
    rollout, branch = config.rollout, config.play_options
    if branch is None:
        played = play(engine, rendering, config, step)
        return played, [s for each in played for s in each.samples if 1 in s.mask]

    def finish(position: Position) -> Position:
        while not position.ended:
            turn(position, engine, rendering, config)
        pay_outcome(position, config.reward)
        return position

    played, samples, of_branches = [], [], list[Sample]()
    stream = TrainStream(config)
    for instance in stream.step(step, range(rollout.instances)):
        for index in range(rollout.group_size):
            position, points = begin(config, instance, index, step), []
            while not position.ended:
                number, seat = len(position.tries), position.game.seat_to_move
                if branch.turns == "first" and len(points) >= branch.per_game:
                    turn(position, engine, rendering, config)
                    continue
                siblings = []
                for sibling in range(1, branch.siblings):
                    twin = fork(position, "branch", number, sibling)
                    turn(twin, engine, rendering, config)
                    ends = [fork(twin, c) for c in range(branch.continuations)]
                    siblings.append([finish(end) for end in (ends if not twin.ended else [twin])])
                turn(position, engine, rendering, config)
                others = range(1, branch.continuations) if not position.ended else ()
                own = [finish(fork(position, "branch", number, 0, c)) for c in others]
                if len(position.tries) > number:  # else no tokens were left for this turn
                    points.append((number, seat, [own, *siblings]))
            pay_outcome(position, config.reward)
            played.append(position)
            of_game = copy.deepcopy(position.samples)
            for number, seat, siblings in points:
                name = f"instance {instance.key} episode {index}"
                siblings[0].insert(0, position)
                for sibling, ends in enumerate(siblings):
                    where = f"turn {number} sibling {sibling}"
                    start, end = span_of(ends[0], seat, number)
                    if sibling == 0:  # it trains as a branch
                        mask = of_game[seat].mask
                        mask[start:end] = [0] * (end - start)
                    sample = copy.deepcopy(ends[0].samples[seat])
                    sample.name, sample.group = f"{name} {where}", f"turn {number} of {name}"
                    sample.ids, sample.mask = sample.ids[:end], [0] * start + [1] * (end - start)
                    values = [returns_at(each.samples[seat], end - 1) for each in ends]
                    sample.rewards = [0.0] * (end - 1) + [float(np.mean(values))]
                    of_branches.append(sample)
                    for c, after in enumerate(ends):
                        if after is position:
                            continue
                        for s, later in enumerate(after.samples):
                            later = copy.deepcopy(later)
                            begun = until(after, s, number)
                            later.mask = [0] * begun + later.mask[begun:]
                            later.name = f"{name} {where} continuation {c} seat {s}"
                            later.group = f"seat {s} after turn {number} of {name}"
                            if 1 in later.mask:
                                of_branches.append(later)
            samples += [sample for sample in of_game if 1 in sample.mask]
    return played, samples + of_branches


def spans(position: Position, seat: int) -> list[tuple[int, int]]:
    """The token ranges of the seat's tries."""
    mask, found, start = position.samples[seat].mask, [], 0
    while 1 in mask[start:]:
        start = mask.index(1, start)
        end = mask.index(0, start) if 0 in mask[start:] else len(mask)
        found.append((start, end))
        start = end
    return found


def span_of(position: Position, seat: int, number: int) -> tuple[int, int]:
    """The token range of try `number` of the game, which is of this seat."""
    return spans(position, seat)[sum(s == seat for s, _ in position.tries[:number])]


def until(position: Position, seat: int, number: int) -> int:
    """Where the seat's tokens of tries up to `number` end."""
    num = sum(s == seat for s, _ in position.tries[: number + 1])
    return spans(position, seat)[num - 1][1] if num else 0


def returns_at(sample: Sample, token: int) -> float:
    return sum(sample.rewards[token:])
