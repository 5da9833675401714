"""Files of chats: what is read, and the one line that names the file and the row of what is not."""

import json
import os
import re
import subprocess
import sys
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pytest
from pyarrow import parquet

from dialop.rows import MAX_TEXT
from selfplay.config import load_config
from selfplay.data.chats import PASSED, Chat, check_shown, read_chats
from selfplay.data.instances import read_file
from selfplay.errors import SettingsError
from tests.helpers.house import ROOT

ASSISTANT = ("assistant",)


def message(role: Any, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TALK = [
    message("system", "Be brief."),
    message("user", "Hi"),
    message("assistant", "Grüße"),
    message("user", "Bye"),
    message("assistant", "So long"),
]
ROWS = [{"messages": TALK, "id": 1}, {"messages": TALK[1:3], "id": 2}]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


def save(path: Path, rows: list[Any]) -> Path:
    """The rows in the form that the path ends with."""
    if path.suffix == ".jsonl":
        return write(path, rows)
    rows = [dict.fromkeys(key for each in rows for key in each) | row for row in rows]
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        datasets = pytest.importorskip("datasets")
        saved = datasets.Dataset.from_list(rows[:1] + rows)
        saved.select(range(1, len(saved))).save_to_disk(path)
    return path


def texts(chats: tuple[Chat, ...]) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    return [(chat.system, chat.users, chat.answers) for chat in chats]


READ = [("Be brief.", ("Hi", "Bye"), ("Grüße", "So long")), ("", ("Hi",), ("Grüße",))]


@pytest.mark.parametrize("form", ["jsonl", "parquet", "datasets"])
def test_each_form_gives_the_same_chats(form: str, tmp_path: Path) -> None:
    path = save(tmp_path / f"chats.{form}", ROWS)
    chats = read_chats(str(path), ASSISTANT)
    assert texts(chats) == READ
    assert chats[1].name == f"{path} {'line 2' if form == 'jsonl' else 'row 1'}"


def test_byte_order_marks_line_ends_of_windows_and_blank_last_lines_are_read(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "chats.jsonl", ROWS)
    text = path.read_bytes().replace(b"\n", b"\r\n")
    path.write_bytes(b"\xef\xbb\xbf" + text + b"\r\n  \n\n")
    assert texts(read_chats(str(path), ASSISTANT)) == READ


def test_a_last_user_text_is_read_only_if_it_is_imitated(tmp_path: Path) -> None:
    path = str(write(tmp_path / "chats.jsonl", [{"messages": TALK[:4]}]))
    assert texts(read_chats(path, ASSISTANT)) == [("Be brief.", ("Hi",), ("Grüße",))]
    assert texts(read_chats(path, ("user",))) == [("Be brief.", ("Hi", "Bye"), ("Grüße",))]


@pytest.mark.parametrize("form", ["jsonl", "datasets"])
def test_chats_that_were_written_again_are_read_again(form: str, tmp_path: Path) -> None:
    """As in a notebook, whose process goes on."""
    path = tmp_path / f"chats.{form}"
    for rows, read in ((ROWS, READ), (ROWS[:1], READ[:1])):
        if form == "jsonl":
            write(path, rows)
        else:
            pytest.importorskip("datasets").Dataset.from_list(rows).save_to_disk(path)
        assert texts(read_chats(str(path), ASSISTANT)) == read


BAD: dict[str, tuple[Any, str]] = {
    "no messages": ({"text": "hi", "id": 3}, "must have messages, got text, id"),
    "no list": ({"messages": "hi"}, "messages must be a list of messages, got 'hi'"),
    "empty": ({"messages": []}, "messages must be a list of messages, got []"),
    "text": ({"messages": ["hi"]}, "message 0 must have a role and a content, got 'hi'"),
    "role": (
        {"messages": [message("human", "hi")]},
        "the role of message 0 must be system, user or assistant, got 'human'",
    ),
    "content": (
        {"messages": [message("user", None)]},
        "the content of message 0 must be text, got None",
    ),
    "parts": (
        {"messages": [message("user", [{"type": "text"}])]},
        "the content of message 0 must be text, got [{'type': 'text'}]",
    ),
    "order": ({"messages": [TALK[0], TALK[1], TALK[1]]}, "message 2 must be assistant, got user"),
    "late system": ({"messages": [*TALK, TALK[0]]}, "message 5 must be user, got system"),
    "tools": (
        {"messages": [TALK[1], message("assistant", "", tool_calls=[{"id": 1}])]},
        "message 1 must be only text, got tool_calls",
    ),
    "weight": (
        {"messages": [TALK[1], message("assistant", "hi", weight=0)]},
        "message 1 must have weight 1 or none, got 0; warm_start.chat_roles",
    ),
    **{
        f"{key} in a message": (
            {"messages": [TALK[1], message("assistant", "hi", **{key: value})]},
            f"message 1 must be only text, got {key} {value!r}; ",
        )
        for key, value in {
            "trainable": False,
            "train": True,
            "loss_mask": 0,
            "reasoning": "Hm.",
            "function_call": {"name": "f"},
            "refusal": "No.",
            "prefix": True,
            "end_turn": False,
        }.items()
    },
    **{
        f"{key} beside messages": (
            {"messages": TALK, key: value},
            f"must not have {key} next to messages, got {value!r}; ",
        )
        for key, value in {
            "tools": [{"a": 1}],
            "functions": [{"a": 1}],
            "system": "Lie.",
            "weight": 0.5,
            "loss_mask": [0, 1],
            "train": False,
            "Trainable": 0,
            "chat_template_kwargs": {"a": 1},
        }.items()
    },
    "a long text": (
        {"messages": [TALK[1], message("assistant", "a" * (MAX_TEXT + 1))]},
        f"messages must have at most 16000000 characters, got {MAX_TEXT + 16}",
    ),
    "nothing said": ({"messages": TALK[:2]}, "must have a turn to imitate (assistant), got none"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_in_one_line(name: str, tmp_path: Path) -> None:
    row, rule = BAD[name]
    path = write(tmp_path / "chats.jsonl", [*ROWS, row])
    line = rf"^warm_start\.chats: {re.escape(str(path))} line 3: .*{re.escape(rule)}[^\n]*$"
    with pytest.raises(SettingsError, match=line):
        read_chats(str(path), ASSISTANT)


MARKED = [name for name in BAD if name.endswith((" in a message", " beside messages"))]


@pytest.mark.parametrize(
    ("name", "form"),
    [*((name, "parquet") for name in MARKED), *((name, "datasets") for name in MARKED[::7])],
)
def test_a_mark_is_named_in_every_form(name: str, form: str, tmp_path: Path) -> None:
    """In a table every message has every key, and the rows without the mark have null there."""
    row, rule = BAD[name]
    path = save(tmp_path / f"chats.{form}", [*ROWS, row])
    with pytest.raises(SettingsError, match=rf"{re.escape(str(path))} row 2: {re.escape(rule)}"):
        read_chats(str(path), ASSISTANT)


@pytest.mark.parametrize("form", ["jsonl", "parquet", "datasets"])
def test_what_changes_nothing_is_read_and_named(form: str, tmp_path: Path) -> None:
    more = {"name": "Ann", "id": "a1", "metadata": {"lang": "en"}, "weight": 1, "loss_mask": None}
    talk = [{**TALK[1], "weight": 1.0}, {**TALK[2], **more, "tool_calls": []}]
    rows = [{"messages": talk, "weight": 1, "source": "x", "tools": [], "train": None}]
    (chat,) = read_chats(str(save(tmp_path / f"chats.{form}", rows)), ASSISTANT)
    assert (chat.users, chat.answers) == (("Hi",), ("Grüße",))
    passed = {f"messages.{key}" for key in PASSED}
    assert chat.unread == passed | {"source", "weight"}
    check_shown([chat], ())
    for key in PASSED:
        with pytest.raises(SettingsError, match=rf"^warm_start\.chats: .* must not have {key}, "):
            check_shown([chat], (key,))


def test_a_blank_line_between_rows_is_named(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(f"\n{json.dumps(ROWS[0])}\n")
    with pytest.raises(SettingsError, match="line 1: blank; a line is one object"):
        read_chats(str(path), ASSISTANT)


def test_what_is_no_source_of_chats_is_refused(tmp_path: Path) -> None:
    csv = tmp_path / "chats.csv"
    csv.write_text("a,b\n")
    with pytest.raises(SettingsError, match=r"chats: .*/none\.jsonl does not exist$"):
        read_chats(str(tmp_path / "none.jsonl"), ASSISTANT)
    for path in (csv, tmp_path):
        with pytest.raises(SettingsError, match=r"chats: must be a \.jsonl or \.parquet .*, got "):
            read_chats(str(path), ASSISTANT)
    with pytest.raises(SettingsError, match="contains no chats"):
        read_chats(str(write(tmp_path / "empty.jsonl", [])), ASSISTANT)
    near = r"empt\.jsonl does not exist; nearest is .*/empty\.jsonl$"
    with pytest.raises(SettingsError, match=near):
        read_chats(str(tmp_path / "empt.jsonl"), ASSISTANT)


def test_a_folder_of_splits_names_them_and_a_damaged_one_the_damage(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    split, home = datasets.Dataset.from_list(ROWS), tmp_path / "all"
    datasets.DatasetDict(train=split, test=split).save_to_disk(home)
    splits = f"one of {home}/test, {home}/train"
    with pytest.raises(SettingsError, match=f"must be one split, got all of {home}: {splits}"):
        read_chats(str(home), ASSISTANT)
    assert texts(read_chats(str(home / "train"), ASSISTANT)) == READ
    (saved,) = (home / "test").glob("*.arrow")
    saved.write_bytes(saved.read_bytes()[:100])
    with pytest.raises(SettingsError, match=f"{home}/test: not a readable dataset"):
        read_chats(str(home / "test"), ASSISTANT)


def hub_folder(folder: Path, num_splits: int = 1) -> Path:
    """A data set's folder as the hub has it: shards of its splits, and a page."""
    datasets = pytest.importorskip("datasets")
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text("# A data set\n")
    for split in ("train", "test")[:num_splits]:
        for number, row in enumerate(ROWS):
            shard = folder / "data" / f"{split}-{number:05d}-of-{len(ROWS):05d}.parquet"
            datasets.Dataset.from_list([row]).to_parquet(shard)
    return folder


def test_a_folder_of_the_hub_is_read_shard_by_shard(tmp_path: Path) -> None:
    one, two = hub_folder(tmp_path / "one"), hub_folder(tmp_path / "two", 2)
    assert texts(read_chats(str(one), ASSISTANT)) == READ
    with pytest.raises(SettingsError, match=f"must be one split, .* {two}/test, {two}/train"):
        read_chats(str(two), ASSISTANT)
    for path in (two / "train", one / "train"):
        assert texts(read_chats(str(path), ASSISTANT)) == READ
    with pytest.raises(SettingsError, match=r"two/trian does not exist; nearest is .*/two/train$"):
        read_chats(str(two / "trian"), ASSISTANT)


def test_instances_are_read_from_saved_and_from_hub_folders(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    game = load_config(None, ["game.options.size=2", "model.path=x"]).game
    made = game.kit.generate(game.options, seed=0, num=3)
    (tmp_path / "hub" / "data").mkdir(parents=True)
    game.kit.write(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet", made)
    rows = datasets.Dataset.from_parquet(str(tmp_path / "hub" / "data" / "*.parquet"))
    rows.save_to_disk(tmp_path / "saved")
    for path in ("hub", "hub/train", "saved"):
        assert list(read_file(game, "data.train", str(tmp_path / path))) == made
    with pytest.raises(SettingsError, match=r"^data\.train: .*hub/test does not exist"):
        read_file(game, "data.train", str(tmp_path / "hub" / "test"))


READ_IT = """
import sys
from selfplay.data.chats import read_chats
try:
    print(*(chat.answers for chat in read_chats(sys.argv[1], ("assistant",))))
except ValueError as error:
    print(error)
"""


def test_a_name_of_the_hub_is_downloaded_from_a_stand_in_for_it(tmp_path: Path) -> None:
    """A local server with the three answers that a download needs, not the hub itself."""
    files = hub_folder(tmp_path / "hub", 2)
    listed = [str(file.relative_to(files)) for file in sorted(files.rglob("*.*"))]
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            content, code = b"", 200
            if self.path.startswith("/api/datasets/we/chats/revision/"):
                siblings = [{"rfilename": name} for name in listed]
                about = {"id": "we/chats", "sha": "a" * 40, "siblings": siblings}
                content = json.dumps(about).encode()
            elif self.path.startswith("/api/datasets/we/chats/tree/"):
                sizes = {name: (files / name).stat().st_size for name in listed}
                tree = [{"type": "file", "path": n, "size": s, "oid": n} for n, s in sizes.items()]
                content = json.dumps(tree).encode()
            elif self.path.startswith("/datasets/we/chats/resolve/"):
                content = (files / unquote(self.path).split("/", 6)[6]).read_bytes()
            else:
                code = 404
            self.send_response(code)
            for name, value in {
                "Content-Length": str(len(content)),
                "ETag": f'"{sha256(content).hexdigest()}"',
                "X-Repo-Commit": "a" * 40,
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content if self.command == "GET" else b"")

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        told = []
        for name in ("we/chats/train", "we/none"):
            environment = os.environ | {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home")}
            environment |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
            done = subprocess.run(
                [sys.executable, "-c", READ_IT, name],
                env=environment, cwd=ROOT, capture_output=True, text=True,
            )  # fmt: skip
            told.append(done.stdout.strip() or done.stderr)
        server.shutdown()
    assert told[0] == " ".join(str(answers) for *_, answers in READ)
    assert told[1].startswith("warm_start.chats we/none is neither here") and "\n" not in told[1]
    assert not any("README" in path for path in asked)
