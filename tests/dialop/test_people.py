"""People's recorded games as moves to imitate: legal in this game, words that have no place left
out."""

from dataclasses import replace
from pathlib import Path

from dialop.logged import Rules
from dialop.matching.game import MatchingGame, MatchingInstance
from dialop.matching.generate import MatchingRecipe, generate_instance
from dialop.matching.people import board_digest, peoples_game
from dialop.matching.recorded import read_recorded
from dialop.starts import PeoplesGame
from tests.helpers.dialop_boards import human_games, record_of, write_records

BOARD = generate_instance(MatchingRecipe(keep="all"), seed=0, index=0)


def read(path: Path, *entries: tuple[int, str, str]) -> PeoplesGame:
    (recorded,) = read_recorded(write_records(path / "games.jsonl", record_of(BOARD, *entries)))
    played = peoples_game(recorded)
    assert played is not None
    return played


def replayed(played: PeoplesGame) -> MatchingGame:
    """The game after every move, each made by its seat's script."""
    game = MatchingGame(played.instance, Rules())
    for _ in played.moves:
        seat = game.seat_to_move
        assert seat is not None
        step = game.step(seat, played.scripts[seat].act(game.view(seat)))
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
    (detour,) = played.scripts[0].lesson(replace_log(played, num=2)).detours
    assert detour == (0, len("[reject]"))


def replace_log(played: PeoplesGame, *, num: int) -> object:
    """The view of the seat to move after `num` moves."""
    game = replayed(replace(played, moves=played.moves[:num]))
    assert game.seat_to_move is not None
    return game.view(game.seat_to_move)


def test_a_boards_digest_is_the_tables_and_not_the_files() -> None:
    other: MatchingInstance = replace(BOARD, key="another file/7")
    assert board_digest(other) == board_digest(BOARD)
    assert board_digest(replace(BOARD, masks=BOARD.masks[::-1])) != board_digest(BOARD)


def test_people_said_almost_all_in_turns() -> None:
    """Of 995 recorded moves of 66 readable games 94 have no place, most of them one line before a
    proposal."""
    games = [peoples_game(recorded) for recorded in read_recorded(human_games())]
    played = [game for game in games if game is not None]
    assert len(played) == 66
    for game in played:
        replayed(game)
    assert sum(len(game.moves) for game in played) == 887
    assert sum(game.left_out for game in played) == 94
