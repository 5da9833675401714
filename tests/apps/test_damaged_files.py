"""Any file of a run, damaged in any way: the page and the card name it or do without it."""

import copy
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from selfplay.apps.publish.card import card, read_results
from selfplay.apps.report.games import viewer_data
from selfplay.apps.report.page import page_html, scores_table, tiles
from selfplay.apps.report.run_files import read_run
from selfplay.config import Config, load_config
from selfplay.errors import SettingsError
from tests.helpers.run_folders import make_run

WRONG = [None, [], {}, "x", True, -1, 1e308, 10**400, float("inf"), float("nan"), [[]], {"a": [1]}]
RESULTS = ["held_out_before.json", "held_out_after.json", "eval_x/evaluation.json"]


def hurt(value: Any, draw: random.Random) -> Any:
    """The JSON value with one entry, or itself, replaced by a wrong one or left out."""
    if isinstance(value, dict | list) and value and draw.random() < 0.9:
        places = list(value) if isinstance(value, dict) else range(len(value))
        place, other = draw.choice(places), copy.copy(value)
        if draw.random() < 0.2:
            del other[place]
        else:
            other[place] = hurt(value[place], draw)
        return other
    return draw.choice(WRONG)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with its games before and after self-play, and an evaluation."""
    run = make_run(tmp_path / "run", num_games=2)
    for stage in ("before", "after"):
        path = run / f"held_out_{stage}.json"
        rows = json.loads(path.read_text())
        path.write_text(json.dumps(rows | {"greedy": rows["sampled"]}))
    (run / "eval_x").mkdir()
    page = {"games": "generated", "num_games": 2, "rows": {"policy": rows["sampled"]}}
    (run / "eval_x" / "evaluation.json").write_text(json.dumps(page))
    return run


def refused(run: Path, config: Config, file: str) -> bool:
    """Whether the card refuses the file by its name. The page is drawn."""
    files = replace(read_run(run), config=config)
    assert [*tiles(files)] and scores_table([files])["rows"] and viewer_data([files])["games"]
    try:
        results = read_results(run)
    except SettingsError as error:
        assert str(error).startswith(f"{run / file} must have the games")
        return True
    assert card("me/pair", config, results, code="started 1", step=1)
    return False


@pytest.mark.parametrize("file", RESULTS)
def test_a_damaged_result_file_is_named_never_a_traceback(file: str, run: Path) -> None:
    draw, whole = random.Random(0), json.loads((run / file).read_text())
    config, num = load_config(run / "config.yaml"), 0
    (run / "config.yaml").write_text("")  # not read again each time
    for _ in range(16):
        (run / file).write_text(json.dumps(hurt(whole, draw)))
        num += refused(run, config, file)
    assert 0 < num < 16


@pytest.mark.parametrize("number", ["1e400", "1" + 5000 * "0"])
def test_numbers_beyond_every_bound_cost_only_their_place(number: str, run: Path) -> None:
    """In steps, games and evaluations; a card has none of them to do without."""
    draw = random.Random(0)
    for file in (*run.glob("*.jsonl"), run / "eval_x" / "evaluation.json"):
        text = re.sub(
            r"(?<=[\[ :,])-?\d+(\.\d+)?(?=[,\]}])",
            lambda found: number if draw.random() < 0.03 else found[0],
            file.read_text(),
        )
        file.write_text(text)
    refused(run, load_config(run / "config.yaml"), "eval_x/evaluation.json")
    data = re.search(r'id="data">(.*?)<', page_html([read_run(run)]))
    assert data is not None and json.loads(data[1]) and not re.search("NaN|Infinity", data[1])
