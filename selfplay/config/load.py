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
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from dialop.specs import nearest
from selfplay.config.help import names_of
from selfplay.config.schema import join, model_of
from selfplay.config.secrets import hidden, names_key
from selfplay.config.shipped import find_settings, nearest_settings
from selfplay.config.text import Loader, show
from selfplay.errors import SettingsError

C = TypeVar("C")
Layer = tuple[str, yaml.Node]  # settings, and their source: "FILE" or "override 'key=value'"

# The key that a plain value of a section sets, as in `algorithm: rloo` and `track=wandb`.
_SHORT = {"algorithm": "method", "track": "kind"}
_NULL = "tag:yaml.org,2002:null"
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
    values, layers = _read_all(path, overrides)
    try:
        return TypeAdapter(cls).validate_json(json.dumps(values))
    except ValidationError as error:
        name, rule = _first_fault(error, cls)
    place = _place_of(name, rule, layers) or path or "defaults"
    raise SettingsError(f"{place}: {rule}")


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


# --- where a key was given


def _place_of(name: str, rule: str, layers: Sequence[Layer]) -> str:
    """Where the keys were given that a rule names; if none was, where `name` was, or the section or
    list that holds it."""
    if not rule.startswith("unknown key "):
        named = re.findall(r"^[a-z_]+(?= )|[a-z_]+(?=\.\*)|[a-z_]+(?:\.[a-z_]+|\[\d+\])+", rule)
        if places := [place for each in named if (place := _given(each, layers))]:
            return ", ".join(dict.fromkeys(places))
    while name and not _given(name, layers):
        name = re.sub(r"(\.?[^.\[]*|\[\d+\])$", "", name)
    return _given(name, layers)


def _given(name: str, layers: Sequence[Layer]) -> str:
    """Where the dotted name was given last; "" if it was not."""
    for source, node in reversed(layers):
        mark, found = None, name != ""
        for part in re.findall(r"[^.\[\]]+", name):
            inside = {key.value: (key.start_mark, value) for key, value in _pairs(node)}
            if part not in inside:
                found = False
                break
            mark, node = inside[part]
        if found:
            return _place(source, mark)
    return ""


def _pairs(node: yaml.Node) -> list[tuple[yaml.Node, yaml.Node]]:
    """The keys and values of a mapping, or the numbers and items of a list."""
    if isinstance(node, yaml.MappingNode):
        return node.value
    items = node.value if isinstance(node, yaml.SequenceNode) else []
    return [(yaml.ScalarNode("", str(n), item.start_mark), item) for n, item in enumerate(items)]


def _place(source: str, mark: yaml.Mark | None) -> str:
    return source if mark is None or source.startswith("override ") else f"{source}:{mark.line + 1}"


# --- files and overrides


def _read_all(path: Path | None, overrides: Sequence[str]) -> tuple[dict[str, Any], list[Layer]]:
    """The values of a file with its overrides applied in order, and all that was given for them."""
    values, layers = ({}, []) if path is None else _read(find_settings(Path(path)))
    for text in overrides:
        name, equals, value = (part.strip() for part in text.partition("="))
        shown = f"{name}=…" if equals and names_key(name) else hidden(text)
        source = f"override {shown!r}"
        if not equals or not all(name.split(".")):
            raise SettingsError(f"{source}: must read key=value or section.key=value")
        over, layer = _parsed(value, source, name.split("."))
        values, layers = _merged(values, over), [*layers, layer]
    return values, layers


def _read(path: Path, parents: tuple[Path, ...] = ()) -> tuple[dict[str, Any], list[Layer]]:
    """The values of a file merged over those of its `base`, and the layers of both."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such file{nearest_settings(path)}") from None
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from None
    values, layer = _parsed(text, str(path))
    if not isinstance(values, dict | None):
        raise SettingsError(f"{path}: settings must be a mapping of keys, got {show(values)[:80]}")
    values = values or {}
    base = values.pop("base", None)
    if base is None:
        return values, [layer]
    place, chain = _given("base", [layer]), (*parents, path.resolve())
    target = path.parent / str(base)
    target = target if target.is_file() else find_settings(Path(str(base)))
    if not target.is_file():
        near = nearest_settings(target)
        raise SettingsError(f"{place}: base must be a file, got {show(base)}{near}")
    if target.resolve() in chain:
        raise SettingsError(f"{place}: base {base} leads back to itself")
    under, layers = _read(target, chain)
    return _merged(under, values), [*layers, layer]


def _parsed(text: str, source: str, parts: Sequence[str] = ()) -> tuple[Any, Layer]:
    """The value of a YAML text; with `parts`, as the value of this key in nested mappings."""
    try:
        loader = Loader(text)
        node = loader.get_single_node() or yaml.ScalarNode(_NULL, "")
        for part in reversed(parts):
            node = _mapping(part, node)
        _expand_short(node)
        value = loader.construct_document(node)
        json.dumps(value)  # refuses cycles and what only YAML has, such as dates
    except yaml.MarkedYAMLError as error:
        place = _place(source, error.problem_mark)
        raise SettingsError(f"{place}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, TypeError, LookupError, RecursionError) as error:
        problem = " ".join(str(error).split())
        raise SettingsError(f"{source}: not valid YAML: {problem}") from None
    return value, (source, node)


def _expand_short(node: yaml.Node) -> None:
    """Write a plain value of a section as a mapping."""
    for number, (key, value) in enumerate(_pairs(node)):
        plain = isinstance(value, yaml.ScalarNode) and value.tag != _NULL
        if plain and key.value in _SHORT:
            node.value[number] = key, _mapping(_SHORT[key.value], value)


def _mapping(key: str, value: yaml.Node) -> yaml.MappingNode:
    label = yaml.ScalarNode("tag:yaml.org,2002:str", key, value.start_mark)
    return yaml.MappingNode("tag:yaml.org,2002:map", [(label, value)])


def _merged(under: Any, over: Any) -> Any:
    """The values of `over` merged into those of `under`, mapping by mapping."""
    if not (isinstance(under, dict) and isinstance(over, dict)):
        return over
    return {**under, **{key: _merged(under.get(key), value) for key, value in over.items()}}
