"""The observer that keeps a run's page: when it draws, and what it writes for the page."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import selfplay
from selfplay.advantages.advantages import CreditStats
from selfplay.advantages.rewards import sample_name
from selfplay.apps.report import refresh_report
from selfplay.apps.report.observer import Page
from selfplay.apps.report.run_files import read_run
from selfplay.config import Config
from selfplay.config.load import load
from selfplay.distributed import init_world
from selfplay.metrics.observer import Step
from tests.helpers.interrupted import replaced
from tests.helpers.run_folders import make_run
from tests.helpers.tiny_run import TINY, begin_halfway, begin_warm, finished, run_tiny


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "page.jsonl").read_text().splitlines()]


def touch(_: Any, folder: Path, *, rank: int) -> None:
    (folder / "report.html").touch()


# A page is an empty file: a process draws a real one in more than a second (test_page.py).
not_drawn = partial(replaced, refresh_report, touch)


@not_drawn()
def test_a_page_is_drawn_at_the_first_step_and_then_once_its_pause_is_over(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    page = Page(load(Config, folder / "config.yaml", [f"out={folder}"]), init_world(device="cpu"))
    report = folder / "report.html"

    def drawn_at(number: int) -> bool:
        report.unlink(missing_ok=True)
        page.on_step(Step(number, [], [], {"step": number}, CreditStats(0, 0), {}))
        page._drawing.join()
        return report.exists()

    assert [drawn_at(1), drawn_at(2)] == [True, False]
    page._next = 0.0  # the minute is over
    page.pause_s = page.pause_share = 0
    assert [drawn_at(3), drawn_at(4)] == [True, True]
    report.unlink()
    page.close()
    assert report.exists() and [line["step"] for line in lines_of(folder)] == [1, 2, 3, 4]


@not_drawn()
def test_the_page_has_what_the_update_saw_of_each_token_of_a_logged_game(tmp_path: Path) -> None:
    """A seat's turns, one after another, are its sample's trained tokens; a game of a group without
    variance did not train, so it has no line."""
    folder = tmp_path / "run"
    begin_warm(folder)
    (tmp_path / "tiny.yaml").write_text(TINY)
    given = {"observers": ["page"], "log_games_every": 1}
    with selfplay.start(tmp_path / "tiny.yaml", given, out=str(folder)) as run:
        step = run.step()
    (line,), seen = lines_of(folder), 0
    for game in line["games"]:
        (episode,) = (
            one
            for one in step.episodes
            if (one.instance, one.index) == (game["instance"], game["episode"])
        )
        for seat in range(2):
            turns = [
                own
                for turn, own in zip(episode.turns, game["turns"], strict=True)
                if turn.seat == seat and own
            ]
            record = step.tokens.get(sample_name(episode, seat))
            if record is None:
                assert not turns
                continue
            for name in ("advantages", "mismatch"):
                told = [number for turn in turns for number in turn[name]]
                assert told == pytest.approx(getattr(record, name), rel=5e-3)
            seen += len(record.ids)
    assert seen == sum(len(record.ids) for record in step.tokens.values()) > 0
    assert 0.01 < line["memory_gib"] < 100
    shown = [game for game in read_run(folder).games if "advantages" in game["turns"][0]]
    assert shown and len(shown[0]["turns"][0]["advantages"]) == len(shown[0]["turns"][0]["tokens"])


@not_drawn()
def test_a_resumed_run_writes_the_lines_of_its_steps_once(tmp_path: Path) -> None:
    """After step 2 of 4 it keeps the lines up to there and replaces the later ones."""
    begin_halfway(finished(), run := tmp_path / "run")
    before = [{"step": step, "memory_gib": 0.0, "games": []} for step in (1, 2, 3, 4)]
    (run / "page.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in before))
    assert run_tiny(run, "observers=[page]") == 0
    *kept, third, fourth = lines_of(run)
    assert kept == before[:2] and [third["step"], fourth["step"]] == [3, 4]
    assert third["games"] and third["memory_gib"] > 0
