"""The table, curves and games of several finished runs."""

import json
from pathlib import Path
from statistics import fmean

import pytest

from bench import compare_runs
from selfplay.metrics.tables import paired_change, show_change
from tests.helpers.run_folders import make_run, write_lines

STEPS = [
    {"step": 1, "score": 0.5, "step_s": 40.0},
    {"step": 2, "eval_score": 0.9, "eval_messages": 1.0, "step_s": 35.0},
]


def test_the_report_of_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seeds 3 and 4 beside a control without messages."""
    folders = []
    for name, override in (
        ("control", "game.options.messages=false"),
        ("talk", "seed=3"),
        ("again", "seed=4"),
    ):
        folder = make_run(tmp_path / name, override)
        for stage in ("before", "after"):
            path = folder / f"held_out_{stage}.json"
            rows = json.loads(path.read_text(encoding="utf-8"))
            others = dict.fromkeys(("greedy", "honest", "solo"), rows["sampled"])
            path.write_text(json.dumps(rows | others), encoding="utf-8")
        write_lines(folder / "metrics.jsonl", STEPS)
        (folder / "code.txt").write_text("started now\ncommit abc\nversions\n", encoding="utf-8")
        folders.append(str(folder))
    out = ["--out", str(tmp_path / "figures")]
    assert compare_runs.main([*folders, *out]) == 0 and not (tmp_path / "figures").exists()
    capsys.readouterr()
    assert compare_runs.main([*folders, *out, "--name", "t"]) == 0
    shown = capsys.readouterr().out
    rows = [line for line in shown.splitlines() if line.startswith("| ")]
    sampled = [json.loads((tmp_path / "talk" / f"held_out_{stage}.json").read_text())["sampled"]
               for stage in ("before", "after")]  # fmt: skip
    before, after = (fmean(row["scores"]) for row in sampled)
    assert 0 < before < after
    assert "Code: commit abc." in shown
    cells = [cell.strip() for cell in rows[2].split("|")[1:-1]]
    assert cells[0] == "messages, seed 3" and cells[-1] == "1m15s"
    assert cells[1].startswith(f"{before:.3f} [") and cells[2].startswith(f"{after:.3f} [")
    assert cells[3] == show_change(paired_change(*(row["scores"] for row in sampled)))
    # Without messages an honest player can only plan alone, so this control gains nothing.
    assert rows[4].startswith("| no messages, seed 0 |") and "+0.000 [" in rows[4]
    mean, worst, _, *training = rows[5:]
    assert mean.startswith(f"| mean of messages | {before:.3f} | {after:.3f} |")
    assert worst.startswith(f"| worst of messages | {before:.3f} | {after:.3f} |")
    assert [line.split("|")[1:3] for line in training[1:]] == [[" 1–1 ", " 0.5 "], [" 2–2 ", " - "]]
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        "t_score.svg",
        "t_messages.svg",
    }
    assert shown.count("```text") == 2 and "Before self-play" in shown


def test_methods_are_not_averaged_and_are_compared_seed_by_seed(tmp_path: Path) -> None:
    """A run of the first one's seed that begins from its warm start, and one of another seed."""
    folders = []
    for name, *words in (
        ("default", "seed=3"),
        ("kl", "seed=3", "algorithm.kl=0.5", "model.scratch=null", "model.path=warm_start"),
        ("other", "seed=4", "algorithm.kl=0.5"),
    ):
        folders.append(make_run(tmp_path / name, *words))
        write_lines(folders[-1] / "metrics.jsonl", STEPS)
    path = folders[1] / "held_out_after.json"
    rows = json.loads(path.read_text(encoding="utf-8"))
    rows["sampled"]["scores"] = [max(0.0, s - 0.25) for s in rows["sampled"]["scores"]]
    path.write_text(json.dumps(rows), encoding="utf-8")
    runs = compare_runs.read_runs(folders)
    assert [run.label for run in runs] == [
        "messages, seed 3", "algorithm.kl=0.5, seed 3", "algorithm.kl=0.5, seed 4"
    ]  # fmt: skip
    _, _, line = compare_runs.changes(runs).split("\n")
    assert line.startswith("- algorithm.kl=0.5, seed 3: -0.") and line.endswith("messages, seed 3")


def test_talk_effect_and_the_games_own_measures_are_summed_up_and_compared(tmp_path: Path) -> None:
    """Two seeds of one method, and another one, with a talk effect after self-play alone."""
    folders = []
    for number, words in enumerate((["seed=3"], ["seed=4"], ["seed=3", "algorithm.kl=0.5"])):
        folders.append(make_run(tmp_path / str(number), *words))
        path = folders[-1] / "held_out_after.json"
        rows = json.loads(path.read_text(encoding="utf-8"))
        rows["sampled"]["measures"]["days_named"] = number + 1.0
        rows["sampled"]["talk"] = {"effect": [0.1 * number, -0.5, 0.5]}
        rows["greedy"] = rows["sampled"]
        path.write_text(json.dumps(rows), encoding="utf-8")
    runs = compare_runs.read_runs(folders)
    table = [line.split(" | ") for line in compare_runs.results_table(runs).split("\n")]
    head, _, first, *_, mean, worst = table
    talk, own = head.index("talk effect [95 %]"), head.index("days named")
    assert (first[talk], first[own]) == ("- → +0.000 [-0.500, +0.500]", "- → 1.000")
    assert (mean[talk], mean[own]) == ("- → +0.050", "- → 1.500")
    assert (worst[talk], worst[own]) == ("- → +0.000", "")
    assert len({len(line) for line in (head, *table[2:])}) == 1
    *_, line = compare_runs.changes(runs).split("\n")
    end = ", talk effect +0.200, messages +0.000, days named +2.000 beside messages, seed 3"
    assert line.endswith(end)


def test_honesty_of_few_statements_says_how_few(tmp_path: Path) -> None:
    """3 of 3 and 50 of 100 true statements are 53 of 103, not the mean of 1 and 0.5."""
    folders = []
    for number, (said, honesty) in enumerate(((3, 1.0), (100, 0.5))):
        folders.append(make_run(tmp_path / str(number), f"seed={number}"))
        path = folders[-1] / "held_out_after.json"
        rows = json.loads(path.read_text(encoding="utf-8"))
        row = rows["sampled"]
        row["measures"] |= {
            "agreement": 1.0,
            "statements": said / len(row["scores"]),
            "honesty": honesty,
        }
        rows["greedy"] = row
        path.write_text(json.dumps(rows), encoding="utf-8")
    runs = compare_runs.read_runs(folders)
    head, _, *lines = compare_runs.results_table(runs).split("\n")
    place = head.split(" | ").index("honesty")
    shown = [line.split(" | ")[place].rpartition("→ ")[2] for line in lines]
    assert shown[:3] == ["1.000 of 3", "0.500", f"{53 / 103:.3f}"]


def test_what_shapes_learning_makes_another_method(tmp_path: Path) -> None:
    """Two seeds of the default, two of another number of steps, and a function whose file was
    changed between two runs; each has its own mean and training table."""
    own = "algorithm.advantage=examples/method/median.py:advantage"
    folders = []
    for number, words in enumerate(
        (
            ["seed=3"],
            ["seed=4"],
            ["seed=3", "steps=2"],
            ["seed=4", "steps=2"],
            ["seed=3", "warm_start.auxiliary_weight=0.5"],
        )
    ):
        folders.append(make_run(tmp_path / str(number), *words))
        write_lines(folders[-1] / "metrics.jsonl", [{"step": 1, "score": 0.25 * number}])
    runs = compare_runs.read_runs(folders)
    assert [run.method for run in runs] == [
        *("messages", "messages", "steps=2", "steps=2", "warm_start.auxiliary_weight=0.5")
    ]
    tables = compare_runs.training_tables(runs)
    assert [table.split("\n")[0] for table in tables] == [
        f"Training games, {method}:" for method in dict.fromkeys(run.method for run in runs)
    ]
    assert [table.split("| ")[-1] for table in tables] == ["0.125 |", "0.625 |", "1 |"]
    assert compare_runs.changes(runs).endswith(
        "- steps=2, mean of 2 seeds: score +0.000, messages +0.000"
    )
    pair = [make_run(tmp_path / digest, own) for digest in ("a1", "b2")]
    for folder in pair:
        write_lines(folder / "metrics.jsonl", STEPS)
        (folder / "code.txt").write_text(f"{own.replace('=', ' ')} sha256 {folder.name * 32}\n")
    assert [run.method for run in compare_runs.read_runs(pair)] == [
        *("messages", "algorithm.advantage of sha256 b2b2b2b2")
    ]
