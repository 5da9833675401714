"""The function of `rollout.play`, which plays a game from a position to its end.

docs/doors.md describes a custom one, such as a search inside a game.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from selfplay.config import Config
from selfplay.config.options import with_options
from selfplay.config.plugins import PLUGINS
from selfplay.engines.base import Generate
from selfplay.errors import OwnFault
from selfplay.rollout.branches import play_branched
from selfplay.rollout.episode import Episode, Position

KEY = "rollout.play"
Play = Callable[[Position, Generate], Coroutine[Any, Any, Episode]]


def play_of(config: Config) -> Play:
    """The function that plays the games of a training step."""
    name = config.rollout.play
    if (branch := config.play_options) is not None:
        return partial(play_branched, branch=branch)
    play: Play = with_options(KEY, config)
    return play if name in PLUGINS[KEY].built_in else _checked(play, name)


def _checked(play: Play, name: str) -> Play:
    """A custom play whose result is checked: OwnFault unless it is its position's finished game."""

    async def checked(position: Position, generate: Generate) -> Episode:
        setup, episode = position.setup, await play(position, generate)
        own = isinstance(episode, Episode) and bool(episode.ended)
        if not own or (episode.instance, episode.index) != (setup.instance, setup.index):
            raise OwnFault(f"{KEY} {name}: it must play its game to the end, got {episode!r:.200}")
        return episode

    return checked
