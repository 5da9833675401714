"""What the page and the terminal say is left of a game is what ends it."""

import io
import random
from pathlib import Path
from typing import Any

import pytest

from dialop.matching.game import MatchingGame
from dialop.tags import MAX_MOVE
from selfplay.apps.play.__main__ import play_here
from selfplay.apps.play.games import Opponent, Session
from selfplay.apps.play.limits import Says, left_of, taken_by
from selfplay.chat.rendering import Rendering, make_rendering
from selfplay.config import RolloutConfig
from selfplay.engines.base import Completion, Request
from selfplay.rollout.episode import GameSetup, Position, limits_of
from selfplay.rollout.players import FrozenPlayer, Player, PolicyPlayer
from tests.helpers.chat_families import ANEW, tokenizer_of
from tests.helpers.dialop_boards import BRIEF, FULL, SMALL
from tests.helpers.hand_games import HAND_GAMES
from tests.helpers.small_games import Lines, Proposes, config_of, policies


def step(position: Position, generate: Any = None) -> None:
    """One try at a move of players who wait for nothing."""
    with pytest.raises(StopIteration):
        position.turn(generate).send(None)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", HAND_GAMES)
def test_the_moves_and_tries_that_are_left_are_those_after_which_a_game_ends(
    name: str, seed: int
) -> None:
    """Random limits, and refused tries at random places of a game of each kind."""
    draw, hand = random.Random(seed), HAND_GAMES[name]
    rollout = RolloutConfig(max_turns=draw.randint(1, 12), max_retries=draw.randint(0, 2))
    tries: dict[int, list[str]] = {}
    for seat, text in hand.moves:
        refused = ["x" * (MAX_MOVE + 1)] * draw.choice([0, 0, 0, 1, 2, 3])
        tries.setdefault(seat, []).extend([*refused, text])
    game = hand.new()
    players = tuple(Lines(*tries.get(seat, ())) for seat in range(game.num_seats))
    position = Position(GameSetup(game, players, "hand", 0), limits_of(rollout))
    left = left_of(position, rollout)
    while position.ended is None:
        assert left.moves[0] > 0 and left.tries[0] > 0 and left.tokens == {}
        step(position)
        legal, before = position.turns[-1].error is None, left
        left = left_of(position, rollout)
        assert left.moves == (before.moves[0] - legal, rollout.max_turns)
        assert left.tries[0] == (before.tries[1] if legal else before.tries[0] - 1)
    if position.ended != "finished":
        zero = {"turns": left.moves, "retries": left.tries}[position.ended]
        assert zero[0] == 0 and sorted((left.moves[0], left.tries[0]))[1] > 0


class Reminded(PolicyPlayer):
    """A player of one's own, who reads more than the game says."""

    async def move(self, game: Any, seat: int, observation: str, generate: Any) -> Any:
        return await super().move(game, seat, f"{observation}\n(Be brief.)", generate)


@pytest.mark.parametrize("template", ["no template", *list(ANEW)[:1]])
@pytest.mark.parametrize("kind", ["policy", "frozen", "own"])
@pytest.mark.parametrize("options", [BRIEF, FULL])
def test_a_model_answers_if_and_only_if_a_message_takes_fewer_tokens_than_are_left(
    options: Any, kind: str, template: str
) -> None:
    """The second message of the person, longer and longer. Weighing it changes nothing."""
    rendering = make_rendering(tokenizer_of(template))
    make = Reminded if kind == "own" else PolicyPlayer
    answer = rendering.action_ids("[message] ok")

    async def generate(request: Request) -> Completion:
        return Completion(answer, [0.0] * len(answer), "stop", 0)

    game, rollout, ended = MatchingGame(SMALL, options), RolloutConfig(), set()
    start = rendering.conversation(game.prompt(1).system, [game.prompt(1).user], [])
    room = len(start) + 150
    for num in range(1, 60):
        text = "[message]" + " x" * num
        policy = make(rendering, seed_names=(), max_new_tokens=100, max_game_tokens=room)
        partner: Player = FrozenPlayer(policy, name="other") if kind == "frozen" else policy
        setup = GameSetup(game.clone(), (Lines("[message] hi", text), partner), SMALL.key, 0)
        position = Position(setup, limits_of(rollout))
        assert (left_of(position, rollout).tokens == {1: (150, room)}) == (kind != "own")
        step(position)
        step(position, generate)
        read = len(policy.transcript)
        left, taken = left_of(position, rollout).tokens[1][0], taken_by(position, text)[1]
        assert len(policy.transcript) == read and len(position.turns) == 2
        step(position)
        assert left_of(position, rollout).tokens[1][0] == max(0, left - taken)
        step(position, generate)
        assert (position.ended == "tokens") == (taken >= left)
        ended.add(position.ended)
    assert ended == {None, "tokens"}


def test_a_move_that_ends_the_game_or_is_refused_takes_nothing(rendering: Rendering) -> None:
    (policy,) = policies(rendering, "hand", num=1)
    setup = GameSetup(MatchingGame(SMALL, BRIEF), (Says(""), policy), SMALL.key, 0)
    position = Position(setup, limits_of(RolloutConfig(max_turns=1)))
    assert taken_by(position, "[message] hi") == {}
    assert taken_by(Position(setup, limits_of(RolloutConfig())), "hi") == {1: 0}


def test_the_terminal_warns_before_words_that_leave_a_model_no_tokens(
    rendering: Rendering,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Typed once they are not sent, typed again they end the game."""
    config = config_of("rollout.max_new_tokens=100")
    policy = Opponent("the policy", Proposes(rendering, {}), rendering)
    session = Session([SMALL], policy, [0], config.game, config.rollout, config.seed)
    words = f"[message] {'so on ' * 1000}\n"
    typed = f"{words}[message] hi\n[reject]\n{words}{words}"
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert play_here(session, tmp_path / "games.jsonl") == 0
    said = capsys.readouterr().out
    assert said.count("so it cannot answer and the game ends") == 2
    assert "A limit ended it: your partner had no tokens left" in said
    (line,) = (tmp_path / "games.jsonl").read_text().splitlines()
    assert '"data": "hi"' in line
