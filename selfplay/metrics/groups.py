"""The games of a step, instance by instance, with what each seat's game was worth to the update.

For groups.jsonl, the page of a run and a notebook.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from selfplay.advantages.advantages import CreditStats
from selfplay.advantages.rewards import sample_name
from selfplay.advantages.sample import Sample
from selfplay.metrics.step import Pieces, game_record
from selfplay.rollout.episode import Episode


def mean_advantages(samples: Sequence[Sample]) -> dict[str, float]:
    """Each sample's mean advantage over its trained tokens, by its name."""
    return {one.name: sum(one.advantages) / sum(one.mask) for one in samples}


def group_records(
    episodes: Sequence[Episode],
    stats: CreditStats,
    advantages: Mapping[str, float],
    *,
    step: int,
    pieces: Pieces | None = None,
) -> list[dict[str, Any]]:
    """The games of each instance side by side: {"step", "instance", "games"}, in order.

    A game is a record as in games.jsonl whose trained seats also have their `reward`, the total of
    the game; their `return`, the mean over the seat's trained tokens of the reward that is still to
    come; and the mean `advantage` of these tokens. That is None where no sample trains: all returns
    of the group are equal, or a critic gives the advantages later.
    """
    records: dict[str, dict[str, Any]] = {}
    for episode in episodes:
        game = game_record(episode, step=step, pieces=pieces)
        for seat in episode.policy_seats:
            name = sample_name(episode, seat)
            if name in stats.rewards:
                reward, returned = stats.rewards[name]
                credit = {"reward": reward, "return": returned, "advantage": advantages.get(name)}
                game["seats"][seat] |= credit
        new = {"step": step, "instance": episode.instance, "games": []}
        records.setdefault(episode.instance, new)["games"].append(game)
    return list(records.values())
