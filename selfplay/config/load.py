"""Reads settings: YAML files and `key.sub=value` overrides, checked by pydantic.

A file may extend another with `base: FILE`, a path relative to itself or the name of a file that
ships with the project. Mappings merge key by key; any other value is replaced. Every mistake is a
SettingsError of one line: the file and line or the override, the key, the rule, the value, and the
nearest valid choice.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from dialop.specs import nearest
from selfplay.config.schema import fields_of, join, model_of, names_of
from selfplay.config.secrets import hidden, names_key
from selfplay.config.shipped import find_settings, nearest_settings
from selfplay.config.text import Loader, show
from selfplay.errors import SettingsError

C = TypeVar("C")
Places = dict[str, str]  # where each dotted key was given: "FILE:LINE" or "override 'key=value'"

# The key that a plain value of a section sets, as in `algorithm: rloo` and `track=wandb`.
_SHORT = {"algorithm": "method", "track": "kind"}
_OVERRIDE = "override "
_MEANT = {"gpu": "cuda"}  # words that are spelt like another choice
# What a value must be, by the type of pydantic's error.
_RULES = {
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text, in quotes if it reads as another value",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "dataclass_type": "a section of keys, or {{}} for its defaults",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "missing": "given",  # an item of a pair
    "too_long": "a list of at most {max_length}",
}


def load(cls: type[C], path: Path | None, overrides: Sequence[str] = ()) -> C:
    """Read `path` (None: defaults only), then apply `overrides` in order.

    Raises:
        SettingsError: for unreadable files, unknown keys, invalid values and contradictions.
    """
    values, places = _read_all(path, overrides)
    try:
        return TypeAdapter(cls).validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        name, rule = _first_fault(error, cls)
    place = _place_of(name, rule, places) or path or "defaults"
    raise SettingsError(f"{place}: {rule}")


def read_options(cls: Any, values: Mapping[str, Any], prefix: str) -> Any:
    """A game's options, given as the settings `prefix`. Raises ValueError for a mistake."""
    try:
        read = model_of(cls).model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        raise ValueError(_first_fault(error, cls, prefix)[1]) from None
    return cls(**{name: getattr(read, name) for name in fields_of(cls)})


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


def _first_fault(error: ValidationError, cls: type, prefix: str = "") -> tuple[str, str]:
    """The dotted name where pydantic found the first fault, and our line about it."""
    fault = error.errors(include_url=False)[0]
    name = prefix
    for part in fault["loc"]:
        name = f"{name}[{part}]" if isinstance(part, int) else join(name, part)
    if fault["type"] == "value_error":  # of a check, which names the keys itself
        return name, str(fault["ctx"]["error"])
    if fault["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return name, _unknown(name, str(fault["loc"][-1]), names_of(cls, prefix))
    return name, _wrong(name or "settings", fault)


def _wrong(name: str, fault: Mapping[str, Any]) -> str:
    value, facts = fault["input"], fault.get("ctx", {})
    got = "a value not shown here" if names_key(name) else hidden(show(value))[:200]
    if fault["type"] == "literal_error":
        choices = re.findall("'([^']*)'", facts["expected"]) or [facts["expected"]]
        near = nearest(_MEANT.get(str(value), str(value)), choices)
        return f"{name} must be one of {', '.join(choices)}, got {got}{near}"
    rule = _RULES.get(fault["type"], fault["msg"]).format(**facts)
    return f"{name} must be {rule}, got {got}"


def _unknown(name: str, last: str, names: Sequence[str]) -> str:
    """The line for a key that does not exist. It suggests a key of another section with the same
    last part, else the nearest spelling, else it lists the section's keys."""
    home = name.removesuffix(last).removesuffix(".")
    siblings = [each.rpartition(".")[2] for each in names if each.rpartition(".")[0] == home]
    first, *below = last.split(".")
    if below and first in siblings:
        nested = f"{': {'.join([first, *below])}: VALUE{'}' * len(below)}"
        return f"{name} must be written below its section, as {nested}"
    same = [other for other in names if other.rpartition(".")[2] == last]
    near = (
        difflib.get_close_matches(name, same, 1, 0.0)
        or [join(home, other) for other in difflib.get_close_matches(last, siblings, 1)]
        or difflib.get_close_matches(name, names, 1)
    )
    hint = f"nearest is {near[0]}" if near else f"valid here are {', '.join(siblings)}"
    return f"unknown key {name}; {hint}"


def _place_of(name: str, rule: str, places: Places) -> str:
    """Where `name` was given; for a contradiction, where all keys were that its rule names."""
    named = [place for given, place in places.items() if _stands_in(rule, given)]
    if named and not rule.startswith("unknown key "):
        return ", ".join(dict.fromkeys(named))
    while name and name not in places:  # a default: where its section or list was given
        name = re.sub(r"(\.?[^.\[]*|\[\d+\])$", "", name)
    return places.get(name, "")


def _stands_in(rule: str, name: str) -> bool:
    if "." not in name:  # such as steps, which may also be a plain word
        return rule.startswith(f"{name} ") or f"{name}.*" in rule
    return re.search(rf"(?<![\w.]){re.escape(name)}(?!\w|\.\w)", rule) is not None


# --- files and overrides


def _read_all(path: Path | None, overrides: Sequence[str]) -> tuple[dict[str, Any], Places]:
    """The values of a file with its overrides applied in order, and where each key was given."""
    values, places = ({}, {}) if path is None else _read(find_settings(Path(path)))
    for text in overrides:
        values, places = _merged(values, places, *_override(text))
    return values, places


def _read(path: Path, parents: tuple[Path, ...] = ()) -> tuple[dict[str, Any], Places]:
    """The values of a file merged over those of its `base`, and where each key was given."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such file{nearest_settings(path)}") from None
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from None
    values, places = _parsed(text, str(path))
    if not isinstance(values, dict | None):
        raise SettingsError(f"{path}: settings must be a mapping of keys, got {show(values)[:80]}")
    values = values or {}
    _expand_short(values, places)
    base = values.pop("base", None)
    if base is None:
        return values, places
    place, chain = places.pop("base"), (*parents, path.resolve())
    target = path.parent / str(base)
    target = target if target.is_file() else find_settings(Path(str(base)))
    if not target.is_file():
        near = nearest_settings(target)
        raise SettingsError(f"{place}: base must be a file, got {show(base)}{near}")
    if target.resolve() in chain:
        raise SettingsError(f"{place}: base {base} leads back to itself")
    return _merged(*_read(target, chain), values, places)


def _override(text: str) -> tuple[dict[str, Any], Places]:
    """`a.b=value` as {"a": {"b": value}}; the value is read as YAML."""
    name, equals, value = (part.strip() for part in text.partition("="))
    shown = f"{name}=…" if equals and names_key(name) else hidden(text)
    place = f"{_OVERRIDE}{shown!r}"
    parts = name.split(".")
    if not equals or not all(parts):
        raise SettingsError(f"{place}: must read key=value or section.key=value")
    values, places = _parsed(value, place, name)
    for number in range(len(parts), 0, -1):
        places[".".join(parts[:number])] = place
        values = {parts[number - 1]: values}
    _expand_short(values, places)
    return values, places


def _parsed(text: str, source: str, name: str = "") -> tuple[Any, Places]:
    """The value of a YAML text, and where each key below `name` stands."""
    places: Places = {}

    def place(mark: yaml.Mark | None) -> str:
        if mark is None or source.startswith(_OVERRIDE):
            return source
        return f"{source}:{mark.line + 1}"

    def value_of(node: yaml.Node, name: str) -> Any:
        if name:
            places.setdefault(name, place(node.start_mark))
        if isinstance(node, yaml.SequenceNode):
            return [value_of(child, f"{name}[{n}]") for n, child in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            value = loader.construct_object(node)
            # A shell leaves the ~ of out=~/runs as it is.
            home = isinstance(value, str) and value.startswith("~/")
            return str(Path(value).expanduser()) if home else value
        values: dict[str, Any] = {}
        for label, child in node.value:
            part = str(label.value)
            if part in values:
                problem = f"{part} is given twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=label.start_mark)
            places[join(name, part)] = place(label.start_mark)
            values[part] = value_of(child, join(name, part))
        return values

    try:
        loader = Loader(text)
        node = loader.get_single_node()
        return (None if node is None else value_of(node, name)), places
    except yaml.MarkedYAMLError as error:
        line = place(error.problem_mark)
        raise SettingsError(f"{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, LookupError, RecursionError) as error:
        problem = " ".join(str(error).split())
        raise SettingsError(f"{source}: not valid YAML: {problem}") from None


def _expand_short(values: dict[str, Any], places: Places) -> None:
    """Write a plain value of a section as a mapping."""
    for name, short in _SHORT.items():
        if isinstance(values.get(name), (str, bool, int, float)):
            values[name] = {short: values[name]}
            places[f"{name}.{short}"] = places[name]


def _merged(
    under: dict[str, Any], under_places: Places, over: dict[str, Any], over_places: Places
) -> tuple[dict[str, Any], Places]:
    """The values of `over` merged into those of `under`, and where each key was given."""
    places = dict(under_places)

    def merge(old: Any, new: Any, name: str) -> Any:
        if isinstance(old, dict) and isinstance(new, dict):
            both = {part: merge(old.get(part), new[part], join(name, part)) for part in new}
            return {**old, **both}
        for gone in [each for each in places if each.startswith((f"{name}.", f"{name}["))]:
            del places[gone]
        return new

    return merge(under, over, ""), {**places, **over_places}
