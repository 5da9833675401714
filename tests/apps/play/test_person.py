"""Evaluations with a person at the terminal, an endpoint and a frozen checkpoint as partners."""

import io
from dataclasses import replace
from pathlib import Path

import pytest

import eval as door
from dialop.matching.game import MatchingGame
from dialop.matching.kit import write as write_instances
from selfplay.apps.play.person import PersonPlayer
from selfplay.rollout.driver import play_scripted
from selfplay.rollout.episode import GameSetup, Limits
from tests.helpers.chat_server import Answer, chat_server
from tests.helpers.dialop_boards import FULL, SMALL
from tests.helpers.run_folders import evaluated
from tests.helpers.small_games import Lines
from tests.helpers.tiny_run import finished


@pytest.fixture(scope="module")
def run() -> Path:
    """A run whose policy makes legal and illegal moves."""
    return finished()


# --- a person -----------------------------------------------------------------------------------

TYPED = """\
hello

[message] I see Ava BLEU 3 and Daniel Electra 9

[propose]
BLEU: Ava
Electra: Daniel

"""


def test_a_session_at_the_terminal() -> None:
    """A refused move, a message, a proposal over three lines; the partner accepts."""
    out = io.StringIO()
    person = PersonPlayer(
        name="person", called="the guest", lines_in=io.StringIO(TYPED), lines_out=out
    )
    game = MatchingGame(SMALL, FULL)
    setup = GameSetup(game, (person, Lines("[message] I see 7 and 1", "[accept]")), SMALL.key, 0)
    (episode,) = play_scripted([setup], limits=Limits(max_turns=8, max_retries=2))
    assert (episode.ended, episode.outcome.score_norm) == ("finished", 1.0)
    shown, prompt = out.getvalue(), game.prompt(0)
    assert prompt.system in shown and prompt.user in shown and "you are the guest" in shown
    assert "\n> Error: line 1 has no tag" in shown and "\n> Partner: [message] I see" in shown
    actions = [None, "message", "message", "propose", "accept"]
    assert [turn.action for turn in episode.turns] == actions


def test_a_game_whose_input_ends_is_void() -> None:
    person = PersonPlayer(
        name="person", called="the guest", lines_in=io.StringIO(""), lines_out=io.StringIO()
    )
    setup = GameSetup(MatchingGame(SMALL, FULL), (person, Lines()), SMALL.key, 0)
    (episode,) = play_scripted([setup], limits=Limits(max_turns=8, max_retries=2))
    assert episode.ended == "void"


# --- an endpoint, a checkpoint ------------------------------------------------------------------


def test_an_evaluation_with_an_endpoint_counts_its_void_games(run: Path, tmp_path: Path) -> None:
    answers = [Answer("[accept]"), Answer(status=404)]
    with chat_server(lambda body, number: answers[number % 2]) as server:
        spec = f"endpoint:small@{server.url}"
        words = [str(run), "--games", "generated", "--num", "12"]
        words += ["--partner", spec, "--out", str(tmp_path), "endpoint.concurrency=1"]
        assert door.main([*words, "endpoint.retries=0"]) == 0
    row = evaluated(tmp_path)["rows"][f"policy with {spec}"]
    num_void = row["measures"]["num_void"]
    assert len(row["scores"]) + num_void == 12
    assert row["measures"]["void_share"] == num_void / 12 > 0


def test_an_evaluation_with_a_dead_endpoint_scores_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No server listens at that port, and the endpoint moves first: no score of 0 is written."""
    file = tmp_path / "one.parquet"
    write_instances(file, [replace(SMALL, first_seat=1)])
    words = [str(run), "--games", str(file), "--out", str(tmp_path / "out")]
    dead = ["--partner", "endpoint:small@http://127.0.0.1:9/v1", "endpoint.retries=0"]
    assert door.main([*words, *dead]) == 1
    output = capsys.readouterr().err
    assert "ConnectError" in output and "all 1 games were aborted" in output
    assert not (tmp_path / "out" / "evaluation.json").exists()


def test_an_evaluation_with_a_checkpoint_has_the_score_of_each_seat(
    run: Path, tmp_path: Path
) -> None:
    words = [str(run), "--games", "generated", "--num", "6"]
    spec = f"checkpoint:{run}/warm_start"
    assert door.main([*words, "--partner", spec, "--out", str(tmp_path)]) == 0
    row = evaluated(tmp_path)["rows"][f"policy with {spec}"]
    assert len(row["scores"]) == 6
    by_seat = [row["measures"][f"score/{spec}/{seat}"] for seat in (0, 1)]
    assert sum(by_seat) / 2 == pytest.approx(row["interval"][0])
