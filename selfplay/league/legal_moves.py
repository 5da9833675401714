"""The method `legal_moves`: an entropy bonus and a KL to the reference over the moves that a game
lists, not over all texts.

A bonus on the entropy of tokens moves probability to texts that are no moves. Here the policy's
probabilities of the listed moves are divided by their sum first. A policy gradient with a bonus
that falls to 0 approaches an equilibrium of a zero-sum game: magnetic mirror descent with uniform
play as its magnet (Sokota et al., arXiv 2206.05825; Rudolph et al., arXiv 2502.08938). With the KL
the reference is the magnet; R-NaD (arXiv 2206.15378) pays the same sum over legal moves in rewards.

In an information set with the log-probs s_i of its moves' texts let q be the softmax of s, H its
entropy, r the reference's q and K = sum of q_i log(q_i / r_i). Then dH/ds_i = -q_i (log q_i + H)
and dK/ds_i = q_i (log(q_i / r_i) - K). These sum to 0: all s_i may rise alike without effect.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dialop.tree import tree_of
from selfplay.advantages.sample import Sample, trained_stretches
from selfplay.config import Config
from selfplay.config.plugins import methods_of
from selfplay.distributed import gather_objects
from selfplay.errors import SettingsError
from selfplay.league.exploitability import MoveTexts
from selfplay.learner.batch import MicroBatch
from selfplay.learner.learner import Learner, batch_logprobs
from selfplay.learner.method import LossTerm, Method, Parts
from selfplay.learner.rescore import token_values
from selfplay.methods.kl_reference import KLReference
from selfplay.methods.options import LegalMovesOptions
from selfplay.model.lora import without_adapters

SLOPE = "legal_move"  # the column with the loss's slope in a move's log-prob, times its visits
Ids = tuple[int, ...]


class LegalMoves(Method):
    """Adds the terms -entropy and KL(policy || reference), means over the turns of the step's
    samples whose position the game lists, to the loss of each optimizer step. Logs both before the
    update, `legal_entropy` and, with a KL, `legal_kl`, in nats."""

    Options = LegalMovesOptions

    def __init__(self, options: LegalMovesOptions, parts: Parts) -> None:
        """Plays the whole game, to know its information sets. Raises GameError as `MoveTexts`."""
        super().__init__(options, parts)
        assert parts.rendering is not None
        game = parts.config.game
        texts = MoveTexts(tree_of(game.kit, game.options), parts.config, parts.rendering)
        self._moves: dict[Ids, list[list[int]]] = {}  # of each prompt
        for text, num in zip(texts.texts, texts.num_prompt, strict=True):
            self._moves.setdefault(tuple(text[:num]), []).append(text[num:])
        self._visits: list[tuple[Ids, int]] = []  # this rank's share of the sets, with all turns
        self._held: list[Tensor] = []  # the reference's log-probs of the moves of `_visits`
        self._num, self._config = 0, parts.config

    @classmethod
    def ready(cls, options: LegalMovesOptions, config: Config, *, ask: bool) -> None:
        """Raise SettingsError for a game that does not list its moves, for several policies, and
        for a KL without a reference or before the method that moves it; GameError as `tree_of`."""
        what = "methods.legal_moves needs"
        if not config.game.kit.has("deals"):
            raise SettingsError(
                f"{what} a game that lists its deals and moves (docs/exploitability.md), got "
                f"game.name {config.game.name}"
            )
        if config.policies:
            raise SettingsError(
                f"{what} one policy in every seat: policies must be empty, got "
                f"{', '.join(config.policies)}"
            )
        kinds = [kind for _, kind, _ in methods_of(config)]
        moved = [issubclass(kind, KLReference) for kind in kinds]
        held = config.algorithm.kl and not any(kind.has_reference for kind in kinds)
        if options.kl and not held and not any(moved):
            raise SettingsError(
                f"methods.legal_moves.kl needs a reference, of methods.kl_reference or of "
                f"algorithm.kl above 0, got kl {options.kl:g} without; nearest: "
                f"methods.kl_reference.every={config.steps or 100}"
            )
        if options.kl and any(moved[kinds.index(cls) :]):
            raise SettingsError(
                "methods.kl_reference must come before methods.legal_moves with a kl, got it after"
            )
        tree_of(config.game.kit, config.game.options)

    def prepare(
        self, samples: Sequence[Sample], *, step: int, config: Config
    ) -> tuple[Sequence[Sample], dict[str, float]]:
        """Count the step's turns in each information set over all ranks."""
        world, own, self._config = self.parts.learner.world, Counter[Ids](), config
        for sample in samples:
            for first, _ in trained_stretches(sample.mask):
                begin = max(start for start in (0, *sample.starts) if start <= first)
                prompt = tuple(sample.ids[begin:first])
                own.update([prompt] if prompt in self._moves else [])
        every = sum(gather_objects(own, world), Counter[Ids]())
        met = [(prompt, every[prompt]) for prompt in self._moves if prompt in every]
        self._visits, self._num = met[world.dp_rank :: world.dp_size], every.total()
        samples_of_moves, entropy, kl = self._samples(), 0.0, 0.0
        logs = self._read(samples_of_moves, self.parts.learner.model)
        if self.options.kl:
            with self._reference() as model:
                self._held = self._read(samples_of_moves, model)
        for (_, num), of, reference in zip(self._visits, logs, self._held or logs, strict=True):
            entropy -= num * float((of.exp() * of).sum())
            kl += num * float((of.exp() * (of - reference)).sum())
        sums = {"legal_entropy": entropy} | ({"legal_kl": kl} if self.options.kl else {})
        totals = {name: math.fsum(gather_objects(each, world)) for name, each in sums.items()}
        return samples, {name: each / self._num for name, each in totals.items() if self._num}

    def terms(
        self, terms: Sequence[LossTerm], minibatch: Sequence[Sample], *, step: int
    ) -> list[LossTerm]:
        """The terms and those of the moves as one, with the slopes at the weights of now."""
        world, options = self.parts.learner.world, self.options
        left = max(0.0, 1.0 - step / options.until) if options.until else 1.0
        entropy = options.entropy * left
        scale = entropy or options.kl
        if not self._num or not scale:
            return [*terms]
        samples = self._samples()
        num = sum(gather_objects(len(samples), world))
        logs = self._read(samples, self.parts.learner.model)
        moves = iter(samples)
        for (_, visits), own, reference in zip(self._visits, logs, self._held or logs, strict=True):
            q, ratio = own.exp(), own - reference
            of_entropy, of_kl = own - (q * own).sum(), ratio - (q * ratio).sum()
            slopes = visits * q * (entropy / scale * of_entropy + options.kl / scale * of_kl)
            for slope in slopes.tolist():
                sample = next(moves)
                sample.columns[SLOPE] = [slope] * len(sample.ids)

        def slopes_of(learner: Learner, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            """A loss whose gradient is that of -entropy and the KL."""
            return batch.columns[SLOPE] * self._logprobs(batch, learner.model), {}

        weight = scale * num / self._num  # by_sample divides by `num`
        return [*terms, LossTerm(samples, slopes_of, weight, name="legal_moves", by_sample=True)]

    def _samples(self) -> list[Sample]:
        """A sample for each move of this rank's sets."""
        samples = []
        for number, (prompt, _) in enumerate(self._visits):
            for move, text in enumerate(self._moves[prompt]):
                ids = [*prompt, *text]
                mask = [0] * len(prompt) + [1] * len(text)
                zeros = [0.0] * len(ids)
                name = f"move {move} of listed position {number}"
                samples.append(Sample(name, ids, mask, zeros, zeros))
        return samples

    def _read(self, samples: Sequence[Sample], model: PreTrainedModel) -> list[Tensor]:
        """For each of this rank's sets the model's log-probs of its moves, normalised. Every rank
        must call."""

        def logprobs(batch: MicroBatch) -> Tensor:
            return self._logprobs(batch, model)

        values = iter(token_values(self.parts.learner, samples, logprobs, optim=self._config.optim))
        found = []
        for prompt, _ in self._visits:
            logs = [math.fsum(next(values)) for _ in self._moves[prompt]]
            found.append(torch.tensor(logs, dtype=torch.float64).log_softmax(0))
        return found

    @contextmanager
    def _reference(self) -> Iterator[PreTrainedModel]:
        """Inside the block the model of the reference: one that moves, or that of the start."""
        learner = self.parts.learner
        moving = [each for each in learner.methods if isinstance(each, KLReference)]
        if moving:
            with moving[0].as_policy():
                yield learner.model
        else:
            assert learner.reference is not None
            with without_adapters(learner.reference):
                yield learner.reference

    def _logprobs(self, batch: MicroBatch, model: PreTrainedModel) -> Tensor:
        """Of the trained tokens, at the rollout's temperature [M]."""
        temperature = self._config.rollout.temperature
        return batch_logprobs(self.parts.learner, model, batch, temperature=temperature)[0]
