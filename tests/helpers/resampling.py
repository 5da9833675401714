"""Made-up games for dynamic sampling: which instances have groups with variance is given."""

from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from selfplay import step
from selfplay.config import Config, load_config
from selfplay.distributed import World
from selfplay.learner.method import Parts, make_methods
from selfplay.rollout.driver import Rollout, RolloutStats
from selfplay.rollout.episode import Episode
from tests.helpers.hand_episodes import episode, said

METHODS = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "ema")
HasVariance = Callable[[int], bool]


def has_variance(number: int) -> bool:
    """Of the first four instances rank 0 plays the even ones, all without variance; rank 1 plays
    the odd ones, all with variance."""
    return number in (1, 3) or number >= 5


def config_of(resample: int, *more: str) -> Config:
    words = ["model.scratch={}", "rollout.max_game_tokens=1000", "rollout.instances=4"]
    if resample:
        words.append(f"methods.resample.instances={resample}")
    return load_config(None, [*words, "rollout.group_size=2", *more])


def played_games(
    has_variance: HasVariance,
    numbers: Sequence[int],
    *,
    alone: Collection[int] = (),
    cast: Sequence[str] = ("", ""),
    trained: Sequence[str] = ("",),
) -> Rollout:
    """Two games of each instance. Their rewards differ where there is variance, less at later
    instances; of an instance in `alone` those of seat 0 only. `cast` are the seats' policies."""
    games: list[Episode] = []
    for number in numbers:
        for index in (0, 1):
            reward = index / (1 + number) if has_variance(number) else 1.0
            seats = (said(10, num=1 + number), said(20))
            for transcript, policy in zip(seats, cast, strict=True):
                transcript.policy = policy
            name = f"board {number}"
            rewards = (reward, 1.0 if number in alone else reward)
            games.append(episode(rewards, index, instance=name, transcripts=seats))
    return Rollout(games, RolloutStats(10 * len(games), len(games), 0.5), trained)


def play_rounds(
    has_variance: HasVariance, *, resample: int, world: World, **more: Any
) -> tuple[list[list[int]], Rollout]:
    """The instances of each round on this rank, and the games that the step uses; `more` are words
    of `played_games`."""
    rounds: list[list[int]] = []
    cast = more.get("cast", ())
    policies = ", ".join(f"{name}: {{seats: [{seat}]}}" for seat, name in enumerate(cast))

    def play(_run: Any, _step: int, numbers: Sequence[int]) -> Rollout:
        rounds.append(list(numbers))
        return played_games(has_variance, numbers, **more)

    config = config_of(resample, *([f"policies={{{policies}}}"] if cast else []))
    run: Any = SimpleNamespace(config=config, world=world)
    parts = Parts(run.config, run, lambda: pytest.fail("it loads no model"))
    rollout = play(run, 0, world.replica.share(run.config.rollout.instances))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "play", play)
        further = [*run.config.further_instances]
        return rounds, step.after_play(run, 0, rollout, make_methods(parts), further)
