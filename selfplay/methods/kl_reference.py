"""A reference of the KL term that moves to the policy, so that the last policy in a zero-sum game
can approach an equilibrium.

With a fixed reference play converges to an equilibrium of the game plus the KL, exploitable by
about its weight (magnetic mirror descent, Sokota et al., arXiv 2206.05825). A reference that
becomes the policy each time this game is nearly solved removes the rest: R-NaD (Perolat et al.,
arXiv 2206.15378) and the slingshot of Abe et al. (arXiv 2305.16610).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from selfplay.advantages.sample import Sample
from selfplay.config import Config
from selfplay.data.seeds import named_seed
from selfplay.distributed import local_part, reshard, shard_index
from selfplay.learner.batch import MicroBatch
from selfplay.learner.learner import batch_logprobs
from selfplay.learner.method import Method, Parts
from selfplay.learner.optimizer import rounded
from selfplay.learner.rescore import token_values
from selfplay.methods.options import KLReferenceOptions
from selfplay.model.lora import own_parameters


class KLReference(Method):
    """Keeps the reference's copy of every weight that the policy trains, by its name in the model:
    all of them, or the adapters on the base that both share."""

    Options = KLReferenceOptions
    has_reference = True

    def __init__(self, options: KLReferenceOptions, parts: Parts) -> None:
        """The reference starts as the policy."""
        super().__init__(options, parts)
        self.weights = own_parameters(parts.learner.model, parts.learner.policy)
        self.kept = {f"reference.{n}": p.detach().clone() for n, p in self.weights.items()}
        self.last: int | None = None  # the newest step in which it could move

    def prepare(
        self, samples: Sequence[Sample], *, step: int, config: Config
    ) -> tuple[list[Sample], dict[str, float]]:
        """The samples with a column `reference`, after the reference's move if one is due, or was
        due while the policy rested; without an `algorithm.kl`, whose column it is, as they were."""
        learner, every = self.parts.learner, self.options.every
        last = max(0, step - 1) if self.last is None else self.last
        if step // every > last // every:
            self._move(step)
        self.last = step
        if not config.algorithm.kl:
            return [*samples], {}

        def logprobs(batch: MicroBatch) -> Tensor:
            """Of the trained tokens, at the rollout's temperature."""
            temperature = config.rollout.temperature
            return batch_logprobs(learner, learner.model, batch, temperature=temperature)[0]

        with self.as_policy():
            values = token_values(learner, samples, logprobs, optim=config.optim)
        pairs = zip(samples, values, strict=True)
        return [replace(s, columns=s.columns | {"reference": of}) for s, of in pairs], {}

    def _move(self, step: int) -> None:
        """Move each weight by `average` of the way, computed in fp32. bf16 weights are rounded
        stochastically, as a short way would be lost, with draws named by step, weight and shard."""
        seeds = self.parts.config.seed, "kl reference", step
        for number, (weight, kept) in enumerate(self._pairs()):
            moved = local_part(kept).float().lerp(local_part(weight).float(), self.options.average)
            if kept.dtype == torch.bfloat16:
                moved = rounded(moved, seed=named_seed(*seeds, number, shard_index(kept)))
            local_part(kept).copy_(moved)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each weight of the policy with the reference's."""
        for weight, kept in zip(self.weights.values(), self.kept.values(), strict=True):
            yield weight.detach(), kept

    def state(self) -> dict[str, Any]:
        """The newest step in which it could move."""
        return {"last": self.last}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from it. A checkpoint of before 2026-11-30 has no such step: a move that was due
        in a rest then is not made."""
        self.last = state.get("last")

    @contextmanager
    def as_policy(self) -> Iterator[None]:
        """Inside the block the policy's model has the reference's weights. No weight is rounded."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        """Exchange the values of each weight with the reference's, in place.

        FSDP may still hold weights that it gathered for an earlier pass, so they are freed first.
        """
        reshard(self.parts.learner.model)
        for weight, kept in self._pairs():
            held = local_part(weight).clone()
            local_part(weight).copy_(local_part(kept))
            local_part(kept).copy_(held)
