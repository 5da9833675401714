"""One training step on one page: instances, games token by token, rewards, advantages, the loss,
the optimizer step, the engine's new weights.

    python examples/one_step.py     # a warm start, then three steps: a minute on a CPU core

This is the trainer's step (GRPO) in plain PyTorch: one game, one sequence and one token at a time.
`tests/test_one_step.py` tests that the two are equal. One set of weights, the policy, plays all
seats. A sample is one seat's game as tokens, read and sampled. A group has the samples of one seat
in all games of an instance. Shapes: T tokens of a sample, K of them trained, V words. Comments name
the files of `selfplay/` that work in another way. Left out: ranks (distributed/), faults and checks
of engines (weight_sync/), and methods added to GRPO, such as a critic (methods/)."""

import random
import sys
from dataclasses import dataclass, field
from itertools import accumulate, compress
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

import selfplay
from dialop.game import Game, Step
from dialop.tags import in_thought
from selfplay.chat.rendering import make_rendering
from selfplay.chat.tokenizer import load_tokenizer
from selfplay.config import load_config
from selfplay.data.seeds import named_seed


@dataclass
class Sample:
    """One seat's game. Each list has one entry per token [T]."""

    name: str
    group: str
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)  # 1: sampled, so trained; 0: read
    old_logprobs: list[float] = field(default_factory=list)  # by the engine; 0 where read
    rewards: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)

    def add(self, ids, logprobs=None):
        """Append tokens that the seat read, or, with log-probs, sampled."""
        self.ids += ids
        self.mask += [int(logprobs is not None)] * len(ids)
        self.old_logprobs += logprobs or [0.0] * len(ids)
        self.rewards += [0.0] * len(ids)

    def pay(self, reward):
        """Add a reward at the last token sampled so far, possibly turns ago, if any."""
        if sampled := self.trained(range(len(self.mask))):
            self.rewards[sampled[-1]] += reward

    def trained(self, values):
        """The values of the trained tokens [K]."""
        return [*compress(values, self.mask)]

    def returns(self):
        """Each trained token's return [K]: all rewards from this token on, without discount."""
        return np.array(self.trained([*accumulate(self.rewards[::-1])][::-1]))


@dataclass
class Position:
    """A game in play. `names` name its random draws, so that any game can be played again."""

    game: Game
    samples: list[Sample]  # one per seat
    names: tuple
    unread: list[str]  # what each seat reads before its next turn
    tries: list[tuple[int, str]] = field(default_factory=list)  # (seat, "legal"|"refused"|"cut")
    ended: str = ""  # "finished", or by the limit of "turns", "retries" or "tokens"


def begin(config, instance, index, step):
    """Game `index` of an instance in a step. Partners in some seats: rollout/seating.py."""
    game, key = config.game.kit.new_game(instance, config.game.options), instance.key
    seats, name = range(game.num_seats), f"instance {key} episode {index}"
    samples = [Sample(f"{name} seat {seat}", f"seat {seat} of {key}") for seat in seats]
    return Position(game, samples, (config.seed, "play", step, key, index), [""] * len(seats))


def turn(position, engine, rendering, config):
    """One try at a move (rollout/episode.py, rollout/players.py)."""
    game, rollout, seat = position.game, config.rollout, position.game.seat_to_move
    sample, unread = position.samples[seat], position.unread
    if not sample.ids:
        prompt = game.prompt(seat)
        sample.add(rendering.conversation(prompt.system, *prompt.read(unread[seat])))
    else:  # Only new text becomes tokens. For templates that rewrite old turns: rollout/players.py.
        sample.add(rendering.continued(sample.ids, unread[seat])[1])
    room = min(rollout.max_new_tokens, rollout.max_game_tokens - len(sample.ids))
    if room < 1:
        position.ended = "tokens"
        return
    seed = named_seed(*position.names, seat, sum(seat == other for other, _ in position.tries))
    stop_ids, temperature = rendering.stop_ids, rollout.temperature
    ids, logprobs = generate(engine, sample.ids, room, temperature, stop_ids, seed)
    sample.add(ids, logprobs)  # invalid tries train too, so that the policy learns to avoid them
    complete, text = ids[-1] in stop_ids, rendering.decode(ids)
    if not complete and room < rollout.max_new_tokens:  # the game's limit: a retry has no room
        position.tries.append((seat, "cut"))
        position.ended = "tokens"
        return
    too_long = Step(seat, None, "Error: your move was cut off; be shorter.", "cut_off", ())
    result = game.step(seat, text) if complete and not in_thought(text) else too_long
    position.tries.append((seat, "refused" if result.error else "legal"))
    unread[seat] = result.error or ""
    for each, observed in enumerate(result.observations):
        unread[each] = "\n".join(filter(None, (unread[each], observed)))
    for each, reward in enumerate(result.rewards):  # of this move alone
        position.samples[each].pay(reward)
    if game.seat_to_move is None:
        position.ended = "finished"
    elif sum(how == "legal" for _, how in position.tries) >= rollout.max_turns:
        position.ended = "turns"
    elif position.tries[-1 - rollout.max_retries :].count((seat, "refused")) > rollout.max_retries:
        position.ended = "retries"


@torch.no_grad()
def generate(engine, prompt, num, temperature, stop_ids, seed):
    """At most `num` sampled ids and their log-probs in nats. The trainer's engines keep keys and
    values, and answer many games at once: engines/hf.py, engines/sglang/engine.py."""
    ids, logprobs = [], []
    for draw in np.random.Generator(np.random.Philox(seed)).random(num):
        logits_V = engine(torch.tensor([prompt + ids])).logits[0, -1]
        logprobs_V = (logits_V.float() / temperature).log_softmax(-1)
        cdf_V = logprobs_V.double().exp().cumsum(-1)
        ids.append(int(torch.searchsorted(cdf_V, draw * cdf_V[-1], right=True)))
        logprobs.append(float(logprobs_V[ids[-1]]))
        if ids[-1] in stop_ids:
            break
    return ids, logprobs


def pay_outcome(position, reward):
    """Pay each seat its final reward (others: advantages/rewards.py). If the last try was refused
    or cut, its seat forfeits, and the game gives the outcome; else the outcome is unchanged."""
    game, (last, how) = position.game, (position.tries or [(0, "legal")])[-1]
    outcome = game.outcome() if how == "legal" else game.outcome_of_forfeit(last)
    for number, sample in enumerate(position.samples):
        cost = min(1.0, reward.token_cost * sum(sample.mask))
        penalty = reward.error_penalty * position.tries.count((number, "refused"))
        sample.pay(outcome.rewards[number] - cost - penalty)


def play(engine, rendering, config, step):
    """A step's games, `group_size` of each instance. Instances from files: data/stream.py."""
    num, seed = config.rollout.instances, named_seed("instances", config.seed, "train")
    positions, kit = [], config.game.kit
    for instance in kit.generate(config.game.options, seed=seed, start=step * num, num=num):
        for index in range(config.rollout.group_size):
            positions.append(position := begin(config, instance, index, step))
            while not position.ended:
                turn(position, engine, rendering, config)
            pay_outcome(position, config.reward)
    return positions


def grpo(samples, algorithm):
    """Samples with advantages, A_t = (R_t - m) / (s + eps): R_t is the return of token t, m and s
    are the mean and standard deviation of returns in the group; samples have equal weights,
    whatever their length. Groups of equal returns have no gradient and are dropped. Seats of one
    game are never compared, because they may share a reward. Others: advantages/advantages.py."""
    kept, groups = [], {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    for group in groups.values():
        mean = np.mean([sample.returns().mean() for sample in group])
        std = np.sqrt(np.mean([((sample.returns() - mean) ** 2).mean() for sample in group]))
        for sample in group if std > 1e-9 else []:
            advantages_K = iter((sample.returns() - mean) / (std + algorithm.advantage_eps))
            sample.advantages = [float(next(advantages_K)) if m else 0.0 for m in sample.mask]
            kept.append(sample)
    return kept


def policy_logprobs(model, sample, temperature):
    """Log-probs of the trained tokens [K]. The trainer packs samples into rows, computes shared
    prefixes once (learner/batch.py), and never has all logits (model/logprob.py)."""
    ids_T, trained_T = torch.tensor(sample.ids), torch.tensor(sample.mask) == 1
    logprobs_TV = (model(ids_T[None]).logits[0, :-1] / temperature).log_softmax(-1)
    return logprobs_TV.gather(1, ids_T[1:, None])[:, 0][trained_T[1:]]


def clipped_surrogate(logprobs_K, sample, algorithm):
    """PPO's clipped objective, negated [K]. The ratio's denominator is the engine's own log-prob of
    the token, so the ratio also corrects the mismatch of engine and trainer. Other losses:
    learner/loss.py; a KL and an entropy term: learner/update.py."""
    old_K = logprobs_K.new_tensor(sample.trained(sample.old_logprobs))
    advantages_K = logprobs_K.new_tensor(sample.trained(sample.advantages))
    ratios_K = (logprobs_K - old_K).exp()
    clipped_K = ratios_K.clamp(1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high)
    return -torch.minimum(ratios_K * advantages_K, clipped_K * advantages_K)


def update(model, optimizer, samples, config, *, step, lr, loss=clipped_surrogate):
    """Passes over the samples (epochs), one optimizer step per minibatch (learner/update.py). By
    default one of each, so every ratio is 1 up to rounding, and nothing is clipped."""
    for epoch in range(config.algorithm.epochs):
        order = [*range(len(samples))]
        random.Random(named_seed(config.seed, "minibatches", step, epoch)).shuffle(order)
        for first in range(config.algorithm.minibatches):
            minibatch = [samples[i] for i in order[first :: config.algorithm.minibatches]]
            # Without the tokens of dropped groups; the sum over all ranks (learner/update.py).
            num_tokens = sum(sum(sample.mask) for sample in minibatch)
            for sample in minibatch:
                logprobs_K = policy_logprobs(model, sample, config.rollout.temperature)
                (loss(logprobs_K, sample, config.algorithm).sum() / num_tokens).backward()
            clip_grad_norm_(model.parameters(), config.optim.max_grad_norm or float("inf"))
            for parameters in optimizer.param_groups:
                parameters["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()


def take_step(step, engine, model, optimizer, rendering, config):
    """Play, credit (`grpo`), update, push, as in step/. Other schedules: learner/update.py."""
    positions = play(engine, rendering, config, step)
    samples = [each for position in positions for each in position.samples if 1 in each.mask]
    lr = config.optim.lr * min(1.0, (step + 1) / max(1, config.optim.warmup_steps))
    update(model, optimizer, grpo(samples, config.algorithm), config, step=step, lr=lr)
    engine.load_state_dict(model.state_dict())  # other engines: engines/weights.py
    return positions, samples


def main():
    """Random weights never agree, so the first weights imitate scripts (warm_start/)."""
    words = ["steps=0", "warm_start.num_games=4000", "warm_start.lr=4e-3", "out=runs/one_step"]
    words += ["rollout.instances=8", "rollout.group_size=4", "eval.final_games=64"]
    config = load_config(Path(__file__).with_name("meeting") / "meeting.yaml", words)
    folder = selfplay.train(config).folder / "warm_start"
    rendering = make_rendering(load_tokenizer(folder))
    load = AutoModelForCausalLM.from_pretrained
    model, engine = (load(folder, dtype=torch.float32) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(3):
        positions, samples = take_step(step, engine, model, optimizer, rendering, config)
        score = np.mean([position.game.outcome().score_norm for position in positions])
        print(f"step {step + 1}: {len(samples)} samples, score {score:.2f}")


if __name__ == "__main__":
    main()
