"""Evaluations and single games from Python are those of eval.py, as records."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import eval as program
import selfplay
from tests.helpers.tiny_run import TINY, begin_warm, finished

SETTINGS: dict[str, Any] = yaml.safe_load(TINY)


def test_evaluate_is_eval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = selfplay.load_run(finished())
    of_python = selfplay.evaluate(
        run, {"game.options.max_value": 9}, num=4, temperature=[1, 0], seed=3, out=tmp_path / "one"
    )
    words = [str(run.folder), "--games", "generated", "--num", "4"]
    more = ["--temperature", "1", "--temperature", "0", "game.options.max_value=9", "seed=3"]
    capsys.readouterr()
    two = tmp_path / "two"
    assert program.main([*words, *more, "--out", str(two)]) == 0
    shown = f"{of_python}\n{two / 'evaluation.json'}\n{two / 'evaluation.md'}\n"
    assert capsys.readouterr().out.endswith(shown)
    written = json.loads((two / "evaluation.json").read_text())
    assert json.loads(of_python.paths[0].read_text()) == written
    assert of_python.record == written and of_python.rows == written["rows"]
    assert {"policy", "policy, greedy", "scripted:honest"} <= of_python.rows.keys()
    assert len(of_python.rows["policy"]["scores"]) == 4 and repr(of_python) == str(of_python)
    assert "board_sizes: 2" in str(of_python)
    assert r"\_" in of_python._repr_markdown_() and r"\_" not in str(of_python)


def test_the_open_policy_is_evaluated_as_the_saved_one(tmp_path: Path) -> None:
    """Also between its steps, which go on as without an evaluation."""
    begin_warm(tmp_path / "run")
    talk = {"eval.talk_games": 8, "eval.final_games": 8}
    with selfplay.start(SETTINGS, talk, out=tmp_path / "run", steps=2) as run:
        before = run.evaluate(4)
        assert before["scores"] == run.before["sampled"]["scores"][:4]
        with pytest.raises(selfplay.SettingsError, match="is open and its policy is not saved"):
            selfplay.evaluate(run)
        for num, temperature in (("4", None), (0, None), (-1, None), (4, -1.0), (4, 1000)):
            with pytest.raises(selfplay.SettingsError, match=r"^(num|temperature) must be "):
                run.evaluate(num, temperature=temperature)  # type: ignore[arg-type]
        for _ in range(2):
            run.step()
        after = run.evaluate(temperature=0.0)
        run.finish()
        assert after["scores"] == run.after["greedy"]["scores"]
        assert run.after["sampled"]["talk"]["num_games"] > 0
        rows = selfplay.evaluate(run, num=8, temperature=0).rows
    assert rows["policy, greedy"]["scores"] == after["scores"]
    plain = selfplay.load_run(finished()).metrics[:2]
    assert [line["score"] for line in run.metrics] == [line["score"] for line in plain]


def test_play_returns_whole_games() -> None:
    games = selfplay.play(finished(), num=40, temperature=0)
    assert len(games) == 40 > len(selfplay.evaluate(finished(), num=40).rows["policy"]["games"])
    assert len({game["instance"] for game in games}) == 40
    assert {turn["trained"] for game in games for turn in game["turns"]} == {True}
    text = selfplay.game_text(games[0])
    assert all(turn["text"].strip().splitlines()[0] in text for turn in games[0]["turns"])
    (mixed,) = selfplay.play(finished(), partner="scripted:honest")
    assert "scripted:honest" in [seat["player"] for seat in mixed["seats"]]


def test_scripts_play_a_game_without_a_model() -> None:
    game = {"name": "examples/meeting/meeting.py", "options": {"num_days": 3}}
    one, two = selfplay.play("scripted:tell", config={"game": game}, num=2)
    assert one["score_norm"] == two["score_norm"] == 1.0 and one["instance"] != two["instance"]
    (mixed,) = selfplay.play("scripted:tell", {"game": game}, partner="scripted:guess")
    assert [seat["player"] for seat in mixed["seats"]] == ["scripted:tell", "scripted:guess"]
