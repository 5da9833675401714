"""The user's files that settings name, and the copies of them that a run keeps in `code/`.

A copy's path below `code/` follows its module's name. The index in `code/` has each file's setting,
original path and sha256. `RUN/config.yaml` names the files as given; loading it uses the copies, so
that a run means the same in every folder and after its files have changed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, Literal

from dialop.kit import games
from dialop.modules import KEPT, imported_digest, is_own, own_files, own_module, sha256_of, texts_in
from selfplay.config.moved import MOVED
from selfplay.config.plugins import own_functions
from selfplay.errors import SettingsError

CODE = "code"  # the folder of copies in a run
TEXT_OF = "methods."  # prefix of the keys of texts that a method reads
UNTIL = "until_step_"  # prefix of the folders in it with copies up to a step with a code change
GAME = "game.name"
_MAX_DATA = 2**20  # bytes of the largest file that is copied because a module names it


@dataclass(frozen=True, slots=True)
class OwnCode:
    """`named` maps each setting "KEY VALUE" to its file's name below `code/`. `files` maps the name
    of each of these files, and of the modules that they import, to its path and sha256."""

    named: Mapping[str, str]
    files: Mapping[str, tuple[Path, str]]

    @property
    def digests(self) -> dict[str, str]:
        return {name: digest for name, (_, digest) in self.files.items()}


def played_names(config: Any) -> list[tuple[str, str]]:
    """The keys of `own_names` whose code plays games, and their values."""
    return [each for each in own_names(config) if each[0] in (GAME, "rollout.player")]


def own_names(config: Any) -> Iterator[tuple[str, str]]:
    """Each key that names code or a text of the user, and its value."""
    for name in config.policies:
        yield from own_names(config.of_policy(name))
    if is_own_game(config.game.name):
        yield GAME, config.game.name
    yield from own_functions(config)
    for name, options in config.methods.items():
        for field in getattr(options, "FILES", ()):
            if (value := getattr(options, field)) is not None:
                yield f"{TEXT_OF}{name}.{field}", value


def is_plain(key: str) -> bool:
    """Whether a key's value is a file without a function in it."""
    return key == GAME or key.startswith(TEXT_OF)


def is_own_game(name: str) -> bool:
    """Whether a game is the user's file or module, not from this package or a bridge."""
    return name not in games() and ":" not in name


def same_module(one: str, other: str) -> bool:
    """Whether two custom games have the same module name; Python imports only one of them."""
    stems = {Path(n).stem if n.endswith(".py") else n.rpartition(".")[2] for n in (one, other)}
    return len(stems) == 1 and is_own_game(one) and is_own_game(other)


def own_code(names: Iterable[tuple[str, str]]) -> OwnCode:
    """The files that these keys and values name, with the modules that they import, except
    installed packages.

    Raises SettingsError if a file has changed since this process imported it: Python does not
    import a module again.
    """
    named, files = dict[str, str](), dict[str, tuple[Path, str]]()
    for key, value in names:
        module, path = _module_of(key, value)
        if module is None:
            if path.is_file():
                name = path.name if path.suffix != ".py" else f"{path.name}.txt"
                named[f"{key} {value}"], files[name] = name, (path, sha256_of(path))
            continue
        is_file = value.partition(":")[0].endswith(".py") or is_own(path)
        if module.__name__ == "__main__" or not is_file:  # a notebook cannot be imported
            continue
        for dotted, file in own_files(module.__name__, path).items():
            package = dotted if file.name == "__init__.py" else dotted.rpartition(".")[0]
            name = str(PurePosixPath(*filter(None, package.split(".")), file.name))
            named.setdefault(f"{key} {value}", name)
            files[name] = file, _unchanged(file)
            for text in texts_in(file):
                if (data := _data_at(file.parent, text)) is not None:
                    files[str(PurePosixPath(name).parent / text)] = data, sha256_of(data)
    return OwnCode(named, files)


def _data_at(folder: Path, text: str) -> Path | None:
    """The file that a text names below this folder, if it is small and neither code nor hidden."""
    parts = PurePosixPath(text).parts
    if not parts or any(p[0] in "./" for p in parts) or not text.isprintable():
        return None
    if len(text.encode()) > 200:  # too long for a file's name
        return None
    path = folder.joinpath(*parts)
    is_data = path.suffix != ".py" and path.is_file() and path.stat().st_size <= _MAX_DATA
    return path if is_data else None


def digest_of(key: str, value: str) -> str:
    """The sha256 of the file that a key names, "unknown" without a file."""
    path = _module_of(key, value)[1]
    return sha256_of(path) if path.is_file() else "unknown"


@cache
def game_digest(name: str) -> str:
    """The sha256 of a user's game with the modules that it imports, as this process imported them,
    in 16 hexadecimal digits; "" for a game of a package."""
    if not is_own_game(name):
        return ""
    module, path = _module_of(GAME, name)
    files = own_files(module.__name__, path).values() if module else ()
    return hashlib.sha256("".join(sorted(map(imported_digest, files))).encode()).hexdigest()[:16]


def _module_of(key: str, value: str) -> tuple[ModuleType | None, Path]:
    """The module that a key names, None for a text, and its file: the given path, if the value is
    one, even if an identical file was imported from another path."""
    name = value if is_plain(key) else value.rpartition(":")[0]
    if key.startswith(TEXT_OF):
        return None, Path(name).resolve()
    module = own_module(name, what=key, expected=f"a module or a .py file, got {name}")
    file = name if name.endswith(".py") else getattr(module, "__file__", None) or "/"
    return module, Path(file).resolve()


def _unchanged(file: Path) -> str:
    first, now = imported_digest(file), sha256_of(file)
    if first != now:
        raise SettingsError(
            f"{file} must not change after its import: this process still runs the old version; "
            "restart Python (in a notebook, the kernel)"
        )
    return now


# --- the copies of a run --------------------------------------------------------------------------


def kept_in(folder: Path | None) -> OwnCode | None:
    """The index of a folder of copies, with the files' original paths; None without a folder or an
    index. Raises SettingsError for an index that cannot be read."""
    if folder is None or not (path := folder / KEPT).is_file():
        return None
    try:
        index = json.loads(path.read_bytes())
        files = {
            name: (Path(each.get("from", "")), str(each["sha256"]))
            for name, each in index["files"].items()
        }
        if outside := [name for name in files if {"..", "/"} & {*PurePosixPath(name).parts}]:
            raise ValueError(f"{outside[0]} is outside the folder")
        return OwnCode({what: str(name) for what, name in index["named"].items()}, files)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise SettingsError(
            f"{path} must be the index of a run's code: {error!r}; restore the file"
        ) from None


def write_copies(code: OwnCode, folder: Path) -> None:
    """Copy the files into a folder, with their index. For a copy, the index has the original."""
    index = {}
    for name, (path, digest) in code.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)
        index[name] = {"sha256": digest, "from": str(_original(path))}
    text = json.dumps({"named": code.named, "files": index}, indent=1, ensure_ascii=False)
    (folder / KEPT).write_text(text + "\n", encoding="utf-8", errors="backslashreplace")


def home_of(value: str) -> Path | None:
    """The folder of copies that contains this file, or the file of this function."""
    return next((home for home in Path(value).parents if (home / KEPT).is_file()), None)


def _original(path: Path) -> Path:
    """The original path of a copy, else the path itself."""
    kept = kept_in(home := home_of(str(path)))
    if home is None or kept is None:
        return path
    return kept.files.get(path.relative_to(home).as_posix(), (path, ""))[0]


def copies_of(settings: Path | None) -> Path | None:
    """The folder of copies that belongs to a run's settings, its config.yaml."""
    if settings is None or settings.name != "config.yaml":
        return None
    homes = (settings.parent / CODE, settings.parent)
    return next((home for home in homes if (home / KEPT).is_file()), None)


def earlier_code(home: Path) -> dict[int, Path]:
    """The folders in `code/` with the copies of a run up to a step, by the step."""
    paths = {path.name.removeprefix(UNTIL): path for path in sorted(home.glob(f"{UNTIL}*"))}
    return {int(step): path for step, path in paths.items() if step.isdecimal()}


Code = Literal["copies", "originals", "none"]  # which files the settings of a run refer to


def with_code(settings: Path, values: dict[str, Any], code: Code) -> dict[str, Any]:
    """The values of a run's settings, with the user's files named as `renamed` says."""
    for key, value, name in renamed(settings, code):
        put_name(values, key, value, name)
    return values


def renamed(settings: Path, code: Code) -> Iterator[tuple[str, str, str]]:
    """Each key of a run's settings that names a file of the user, its value, and the path of the
    run's copy, or the original path where the given one does not exist."""
    kept = kept_in(home := copies_of(settings)) if code != "none" else None
    if kept is None:
        return
    for what, name in kept.named.items():
        key, _, value = what.partition(" ")
        key = MOVED.get(key, key)
        file, colon, function = (value, "", "") if is_plain(key) else value.rpartition(":")
        if code == "copies" and name in kept.files:
            file = f"{home}/{name}"
        elif file.endswith(".py") and not Path(file).is_file():  # it was given from another folder
            file = str(kept.files[name][0])
        yield key, value, f"{file}{colon}{function}"


def put_name(values: dict[str, Any], key: str, value: str, name: str) -> None:
    """Replace the value of a key by another name, of the run and of its policies, also inside a
    list or mapping of names."""
    for own in (values, *filter(None, values.get("policies", {}).values())):
        home, field = section_of(own, key)
        if field in home:
            home[field] = _renamed(home[field], value, name)


def section_of(values: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """The section of a dotted key, empty if it is absent, and the key's last part."""
    *sections, field = key.split(".")
    for section in sections:
        of = values.get(section)
        values = of if isinstance(of, dict) else {}
    return values, field


def _renamed(entries: Any, value: str, name: str) -> Any:
    """A name, or a list or mapping of names, with one of them replaced."""
    if isinstance(entries, list):
        return [_renamed(each, value, name) for each in entries]
    if isinstance(entries, dict):
        return {name if key == value else key: of for key, of in entries.items()}
    return name if entries == value else entries


def changed_originals(home: Path, *, of_game: bool = False) -> str:
    """A line that names the originals of this folder's copies that have changed or are gone; "" if
    there are none. With `of_game` only the game and imported modules count."""
    kept = kept_in(home)
    if kept is None:
        return ""
    others = {name for what, name in kept.named.items() if of_game and not what.startswith(GAME)}
    there = dict(each for name, each in kept.files.items() if name not in others)
    found = [f"{path} is gone" for path in there if not path.is_file()]
    files = (path for path in there if path.is_file())
    found += [f"{path} differs" for path in files if sha256_of(path) != there[path]]
    return f"code: {home} has the code of its run: {', '.join(found)}" if found else ""


def all_changed_originals(names: Iterable[tuple[str, str]]) -> list[str]:
    """The lines of `changed_originals` for the folders of copies that these values name."""
    homes = dict.fromkeys(home for _, value in names if (home := home_of(value)))
    return [line for home in homes if (line := changed_originals(home))]


def other_code(names: Sequence[tuple[str, str]], settings: Path | None) -> list[str]:
    """The files of these keys in the run of these settings that are missing here, or differ from
    the files that the keys name here."""
    kept = kept_in(copies_of(settings))
    if kept is None:
        return []
    used = own_code(names).digests
    keys = {key for key, _ in names}
    named = {name for what, name in kept.named.items() if what.partition(" ")[0] in keys}
    both = named | (used.keys() & kept.files.keys())
    return sorted(name for name in both if used.get(name) != kept.digests[name])
