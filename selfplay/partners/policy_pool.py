"""The policy pool: snapshots of the policy at earlier steps of the run, and which one plays in a
step.

Snapshots are Hugging Face folders `policy_pool/step_N` in the run folder. They stay on disk after
they leave the pool. The checkpoint stores who is in the pool. Never sees games or text.
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
from selfplay.partners.ratings import INITIAL_RATING, draw_weights


def member_name(step: int) -> str:
    """The partner name of the policy after `step` steps."""
    return f"pool:{step}"


def snapshot_folder(folder: Path, step: int) -> Path:
    return folder / "policy_pool" / f"step_{step:06d}"


def joined(members: list[int], step: int, *, size: int) -> list[int]:
    """The pool after the policy of `step` joined: its first member and the newest others.

    The first member stays because it still uses the language of the warm start. `size` 0 keeps all.
    """
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
    """Draw a member with the seed of `names`, the same on all ranks."""
    weights = draw_weights(
        [ratings.get(member_name(member), INITIAL_RATING) for member in members],
        prefer_weak=settings.prefer_weak,
    )
    return pick(members, weights, named_seed(*names))


def snapshot_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a Hugging Face folder as (the model's parameter name, tensor), one at
    a time."""
    model = empty_model(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    stored = Stored(folder, model)
    for name, parameter in model.named_parameters():
        yield name, stored.read(name, tuple(slice(0, size) for size in parameter.shape))
