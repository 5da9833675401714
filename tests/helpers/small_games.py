"""Games by hand: settings, boards, the games of a step, a game with prepared moves, an engine of
one text, a player that reads its moves from a list."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from dialop.game import Game
from dialop.matching.game import MatchingGame, MatchingInstance
from selfplay.chat.rendering import Rendering
from selfplay.chat.transcript import Transcript
from selfplay.config import Config, load_config
from selfplay.data.seeds import named_seed
from selfplay.engines.base import Completion, Generate, Request, Sampling
from selfplay.preflight.functions import findings
from selfplay.rollout.driver import play_games
from selfplay.rollout.episode import Episode, GameSetup, Limits
from selfplay.rollout.players import Move, PolicyPlayer
from selfplay.rollout.seating import SELF_PLAY, Partner, self_play_games, whole_cast
from tests.helpers.dialop_boards import BEST, BRIEF, SMALL, WORST
from tests.helpers.scripted_engine import CUT, StreamEngine, WaveEngine

LIMITS = Limits(max_turns=8, max_retries=1)
SAMPLING = Sampling(temperature=1.0, stop_ids=())
MESSAGE = "[message] BLEU Ava 3"
# Four games of different lengths, with refused moves, a cut-off move and a rejection.
GAMES: list[list[tuple[int, str]]] = [
    [(0, MESSAGE), (1, BEST), (0, "[accept]")],
    [(0, WORST), (1, "[reject]"), (1, "[message] no"), (0, BEST), (1, "[accept]")],
    [(0, "what?"), (0, "[accept]")],
    [(0, "[message] Ava BLEU 3, then" + CUT), (0, BEST), (1, "hm"), (1, "[accept]")],
]


def config_of(*overrides: str) -> Config:
    tiny = [
        "model.scratch={}",
        "rollout.max_game_tokens=1000",
        "game.options.size=2",
        "game.options.brief=true",
    ]
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
        cast=whole_cast(rendering, config.game),
    )


def policies(
    rendering: Rendering,
    *names: object,
    num: int = 2,
    max_new_tokens: int = 100,
    max_game_tokens: int = 900,
) -> tuple[PolicyPlayer, ...]:
    """The policy in `num` seats; its draws are named (*names, seat, turn)."""
    room = {"max_new_tokens": max_new_tokens, "max_game_tokens": max_game_tokens}
    return tuple(PolicyPlayer(rendering, seed_names=names, **room) for _ in range(num))


def texts_of(moves: Sequence[tuple[int, str]], *names: object) -> dict[int, str]:
    """Seeds to texts of the moves, each a seat and its text."""
    texts, num = {}, Counter[int]()
    for seat, text in moves:
        texts[named_seed(*names, seat, num[seat])] = text
        num[seat] += 1
    return texts


def play_one(
    game: Game,
    rendering: Rendering,
    moves: Sequence[tuple[int, str]],
    *,
    key: str = SMALL.key,
    index: int = 0,
    limits: Limits = LIMITS,
    **room: int,
) -> Episode:
    """The game of the policy in all seats with these moves."""
    engine = WaveEngine(rendering, texts_of(moves, "hand", index))
    players = policies(rendering, "hand", index, num=game.num_seats, **room)
    setup = GameSetup(game, players, key, index)
    (episode,), _ = play_games([setup], engine, sampling=SAMPLING, limits=limits)
    return episode


def tokens(transcript: Transcript) -> tuple[object, ...]:
    return (transcript.ids, transcript.mask, transcript.logprobs, transcript.spans)


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

    async def move(self, game: Game, seat: int, observation: str, generate: Generate) -> Move:
        return Move(self.texts.pop(0), complete=True, num_tokens=2)

    def refused(self) -> None: ...

    def fork(self, *names: object) -> Lines:
        return Lines(*self.texts)


def hand_setups(rendering: Rendering, num: int = 1, **room: int) -> list[GameSetup]:
    """The hand-sized board with the policy in both seats; draws are named ("hand", index, …)."""
    return [
        GameSetup(MatchingGame(SMALL, BRIEF), policies(rendering, "hand", i, **room), SMALL.key, i)
        for i in range(num)
    ]


def prepared(*games: Sequence[tuple[int, str]]) -> dict[int, str]:
    """Seeds to texts; each game is a list of (seat, text of its move)."""
    return {k: v for i, moves in enumerate(games) for k, v in texts_of(moves, "hand", i).items()}


def refusal(key: str, name: str, config: Config) -> str:
    """Why the check refuses what a key names: one line that begins with the key and the name."""
    with pytest.raises(ValueError, match=rf"^{re.escape(f'{key} {name}')}: ") as caught:
        list(findings(key, name, config))
    assert "\n" not in str(caught.value)
    return str(caught.value)
