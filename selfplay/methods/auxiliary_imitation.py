"""An imitation loss on new games of the teachers, added to each update of self-play."""

from __future__ import annotations

from collections.abc import Sequence

from selfplay.advantages.sample import Sample
from selfplay.config import Config
from selfplay.learner.method import LossTerm, Method
from selfplay.learner.update import imitation_term
from selfplay.methods.options import AuxiliaryImitationOptions
from selfplay.warm_start.imitation import of_seats, teacher_samples


class AuxiliaryImitation(Method):
    """Each step's games are new ones, played by the mixture of `warm_start.teachers`. One of
    several policies imitates its own seats."""

    Options = AuxiliaryImitationOptions

    def prepare(
        self, samples: Sequence[Sample], *, step: int, config: Config
    ) -> tuple[Sequence[Sample], dict[str, float]]:
        """Let the teachers play; the samples are unchanged."""
        assert self.parts.rendering is not None
        num = self.options.games
        start = config.warm_start.num_games + step * num
        lesson = teacher_samples(config, self.parts.rendering, start=start, num=num)
        lesson = of_seats(lesson, self.parts.seats)
        self.term = imitation_term(lesson, self.parts.learner.world, self.options.weight)
        return samples, {}

    def terms(
        self, terms: Sequence[LossTerm], minibatch: Sequence[Sample], *, step: int
    ) -> list[LossTerm]:
        """The terms and the imitation loss of this step's games."""
        return [*terms, self.term]
