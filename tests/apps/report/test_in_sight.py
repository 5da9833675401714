"""What the page says first: whose run it is, whether it goes on, rewards, and groups of games."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from selfplay.apps.publish.card import card, read_results
from selfplay.apps.report.games import viewer_data
from selfplay.apps.report.page import page_html, run_charts, scores_table, tiles
from selfplay.apps.report.run_files import read_run
from selfplay.config import load_config
from selfplay.metrics.run_folder import hold_run
from tests.helpers.run_folders import make_run, step_line, write_lines


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("sight") / "run", num_games=3)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "run")


def with_rewards(folder: Path, *, equal: bool) -> None:
    """Steps of a run with rewards and a partner; its games pay their seats the same or not."""
    seen = {"reward": 0.65, "reward_std": 0.2, "reward/0": 0.7, "reward/1": 0.6}
    lines = [step_line(step) | seen for step in range(1, 13)]
    lines[3] |= {"eval_score/scripted:fair": 0.5}
    write_lines(folder / "metrics.jsonl", lines)
    games = [game | {"rewards": [0.5, 0.5 if equal else 1]} for game in read_run(folder).games]
    write_lines(folder / "games.jsonl", games)


@pytest.mark.parametrize("equal", [True, False])
def test_seats_with_different_rewards_are_the_first_curves(equal: bool, folder: Path) -> None:
    with_rewards(folder, equal=equal)
    charts = run_charts(read_run(folder))
    partners, reward, score = "Score with partners that do not change", "Reward", "Score"
    first = [score, partners, reward] if equal else [partners, reward, score]
    assert [chart.title for chart in charts[:3]] == first
    lines = {chart.title: [line["name"] for line in chart.lines] for chart in charts}
    assert lines[partners] == ["with scripted:fair", "by itself"]
    assert lines[reward] == ["player 0", "player 1", "standard deviation of all"]


def test_a_judges_mark_and_void_games_have_curves_where_there_are_any(folder: Path) -> None:
    for more, titles in (
        ({"num_void": 0.0}, set()),
        ({"num_void": 2.0, "mark": 0.5}, {"Judge", "Void games"}),
    ):
        write_lines(folder / "metrics.jsonl", [step_line(step) | more for step in range(1, 13)])
        shown = {chart.title for chart in run_charts(read_run(folder))}
        assert shown & {"Judge", "Void games"} == titles
    game = read_run(folder).games[0] | {"judge": "So-so.\n\x1b{}"}
    write_lines(folder / "games.jsonl", [game])
    shown = [one["judge"] for one in viewer_data([read_run(folder)])["games"] if "judge" in one]
    assert len(shown) == 1 and shown[0].startswith("So-so. ") and "\x1b" not in shown[0]


def test_the_reward_of_each_seat_before_and_after_stands_beside_the_score(folder: Path) -> None:
    for stage, paid in (("before", (0.585, 0.615)), ("after", (0.723, 0.477))):
        path = folder / f"held_out_{stage}.json"
        rows = json.loads(path.read_text())
        rows["sampled"]["measures"] |= {f"reward/{seat}": one for seat, one in enumerate(paid)}
        path.write_text(json.dumps(rows))
    shown = {name: value for name, value, _ in tiles(read_run(folder))}
    assert shown["reward of player 0"] == "0.58 → 0.72"
    assert shown["reward of player 1"] == "0.61 → 0.48"


def test_both_players_scores_stand_before_and_after_self_play(folder: Path) -> None:
    """Also where both scored the same before, and where no file has a difference: then neither."""

    def shown(after: float) -> list[tuple[str, str, bool, str]]:
        for stage, other in (("before", 0.25), ("after", after)):
            path = folder / f"held_out_{stage}.json"
            rows = json.loads(path.read_text())
            row = {**rows["scripted:random"], "scores": [0.25] * 4, "interval": [0.25, 0.0, 0.5]}
            partner = {**row, "scores": [other] * 4, "interval": [other, other - 0.1, other + 0.1]}
            rows |= {"greedy": row, "sampled with scripted:fair": {**row, "partner": partner}}
            path.write_text(json.dumps(rows))
        table = scores_table([read_run(folder)])["rows"]
        keys = ("source", "name", "policy", "score")
        return [tuple(line[k] for k in keys) for line in table if "fair" in line["name"]]

    name, low, high = "sampled with scripted:fair", "0.250 [0.000, 0.500]", "0.750 [0.650, 0.850]"
    other, own = f"{name} (the other player)", [(s, name, True, low) for s in ("before", "after")]
    assert shown(0.75) == [
        own[0], ("before", other, False, "0.250 [0.150, 0.350]"),
        own[1], ("after", other, False, high),
    ]  # fmt: skip
    lines = card(
        "me/x", load_config(folder / "config.yaml"), read_results(folder), code="", step=1
    ).splitlines()
    cells = [[part.strip() for part in line.split("|")[1:3]] for line in lines if "fair" in line]
    assert cells == [
        [f"{name}, before self-play", low],
        [f"{name}, before self-play (the other player)", "0.250 [0.150, 0.350]"],
        [f"{name}, after", low],
        [f"{name}, after (the other player)", high],
    ]  # fmt: skip
    assert shown(0.25) == own


def test_the_page_says_whose_run_it_is_and_whether_it_goes_on(folder: Path) -> None:
    (folder / "held_out_after.json").unlink()
    start = "started 2026-11-26 09:00:00 +0000\ncommit a\ncommand python train.py seed=3\n\n"
    (folder / "code.txt").write_text(start + start.replace("09:", "11:").replace("=3", "=4"))
    about = dict(read_run(folder).about)
    assert about["model"] == "from scratch, qwen2 of width 32" and about["game"] == "matching"
    assert about["started"].startswith("2026-11-26 09") and about["command"].endswith("seed=4")
    assert read_run(folder).state == "stopped"
    with hold_run(folder):
        assert read_run(folder).state == "running"
        html = page_html([read_run(folder)])
    assert "python train.py seed=4" in html and re.search(r"step 12 of\s+12", html)
    assert json.loads(html.split('id="data">')[1].split("<")[0])["running"]
    (folder / "held_out_after.json").write_text("{}")
    assert read_run(folder).state == "finished"


def test_a_page_is_late_after_three_times_the_runs_own_pace(folder: Path) -> None:
    """A new page every 50 steps (save_every) or 4 (eval.every), here of 2 to 40 seconds."""
    lines = [
        step_line(step) | {"step_s": seconds} for step, seconds in enumerate((2.0, 3.5, 40.0), 1)
    ]
    write_lines(folder / "metrics.jsonl", lines)
    assert read_run(folder).redrawn_s == 3 * 50 * 3.5 + 120
    path = folder / "config.yaml"
    path.write_text(path.read_text().replace("\n  every: 0\n", "\n  every: 4\n"))
    assert read_run(folder).redrawn_s == 3 * 4 * 3.5 + 120
    write_lines(folder / "metrics.jsonl", [])
    assert read_run(folder).redrawn_s == 3600


def test_the_page_shows_what_the_monitors_warned_of(folder: Path) -> None:
    lines = [step_line(step) | {"messages": 0.6 if step < 20 else 0.01} for step in range(1, 40)]
    write_lines(folder / "metrics.jsonl", lines)
    (warning,) = [text for text in read_run(folder).warnings if "messages" in text]
    assert "monitor 'warn if messages loses 75% over 10', step 27" in warning
    assert warning.endswith("the mean of messages over 10 steps is 0.128, 79% below its first, 0.6")
    assert "messages loses 75% over 10" in page_html([read_run(folder)])


def test_the_games_of_a_group_have_what_they_were_worth_and_stand_once(folder: Path) -> None:
    first, *others = read_run(folder).games
    group: list[dict[str, Any]] = json.loads(json.dumps([first, first | {"episode": 1}]))
    for number, game in enumerate(group):
        game["seats"][0] |= {"reward": 0.5 + number, "return": 0.5 + number, "advantage": None}
    record = {"step": first["step"], "instance": first["instance"], "games": group}
    write_lines(folder / "groups.jsonl", [record, {"step": 1, "games": 3}])
    run = read_run(folder)
    assert len(run.games) == 2 + len(others)
    assert run.problems == ["groups.jsonl: games must be a list of objects, got 3"]
    shown = [game for game in viewer_data([run])["games"] if game["source"] == "training"]
    credit = [game["seats"][0].get("reward") for game in shown]
    assert credit == [0.5, 1.5, *[None] * len(others)]
    assert all("advantage" not in seat for game in shown for seat in game["seats"])
