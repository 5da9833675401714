"""The table, curves and games of several finished runs."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from bench import compare_runs
from selfplay.config import load_config
from selfplay.config.own_code import CODE, own_code, own_names, write_copies
from selfplay.config.text import dump
from selfplay.evaluation.rows import Row, read_row
from selfplay.evaluation.tables import paired_change, show_change
from tests.helpers.run_folders import make_run, write_lines

STEPS = [
    {"step": 1, "score": 0.5, "step_s": 40.0},
    # An entropy that was not finite.
    {
        "step": 2,
        "entropy": None,
        "non_finite": ["entropy"],
        "eval_score": 0.9,
        "eval_messages": 1.0,
        "step_s": 35.0,
    },
]


def held_out(folder: Path, stage: str = "after") -> dict[str, Any]:
    row = json.loads((folder / f"held_out_{stage}.json").read_text(encoding="utf-8"))["sampled"]
    assert isinstance(row, dict)
    return row


def made(folder: Path, *words: str, measures: dict[str, float] | None = None, **row: Any) -> Path:
    """A run with these fields in its row after self-play, sampled and greedy."""
    make_run(folder, *words)
    write_lines(folder / "metrics.jsonl", STEPS)
    (folder / "code.txt").write_text("started now\ncommit abc\nversions\n", encoding="utf-8")
    for stage in ("before", "after"):
        path = folder / f"held_out_{stage}.json"
        rows = json.loads(path.read_text(encoding="utf-8"))
        if stage == "after":
            rows["sampled"] |= row
            rows["sampled"]["measures"] |= measures or {}
        others = dict.fromkeys(("greedy", "honest", "solo"), rows["sampled"])
        path.write_text(json.dumps(rows | others), encoding="utf-8")
    return folder


def table_of(folders: list[Path]) -> tuple[list[str], list[list[str]]]:
    """The head and the lines of the results' table."""
    head, _, *lines = compare_runs.results_table(compare_runs.read_runs(folders)).split("\n")
    return head.split(" | "), [line.split(" | ") for line in lines]


def test_the_report_of_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seeds 3 and 4 beside a control without messages."""
    settings = ("game.options.messages=false", "seed=3", "seed=4")
    folders = [made(tmp_path / word, word) for word in settings]
    words = [*map(str, folders), "--out", str(tmp_path / "figures")]
    assert compare_runs.main([*words, "--name", "t"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    sampled = [read_row(held_out(folders[1], stage), "p", Row) for stage in ("before", "after")]
    before, after = (fmean(row.scores) for row in sampled)
    cells = [cell.strip() for cell in rows[2].split("|")[1:-1]]
    assert cells[0] == "messages, seed 3" and cells[-1] == "1m15s"
    assert cells[3] == show_change(paired_change(*sampled))
    # Without messages an honest player can only plan alone, so this control gains nothing.
    assert rows[4].startswith("| no messages, seed 0 |") and "+0.000 [" in rows[4]
    assert rows[5].startswith(f"| mean of messages | {before:.3f} | {after:.3f} |")
    figures = {path.name for path in (tmp_path / "figures").iterdir()}
    assert figures == {"t_score.svg", "t_messages.svg"}


def test_methods_are_not_averaged_and_are_compared_seed_by_seed(tmp_path: Path) -> None:
    """A run of the first one's seed that begins from its warm start, and one of another seed."""
    folders = [made(tmp_path / "default", "seed=3")]
    worse = [max(0.0, score - 0.25) for score in held_out(folders[0])["scores"]]
    begun = ("seed=3", "algorithm.kl=0.5", "model.scratch=null", "model.path=warm_start")
    folders.append(made(tmp_path / "kl", *begun, scores=worse))
    folders.append(made(tmp_path / "other", "seed=4", "algorithm.kl=0.5"))
    runs = compare_runs.read_runs(folders)
    labels = ["messages, seed 3", "algorithm.kl=0.5, seed 3", "algorithm.kl=0.5, seed 4"]
    assert [run.label for run in runs] == labels
    _, _, line = compare_runs.changes(runs).split("\n")
    assert line.startswith("- algorithm.kl=0.5, seed 3: -0.") and line.endswith("messages, seed 3")


def test_honesty_of_few_statements_says_how_few(tmp_path: Path) -> None:
    """3 of 3 and 50 of 100 true statements are 53 of 103, not the mean of 1 and 0.5."""
    folders = []
    for number, (said, honesty) in enumerate(((3, 1.0), (100, 0.5))):
        told = {"agreement": 1.0, "statements": said / 12, "honesty": honesty}  # of 12 games
        folders.append(made(tmp_path / str(number), f"seed={number}", measures=told))
    head, lines = table_of(folders)
    shown = [line[head.index("honesty")].rpartition("→ ")[2] for line in lines]
    assert shown[:3] == ["1.000 of 3", "0.500", f"{53 / 103:.3f}"]


def test_what_shapes_learning_makes_another_method(tmp_path: Path) -> None:
    """Two seeds of the default, two of another number of steps, and a function whose file was
    changed between two runs; each has its own mean and training table."""
    other = ("seed=3", "methods.auxiliary_imitation.weight=0.5")
    words = (["seed=3"], ["seed=4"], ["seed=3", "steps=2"], ["seed=4", "steps=2"], other)
    folders = [made(tmp_path / str(number), *each) for number, each in enumerate(words)]
    for number, folder in enumerate(folders):
        write_lines(folder / "metrics.jsonl", [{"step": 1, "score": 0.25 * number}])
    runs = compare_runs.read_runs(folders)
    methods = ["messages", "messages", "steps=2", "steps=2", other[1]]
    assert [run.method for run in runs] == methods
    tables = compare_runs.training_tables(runs)
    heads = [f"Training games, {method}:" for method in dict.fromkeys(methods)]
    assert [table.split("\n")[0] for table in tables] == heads
    assert [table.split("| ")[-1] for table in tables] == ["0.125 |", "0.625 |", "1 |"]
    end = "- steps=2, mean of 2 seeds: score +0.000, messages +0.000"
    assert compare_runs.changes(runs).endswith(end)
    own = "algorithm.advantage=examples/method/median.py:advantage"
    pair = [made(tmp_path / digest, own) for digest in ("a1", "b2")]
    for folder in pair:
        (folder / "code.txt").write_text(f"{own.replace('=', ' ')} sha256 {folder.name * 32}\n")
    labels = ["messages", "algorithm.advantage of sha256 b2b2b2b2"]
    assert [run.method for run in compare_runs.read_runs(pair)] == labels


def test_another_model_is_another_method_but_not_other_first_weights(tmp_path: Path) -> None:
    shared = ("model.scratch=null", "policies={one: {seats: [0]}, other: {seats: [1]}}")
    rows = (
        ("seed=3",),
        ("seed=4", "model.scratch.width=64"),
        ("seed=5", "data.train=x.parquet"),
        ("seed=6", *shared, "model.path=a"),
        ("seed=7", *shared, "model.path=b", "policies.one.model={path: c}"),
        ("seed=8", *shared, "model.path=b", "policies.one.optim={lr: 0.5}"),
    )
    runs = compare_runs.read_runs([made(tmp_path / words[0], *words) for words in rows])
    pair = "rollout.policy_seats=[player], policies.one.seats=[0], policies.other.seats=[1]"
    methods = ["messages", "model.scratch.width=64", "data.train=x.parquet", pair, pair]
    assert [run.method for run in runs[:5]] == methods
    assert "policies.one.optim={lr: 0.5}" in runs[5].method


def test_a_tool_that_is_taken_away_makes_another_method() -> None:
    words = ("model.path=x", "game.name=planning"), ("game.options.search=false",)
    configs = [load_config(None, list(given)) for given in (words[0], words[0] + words[1])]
    one, other = (compare_runs.Run("", "", each, (), {}, {}, {}, []) for each in configs)
    assert compare_runs.method_of(other, one) == "game.options.search=false"


def test_code_that_differs_is_told_by_its_key_or_its_file(tmp_path: Path) -> None:
    """Two classes of one's own at one key, a text, and a module that they import."""
    keys = ("methods a.py:A", "methods b.py:B", "methods.judge.rubric r.md", "my_part.py")
    pair = [made(tmp_path / digest, "seed=3") for digest in ("a1", "b2")]
    for folder in pair:
        told = [f"{key} sha256 {folder.name * 4}" for key in keys]
        same = "methods c.py:C sha256 " + "c3" * 4
        (folder / "code.txt").write_text("\n".join([*told, same, "", ""]))
    names = ("methods", "methods", "methods.judge.rubric", "my_part.py")
    method = ", ".join(f"{name} of sha256 b2b2b2b2" for name in names)
    assert [run.method for run in compare_runs.read_runs(pair)] == ["messages", method]


def test_seeds_of_ones_own_game_and_function_are_of_one_method(tmp_path: Path) -> None:
    """Although each run has its own copies."""
    own = ("game.name=examples/meeting/meeting.py", "game.options=null", "warm_start=off")
    own += ("algorithm.advantage=examples/method/median.py:advantage",)
    pair = [made(tmp_path / seed, f"seed={seed}") for seed in ("3", "4")]
    for folder in pair:
        path = folder / "config.yaml"
        path.write_text(dump(config := load_config(path, own)))
        (folder / CODE).mkdir()
        write_copies(own_code(own_names(config)), folder / CODE)
        assert load_config(path).game.name == str(folder / CODE / "meeting.py")
    assert [run.method for run in compare_runs.read_runs(pair)] == ["messages", "messages"]
