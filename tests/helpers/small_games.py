"""Games on boards by hand: settings, boards, the games of a step, an engine of one text, a player
with prepared moves."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from dialop_boards import BEST, SMALL
from scripted_engine import StreamEngine, WaveEngine

from dialop.game import Game
from dialop.matching.game import MatchingInstance
from selfplay.chat.rendering import Rendering
from selfplay.config import Config, load_config
from selfplay.engines.base import Completion, Request, Sampling
from selfplay.rollout.episode import GameSetup, Limits
from selfplay.rollout.players import Move
from selfplay.rollout.seating import SELF_PLAY, Partner, self_play_games

LIMITS = Limits(max_turns=8, max_retries=1)
SAMPLING = Sampling(temperature=1.0, stop_ids=())


def config_of(*overrides: str) -> Config:
    tiny = ["model.scratch={}", "rollout.max_game_tokens=1000", "game.size=2", "game.brief=true"]
    return load_config(None, [*tiny, "rollout.group_size=4", *overrides])


def boards(num: int) -> list[MatchingInstance]:
    return [replace(SMALL, key=f"hand/{i}", first_seat=i % 2) for i in range(num)]


def games_of(
    instances: Sequence[Any],
    rendering: Rendering,
    config: Config,
    partners: Sequence[tuple[Partner, float]] = ((SELF_PLAY, 1.0),),
    *,
    step: int = 0,
) -> list[GameSetup]:
    """The games of a step on these instances."""
    return self_play_games(
        instances,
        partners,
        step=step,
        game=config.game,
        rollout=config.rollout,
        seed=config.seed,
        rendering=rendering,
    )


class Proposes(WaveEngine):
    """Answers every request with the best proposal, or with another text."""

    text = BEST

    def answer(self, request: Request) -> Completion:
        self.asked.append(request)
        ids = self.rendering.action_ids(self.text)
        return Completion(ids, [0.0] * len(ids), "stop", 0)


class ProposesInAStream(StreamEngine):
    text, answer = BEST, Proposes.answer


class Lines:
    """A player that reads its moves from a list."""

    name, transcript = "lines", None

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)

    def move(
        self, game: Game, seat: int, observation: str
    ) -> Generator[Request, Completion, Move | None]:
        return Move(self.texts.pop(0), complete=True, num_tokens=2)
        yield  # makes this a generator, though it never requests a completion

    def refused(self) -> None: ...

    def fork(self, *names: object) -> Lines:
        return Lines(*self.texts)
