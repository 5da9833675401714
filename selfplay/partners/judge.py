"""The judge: a chat model that rates each finished game, where `reward.judge` names one.

The game's kit says what the judge reads and how its answer changes the game's outcome.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace

from dialop.kit import Kit
from selfplay.config import EndpointConfig, RewardConfig
from selfplay.config.player_spec import parse_spec
from selfplay.data.seeds import named_seed
from selfplay.distributed import World
from selfplay.engines.base import Message, Request
from selfplay.engines.endpoint import Endpoint, endpoint_key
from selfplay.rollout.episode import Episode

_MAX_NEW_TOKENS = 300


@dataclass(frozen=True, slots=True)
class Judge:
    """A model that rates games, and the kit of the game."""

    kit: Kit
    endpoint: Endpoint


def make_judge(
    reward: RewardConfig, settings: EndpointConfig, kit: Kit, world: World, *, cleanup: ExitStack
) -> Judge | None:
    """The judge of the game that `reward.judge` names; None for the game's own rule and on ranks
    that play no games.

    `cleanup` ends its threads. Raises SettingsError if the variable with the API key is not set.
    """
    if reward.judge == "rubric":
        return None
    key = endpoint_key(settings)
    if not world.replica.leads:
        return None
    model, url = parse_spec(reward.judge).address
    endpoint = Endpoint(model, url, settings=settings, key=key)
    cleanup.callback(endpoint.close)
    return Judge(kit, endpoint)


def judge_games(episodes: list[Episode], judge: Judge | None) -> list[Episode]:
    """The games with the judge's ratings in their outcomes and measures, including the
    continuations of branch points. All requests are sent at once."""
    if judge is None:
        return episodes
    continuations = [
        game
        for episode in episodes
        for point in episode.branches
        for game in point.continuations.values()
    ]
    answers = {
        id(game): judge.endpoint.submit(_request(game, judge.kit))
        for game in (*episodes, *continuations)
    }

    def rated(episode: Episode) -> Episode:
        answer = answers[id(episode)].result()
        assert episode.game is not None
        game = judge.kit.judged(episode.game, answer.text if answer.finish == "stop" else "")
        branches = tuple(
            replace(
                point,
                continuations={key: rated(each) for key, each in point.continuations.items()},
            )
            for point in episode.branches
        )
        seats = episode.policy_seats or range(game.num_seats)
        return replace(
            episode,
            game=game,
            outcome=game.outcome(),
            measures=game.measures(seats),
            branches=branches,
        )

    return [rated(episode) for episode in episodes]


def _request(episode: Episode, kit: Kit) -> Request:
    assert episode.game is not None
    prompt = kit.judge_prompt(episode.game)
    return Request(
        prompt_ids=(),
        max_new_tokens=_MAX_NEW_TOKENS,
        seed=named_seed("judge", episode.instance, episode.index, prompt.user),
        messages=(Message("system", prompt.system), Message("user", prompt.user)),
    )
