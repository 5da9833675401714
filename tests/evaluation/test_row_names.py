"""A figure stands under its own name: rows of the policy, of scripts and of people are never one
another's, in any file and for any reader, whatever scripts and folders are called."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import selfplay
from bench.compare_runs import main as compare
from bench.compare_runs import read_run as compared
from bench.compare_runs import results_table
from eval import main as run_eval
from selfplay.apps.publish.card import card, read_results
from selfplay.apps.report.games import viewer_data
from selfplay.apps.report.page import reference_levels, scores_table
from selfplay.apps.report.run_files import read_run
from selfplay.config import load_config
from selfplay.errors import SettingsError
from selfplay.evaluation.asked import EvalPlan
from selfplay.evaluation.held_out import held_out, what_changed
from selfplay.evaluation.plan import find_matches
from selfplay.evaluation.rows import named_rows
from tests.helpers.run_folders import context_of, evaluated, untrained_run, write_lines

SPLIT = Path(__file__).resolve().parents[2] / "examples/split/split.py"
SETTINGS = """
threads: 1
device: cpu
game: {{name: {game}}}
model: {{scratch: {{width: 32, layers: 1, heads: 2, kv_heads: 2, mlp_width: 48, max_positions: 256,
                   vocab_size: 320, tokenizer_games: 40}}}}
warm_start: {{teachers: [greedy]}}
rollout: {{max_turns: 6, max_retries: 1, max_new_tokens: 6, max_game_tokens: 200}}
eval: {{final_games: 4}}
"""
NAMES = ["sampled", "greedy", "policy", "people"]  # what the game calls its scripts
SCRIPTS = [f"scripted:{name}" for name in NAMES]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained run of the split, whose players have the names of rows, with its evaluations."""
    home = tmp_path_factory.mktemp("names")
    game = home / "game.py"
    head = SPLIT.read_text("utf-8").partition("SCRIPTS = ")[0]
    players = ", ".join(f'"{name}": player({wants})' for wants, name in enumerate(NAMES, start=2))
    game.write_text(f"{head}SCRIPTS = {{{players}}}\nnew_game, restore = Split, Split.from_state\n")
    folder = untrained_run(home / "run", SETTINGS.format(game=game))
    for stage in ("before", "after"):
        held_out(stage, context_of(folder), folder=folder)
    asked = ["--games", "generated", "--num", "4", "--temperature", "1", "--temperature", "0"]
    assert run_eval([str(folder), *asked, "--out", str(folder / "eval_all")]) == 0
    write_lines(folder / "metrics.jsonl", [{"step": 1, "step_s": 1.0, "num_trained_tokens": 1}])
    return folder


def rows_of(run: Path, name: str = "held_out_after.json") -> dict[str, Any]:
    rows: dict[str, Any] = json.loads((run / name).read_text("utf-8"))
    return rows


def old_form(rows: Mapping[str, Any], *scripts: str) -> dict[str, Any]:
    """The rows as files before 2026-11-29 hold them, of the scripts only these: a script has its
    bare name, and takes the place of the policy's row of that name."""
    own = {name: row for name, row in rows.items() if name not in SCRIPTS}
    return own | {name: {**rows[f"scripted:{name}"], "name": name} for name in scripts}


def in_old_form(run: Path, folder: Path, *scripts: str) -> Path:
    """A copy of the run with old files."""
    shutil.copytree(run, folder)
    for path in folder.glob("held_out_*.json"):
        path.write_text(json.dumps(old_form(rows_of(folder, path.name), *scripts)))
    page = evaluated(folder / "eval_all")
    page["rows"] = old_form(page["rows"], *scripts)
    (folder / "eval_all" / "evaluation.json").write_text(json.dumps(page))
    return folder


def test_scripts_that_are_called_like_rows_replace_none(run: Path) -> None:
    """The policy makes no legal move and scores 0; scripts agree in each game."""
    for rows, own in (
        (rows_of(run), ["sampled", "greedy"]),
        (evaluated(run / "eval_all")["rows"], ["policy", "policy, greedy"]),
        (selfplay.load_run(run).after, ["sampled", "greedy"]),
        (selfplay.load_run(run).before, ["sampled", "greedy"]),
    ):
        assert rows is not None and list(rows) == [*own, *SCRIPTS]
        assert [rows[name]["measures"]["agreement"] for name in rows] == [0, 0, 1, 1, 1, 1]
    assert "from 0.000 [" in what_changed(run) and "to 0.000 [" in what_changed(run)


def test_every_reader_tells_them_apart(run: Path) -> None:
    files = read_run(run)
    assert not files.problems
    kinds = {(row.source, row.name): row.kind for row in files.rows}
    assert {name for (_, name), kind in kinds.items() if kind == "reference"} == {*SCRIPTS}
    assert [level.name for level in reference_levels(files)] == SCRIPTS
    table = scores_table([files])["rows"]
    assert {line["name"] for line in table if line["policy"]} == {
        *("sampled", "greedy", "policy", "policy, greedy")
    }
    games = viewer_data([files])["games"]
    assert {seat["player"] for game in games for seat in game["seats"]} == {"policy"}
    lines = card("me/x", load_config(run / "config.yaml"), read_results(run), code="", step=1)
    cells = {line.split("|")[1].strip(): line for line in lines.splitlines() if "|" in line}
    assert " 0.000 [" in cells["greedy, after"] and " 0.000 [" not in cells["scripted:greedy"]
    page = (run / "eval_all" / "evaluation.md").read_text("utf-8")
    assert page.count("## Best game of policy") == 2 and "game of scripted" not in page


def test_an_old_file_in_which_a_script_took_the_greedy_row_is_read_as_meant(
    run: Path, tmp_path: Path
) -> None:
    """As those of the shipped split. The policy's own greedy row is lost, and that is said."""
    old, rows = in_old_form(run, tmp_path / "old", "greedy", "people"), rows_of(run)
    assert list(rows_of(old)) == ["sampled", "greedy", "people"]
    after = selfplay.load_run(old).after
    assert after is not None and list(after) == ["sampled", "scripted:greedy", "scripted:people"]
    assert after["scripted:greedy"]["scores"] == rows["scripted:greedy"]["scores"]
    files = read_run(old)
    lost = [f"{stage} greedy: a script of this name replaces the policy"
            for stage in ("before", "after")]  # fmt: skip
    assert files.problems == lost
    assert [level.name for level in reference_levels(files)] == [*after][1:]
    assert {row.name for row in files.rows if row.kind == "policy"} == {
        *("sampled", "policy", "policy, greedy")
    }
    lines = card("me/x", load_config(old / "config.yaml"), read_results(old), code="", step=1)
    assert "| sampled, after" in lines and "| scripted:greedy" in lines
    assert "greedy, after" not in lines
    head, _, line = results_table([compared(old)]).splitlines()
    shown = dict(zip(head.split(" | "), line.split(" | "), strict=True))
    assert (shown["greedy score"], shown["greedy agreement"]) == ("-", "-")
    assert what_changed(old) == what_changed(run)


def test_an_old_file_without_the_policys_first_row_is_refused_in_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = in_old_form(run, tmp_path / "old", *NAMES)
    assert read_run(old).row("after", "sampled") is None
    with pytest.raises(
        SettingsError, match=r"held_out_before.json .*script named sampled replaces"
    ):
        read_results(old)
    assert compare([str(old)]) == 2
    assert "a script named sampled replaces the policy" in capsys.readouterr().err
    rows = named_rows(evaluated(old / "eval_all")["rows"])
    assert list(rows) == ["scripted:policy", "policy, greedy", *SCRIPTS[:2], "scripted:people"]
    assert named_rows(rows) == rows == named_rows(named_rows(rows))
    people = {"name": "people", "scores": [1.0], "examples": {}}  # of recorded games
    assert list(named_rows({"people": people})) == ["people"]


@pytest.mark.parametrize("name", ["policy", "people", "scripted:greedy"])
def test_a_folder_that_is_called_like_a_row_has_its_own_in_a_cross_play(
    run: Path, tmp_path: Path, name: str
) -> None:
    """Its page draws none of the matrix as the policy's."""
    shutil.copytree(run, tmp_path / name)
    words = [str(tmp_path / name), "--partners", "scripted:greedy", "--games", "generated"]
    out = tmp_path / name / "eval_x"
    assert run_eval([*words, "--num", "2", "--out", str(out)]) == 0
    page = evaluated(out)
    cells = {(c["seat_0"], c["seat_1"]): page["rows"][c["row"]] for c in page["matrix"]["cells"]}
    (label,) = page["matrix"]["rows"]
    assert label == (json.dumps(name) if name in ("people", "scripted:greedy") else name)
    players = {
        pair: [seat["player"] for seat in row["examples"]["best"]["seats"]]
        for pair, row in cells.items()
    }
    script = "scripted:greedy"
    assert players == {
        (label, label): ["policy", "policy"],
        (label, script): ["policy", script],
        (script, label): [script, "policy"],
    }
    assert page["rows"][label]["measures"]["agreement"] == 0
    assert [page["rows"][each]["measures"]["agreement"] for each in SCRIPTS] == [1, 1, 1, 1]
    files = read_run(tmp_path / name)
    assert {row.kind for row in files.rows if row.source == "eval_x"} == {""}
    assert [level.name for level in reference_levels(files)] == SCRIPTS


def test_no_two_pairs_of_a_cross_play_have_one_name(run: Path, tmp_path: Path) -> None:
    names = [
        "a",
        "b",
        "a with b",
        "b with a",
        'b" with "a',
        "a with b with a",
        "a (the other player)",
    ]
    folders = [tmp_path / name for name in names]
    for folder in folders:
        shutil.copytree(run, folder)
    plan = find_matches(EvalPlan(folders, partners=["scripted:greedy"]))
    rows = [match.name for match in plan.matches]
    assert len(rows) == 7 + 7 * 6 + 7 * 2 and len({*rows}) == len(rows)
    assert plan.rows[:3] == ("a", "b", '"a with b"')
