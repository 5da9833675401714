"""Imitation of the policy's own best games (rejection sampling)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from selfplay.advantages.advantages import grouped, imitated, imitation_samples
from selfplay.advantages.sample import Sample
from selfplay.data.seeds import named_seed
from selfplay.distributed import gather_objects
from selfplay.learner.method import LossTerm, Method, Parts
from selfplay.learner.update import imitation_term
from selfplay.methods.options import BestGamesOptions
from selfplay.rollout.episode import Episode


class BestGames(Method):
    """`best` are the samples of the newest `rollout.instances` best games, oldest first, equal on
    every rank."""

    Options = BestGamesOptions

    def __init__(self, options: BestGamesOptions, parts: Parts) -> None:
        """Starts without games."""
        super().__init__(options, parts)
        self.best: list[list[Sample]] = []

    def samples(self, samples: list[Sample], episodes: Sequence[Episode]) -> list[Sample]:
        """Add the best games of this step to those of earlier steps; the samples are unchanged."""
        policy = self.parts.policy
        own = [imitation_samples([game], policy=policy) for game in best_games(episodes)]
        every = gather_objects(own, self.parts.learner.world)
        new = [game for of_rank in every for game in of_rank if game]
        self.best.extend(sorted(new, key=lambda game: named_seed("best games", game[0].name)))
        del self.best[: -self.parts.config.rollout.instances]
        return samples

    def terms(
        self, terms: Sequence[LossTerm], minibatch: Sequence[Sample], *, step: int
    ) -> list[LossTerm]:
        """The terms and the imitation loss of this rank's share of the best games."""
        samples = [sample for game in self.best for sample in game]
        world = self.parts.learner.world
        return [*terms, imitation_term(samples, world, self.options.weight)]

    def state(self) -> dict[str, Any]:
        """The names, ids, masks and sequence starts of the best games' samples."""
        plain = [[(s.name, [*s.ids], [*s.mask], s.starts) for s in game] for game in self.best]
        return {"best": plain}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The games of a checkpoint; older checkpoints hold them under their own key `best`."""
        self.best = [[imitated(*sample) for sample in game] for game in state.get("best", [])]


def best_games(episodes: Sequence[Episode]) -> list[Episode]:
    """For each instance and choice of the policy's seats: the game with the highest score among
    those that ended in an agreement, if its score is above the mean of all these games.

    These are the games imitated by rejection sampling (RAFT, arXiv 2304.06767, the best of n).
    """
    best = []
    for games in grouped(episodes, lambda game: (game.instance, *game.policy_seats)).values():
        mean = sum(game.score for game in games) / len(games)
        agreed = [game for game in games if game.outcome.agreed and game.score > mean]
        best += sorted(agreed, key=lambda game: -game.score)[:1]
    return best
