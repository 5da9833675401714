"""The settings loader: fills typed dataclasses from YAML files and `key.sub=value` overrides.

A section is a `@dataclass(frozen=True, slots=True, kw_only=True)` whose fields are made by `key` or
`section`. The loader knows no key by name; the sections are in the other modules of this folder.
A mistake in the settings raises a `SettingsError` that names the file and line, the rule, the value
and the nearest valid choice. A mistake in a section class raises a `TypeError`.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import shutil
import sys
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from dialop.specs import nearest
from selfplay.config.secrets import hidden, names_key
from selfplay.config.tree import NULL, empty, load_tree, place, rule_sources
from selfplay.errors import SettingsError

__all__ = [
    "SettingsError",
    "chosen",
    "describe",
    "described",
    "difference",
    "dump",
    "key",
    "load",
    "read_value",
    "renamed_keys",
    "section",
]

C = TypeVar("C")

_KINDS = {bool: "true or false", int: "an integer", float: "a finite number", str: "text"}
_PLAIN_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_TAGS = {bool: ("bool",), int: ("int",), float: ("float", "int"), str: ("str",)}
_MEANT = {"gpu": "cuda"}  # words that are spelt like another choice


def key(
    default: Any,
    sentence: str,
    *,
    choices: Sequence[Any] | None = None,
    within: tuple[float | None, float | None] = (None, None),
    formerly: str | None = None,
) -> Any:
    """One setting: its default, its sentence for --help, and its choices or inclusive bounds.

    The choices and bounds of a tuple apply to each element. `formerly` is the old dotted name of a
    renamed key; settings that still use it are refused with the new name.
    """
    low, high = within
    bounds = {"low": low, "high": high}
    rules = {"sentence": sentence, "choices": choices, "formerly": formerly, **bounds}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=rules)
    return field(default=default, metadata=rules)


def section(
    cls: type,
    sentence: str,
    *,
    optional: bool = False,
    short: str | None = None,
    formerly: str | None = None,
) -> Any:
    """A nested group of settings. An optional section is None unless the settings contain it.

    `short` names the key that takes a plain value given to a top-level section: with
    `short="method"`, `algorithm: rloo` means `algorithm: {method: rloo}`. `formerly` is the old
    dotted name of a renamed section.
    """
    rules = {"sentence": sentence, "short": short, "formerly": formerly}
    if optional:
        return field(default=None, metadata=rules)
    return field(default_factory=cls, metadata=rules)


def chosen(sentence: str, *, by: Callable[[Any], type]) -> Any:
    """A nested group of settings whose class depends on its siblings.

    `by` gets the section without this group and returns the class, a frozen dataclass whose fields
    all have defaults. It raises ValueError for siblings that select none. The default is None.
    """
    return field(default=None, metadata={"sentence": sentence, "by": by})


def load(cls: type[C], path: Path | None, overrides: Sequence[str] = ()) -> C:
    """Read `path` (None: defaults only), then apply `overrides` in order.

    Calls the `check()` of every section that has one, inner sections first. A `check()` reports
    settings that contradict each other by a ValueError whose message names the keys.

    Raises:
        SettingsError: for unreadable files, unknown or renamed keys, and invalid values.
    """
    names = {name: entry.metadata.get("formerly") for name, _, entry in _walk(cls, "")}
    if "base" in names:
        raise TypeError(f"{cls.__name__}.base is reserved for the file that settings extend")
    shorts = {e.name: e.metadata.get("short") for e in fields(cls)}  # type: ignore[arg-type]
    sections = [n for n, hint, e in _walk(cls, "") if is_dataclass(hint) or "by" in e.metadata]
    tree = load_tree(path, overrides, shorts, sections)
    value: C = _convert(tree, cls, "", {}, names)
    return value


def dump(config: Any) -> str:
    """All settings as YAML. `load` of this text returns an equal object."""
    text: str = yaml.safe_dump(_plain(config), sort_keys=False, width=100, allow_unicode=True)
    return text


def describe(cls: type, prefix: str = "") -> str:
    """The --help text: each key's type, default, bounds and sentence, grouped by section."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 100)
    lines: list[str] = []
    for entry in described(cls, prefix):
        if entry.kind is None:
            absent = " (default null)" if entry.default else ""
            lines += ["", *textwrap.wrap(f"{entry.name}: {entry.sentence}{absent}", width)]
            continue
        head = (
            f"{entry.name}  ({'; '.join((entry.kind, f'default {entry.default}', *entry.rules))})"
        )
        lines += textwrap.wrap(head, width, initial_indent="  ", subsequent_indent="    ")
        indent = " " * 6
        lines += textwrap.wrap(
            entry.sentence, width, initial_indent=indent, subsequent_indent=indent
        )
    return "\n".join(lines).strip("\n") + "\n"


@dataclass(frozen=True, slots=True)
class Described:
    """One key as text. A section has no `kind`; its `default` is "null" if it is absent unless the
    settings contain it, else ""."""

    name: str
    kind: str | None
    default: str
    rules: tuple[str, ...]
    sentence: str


def described(cls: type, prefix: str = "") -> list[Described]:
    """Every key in order: the keys of a section, then its nested sections."""
    entries = []
    for name, hint, entry in _walk(cls, prefix):
        sentence = entry.metadata.get("sentence", "")
        if is_dataclass(_strip_none(hint)) or "by" in entry.metadata:
            own = entry.default_factory is not MISSING or "by" in entry.metadata
            entries.append(Described(name, None, "" if own else "null", (), sentence))
        else:
            rules = tuple(_rules(entry.metadata))
            kind, default = _type_name(hint), _show(_default(entry))
            entries.append(Described(name, kind, default, rules, sentence))
    return entries


def read_value(path: Path | None, overrides: Sequence[str], name: str) -> Any:
    """The value given for one dotted key, unchecked; None if it is not given.

    Raises:
        SettingsError: for files and overrides that cannot be read.
    """
    value = _construct(load_tree(path, overrides, {}))
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def difference(a: Any, b: Any) -> list[str]:
    """The dotted keys whose values differ, each as `name: value in a -> value in b`."""
    return _difference(_plain(a), _plain(b), "")


def renamed_keys(cls: type) -> dict[str, str]:
    """The old dotted name of each renamed key or section, with its present name."""
    formerly = ((entry.metadata.get("formerly"), name) for name, _, entry in _walk(cls, ""))
    return {old: name for old, name in formerly if old}


# --- values -------------------------------------------------------------------------------------


def _convert(
    node: yaml.Node, hint: Any, name: str, rules: Mapping[str, Any], names: Mapping[str, str | None]
) -> Any:
    """The value of `node` as the type `hint`.

    `name` is its dotted key. `names` maps every valid dotted key to its old name, if it has one.
    """
    inner, origin = _strip_none(hint), get_origin(_strip_none(hint))
    is_null = node.tag == NULL
    if is_null and inner is not hint:
        return None
    if isinstance(inner, type) and is_dataclass(inner):
        filled = empty(node.start_mark.name) if is_null else node
        return _convert_section(filled, inner, name, names)
    if origin is Literal:
        return _choice(node, get_args(inner), name)
    if origin is tuple:
        if not isinstance(node, yaml.SequenceNode):
            raise _wrong(node, name, f"must be a list, written [{_type_name(get_args(inner)[0])}]")
        return tuple(
            _convert(child, get_args(inner)[0], f"{name}[{index}]", rules, names)
            for index, child in enumerate(node.value)
        )
    if origin is dict:
        if not isinstance(node, yaml.MappingNode):
            raise _wrong(node, name, "must be a mapping")
        return {
            label.value: _convert(child, get_args(inner)[1], f"{name}.{label.value}", {}, names)
            for label, child in node.value
        }
    if inner is object:
        return _construct(node)
    if inner not in _TAGS:
        raise TypeError(f"{name} has a type that the loader does not support: {hint}")
    if inner is str and rules.get("choices") is not None:
        return _choice(node, rules["choices"], name)
    value = _scalar(node, inner, name, optional=inner is not hint)
    if rules.get("choices") is not None:
        return _choice(node, rules["choices"], name)
    low, high = rules.get("low"), rules.get("high")
    if (low is not None and value < low) or (high is not None and value > high):
        raise _wrong(node, name, f"must be {' and '.join(_rules(rules))}")
    return value


def _convert_section(node: yaml.Node, cls: type, name: str, names: Mapping[str, str | None]) -> Any:
    keys = [entry.name for entry in fields(cls)]
    if not isinstance(node, yaml.MappingNode):
        raise _wrong(node, name, f"must be a section with {', '.join(keys)}")
    hints, given = get_type_hints(cls), {label.value: (label, value) for label, value in node.value}
    for part, (label, value) in given.items():
        if part not in hints:
            raise _unknown(label, value, _join(name, part), keys, names)
    values: dict[str, Any] = {}
    for entry in fields(cls):
        dotted = _join(name, entry.name)
        if "by" in entry.metadata:
            continue
        if entry.name in given:
            child = given[entry.name][1]
            values[entry.name] = _convert(child, hints[entry.name], dotted, entry.metadata, names)
        elif is_dataclass(hints[entry.name]):
            # The default factory would not call the section's check.
            values[entry.name] = _convert(
                empty(node.start_mark.name), hints[entry.name], dotted, {}, names
            )
    result = cls(**values)
    for entry in fields(cls):
        if "by" in entry.metadata:
            chosen_part = _convert_chosen(node, entry, result, name, names)
            result = replace(result, **{entry.name: chosen_part})
    check = getattr(result, "check", None)
    if check is not None:
        try:
            check()
        except ValueError as error:
            raise _contradiction(node, name, error) from error
    return result


def _convert_chosen(
    node: yaml.MappingNode,
    entry: Field[Any],
    siblings: Any,
    name: str,
    names: Mapping[str, str | None],
) -> Any:
    """The value of a group whose class its siblings select."""
    dotted = _join(name, entry.name)
    child = next((value for label, value in node.value if label.value == entry.name), None)
    child = child if child is not None else empty(node.start_mark.name)
    try:
        cls = entry.metadata["by"](siblings)
        own_names = {each: None for each, _, _ in _walk(cls, dotted)}
        return _convert(child, cls, dotted, {}, {**names, **own_names})
    except SettingsError:
        raise
    except (ValueError, TypeError, NameError) as error:
        raise _contradiction(node, name, error) from error


def _scalar(node: yaml.Node, kind: type, name: str, *, optional: bool) -> Any:
    value = _construct(node)
    tag = node.tag.removeprefix("tag:yaml.org,2002:")
    if kind is float and isinstance(value, str):
        # YAML 1.1 reads 1e-5 as text because it has no dot.
        with contextlib.suppress(ValueError):
            value, tag = float(value), "float"
    if tag not in _TAGS[kind] or (kind is float and not abs(value) <= sys.float_info.max):
        hint = ", so put it in quotes" if kind is str and isinstance(node, yaml.ScalarNode) else ""
        raise _wrong(node, name, f"must be {_KINDS[kind]}{' or null' if optional else ''}{hint}")
    # YAML 1.1 reads 010 as 8 and 1:30 as 90.
    if (tag == "int" and not _PLAIN_INT.fullmatch(node.value)) or (
        tag == "float" and ":" in node.value
    ):
        raise _wrong(node, name, f"must be {_KINDS[kind]} in plain decimal digits")
    if kind is str and value.startswith("~/"):  # which a shell leaves as it is in out=~/runs/a
        value = str(Path(value).expanduser())
    return kind(value)


def _choice(node: yaml.Node, choices: Sequence[Any], name: str) -> Any:
    # YAML 1.1 reads a bare `off` or `no` as false, so values are compared as text.
    value = node.value if isinstance(node, yaml.ScalarNode) else _construct(node)
    for choice in choices:
        if value == (str(choice).lower() if isinstance(choice, bool) else str(choice)):
            return choice
    names = [str(choice) for choice in choices]
    near = nearest(_MEANT.get(str(value), str(value)), names)
    raise _wrong(node, name, f"must be one of {', '.join(names)}", near)


def _construct(node: yaml.Node) -> Any:
    try:
        return yaml.SafeLoader("").construct_document(node)
    except yaml.MarkedYAMLError as error:
        raise SettingsError(f"{place(node.start_mark)}: not valid: {error.problem}") from None
    except ValueError as error:
        raise SettingsError(f"{place(node.start_mark)}: not valid: {error}") from None
    except (LookupError, TypeError, AttributeError):
        raise SettingsError(
            f"{place(node.start_mark)}: a value must be what its YAML tag says, as in !!int 3"
        ) from None


# --- messages and names -------------------------------------------------------------------------


def _wrong(node: yaml.Node, name: str, rule: str, more: str = "") -> SettingsError:
    value = repr(node.value) if isinstance(node, yaml.ScalarNode) else _show(_construct(node))
    what = f"{place(node.start_mark)[:200]}: {name or 'settings'}"
    value = "a value not shown here" if names_key(name) else hidden(value)[:200]
    return SettingsError(f"{what} {rule}, got {value}{more}")


def _contradiction(node: yaml.Node, name: str, error: Exception) -> SettingsError:
    """The error of a rule across settings, with the sources of those that its text names."""
    return SettingsError(f"{', '.join(rule_sources(node, name, str(error)))}: {error}")


def _unknown(
    label: yaml.Node,
    value: yaml.Node,
    name: str,
    siblings: Sequence[str],
    names: Mapping[str, str | None],
) -> SettingsError:
    """The error for a key that does not exist.

    It gives the new name of a renamed key, and how to nest a dotted key. For other keys it suggests
    a key of another section with the same last part, else the nearest spelling, else it lists the
    section's keys.
    """
    for new, old in names.items():
        if old == name:
            below = value.value if isinstance(value, yaml.MappingNode) else []
            rest = f".{below[0][0].value}" if len(below) == 1 else ""
            return SettingsError(f"{place(label.start_mark)}: {old}{rest} is now {new}{rest}")
    first, *parts = label.value.split(".")
    if parts and all(parts) and first in siblings:
        nested = "VALUE" if names_key(name) else hidden(_show(_construct(value)))[:200]
        for part in reversed(parts):
            nested = f"{{{part}: {nested}}}"
        return SettingsError(
            f"{place(label.start_mark)}: {name} must be written below its section, as "
            f"{first}: {nested}"
        )
    home, _, last = name.rpartition(".")
    same = [other for other in names if other.rpartition(".")[2] == last]
    here = [_join(home, other) for other in difflib.get_close_matches(last, siblings, 1)]
    near = (
        difflib.get_close_matches(name, same, 1, 0.0)
        or here
        or difflib.get_close_matches(name, names, 1)
    )
    hint = f"nearest is {near[0]}" if near else f"valid here are {', '.join(siblings)}"
    return SettingsError(f"{place(label.start_mark)}: unknown key {name}; {hint}")


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _strip_none(hint: Any) -> Any:
    """`X` for the type `X | None`; any other type unchanged."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    inner = [arg for arg in get_args(hint) if arg is not type(None)]
    if len(inner) != 1:
        raise TypeError(f"the only union that the loader supports is X | None, got {hint}")
    return inner[0]


def _walk(cls: type, prefix: str) -> list[tuple[str, Any, Field[Any]]]:
    """Every key as (dotted name, type, field): the keys of a section, then its nested sections."""
    hints = get_type_hints(cls)
    flat: list[tuple[str, Any, Field[Any]]] = []
    nested: list[tuple[str, Any, Field[Any]]] = []
    for entry in fields(cls):
        name, hint = _join(prefix, entry.name), hints[entry.name]
        inner = _strip_none(hint)
        listed = get_origin(inner) is tuple and is_dataclass(get_args(inner)[0])
        part = get_args(inner)[0] if listed else inner
        rows = nested if is_dataclass(inner) or "by" in entry.metadata else flat
        rows.append((name, hint, entry))
        if isinstance(part, type) and is_dataclass(part):
            rows += _walk(part, f"{name}[]" if listed else name)
    return flat + nested


def _default(entry: Field[Any]) -> Any:
    return entry.default if entry.default_factory is MISSING else entry.default_factory()


def _rules(rules: Mapping[str, Any]) -> list[str]:
    bounds = {"low": "at least {}", "high": "at most {}"}
    shown = [
        text.format(rules[name]) for name, text in bounds.items() if rules.get(name) is not None
    ]
    if rules.get("choices") is not None:
        shown.append(f"one of {', '.join(str(choice) for choice in rules['choices'])}")
    return shown


def _type_name(hint: Any) -> str:
    inner = _strip_none(hint)
    if get_origin(inner) is Literal:
        name = " | ".join(str(choice) for choice in get_args(inner))
    elif get_origin(inner) is tuple:
        name = f"list of {_type_name(get_args(inner)[0])}"
    elif get_origin(inner) is dict:
        name = "mapping"
    else:
        names = {object: "any"}
        name = "section" if is_dataclass(inner) else names.get(inner, inner.__name__)
    return name if inner is hint else f"{name} | null"


def _show(value: Any) -> str:
    text: str = yaml.safe_dump(_plain(value), default_flow_style=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


def _plain(value: Any) -> Any:
    """The value with all dataclasses as dicts and all tuples as lists, at every depth."""
    if is_dataclass(value) and not isinstance(value, type):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value


def _difference(a: Any, b: Any, name: str) -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        names = [*a, *(other for other in b if other not in a)]
        return [
            line
            for part in names
            for line in _difference(a.get(part), b.get(part), _join(name, part))
        ]
    return [] if a == b else [f"{name}: {_show(a)} -> {_show(b)}"]
