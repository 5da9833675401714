"""Reads settings: YAML files and `key.sub=value` overrides, checked by pydantic.

A file may extend another with `base: FILE`, a path relative to itself or the name of a file that
ships with the project. Mappings merge key by key; any other value is replaced. Every mistake is a
SettingsError of one line: the file and line or the override, the key, the rule, the value, and the
nearest valid choice.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from dialop.specs import nearest
from selfplay.config.schema import join, model_of, names_of
from selfplay.config.secrets import hidden, names_key
from selfplay.config.text import Loader, show
from selfplay.errors import SettingsError

C = TypeVar("C")
Origins = dict[str, str]  # where each key was given: "FILE:LINE" or "override 'key=value'"

_PACKAGE = Path(__file__).resolve().parents[1]
_MEANT = {"gpu": "cuda"}  # words that are spelt like another choice
# Rules that the help words in the same way; the others are in pydantic's words.
_RULES = {
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "missing": "given",
}


def load(cls: type[C], path: Path | None, overrides: Sequence[str] = ()) -> C:
    """Read `path` (None: defaults only), then apply `overrides` in order.

    Raises:
        SettingsError: for unreadable files, unknown keys, invalid values and contradictions.
    """
    values, origins = _read_all(path, overrides)
    try:
        return TypeAdapter(cls).validate_json(json.dumps(values))
    except ValidationError as error:
        name, rule = _first_fault(error, cls)
    raise SettingsError(f"{_origin_of(name, rule, origins) or path or 'defaults'}: {rule}")


def read_options(cls: Any, values: Mapping[str, Any], prefix: str) -> Any:
    """A game's options, given as the settings `prefix`. Raises ValueError for a mistake."""
    try:
        read = model_of(cls).model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise ValueError(_first_fault(error, cls, prefix)[1]) from None
    return cls(**{field.name: getattr(read, field.name) for field in dataclasses.fields(cls)})


def read_value(path: Path | None, overrides: Sequence[str], name: str) -> Any:
    """The value given for one dotted key, unchecked; None if it is not given.

    Raises:
        SettingsError: for files and overrides that cannot be read.
    """
    value: Any = _read_all(path, overrides)[0]
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


# --- messages


def _first_fault(error: ValidationError, cls: Any, prefix: str = "") -> tuple[str, str]:
    """The dotted name where pydantic found the first fault, and our line about it."""
    fault = error.errors(include_url=False)[0]
    name = prefix
    for part in fault["loc"]:
        name = f"{name}[{part}]" if isinstance(part, int) else join(name, part)
    if fault["type"] == "value_error":  # of a check, which names the keys itself
        return name, str(fault["ctx"]["error"])
    if fault["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return name, _unknown(name, names_of(cls, prefix))
    return name, _wrong(name or "settings", fault)


def _wrong(name: str, fault: Mapping[str, Any]) -> str:
    value, facts = fault["input"], fault.get("ctx", {})
    got = "a value not shown here" if names_key(name) else hidden(show(value))[:200]
    if fault["type"] == "literal_error":
        choices = re.findall("'([^']*)'", facts["expected"]) or [facts["expected"]]
        near = nearest(_MEANT.get(str(value), str(value)), choices)
        return f"{name} must be one of {', '.join(choices)}, got {got}{near}"
    if fault["type"] in _RULES:
        return f"{name} must be {_RULES[fault['type']].format(**facts)}, got {got}"
    rule = re.sub("^[A-Z][a-z]+ should ", "must ", fault["msg"])
    return f"{name} {rule}, got {got}"


def _unknown(name: str, names: Sequence[str]) -> str:
    """The line for a key that does not exist. It suggests a key of another section with the same
    last part, else the nearest spelling, else it lists the section's keys."""
    home, _, last = name.rpartition(".")
    if name in names:
        return f"{name} must be written below its section, as {home}: {{{last}: VALUE}}"
    same = [other for other in names if other.rpartition(".")[2] == last]
    near = difflib.get_close_matches(name, same or names, 1, 0.0 if same else 0.6)
    siblings = [each.rpartition(".")[2] for each in names if each.rpartition(".")[0] == home]
    hint = f"nearest is {near[0]}" if near else f"valid here are {', '.join(siblings)}"
    return f"unknown key {name}; {hint}"


def _origin_of(name: str, rule: str, origins: Origins) -> str:
    """Where the keys were given that a rule names; if none was, where `name` was, or the section or
    list that holds it."""
    if not rule.startswith("unknown key "):
        named = re.findall(r"^[a-z_]+(?= )|[a-z_]+(?=\.\*)|[a-z_]+(?:\.[a-z_]+|\[\d+\])+", rule)
        if given := [origins[key] for key in named if key in origins]:
            return ", ".join(dict.fromkeys(given))
    while name and name not in origins:
        name = re.sub(r"(\.?[^.\[]*|\[\d+\])$", "", name)
    return origins.get(name, "")


# --- files and overrides


def _read_all(path: Path | None, overrides: Sequence[str]) -> tuple[dict[str, Any], Origins]:
    """The values of a file with its overrides applied in order, and where they were given."""
    values, origins = ({}, {}) if path is None else _read(find_settings(Path(path)))
    for text in overrides:
        name, equals, value = (part.strip() for part in text.partition("="))
        shown = f"{name}=…" if equals and names_key(name) else hidden(text)
        source = f"override {shown!r}"
        parts = name.split(".")
        if not equals or not all(parts):
            raise SettingsError(f"{source}: must read key=value or section.key=value")
        over, node = _parsed(value, source)
        given = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        origins |= dict.fromkeys([*given, *_lines(node, name)], source)
        for part in reversed(parts):
            over = {part: over}
        values = _merged(values, over)
    return values, origins


def _read(path: Path, parents: tuple[Path, ...] = ()) -> tuple[dict[str, Any], Origins]:
    """The values of a file merged over those of its `base`, and where both were given."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such file{_nearest_shipped(path)}") from None
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from None
    values, node = _parsed(text, str(path))
    if not isinstance(values, dict | None):
        raise SettingsError(f"{path}: settings must be a mapping of keys, got {show(values)[:80]}")
    values = values or {}
    origins = {name: f"{path}:{line}" for name, line in _lines(node).items()}
    base = values.pop("base", None)
    if base is None:
        return values, origins
    origin, chain = origins["base"], (*parents, path.resolve())
    target = path.parent / str(base)
    target = target if target.is_file() else find_settings(Path(str(base)))
    if not target.is_file():
        near = _nearest_shipped(target)
        raise SettingsError(f"{origin}: base must be a file, got {show(base)}{near}")
    if target.resolve() in chain:
        raise SettingsError(f"{origin}: base {base} leads back to itself")
    under, origins_under = _read(target, chain)
    return _merged(under, values), origins_under | origins


def _parsed(text: str, source: str) -> tuple[Any, yaml.Node | None]:
    """The value of a YAML text, and its node, which knows the lines."""
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        value = None if node is None else loader.construct_document(node)
        json.dumps(value)  # refuses cycles and what only YAML has, such as sets
    except yaml.MarkedYAMLError as error:
        mark = None if source.startswith("override ") else error.problem_mark
        origin = source if mark is None else f"{source}:{mark.line + 1}"
        raise SettingsError(f"{origin}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, TypeError, LookupError, RecursionError) as error:
        problem = " ".join(str(error).split())
        raise SettingsError(f"{source}: not valid YAML: {problem}") from None
    return value, node


def _lines(node: yaml.Node | None, name: str = "") -> dict[str, int]:
    """The line, from 1, of each key and list item below `name`, at every depth."""
    inside: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        inside = [(join(name, str(key.value)), key, value) for key, value in node.value]
    if isinstance(node, yaml.SequenceNode):
        inside = [(f"{name}[{number}]", item, item) for number, item in enumerate(node.value)]
    lines = dict[str, int]()
    for each, first, value in inside:
        lines |= {each: first.start_mark.line + 1, **_lines(value, each)}
    return lines


def _merged(under: Any, over: Any) -> Any:
    """The values of `over` merged into those of `under`, mapping by mapping."""
    if not (isinstance(under, dict) and isinstance(over, dict)):
        return over
    return {**under, **{key: _merged(under.get(key), value) for key, value in over.items()}}


# --- files that ship with the project: at the top of a clone, inside selfplay/ once installed


def shipped(name: str) -> Path:
    """The path of `train.py`, `eval.py` or `configs`, in a clone or in an installed package."""
    installed = _PACKAGE / name
    return installed if installed.exists() else _PACKAGE.parent / name


def find_settings(path: Path) -> Path:
    """`path` if it is a file, else the shipped settings file of that name.

    `tiny`, `tiny.yaml` and `configs/tiny.yaml` all name `configs/tiny.yaml` of the project, from
    any folder. Returns `path` itself if neither exists.
    """
    with suppress(OSError):  # of a name too long: reading it tells
        if path.parent in (Path(), Path("configs")) and (path.is_dir() or not path.exists()):
            named = shipped("configs") / path.name
            for file in (named, named.with_name(f"{path.name}.yaml")):
                if file.is_file():
                    return file
    return path


def _nearest_shipped(path: Path) -> str:
    """The end of an error line: the shipped settings file whose name is nearest, or ""."""
    names = [file.stem for file in shipped("configs").glob("*.yaml")]
    near = difflib.get_close_matches(path.stem, names, 1)
    return f"; nearest shipped file is {near[0]}" if near else ""
