"""People's recorded games as moves to imitate: legal in this game, words that have no place left
out."""

from dataclasses import replace
from pathlib import Path

import pytest

from dialop.game import Game
from dialop.kit import load_kit
from dialop.logged import Rules
from dialop.matching.game import MatchingInstance
from dialop.matching.generate import MatchingRecipe, generate_instance
from dialop.mediation.game import MediationGame
from dialop.mediation.records import Act
from dialop.mediation.texts import move_text
from dialop.people import PeoplesGame, peoples_games
from dialop.starts import RecordedGame
from tests.helpers.dialop_boards import human_games, record_of, write_records
from tests.helpers.mediation_games import SMALL as TRIP

BOARD = generate_instance(MatchingRecipe(keep="all"), seed=0, index=0)


def read(path: Path, *entries: tuple[int, str, str]) -> PeoplesGame:
    file = write_records(path / "games.jsonl", record_of(BOARD, *entries))
    (played,) = load_kit("matching").read_people(file)
    return played


def replayed(played: PeoplesGame, name: str = "matching") -> Game:
    """The game after every move, each made by its seat's script."""
    kit = load_kit(name)
    game = kit.new_game(played.instance, kit.Options())
    for _ in played.moves:
        seat = game.seat_to_move
        assert seat is not None
        step = game.step(seat, played.script(seat).act(game.view(seat)))
        assert step.error is None
    return game


def test_a_game_in_turns_is_repeated_word_for_word(tmp_path: Path) -> None:
    played = read(
        tmp_path, (0, "message", "my best is 99"), (1, "propose", ""), (0, "reject", ""),
        (0, "message", "look again"), (1, "propose", ""), (0, "accept", ""),
    )  # fmt: skip
    assert played.left_out == 0 and all(move.imitated for move in played.moves)
    texts = [move.text for move in played.moves]
    assert texts[0] == "[message] my best is 99" and texts[3] == "[message] look again"
    assert texts[1].startswith("[propose]\nProposal:\nBLEU: ") and "<br/>" not in texts[1]
    assert replayed(played).outcome().score_norm == 1.0


def test_words_without_a_turn_are_left_out_and_their_answer_is_not_imitated(tmp_path: Path) -> None:
    played = read(
        tmp_path, (0, "message", "hello"), (1, "message", "how about this"), (1, "propose", ""),
        (1, "message", "what do you say"), (0, "reject", ""), (0, "message", "no"),
        (1, "propose", ""), (0, "accept", ""),
    )  # fmt: skip
    assert [move.text.split("\n")[0] for move in played.moves] == [
        "[message] hello", "[propose]", "[reject]", "[message] no", "[propose]", "[accept]",
    ]  # fmt: skip
    assert played.left_out == 2
    assert [move.imitated for move in played.moves] == [True, True, False, True, True, True]
    (detour,) = played.script(0).lesson(replace_log(played, num=2)).detours
    assert detour == (0, len("[reject]"))


def replace_log(played: PeoplesGame, *, num: int) -> object:
    """The view of the seat to move after `num` moves."""
    game = replayed(replace(played, moves=played.moves[:num]))
    assert game.seat_to_move is not None
    return game.view(game.seat_to_move)


def test_a_boards_digest_is_the_tables_and_not_the_files() -> None:
    other: MatchingInstance = replace(BOARD, key="another file/7")
    digest = load_kit("matching").digest
    assert digest(other) == digest(BOARD)
    assert digest(replace(BOARD, masks=BOARD.masks[::-1])) != digest(BOARD)


def test_each_room_of_a_recorded_game_keeps_its_order(tmp_path: Path) -> None:
    """The agent writes to both users before either answers; here user 0 answers at once. A second
    message in a row and one before a proposal are left out."""
    said = [
        Act(1, "message", "one", 1), Act(0, "message", "nil", 0), Act(2, "message", "you?", 0),
        Act(2, "message", "and you?", 1), Act(1, "message", "9", 1), Act(1, "message", "or 8", 1),
        Act(0, "message", "7", 0), Act(2, "message", "then", 0),
        Act(2, "propose", "user 0: id 0, user 1: id 1", None, (0, 1)),
        Act(1, "accept", "", 1), Act(0, "accept", "", 0),
    ]  # fmt: skip
    recorded = RecordedGame(TRIP, tuple(said), len(said))
    (played,) = peoples_games(
        [recorded],
        lambda i: MediationGame(i, Rules()),
        lambda act, _: move_text(act),
        ((0, 2), (1, 2)),
    )
    assert [(move.seat, move.text) for move in played.moves] == [
        (0, "[message] nil"), (1, "[message] one"), (2, "0: [message] you?"), (0, "[message] 7"),
        (2, "1: [message] and you?"), (1, "[message] 9"),
        (2, "all: [propose] user 0: id 0, user 1: id 1"), (0, "[accept]"), (1, "[accept]"),
    ]  # fmt: skip
    # "then" is taken back for the proposal, "or 8" had no turn: the agent's proposal may answer it.
    heard = [move.imitated for move in played.moves]
    assert played.left_out == 2 and heard == [True] * 6 + [False, False, True]


@pytest.mark.parametrize(
    ("name", "games", "moves", "left_out", "not_imitated"),
    [
        ("matching", 66, 887, 94, 78),
        ("planning", 57, 638, 176, 165),
        ("mediation", 81, 918, 369, 264),
    ],
)
def test_people_said_most_in_turns(
    name: str, games: int, moves: int, left_out: int, not_imitated: int
) -> None:
    """Most of what is left out is a message before a proposal or two in a row."""
    kit = load_kit(name)
    played = kit.read_people(human_games(name))
    for game in played:
        replayed(game, name)
    assert len({kit.digest(game.instance) for game in played}) == len(played) == games
    assert sum(len(game.moves) for game in played) == moves
    assert sum(game.left_out for game in played) == left_out
    assert sum(not move.imitated for game in played for move in game.moves) == not_imitated
