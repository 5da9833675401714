"""Folders are there completely or not at all, wherever a process is killed, and lost files show."""

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from selfplay.atomic import MANIFEST, atomic_folder, clear_leftovers, damage, discard

OLD = {"a.bin": b"old" * 50, "deep/b.txt": b"old b"}
NEW = {"a.bin": b"new" * 70, "deep/c.txt": b"", "d.txt": b"more"}


def fill(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def write(folder: Path, files: dict[str, bytes]) -> None:
    with atomic_folder(folder) as place:
        fill(place, files)


def files_in(folder: Path) -> dict[str, bytes]:
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {
        str(p.relative_to(folder)): content for p, content in files.items() if p.name != MANIFEST
    }


def before_each_access(work: Callable[[], object], home: Path) -> list[Path]:
    """Do the work in a fork. Copies of `home` before each access to a file below it, which are what
    a SIGKILL there would leave; and `home` itself, as the work leaves it."""
    copies = home.parent / "copies"
    copies.mkdir()
    child = os.fork()
    if child == 0:
        lock, copying, num = threading.RLock(), False, 0

        def watch(name: str, arguments: tuple[object, ...]) -> None:
            nonlocal copying, num
            if name.startswith(("open", "os.", "shutil.")) and str(home) in str(arguments):
                with lock:
                    if not copying:  # the copy's own accesses
                        copying, num = True, num + 1
                        shutil.copytree(home, copies / f"{num:04d}")
                        copying = False

        sys.addaudithook(watch)
        work()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return [*sorted(copies.iterdir()), home]


@pytest.mark.parametrize("replaced", [False, True], ids=["new", "replaced"])
def test_killed_at_any_file_access_leaves_the_old_folder_or_the_new_one(
    tmp_path: Path, replaced: bool
) -> None:
    """What a person has put into it stays in both; a file of the new one comes before theirs."""
    home, found = tmp_path / "home", []
    home.mkdir()
    theirs = {"README.md": b"theirs", "notes/a.txt": b"note"} if replaced else {}
    if replaced:
        write(home / "folder", OLD)
        fill(home / "folder", theirs | {"d.txt": b"theirs too"})
    *killed, whole = before_each_access(lambda: write(home / "folder", NEW), home)
    for left in killed:
        clear_leftovers([left], ["folder"])
        there = (left / "folder").exists()
        assert there or not replaced
        assert list(left.iterdir()) == [left / "folder"] * there
        found.append(files_in(left / "folder") if there else None)
        assert found[-1] in (NEW | theirs, OLD | theirs | {"d.txt": b"theirs too"}, None)
        assert not there or damage(left / "folder") is None
    assert len(found) > 15
    new = NEW | theirs
    assert found == sorted(found, key=lambda files: files == new), "old, then new"
    assert new in found and found[0] != new and files_in(whole / "folder") == new


def test_killed_while_it_is_deleted_a_folder_is_gone_or_whole(tmp_path: Path) -> None:
    home = tmp_path / "home"
    write(home / "folder", OLD)
    *killed, gone = before_each_access(lambda: discard(home / "folder"), home)
    for left in killed:
        clear_leftovers([left], ["folder"])
        assert not (left / "folder").exists() or damage(left / "folder") is None
        assert list(left.iterdir()) == [left / "folder"] * (left / "folder").exists()
    assert len(killed) > 4 and not (gone / "folder").exists()


def test_only_leftovers_of_names_that_are_written_are_deleted(tmp_path: Path) -> None:
    """Of `step_*` folders and a file; a person's folders and files of similar names stay."""
    ours = [".partial-step_1/a", ".old-step_2/a", "step_2/a", "a.json.new"]
    fill(tmp_path, dict.fromkeys(ours, b"ours"))
    theirs = [
        "notes.new",
        "step_1.new/a",
        ".partial-x/a",
        ".old-x/a",
        ".old-step_3",
        "b.json.new/a",
    ]
    fill(tmp_path, dict.fromkeys(theirs, b"theirs"))
    clear_leftovers([tmp_path], ["step_*"], ["a.json", "b.json"])
    assert files_in(tmp_path) == dict.fromkeys(theirs, b"theirs") | {"step_2/a": b"ours"}


def test_everything_is_on_disk_before_the_folder_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file, every folder and the manifest, then the name; the manifest after the files."""
    done: list[str] = []
    sync, rename = os.fsync, Path.rename

    def recorded_sync(handle: int) -> None:
        sync(handle)
        done.append(str(Path(f"/proc/self/fd/{handle}").readlink()))

    def recorded_rename(path: Path, target: Path) -> Path:
        done.append(f"{path} is {target}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", recorded_sync)
    monkeypatch.setattr(Path, "rename", recorded_rename)
    write(tmp_path / "folder", NEW)
    partial = tmp_path / ".partial-folder"
    names = {str(partial / name) for name in (*NEW, "deep", ".", MANIFEST)}
    named = done.index(f"{partial} is {tmp_path / 'folder'}")
    assert set(done[:named]) == names
    manifest = done.index(str(partial / MANIFEST))
    assert all(done.index(str(partial / name)) < manifest for name in NEW)
    assert done[named + 1 :] == [str(tmp_path)]


@pytest.mark.parametrize(
    ("harm", "found"),
    [
        (lambda f: (f / "a.bin").write_bytes(b"new" * 69), "a.bin has 207 bytes instead of 210"),
        (lambda f: (f / "deep" / "c.txt").unlink(), "deep/c.txt is missing"),
        (lambda f: (f / "a.bin").write_bytes(b"new" * 69 + b"neW"), "a.bin has other bytes than"),
        (lambda f: (f / MANIFEST).unlink(), f"{MANIFEST} is missing"),
        (lambda f: (f / MANIFEST).write_bytes(b""), f"{MANIFEST} cannot be read"),
    ],
)
def test_damage_is_named_by_file(tmp_path: Path, harm: object, found: str) -> None:
    folder = tmp_path / "folder"
    write(folder, NEW)
    assert damage(folder) is None
    harm(folder)  # type: ignore[operator]
    assert found in (damage(folder) or "")


def test_a_manifest_from_before_digests_stays_readable(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    write(folder, NEW)
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({"sizes": manifest["sizes"]}))
    assert damage(folder) is None
    (folder / "d.txt").write_bytes(b"mor")
    assert damage(folder) == "d.txt has 3 bytes instead of 4"
