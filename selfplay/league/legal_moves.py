"""The method `legal_moves`: an entropy bonus over the moves that a game lists, not over all texts.

A bonus on the entropy of tokens moves probability to texts that are no moves. Here the policy's
probabilities of the listed moves are divided by their sum first. A policy gradient with a bonus
that falls to 0 approaches an equilibrium of a zero-sum game: magnetic mirror descent with uniform
play as its magnet (Sokota et al., arXiv 2206.05825; Rudolph et al., arXiv 2502.08938).

In an information set with the log-probs s_i of its moves' texts let q be the softmax of s and H its
entropy. Then dH/ds_i = -q_i (log q_i + H). These sum to 0: all s_i may rise alike without effect.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from dialop.tree import tree_of
from selfplay.advantages.sample import Sample, trained_stretches
from selfplay.config import Config
from selfplay.distributed import gather_objects
from selfplay.errors import SettingsError
from selfplay.league.exploitability import MoveTexts
from selfplay.learner.batch import MicroBatch
from selfplay.learner.learner import Learner, batch_logprobs
from selfplay.learner.method import LossTerm, Method, Parts
from selfplay.learner.rescore import token_values
from selfplay.methods.options import LegalMovesOptions

SLOPE = "legal_move"  # the column with the slope of -H in a move's log-prob, times its visits
Ids = tuple[int, ...]


class LegalMoves(Method):
    """Adds the term -entropy, a mean over the turns of the step's samples whose position the game
    lists, to the loss of each optimizer step. Logs `legal_entropy` before the update."""

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
        self._num, self._config = 0, parts.config

    @classmethod
    def ready(cls, options: LegalMovesOptions, config: Config, *, ask: bool) -> None:
        """Raise SettingsError for a game that does not list its moves, and for several policies."""
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
        _, entropy = self._with_slopes(config)
        total = math.fsum(gather_objects(entropy, world))
        return samples, {"legal_entropy": total / self._num} if self._num else {}

    def terms(
        self, terms: Sequence[LossTerm], minibatch: Sequence[Sample], *, step: int
    ) -> list[LossTerm]:
        """The terms and -entropy, with the slopes at the weights of now."""
        config, world, options = self._config, self.parts.learner.world, self.options
        samples, _ = self._with_slopes(config)
        num = sum(gather_objects(len(samples), world))
        left = max(0.0, 1.0 - step / options.until) if options.until else 1.0
        if not num or not left:
            return [*terms]

        def slopes(learner: Learner, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            """A loss whose gradient is that of -entropy."""
            return batch.columns[SLOPE] * self._logprobs(batch, config), {}

        weight = options.entropy * left * num / self._num  # by_sample divides by `num`
        return [*terms, LossTerm(samples, slopes, weight, name="legal_moves", by_sample=True)]

    def _with_slopes(self, config: Config) -> tuple[list[Sample], float]:
        """A sample for each move of this rank's sets, with the column SLOPE, and the sum of the
        entropies of all their turns. Every rank must call."""
        samples = []
        for number, (prompt, _) in enumerate(self._visits):
            for move, text in enumerate(self._moves[prompt]):
                ids = [*prompt, *text]
                mask = [0] * len(prompt) + [1] * len(text)
                zeros = [0.0] * len(ids)
                name = f"move {move} of listed position {number}"
                samples.append(Sample(name, ids, mask, zeros, zeros))

        def logprobs(batch: MicroBatch) -> Tensor:
            return self._logprobs(batch, config)

        values = token_values(self.parts.learner, samples, logprobs, optim=config.optim)
        left, entropy = iter(zip(samples, values, strict=True)), 0.0
        for prompt, num in self._visits:
            own = [next(left) for _ in self._moves[prompt]]
            logs = torch.tensor([math.fsum(each) for _, each in own], dtype=torch.float64)
            logs = logs.log_softmax(0)
            of_set = -float((logs.exp() * logs).sum())
            entropy += num * of_set
            slopes = (num * logs.exp() * (logs + of_set)).tolist()
            for (sample, _), slope in zip(own, slopes, strict=True):
                sample.columns[SLOPE] = [slope] * len(sample.ids)
        return samples, entropy

    def _logprobs(self, batch: MicroBatch, config: Config) -> Tensor:
        """Of the trained tokens, at the rollout's temperature [M]."""
        learner, temperature = self.parts.learner, config.rollout.temperature
        return batch_logprobs(learner, learner.model, batch, temperature=temperature)[0]
