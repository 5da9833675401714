"""Reads settings: YAML files, mappings and `key.sub=value` overrides, checked by pydantic.

A file or a mapping may extend another with `base: FILE`, a path relative to itself or the name of
a shipped file. Mappings merge key by key; any other value, and an empty mapping, replaces the one
below it: `methods={}` is no method, `optim={}` has the defaults. Every mistake raises a
SettingsError of one line: the file and line or the override, the key, the rule, the value, and the
nearest valid choice.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError, with_config

from dialop.specs import nearest
from selfplay.config.features import section_class
from selfplay.config.moved import MOVED, migrated
from selfplay.config.own_code import Code, with_code
from selfplay.config.schema import RULES, join, names_of
from selfplay.config.secrets import hidden, names_key
from selfplay.config.text import Loader, show
from selfplay.errors import SettingsError

C = TypeVar("C")
Settings = Path | Mapping[str, Any]  # a file, or a file's values
Origins = dict[str, str]  # the source of each key: "FILE:LINE" or "override 'key=value'"

_PACKAGE = Path(__file__).resolve().parents[1]
_MEANT = {"gpu": "cuda"}  # words whose nearest choice by spelling is the wrong one


def load(
    cls: type[C],
    given: Settings | None,
    overrides: Sequence[str] = (),
    *,
    code: Code = "copies",
    own: str = "",
) -> C:
    """Read `given` (None: defaults only), then apply `overrides` in order. `own` names
    settings such as policies.user, whose own sections are merged over the run's.

    The settings of a run, RUN/config.yaml, refer to the run's copies of the user's files
    (`own_code`), or to the originals. With `code` "none" no custom game is imported: its options
    stay as given, unchecked.

    Raises:
        SettingsError: for unreadable files, unknown keys, invalid values and contradictions.
    """
    values, origins = _read_all(given, overrides, code)
    home, (section, _, name) = f"{own}.", own.partition(".")
    owned = {key[len(home) :]: origin for key, origin in origins.items() if key.startswith(home)}
    if own:
        values = _merged({**values, section: {}}, section_class(section).values_of(name, values))
        origins = origins | owned
    declared = [(cls, "")]  # a game adds the class of its options and their section
    context = {"declared": declared, "imports": code != "none"}
    try:
        return TypeAdapter(cls).validate_json(json.dumps(values), context=context)
    except ValidationError as error:
        fault, *more = error.errors(include_url=False)
    name, named = ".".join(map(str, fault["loc"])), []
    name, or_word = re.subn(r"\.(constrained-)?(int|float|bool)$", "", name)  # a number or a word
    words = re.findall("'([^']*)'", more[0]["msg"]) if or_word and more else ()
    if fault["type"] == "value_error":  # from a check, whose message names the keys
        rule = str(fault["ctx"]["error"])
        named = re.findall(r"^[a-z_]+(?=:? )|[a-z_]+(?=\.\*)|[a-z_]+(?:\.\w+)+", rule)
    elif name in MOVED:
        rule = f"{name} is {MOVED[name]} now (CHANGELOG.md)"
    elif fault["type"] == "unexpected_keyword_argument":
        rule = _unknown(name, [each for section in declared for each in names_of(*section)])
    else:
        rule = _wrong(name, fault, words)
    where = [origins[each] for each in named if each in origins] or [_origin_of(name, origins)]
    told = {name, *named, *re.findall(r"nearest is ([a-z_.]+)$", rule)}
    for key in {each for each in told if _origin_of(each, owned)}:
        rule = re.sub(rf"(?<![\w.]){re.escape(key)}(?![\w.])", home + key, rule)
    raise SettingsError(f"{', '.join(dict.fromkeys(where)) or source_of(given)}: {rule}")


def typed_options(kind: type, given: Mapping[str, Any], *, what: str) -> Any:
    """The options of custom code: an instance of its `Options` dataclass with these values.

    Raises:
        ValueError: one line that begins with `what` and the key.
    """
    try:
        return TypeAdapter[Any](with_config(RULES)(kind)).validate_json(json.dumps(given))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
    name = ".".join(map(str, (what, *fault["loc"])))
    if fault["type"] == "unexpected_keyword_argument":
        raise ValueError(_unknown(name, [f"{what}.{each}" for each in names_of(kind)]))
    raise ValueError(_wrong(name, fault, ()))


def source_of(given: Settings | None) -> str:
    """The name of these settings in messages."""
    return "settings" if isinstance(given, Mapping) else str(given or "defaults")


def override_words(
    overrides: Mapping[str, Any] | None, more: Mapping[str, Any] | None = None
) -> list[str]:
    """These dotted keys and values as `key=value` overrides; `more` wins.

    Raises:
        SettingsError: for overrides that are not a mapping, or a value that YAML cannot represent.
    """
    if not isinstance(overrides, Mapping | None):
        raise SettingsError(
            f"overrides must be a mapping, as in {{'optim.lr': 1e-5}}, got {overrides!r}"
        )
    words = []
    for name, value in {**(overrides or {}), **(more or {})}.items():
        plain = _named(value)
        try:
            words.append(f"{name}={json.dumps(plain, ensure_ascii=False, allow_nan=False)}")
        except (TypeError, ValueError) as error:
            raise SettingsError(f"{name} must be plain values, as in YAML: {error}") from None
    check_once(words)
    return words


def _named(value: Any) -> Any:
    """The value with each path, class and function in it replaced by its name, at every depth."""
    if isinstance(value, Mapping):
        return {_named(key): _named(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_named(each) for each in value]
    if isinstance(value, type | FunctionType):
        return f"{value.__module__}:{value.__qualname__}"
    return str(value) if isinstance(value, Path) else value


def check_once(overrides: Sequence[str]) -> None:
    """Raise SettingsError if one of these overrides sets a key that an earlier one sets, on its own
    or inside a section: the last one would win."""
    given: dict[str, str] = {}  # each key without keys below it, and the override that sets it
    for text in overrides:
        _, lines, source = _override(text)
        for name in lines:
            if any(other.startswith(f"{name}.") for other in lines):
                continue
            if twice := [each for each in given if f"{each}.".startswith(f"{name}.")]:
                first = given[twice[0]]
                raise SettingsError(f"{source}: {twice[0]} is given by {first} too; leave one out")
            given[name] = source


def read_value(given: Settings | None, overrides: Sequence[str], name: str) -> Any:
    """The value given for one dotted key, unchecked; None if it is not given.

    Raises:
        SettingsError: for files and overrides that cannot be read.
    """
    value: Any = _read_all(given, overrides)[0]
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


# --- messages


def _wrong(name: str, fault: Mapping[str, Any], words: Sequence[str]) -> str:
    """The line for a value that breaks a rule, close to pydantic's, or is not in `words`."""
    value, rule = fault["input"], re.sub("^[A-Z][a-z]+ should ", "must ", fault["msg"])
    rule = rule.replace("greater than or equal to", "at least")
    rule = rule.replace("less than or equal to", "at most")
    rule = rule.replace("an object", f"a section, as {name}: {{KEY: VALUE}}")
    rule = rule.replace("a valid array", "a list, as [A, B]")
    got = "a value not shown here" if names_key(name) else hidden(show(value))[:200]
    choices = re.findall("'([^']*)'", rule) if fault["type"] == "literal_error" else words
    other = "".join(f", or {word}" for word in words)
    if fault["type"] == "string_type" and isinstance(value, bool | int | float):
        got += "; quote text that YAML would read as another type"
    return f"{name} {rule}{other}, got {got}{nearest(_MEANT.get(str(value), str(value)), choices)}"


def _unknown(name: str, names: Sequence[str]) -> str:
    """The line for an unknown key. It suggests a key of another section with the same last part,
    else the nearest key of the same section, else it lists the section's keys."""
    home, _, last = name.rpartition(".")
    if name in names:
        return f"{name} must be written below its section, as {home}: {{{last}: VALUE}}"
    same = [other for other in names if other.rpartition(".")[2] == last]
    siblings = dict.fromkeys(e.rpartition(".")[2] for e in names if e.rpartition(".")[0] == home)
    beside = difflib.get_close_matches(last, siblings if home else names, 1)
    near = difflib.get_close_matches(name, same, 1, 0.0) or [join(home, e) for e in beside]
    hint = f"nearest is {near[0]}" if near else f"valid here are {', '.join(siblings) or 'none'}"
    return f"unknown key {name}; {hint}"


def _origin_of(name: str, origins: Origins) -> str:
    """The source of a key, or of its section; "" if neither was given."""
    while name and name not in origins:
        name = name.rpartition(".")[0]
    return origins.get(name, "")


# --- files and overrides


def _read_all(
    given: Settings | None, overrides: Sequence[str], code: Code = "copies"
) -> tuple[dict[str, Any], Origins]:
    """The given values with the overrides applied in order, and their sources."""
    values, origins = dict[str, Any](), Origins()
    if isinstance(given, Mapping):
        values, origins = _based(*_of_mapping(given), Path())
    elif isinstance(given, str | Path):
        values, origins = _read(find_settings(Path(given)), code=code)
    elif given is not None:
        raise SettingsError(f"settings must be a file, its name or a mapping, got {given!r}")
    for text in overrides:
        over, lines, source = _override(text)
        origins |= dict.fromkeys(lines, source)
        values = _merged(values, over)
    return values, origins


def _override(text: str) -> tuple[Any, dict[str, int], str]:
    """The value of an override `key=value`, its keys, and its name in messages."""
    name, equals, value = (part.strip() for part in text.partition("="))
    shown = f"{name}=…" if equals and names_key(name) else hidden(text)
    source, parts = f"override {shown!r}", re.split(r"\.(?!py:)", name)
    if not equals or not all(parts):
        raise SettingsError(f"{source}: must read key=value or section.key=value")
    nested = "\n".join(f"{' ' * depth}{part}:" for depth, part in enumerate(parts))
    return *_parsed(f"{nested} {value}", source), source


def _read(
    path: Path, parents: tuple[Path, ...] = (), *, code: Code = "copies"
) -> tuple[dict[str, Any], Origins]:
    """The values of a file merged over the values of its `base`, and their sources."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such file{_nearest_file(path)}") from None
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from None
    values, lines = _parsed(text, str(path))
    if not isinstance(values, dict | None):
        raise SettingsError(f"{path}: settings must be a mapping of keys, got {show(values)[:80]}")
    origins = {name: f"{path}:{line}" for name, line in lines.items()}
    values = values or {}
    if path.name in ("config.yaml", "selfplay.yaml"):
        values = migrated(values)
    values = with_code(path, values, code)
    return _based(values, origins, path.parent, (*parents, path.resolve()))


def _of_mapping(given: Mapping[str, Any]) -> tuple[dict[str, Any], Origins]:
    """The values of a mapping and their sources, as `_parsed` returns them for a file."""
    (word,) = override_words({"settings": dict(given)})
    values, lines = _parsed(word.partition("=")[2], "settings")
    return values, dict.fromkeys(lines, "settings")


def _based(
    values: dict[str, Any], origins: Origins, folder: Path, chain: tuple[Path, ...] = ()
) -> tuple[dict[str, Any], Origins]:
    """The values merged over the values of their `base`, a path relative to `folder`, and their
    sources. `chain` has the files that led here, to detect a cycle."""
    if (base := values.pop("base", None)) is None:
        return values, origins
    origin, target = origins["base"], folder / str(base)
    target = target if target.is_file() else find_settings(Path(str(base)))
    if not target.is_file():
        near = _nearest_file(Path(str(base)), folder)
        raise SettingsError(f"{origin}: base must be a file, got {show(base)}{near}")
    if target.resolve() in chain:
        raise SettingsError(f"{origin}: base {base} leads back to itself")
    under, origins_under = _read(target, chain)
    return _merged(under, values or under), origins_under | origins


def _parsed(text: str, source: str) -> tuple[Any, dict[str, int]]:
    """The value of a YAML text, and the line of each key in it."""
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        lines = _lines(node)
        value = None if node is None else loader.construct_document(node)
        json.dumps(value)  # refuses cycles and YAML-only types such as sets
    except (yaml.YAMLError, ValueError, TypeError, LookupError, RecursionError) as error:
        mark = None if source.startswith("override ") else getattr(error, "problem_mark", None)
        origin = source if mark is None else f"{source}:{mark.line + 1}"
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise SettingsError(f"{origin}: not valid YAML: {problem}") from None
    return value, lines


def _lines(node: yaml.Node | None, name: str = "") -> dict[str, int]:
    """The line number, from 1, of each key and list item below `name`, at every depth.

    Raises:
        yaml.MarkedYAMLError: for a duplicate key.
    """
    inside: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        inside = [(str(key.value), key, value) for key, value in node.value]
    if isinstance(node, yaml.SequenceNode):
        inside = [(str(number), item, item) for number, item in enumerate(node.value)]
    lines = dict[str, int]()
    for last, first, value in inside:
        if (each := join(name, last)) in lines:
            raise yaml.MarkedYAMLError(
                problem=f"{each} is given twice", problem_mark=first.start_mark
            )
        lines |= {each: first.start_mark.line + 1, **_lines(value, each)}
    return lines


def _merged(under: Any, over: Any) -> Any:
    """`over` merged into `under`, mapping by mapping; an empty one empties."""
    if not (isinstance(under, dict) and isinstance(over, dict) and over):
        return over
    return {**under, **{key: _merged(under.get(key), value) for key, value in over.items()}}


# --- shipped files: at the top of a clone, inside selfplay/ if installed


def shipped(name: str) -> Path:
    """The path of `train.py`, `eval.py` or `configs`, in a clone or in an installed package."""
    installed = _PACKAGE / name
    return installed if installed.exists() else _PACKAGE.parent / name


def find_settings(path: Path) -> Path:
    """`path` if it is a file, else the shipped settings file of that name.

    `tiny`, `tiny.yaml` and `configs/tiny.yaml` all name the shipped `configs/tiny.yaml`, from any
    folder. Returns `path` if neither exists.
    """
    with suppress(OSError):  # a name that is too long; reading it reports the error
        if path.parent in (Path(), Path("configs")) and (path.is_dir() or not path.exists()):
            named = shipped("configs") / path.name
            for file in (named, named.with_name(f"{path.name}.yaml")):
                if file.is_file():
                    return file
    return path


def _nearest_file(path: Path, home: Path = Path()) -> str:
    """The end of an error line: the settings file with the name nearest to `path`, in its folder
    below `home` or among the shipped ones; without one, how to list these."""
    files = shipped("configs").glob("*.yaml")
    near = {file.stem: f"; nearest shipped file is {file.stem}" for file in files}
    for file in (home / path.parent).glob("*.y*ml"):
        near[file.stem] = f"; nearest is {path.parent / file.name}"
    found = difflib.get_close_matches(path.stem, near, 1)
    return "".join(near[name] for name in found) or "; --list names the shipped ones"
