"""How settings are declared, and the declarations as text for --help and the settings page.

A section is a frozen pydantic dataclass with `config=RULES`, which is checked whenever it is
created, also by `replace`. The docstring below a key describes it, as a class's does a section.
"""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from collections.abc import Sequence
from inspect import formatannotation
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass, is_pydantic_dataclass

from selfplay.config.text import show

# Strict: no text becomes a number. Files are read as JSON, where a list is still a valid tuple.
RULES = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


def join(prefix: str, name: str) -> str:
    """The dotted name of a key in the section `prefix`; "" is the top level."""
    return f"{prefix}.{name}" if prefix else name


@dataclasses.dataclass(frozen=True, slots=True)
class Described:
    """One key as text. A section has no `kind`; its `default` is "null" if it is absent by default,
    else ""."""

    name: str
    kind: str | None
    default: str
    rules: tuple[str, ...]
    sentence: str


def described(cls: Any, prefix: str = "") -> list[Described]:
    """Every key of a section or of a game's options, then of its nested sections."""
    config = None if hasattr(cls, "__pydantic_config__") else RULES
    own = cls if is_pydantic_dataclass(cls) else dataclass(cls, frozen=True, config=config)
    keys, sections = list[Described](), list[Described]()
    for last, field in own.__pydantic_fields__.items():
        name, sentence = join(prefix, last), field.description
        kinds = (field.annotation, *get_args(field.annotation))
        default = field.get_default(call_default_factory=True, validated_data={})
        section = next(filter(dataclasses.is_dataclass, kinds), None)
        if section is not None:
            absent = "null" if default is None else ""
            sections.append(Described(name, None, absent, (), _line(sentence or section.__doc__)))
            sections += described(section, name)
        elif field.annotation is Any:  # declared by the game
            sections.append(Described(name, None, "", (), _line(sentence)))
        else:
            kind, inside = _kind(field.annotation)
            bounds = [*field.metadata, *inside]
            rules = [f"at least {each.ge}" for each in bounds if hasattr(each, "ge")]
            rules += [f"at most {each.le}" for each in bounds if hasattr(each, "le")]
            keys.append(Described(name, kind, show(default), tuple(rules), _line(sentence)))
    return keys + sections


def _kind(annotation: Any) -> tuple[str, list[Any]]:
    """A type in words, as "list of int" or "constant or linear", and the bounds inside its
    annotation."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        kinds = [_kind(each) for each in inside]
        return " or ".join(kind for kind, _ in kinds), [each for _, own in kinds for each in own]
    if origin is Annotated:
        return _kind(inside[0])[0], inside[1].metadata
    if origin in (tuple, dict):
        return "mapping" if origin is dict else f"list of {_kind(inside[0])[0]}", []
    words = {NoneType: "null", Any: "any", object: "any"}
    return " or ".join(map(str, inside)) or words.get(annotation, formatannotation(annotation)), []


def _line(sentence: str | None) -> str:
    return " ".join((sentence or "").split())


def names_of(cls: Any, prefix: str = "") -> list[str]:
    """The dotted names of all keys and sections below a section."""
    return [each.name for each in described(cls, prefix)]


def describe(entries: Sequence[Described]) -> str:
    """Each key's type, default, rules and sentence, as lines."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 100)
    lines: list[str] = []
    for entry in entries:
        if entry.kind is None:
            absent = " (default null)" if entry.default else ""
            lines += ["", *textwrap.wrap(f"{entry.name}: {entry.sentence}{absent}", width)]
            continue
        facts = "; ".join((entry.kind, f"default {entry.default}", *entry.rules))
        head, sentence = f"{entry.name}  ({facts})", entry.sentence
        lines += textwrap.wrap(head, width, initial_indent="  ", subsequent_indent="    ")
        lines += textwrap.wrap(sentence, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines).strip("\n") + "\n"


def chosen(entries: Sequence[Described], name: str) -> list[Described]:
    """The key or section of this name, and everything below it."""
    return [each for each in entries if f"{each.name}.".startswith(f"{name}.")]
