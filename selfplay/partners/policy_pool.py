"""The pool of the run's own past policies: snapshots in `policy_pool/step_N` of the run folder, and which of
them is met in a step.

Snapshots are ordinary Hugging Face folders and stay on disk, also those that have left the pool.
Who is in the pool is saved with the checkpoint. Must not know: games, text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from transformers import AutoConfig

from selfplay.config import PolicyPoolConfig
from selfplay.data.seeds import named_seed, pick
from selfplay.model.policy import empty_model
from selfplay.model.stored import Stored
from selfplay.partners.ratings import FIRST, draw_weights


def self_name(step: int) -> str:
    """How the policy of this step is called as a partner."""
    return f"pool:{step}"


def snapshot_folder(folder: Path, step: int) -> Path:
    return folder / "policy_pool" / f"step_{step:06d}"


def joined(members: list[int], step: int, *, size: int) -> list[int]:
    """The pool after the policy of `step` has joined: the first member, which still speaks as it
    was taught, and the newest others; all of them where size is 0."""
    pool = sorted({*members, step})
    if size == 0 or len(pool) <= size:
        return pool
    return [pool[0], *pool[len(pool) - (size - 1) :]] if size > 1 else [pool[-1]]


def draw_member(
    members: list[int],
    ratings: Mapping[str, float],
    *,
    names: tuple[object, ...],
    settings: PolicyPoolConfig,
) -> int:
    """Which past policy is met, by the seed of `names`; all ranks of a step draw the same."""
    weights = draw_weights(
        [ratings.get(self_name(member), FIRST) for member in members],
        prefer_weak=settings.prefer_weak,
    )
    return pick(members, weights, named_seed(*names))


def snapshot_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """A Hugging Face folder's weights under the model's own names, one at a time."""
    model = empty_model(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    stored = Stored(folder, model)
    for name, parameter in model.named_parameters():
        yield name, stored.read(name, tuple(slice(0, size) for size in parameter.shape))
