"""A bad data file gives a one-line error that names the file, status 2, and no output."""

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
from dialop.matching.kit import read as read_instances
from dialop.matching.kit import write as write_instances
from selfplay.errors import SettingsError
from selfplay.extras import prepare as collab
from selfplay.metrics.step_log import StepLog
from tests.helpers.collab_tasks import NUMBER
from tests.helpers.dialop_boards import RECORD, SCALED, SMALL
from tests.helpers.run_folders import bare_weights

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
ROW = {"prompt": "a", "completion": "b"}


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


def half(data: bytearray) -> bytearray:
    return data[: len(data) // 2]


NAN, HALF = (json.dumps(RECORD).replace(*pair) for pair in (("1.0", "NaN"), ("I see 7", "\\ud800")))
UNSEEN = {"table": [[5, 5], [5, 5]], "mask_0": [[0, 0]] * 2, "mask_1": [[0, 0]] * 2}
UNSEEN |= {"best": 10.0, "solo_0": 10.0, "solo_1": 10.0}
TASK, TEXTS = asdict(NUMBER), {"table": [["3", "7"]] * 2}
DEEP = '{"task": ' + "[" * 400
# The doors that read such a file, its ending, and what is wrong with it.
FILES: dict[str, tuple[str, str, Write]] = {
    "no parquet": ("eval prepare", ".parquet", content(b"")),
    "no rows": ("eval prepare", ".parquet", lambda path: write_instances(path, [])),
    "cut off": ("*", ".parquet", damaged(half)),
    "a bit flipped": ("eval prepare", ".parquet", damaged(flipped)),
    "another schema": ("eval prepare", ".parquet", parquet({"a": 1, "b": "x"})),
    "no line": ("eval prepare replay", ".jsonl", content(b"")),
    "no JSON": ("eval prepare replay", ".jsonl", content(b'{"table": [[1, 2\n')),
    "not UTF-8": ("*", ".jsonl", content(b'{"table": "\xff\xfe"}\n')),
    "too deep for Python": ("eval prepare replay", ".jsonl", content(b"[" * 100_000)),
    "NaN": ("eval prepare replay", ".jsonl", content(NAN.encode())),
    "half a character": ("eval prepare replay", ".jsonl", content(HALF.encode())),
    "a list": ("eval prepare replay", ".jsonl", content(b"[1, 2]\n")),
    "another ending": ("eval prepare", ".csv", content(b"key,size\n")),
    "a null": ("train", ".parquet", board("best", to=None)),
    "cells that are text": ("train", ".parquet", parquet(board_row() | TEXTS)),
    "a ragged table": ("train", ".parquet", board("table", to=[[3, 7], [1]])),
    "a cell of max_value": ("train", ".parquet", board("max_value", to=9)),
    "a mask of 5": ("train", ".parquet", board("mask_0", 0, 0, to=5)),
    "nothing to see": ("train", ".parquet", parquet(board_row() | UNSEEN)),
    "a scale of 0": ("train", ".parquet", board("scale_0", to=0.0)),
    "a wrong best": ("train", ".parquet", board("best", to=11.0)),
    "a key twice": ("train", ".parquet", parquet(board_row(), board_row())),
    "a key of two lines": ("train", ".parquet", board("key", to="a\n\x1b[2J")),
    "a name twice": ("train", ".parquet", board("reviewers", to=["Ava Li", "ava  li"])),
    "a game without a table": ("train start", ".jsonl", record("table", to=GONE)),
    "above the best": ("train start", ".jsonl", record("proposal_reward", to=10**12)),
    "a third player": ("train start", ".jsonl", record("action_log", 0, "player", to=2)),
    "an unknown entry": ("train start", ".jsonl", record("action_log", 0, "type", to="dance")),
    "no goal": ("ctrain ceval", ".jsonl", lines(put(TASK, ("goal",), GONE))),
    "an empty request": ("ctrain ceval", ".parquet", parquet({**TASK, "request": " "})),
    "a field too many": ("ctrain ceval", ".jsonl", lines({**TASK, "answer\n": "8"})),
    "a task twice": ("ctrain ceval", ".parquet", parquet(TASK, TASK)),
    "a long request": ("ctrain ceval", ".jsonl", lines({**TASK, "request": "a" * 16_000_001})),
    "no tests": ("ctrain ceval", ".jsonl", lines({**TASK, "task": "code", "tests": ""})),
    "no known columns": ("prepare", ".jsonl", lines({"question": "?"})),
    "a deep test": ("prepare", ".jsonl", lines({**ROW, "test": [[1]]})),
    "metadata of deep JSON": ("prepare", ".jsonl", lines({**ROW, "metadata": DEEP})),
}


# --- commands -----------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with settings and two runs; their weights are empty and never read."""
    for name, text in (("matching", SETTINGS), ("collab", COLLAB)):
        bare_weights(tmp_path / name / "final")
        (tmp_path / name / "config.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(kind: str, key: str, *more: str) -> Callable[[str], int]:
    words = ["--config", f"{kind}/config.yaml", "out=made", *more]
    return lambda path: train_door.main([*words, f"data.{key}={json.dumps(path)}"])


def evaluation(*words: str) -> Callable[[str], int]:
    return lambda path: eval_door.main([*words, "--games", path])


DOORS: dict[str, Callable[[str], int]] = {
    "train": train("matching", "train"),
    "validation": train("matching", "validation"),
    "test": train("matching", "test"),
    "start": train("matching", "train", "data.start=2"),
    "ctrain": train("collab", "train"),
    "eval": evaluation("matching"),
    "crossplay": evaluation("matching", "--partners", "scripted:honest"),
    "ceval": evaluation("collab"),
    "prepare": lambda path: collab.main(["--dataset", path, "--out", "made"]),
    "replay": lambda path: cli.main(["replay", path]),
}


@pytest.mark.parametrize("case", FILES)
def test_a_bad_file_is_refused(case: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One reader serves all keys of train.py and all modes of eval.py: two cases ("*") show each,
    of the others one door."""
    doors, ending, write = FILES[case]
    path = home / f"the_games{ending}"
    write(path)
    before = sorted(home.rglob("*"))
    for name in DOORS if doors == "*" else doors.split():
        if name == "replay" and ending != ".jsonl":
            continue
        status = DOORS[name](str(path))
        shown = capsys.readouterr()
        assert status == 2, f"{name}: status {status}, {shown}"
        assert len(shown.err.splitlines()) == 1, f"{name}: {shown.err!r}"
        assert path.name in shown.err, f"{name}: {shown.err!r}"
        assert shown.err.rstrip("\n").isprintable() and len(shown.err) < 1000
        assert not shown.out, f"{name}: {shown.out!r}"
        assert sorted(home.rglob("*")) == before, name


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
