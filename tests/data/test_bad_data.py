"""A bad data file gives a one-line error that names the file, status 2, and no output.

Each file of the tables below is given to every command that reads such a file.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import eval as eval_door
import train as train_door
from dialop import cli
from dialop.collab.kit import write as write_tasks
from dialop.kit import load_kit
from dialop.matching.generate import MatchingRecipe
from dialop.matching.store import read_instances, write_instances
from selfplay.errors import SettingsError
from selfplay.extras import prepare as collab
from selfplay.metrics.step_log import StepLog
from tests.helpers.collab_tasks import NUMBER
from tests.helpers.dialop_boards import RECORD, SCALED, SMALL

generate = load_kit("matching").generate

SETTINGS = """
threads: 1
device: cpu
game:
  options: {size: 2, p_observed: 0.5, scale: false, max_value: 10, keep: exactly_one, brief: true}
model: {scratch: {width: 32, layers: 2, heads: 2, kv_heads: 2, mlp_width: 48,
                  max_positions: 1024, vocab_size: 400, tokenizer_games: 40}}
rollout: {instances: 1, max_new_tokens: 6, max_game_tokens: 160}
"""
OWN = "size: 2, p_observed: 0.5, scale: false, max_value: 10, keep: exactly_one, brief: true"
COLLAB = (
    SETTINGS.replace(OWN, "brief: true")
    .replace("game:", "game:\n  name: collab")
    .replace("instances: 1, ", "instances: 1, partners: ['scripted:user'], ")
)
COLLAB += """
warm_start: {teachers: [ask]}
"""

Row = dict[str, Any]
Write = Callable[[Path], object]

# --- files --------------------------------------------------------------------------------------


def board_row() -> Row:
    row: Row = {name: getattr(SMALL, name) for name in ("key", "size", "first_seat", "max_value")}
    row["table"] = [list(r) for r in SMALL.table]
    for seat in (0, 1):
        row[f"mask_{seat}"] = [list(r) for r in SMALL.masks[seat]]
        row[f"scale_{seat}"], row[f"solo_{seat}"] = SMALL.scales[seat], SMALL.solo[seat]
    row["best"] = float(SMALL.best)
    row["reviewers"], row["papers"] = list(SMALL.reviewers), list(SMALL.papers)
    return row


def put(row: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of nested values with the value at `path` replaced, or removed if it is GONE."""
    row = copy.deepcopy(row)
    inner = row
    for name in path[:-1]:
        inner = inner[name]
    if value is GONE:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return row


GONE = object()


def parquet(*rows: Row) -> Write:
    return lambda path: pq.write_table(pa.Table.from_pylist(list(rows)), path)


def board(*path: Any, to: Any) -> Write:
    """A parquet file whose second board has one value replaced."""
    return parquet({**board_row(), "key": "good"}, put(board_row(), path, to))


def lines(*values: Any) -> Write:
    return lambda path: path.write_text("".join(json.dumps(v) + "\n" for v in values))


def record(*path: Any, to: Any) -> Write:
    """A .jsonl whose second game has one value replaced."""
    return lines(RECORD, put(RECORD, path, to))


def content(data: bytes) -> Write:
    return lambda path: path.write_bytes(data)


def damaged(change: Callable[[bytearray], bytes | bytearray]) -> Write:
    """A parquet file as written here, its bytes changed."""

    def write(path: Path) -> None:
        boards = generate(MatchingRecipe(size=3, p_observed=0.5, keep="all"), seed=1, num=50)
        write_instances(path, boards)
        path.write_bytes(change(bytearray(path.read_bytes())))

    return write


def flipped(data: bytearray) -> bytearray:
    """Flip one bit of a cell; the page of the table's column holds 450 numbers."""
    column = pq.read_metadata(pa.BufferReader(bytes(data))).row_group(0).column(2)
    data[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    return data


UNREADABLE: dict[str, tuple[str, Write]] = {
    "parquet: empty": (".parquet", content(b"")),
    "parquet: no rows": (".parquet", lambda path: write_instances(path, [])),
    "parquet: cut off": (".parquet", damaged(lambda data: data[: len(data) // 2])),
    "parquet: a bit flipped": (".parquet", damaged(flipped)),
    "parquet: another schema": (".parquet", parquet({"a": 1, "b": "x"})),
    "jsonl: empty": (".jsonl", content(b"")),
    "jsonl: no JSON": (".jsonl", content(b'{"table": [[1, 2\n')),
    "jsonl: not UTF-8": (".jsonl", content(b'{"table": "\xff\xfe"}\n')),
    "jsonl: too deep for Python": (".jsonl", content(b"[" * 100_000)),
    "jsonl: NaN": (".jsonl", content(json.dumps(RECORD).replace("1.0", "NaN").encode())),
    "jsonl: half a character": (
        ".jsonl",
        content(json.dumps(RECORD).replace("I see 7", "\\ud800").encode()),
    ),
    "jsonl: a list": (".jsonl", content(b"[1, 2]\n")),
    "another ending": (".csv", content(b"key,size\n")),
}
BOARDS: dict[str, tuple[str, Write]] = {
    "a null": (".parquet", board("best", to=None)),
    "cells that are text": (".parquet", parquet(put(board_row(), ("table",), [["3", "7"]] * 2))),
    "a ragged table": (".parquet", board("table", to=[[3, 7], [1]])),
    "a mask of 5": (".parquet", board("mask_0", 0, 0, to=5)),
    "nothing to see": (
        ".parquet",
        parquet(
            board_row()
            | {"table": [[5, 5], [5, 5]], "mask_0": [[0, 0]] * 2, "mask_1": [[0, 0]] * 2}
            | {"best": 10.0, "solo_0": 10.0, "solo_1": 10.0}
        ),
    ),
    "a scale of 0": (".parquet", board("scale_0", to=0.0)),
    "a wrong best": (".parquet", board("best", to=11.0)),
    "a key twice": (".parquet", parquet(board_row(), board_row())),
    "a key of two lines": (".parquet", board("key", to="a\n\x1b[2J")),
    "a name twice": (".parquet", board("reviewers", to=["Ava Li", "ava  li"])),
    "a game without a table": (".jsonl", record("table", to=GONE)),
    "a game's score above the best": (".jsonl", record("proposal_reward", to=10**12)),
    "a third player": (".jsonl", record("action_log", 0, "player", to=2)),
    "an unknown entry": (".jsonl", record("action_log", 0, "type", to="dance")),
}
TASK = asdict(NUMBER)
TASKS: dict[str, tuple[str, Write]] = {
    "no goal": (".jsonl", lines(put(TASK, ("goal",), GONE))),
    "an empty request": (".parquet", parquet({**TASK, "request": " "})),
    "a field too many": (".jsonl", lines({**TASK, "answer\n": "8"})),
    "a key twice": (".parquet", parquet(TASK, TASK)),
    "a request that no tokenizer takes": (".jsonl", lines({**TASK, "request": "a" * 16_000_001})),
    "code without tests": (".jsonl", lines({**TASK, "task": "code", "tests": ""})),
}
ROWS: dict[str, tuple[str, Write]] = {
    "no known columns": (".jsonl", lines({"question": "?"})),
    "a deep tests": (".jsonl", lines({"prompt": "a", "completion": "b", "test": [[1]]})),
    "metadata of deep JSON": (
        ".jsonl",
        lines({"prompt": "a", "completion": "b", "metadata": '{"task": ' + "[" * 400}),
    ),
}


# --- commands -----------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with settings and two runs; their weights are empty and never read."""
    for name, text in (("matching", SETTINGS), ("collab", COLLAB)):
        model = tmp_path / name / "final"
        model.mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text(text)
        (model / "config.json").write_text("{}")
        (model / "model.safetensors").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(name: str, *keys: str) -> Callable[[Path], int]:
    def run(path: Path) -> int:
        words = [f"{key}={json.dumps(str(path))}" for key in keys]
        words += ["data.start=2"] * ("data.start" in name)
        kind = name.split()[0]
        return train_door.main(["--config", f"{kind}/config.yaml", "out=made", *words])

    return run


def evaluation(kind: str) -> Callable[[Path], int]:
    return lambda path: eval_door.main([kind, "--games", str(path)])


def crossplay(path: Path) -> int:
    words = ["matching", "--partners", "scripted:honest"]
    return eval_door.main([*words, "--games", str(path)])


def replay(path: Path) -> int:
    return cli.main(["replay", str(path)])


def prepare(path: Path) -> int:
    return collab.main(["--dataset", str(path), "--out", "made"])


MATCHING_DOORS = {
    "train": train("matching", "data.train"),
    "validation": train("matching", "data.validation"),
    "test": train("matching", "data.test"),
    "eval": evaluation("matching"),
    "crossplay": crossplay,
}
COLLAB_DOORS = {
    "train": train("collab", "data.train"),
    "eval": evaluation("collab"),
}


def check(
    doors: dict[str, Callable[[Path], int]],
    case: tuple[str, Write],
    home: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ending, write = case
    path = home / f"the_games{ending}"
    write(path)
    before = sorted(home.rglob("*"))
    for name, door in doors.items():
        status = door(path)
        shown = capsys.readouterr()
        assert status == 2, f"{name}: status {status}, {shown}"
        assert len(shown.err.splitlines()) == 1, f"{name}: {shown.err!r}"
        assert path.name in shown.err, f"{name}: {shown.err!r}"
        assert shown.err.rstrip("\n").isprintable() and len(shown.err) < 1000
        assert not shown.out, f"{name}: {shown.out!r}"
        assert sorted(home.rglob("*")) == before, name


@pytest.mark.parametrize("case", UNREADABLE)
def test_an_unreadable_file_is_refused(
    case: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One reader serves all keys of train.py and all modes of eval.py: one case shows each."""
    doors = {"eval": MATCHING_DOORS["eval"]}
    if case in ("parquet: cut off", "jsonl: not UTF-8"):
        doors = MATCHING_DOORS | {f"collab {k}": door for k, door in COLLAB_DOORS.items()}
    check({**doors, "prepare": prepare}, UNREADABLE[case], home, capsys)
    if UNREADABLE[case][0] == ".jsonl":
        check({"replay": replay}, ("_more.jsonl", UNREADABLE[case][1]), home, capsys)


@pytest.mark.parametrize("case", BOARDS)
def test_an_invalid_board_is_refused(
    case: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    doors = {"train": MATCHING_DOORS["train"]}
    check(doors, BOARDS[case], home, capsys)
    if BOARDS[case][0] == ".jsonl":
        starts = {"data.start": train("matching data.start", "data.train")}
        check(starts, ("_more.jsonl", BOARDS[case][1]), home, capsys)


@pytest.mark.parametrize("case", TASKS)
def test_an_invalid_task_is_refused(
    case: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(COLLAB_DOORS, TASKS[case], home, capsys)


@pytest.mark.parametrize("case", ROWS)
def test_rows_that_are_not_tasks_are_refused(
    case: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check({"prepare": prepare}, ROWS[case], home, capsys)


def test_the_good_files_are_read(home: Path) -> None:
    """The same rows without the change are valid, so only the change is refused."""
    parquet(board_row())(home / "good.parquet")
    assert read_instances(home / "good.parquet") == [SMALL]
    lines(RECORD, {**RECORD, "scale1": 2.5})(home / "good.jsonl")
    assert [i.scales for i in read_instances(home / "good.jsonl")] == [(1.0, 1.0), (2.5, 1.0)]
    write_instances(home / "two.parquet", [SMALL, SCALED])
    assert read_instances(home / "two.parquet") == [SMALL, SCALED]
    write_tasks(home / "task.parquet", [NUMBER])
    assert load_kit("collab").read(home / "task.parquet") == [NUMBER]


def test_random_damage_gives_one_line_or_valid_boards(tmp_path: Path) -> None:
    """Flipped bits and truncation anywhere: every board that is read can be played."""
    boards = generate(MatchingRecipe(size=3, p_observed=0.5, keep="all"), seed=1, num=20)
    path = tmp_path / "games.parquet"
    write_instances(path, boards)
    data, rng = path.read_bytes(), np.random.default_rng(0)
    num_refused = 0
    for _ in range(100):
        bad = bytearray(data)
        for place in rng.integers(len(bad), size=rng.integers(1, 4)):
            bad[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(bad if rng.random() < 0.8 else bad[: rng.integers(len(bad))])
        try:
            for instance in read_instances(path):
                instance.check()
        except ValueError as error:
            num_refused += 1
            assert path.name in str(error) and "\n" not in str(error)
    assert num_refused > 50


# --- a run's own files --------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad", [b"{", b"\xff", b"[1]", b"{}", b'{"step": "1"}', b"\0\0", b"[" * 9999]
)
def test_a_damaged_line_within_is_named(bad: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    before = b'{"step": 1}\n' + bad + b'\n{"step": 3}\n'
    path.write_bytes(before)
    with pytest.raises(SettingsError, match=r"metrics\.jsonl line 2"):
        StepLog(path, after_step=3)
    assert path.read_bytes() == before
