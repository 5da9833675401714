"""Published rows become instances and splits; errors name the place of the row."""

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dialop.collab.grading import grade
from dialop.collab.kit import digest, read, write
from dialop.collab.script import content_words, sentences
from selfplay.config import load_config
from selfplay.data.instances import trained_on
from selfplay.extras.prepare import SPLITS, main, rows_of
from selfplay.extras.published import instances_of
from tests.helpers.bwrap import needs_bwrap
from tests.helpers.collab_tasks import DOUBLE, LETTER, NUMBER
from tests.helpers.processes import largest_file

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "collab" / "tasks.jsonl"
MULTI: dict[str, Any] = {
    "prompt": [{"role": "user", "content": "Help me with a sum."}],
    "completion": "Which numbers?",
    "conv_id": 3,
    "turn_id": 1,
    "score": 0.5,
    "single_turn_prompt": "What is 2 plus 2?",
    "single_turn_completion": "It is \\boxed{4}.",
    "single_turn_metadata": {"level": "1"},
}


def of(*rows: dict[str, Any]) -> Any:
    return instances_of([(f"row {i}", row) for i, row in enumerate(rows)], name="set")


def test_a_multi_turn_row() -> None:
    later = {**MULTI, "prompt": [*MULTI["prompt"], {"role": "assistant", "content": "?"}]}
    (instance,) = of(MULTI, later)
    assert (instance.key, instance.task) == ("set/0", "math")
    assert instance.request == "Help me with a sum."
    assert instance.goal == "What is 2 plus 2?"
    assert grade(instance, "4") == 1.0 and grade(instance, "5") == 0.0


@needs_bwrap
def test_a_single_turn_row_and_its_task_type() -> None:
    (text,) = of({"prompt": "Write about owls.", "completion": "Owls fly at night."})
    assert text.task == "writing" and "owls" not in text.request
    (sum_,) = of({"prompt": "2 + 2?", "completion": " 4 ", "level": 1})
    assert (sum_.task, sum_.target) == ("math", "4")
    for completion in ("–4", "½", ".5", "70 + 2 = <<70+2=72>>72\n#### 72", "The answer is: 4"):
        assert of({"prompt": "2 + 2?", "completion": completion})[0].task == "math", completion
    packed = json.dumps({"answer": "def f(): return 1", "test": "assert f() == 1"})
    (code,) = of({"prompt": "Write f.", "completion": packed, "entry_point": "f"})
    assert (code.task, code.entry_point, code.target) == ("code", "f", "def f(): return 1")
    assert grade(code, code.target) == 1.0
    as_text = {**MULTI, "single_turn_metadata": json.dumps({"test": "assert f() == 1"})}
    assert of(as_text)[0].task == "code"


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"question": "?"}, "row 0: .*single_turn_prompt .*question"),
        ({**MULTI, "single_turn_completion": None}, "row 0: single_turn_completion"),
        ({**MULTI, "prompt": [3]}, "row 0: prompt"),
        ({**MULTI, "single_turn_metadata": "x"}, "row 0: single_turn_metadata"),
        ({**MULTI, "single_turn_metadata": {"task": "art"}}, "task .*math, writing"),
    ],
)
def test_a_row_of_unknown_shape_is_refused(row: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        of(row)


@needs_bwrap
def test_our_own_tasks_are_sound() -> None:
    """Every reference solution has grade 1, and no request contains the goal."""
    instances = instances_of(rows_of(str(EXAMPLES)), name="tasks")
    assert sorted({i.task for i in instances}) == ["code", "math", "writing"]
    assert len(instances) == 40
    for instance in instances:
        assert grade(instance, instance.target) == pytest.approx(1.0), instance.key
        assert len(sentences(instance.goal)) >= 2, instance.key
        known = content_words(instance.request)
        assert len(content_words(instance.goal) - known) >= 4, instance.key
        if instance.task == "writing":
            assert grade(instance, instance.request) < 0.2, instance.key


@needs_bwrap
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_prepare_splits_a_local_file(tmp_path: Path, suffix: str) -> None:
    rows = [json.loads(line) for line in EXAMPLES.read_text().splitlines()]
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        for row in rows:
            row["single_turn_metadata"] = json.dumps(row["single_turn_metadata"])
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text(EXAMPLES.read_text())
    out = tmp_path / "out"
    assert main(["--dataset", str(path), "--out", str(out), "--test", "0.2"]) == 0
    sizes = {"train": 28, "validation": 4, "test": 8}
    parts = {part: read(out / f"{part}.parquet") for part in sizes}
    assert {part: len(tasks) for part, tasks in parts.items()} == sizes
    goals = [instance.goal for tasks in parts.values() for instance in tasks]
    assert len(set(goals)) == 40
    again = tmp_path / "again"
    path.with_suffix(".jsonl").write_text("\n".join(json.dumps(row) for row in reversed(rows)))
    words = ["--dataset", str(path.with_suffix(".jsonl")), "--out", str(again)]
    assert main([*words, "--test", "0.2"]) == 0
    assert {i.goal for i in read(again / "test.parquet")} == {i.goal for i in parts["test"]}, (
        "a task's split does not depend on the order of the rows"
    )


def test_a_task_in_another_writing_is_in_the_same_split(tmp_path: Path) -> None:
    """Blank lines, other blanks, other forms of a character and case do not make another task."""
    forms: list[Callable[[str], str]] = [
        lambda text: text,
        lambda text: text.replace(". ", ".\n\n"),
        lambda text: text.replace(" ", "\u00a0"),
        lambda text: unicodedata.normalize("NFD", text),
        lambda text: text.replace(". ", ".\r\n"),
        str.upper,
        lambda text: text.replace("cats", "c\u00adats\u200b").replace("?", "？\t"),
    ]
    texts = [f"Zoé has {n} cats. How many legs has she seen?" for n in range(50)]
    rows = [{"prompt": form(text), "completion": "4"} for form in forms for text in texts]
    splits = []
    for name, written in (("a", rows), ("b", rows[::-1])):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in written))
        assert main(["--dataset", str(file), "--out", str(tmp_path / name)]) == 0
        parts = [read(tmp_path / name / f"{part}.parquet") for part in SPLITS]
        digests = [{digest(task) for task in part} for part in parts]
        assert sum(map(len, parts)) == len(set.union(*digests)) == 50
        splits.append([{task.goal for task in part} for part in parts])
    assert splits[0] == splits[1]
    # A held-out file of its own, in another writing and under other keys, is told.
    train = f"data.train={tmp_path}/a/train.parquet"
    write(tmp_path / "own.parquet", of(*rows[50:100]))
    config = load_config(
        None,
        [
            "game.name=collab",
            train,
            f"data.test={tmp_path}/own.parquet",
            "model.scratch={}",
            "rollout.max_game_tokens=999",
        ],
    )
    (warning,) = trained_on(config.game, config.data)
    assert warning.startswith("40 of the 50 instances of data.test")


def test_a_failed_prepare_leaves_the_splits_of_one_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last file, 170 of 200 tasks, is too large for the disk; the two before it are not."""
    rows = tmp_path / "rows.jsonl"
    texts = [f"Zoé has {n} cats. How many legs has she seen?" for n in range(200)]
    rows.write_text("".join(json.dumps({"prompt": t, "completion": "4"}) + "\n" for t in texts))
    words = ["--dataset", str(rows), "--out", str(tmp_path / "out"), "--test", "0.85"]
    assert main(words) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    sizes = {path.stem: len(data) for path, data in before.items()}
    with largest_file(sizes["test"] - 500):
        assert main([*words, "--seed", "1"]) == 2
    assert "too large" in capsys.readouterr().err.lower()
    assert sizes["train"] < sizes["test"] - 1000 and set(sizes) == set(SPLITS)
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert main([*words, "--seed", "1"]) == 0
    assert [*before] and all(path.read_bytes() != data for path, data in before.items())


@needs_bwrap
def test_what_prepare_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error_of(dataset: Path | str, *more: str) -> str:
        words = ["--dataset", str(dataset), "--out", str(tmp_path / "out"), *more]
        assert main(words) == 2
        return capsys.readouterr().err

    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps(MULTI) + "\n{}\n")
    assert f"{bad} line 2: " in error_of(bad)
    bad.write_text(json.dumps(MULTI) + "\nno\n")
    assert f"{bad} line 2: " in error_of(bad)
    assert "missing.jsonl" in error_of(tmp_path / "missing.jsonl")
    assert "--validation" in error_of(EXAMPLES, "--limit", "2")
    assert "--test" in error_of(EXAMPLES, "--test", "1")
    own = tmp_path / "out" / "train.parquet"
    own.parent.mkdir()
    own.write_bytes(b"mine")
    assert "--out must not replace --dataset" in error_of(own)
    assert own.read_bytes() == b"mine"


@needs_bwrap
def test_instances_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tasks.parquet"
    write(path, [NUMBER, LETTER, DOUBLE])
    assert read(path) == [NUMBER, LETTER, DOUBLE]
    lines = tmp_path / "tasks.jsonl"
    lines.write_text(json.dumps({"key": "a", "task": "math", "request": "r", "goal": "g"}) + "\n")
    with pytest.raises(ValueError, match=r"tasks\.jsonl line 1: .*target"):
        read(lines)
    write(path, [NUMBER, NUMBER])
    with pytest.raises(ValueError, match=r"row 1: key 'number' .* row 0"):
        read(path)
