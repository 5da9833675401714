"""The policy pool: snapshots of the policy at earlier steps of the run, which one plays in a step,
and Elo ratings of all players.

Snapshots are Hugging Face folders `policy_pool/step_N` in the run folder. They stay on disk after
they leave the pool. The checkpoint stores who is in the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from selfplay.model.policy import empty_model
from selfplay.model.stored import Stored

INITIAL_RATING = 0.0  # the rating of a player without games


def expected_score(*ratings: float) -> float:
    """The expected share of the best score of players with these ratings, in (0, 1)."""
    return float(1 / (1 + 10 ** (-sum(ratings) / (400 * len(ratings)))))


def update_ratings(
    ratings: Mapping[str, float], games: Iterable[tuple[Any, ...]], *, step: float
) -> dict[str, float]:
    """New ratings after games of (player, player, ..., score in [0, 1]), applied in order.

    The game is cooperative, so its players are rated as a team, with the mean of their ratings,
    against the instance, whose rating is 0. Their expected share of the best score is Elo's (A.
    Elo, "The Rating of Chessplayers", 1978)

        E = 1 / (1 + 10^(-(r_a + r_b) / 2 / 400))

    and a game with score s moves each player by K (s - E), K being `step`. A rating of 400 means
    0.91 of the best score, 0 means half of it. Games show only the sum of two ratings, so the two
    are separable only if the policy also plays with itself; a player paired with itself moves once.
    """
    new = dict(ratings)
    for *players, score in games:
        before = {player: new.get(player, INITIAL_RATING) for player in players}
        change = step * (score - expected_score(*(before[player] for player in players)))
        new |= {player: rating + change for player, rating in before.items()}
    return new


def member_name(step: int) -> str:
    """The partner name of the policy after `step` steps."""
    return f"pool:{step}"


def snapshot_folder(folder: Path, step: int) -> Path:
    return folder / "policy_pool" / f"step_{step:06d}"


def joined(members: list[int], step: int, *, size: int) -> list[int]:
    """The pool after the policy of `step` joined: the first member and the newest others.

    The first member stays because it has the language of the warm start. `size` 0 keeps all.
    """
    pool = sorted({*members, step})
    if size == 0 or len(pool) <= size:
        return pool
    return [pool[0], *pool[len(pool) - (size - 1) :]] if size > 1 else [pool[-1]]


def snapshot_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a Hugging Face folder as (the model's parameter name, tensor), one at
    a time."""
    model = empty_model(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    stored = Stored(folder, model)
    for name, parameter in model.named_parameters():
        yield name, stored.read(name, tuple(slice(0, size) for size in parameter.shape))
