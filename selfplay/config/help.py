"""The settings as text: for --help, for --list and for the settings page of the docs."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal, get_args, get_origin

from selfplay.config.schema import fields_of, join, section_in
from selfplay.config.shipped import shipped
from selfplay.config.text import show


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
    keys: list[Described] = []
    sections: list[Described] = []
    for field, info in fields_of(cls).items():
        name, part, sentence = join(prefix, field), section_in(info), info.description or ""
        if part or info.annotation is Any:  # Any: options that the game declares
            optional = part is not None and info.default_factory is None
            sections.append(Described(name, None, "null" if optional else "", (), sentence))
        else:
            default = show(info.get_default(call_default_factory=True))
            kind, rules = _type_name(info.annotation), _rules(info.annotation, info.metadata)
            keys.append(Described(name, kind, default, rules, sentence))
        if part:
            sections += described(part, name)
    return keys + sections


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
    """The key or section of this name, and all below it."""
    return [each for each in entries if f"{each.name}.".startswith(f"{name}.")]


def shipped_configs() -> str:
    """The settings files that ship with the project: each one's name and its first sentence."""
    lines = []
    for path in sorted(shipped("configs").glob("*.yaml")):
        text = path.read_text(encoding="utf-8").splitlines()
        comment = " ".join(
            line.strip("# ") for line in takewhile(lambda line: line[:1] == "#", text)
        )
        sentence = comment.split(". ")[0].rstrip(".")
        lines.append(textwrap.fill(f"{path.stem:24}{sentence}", 100, subsequent_indent=" " * 24))
    return "\n".join(lines) + "\n"


def _rules(annotation: Any, metadata: Sequence[Any]) -> tuple[str, ...]:
    """The bounds of a field, or of the items of a list, and its choices."""
    kinds = [annotation, *get_args(annotation)]
    items = kinds[1] if get_origin(annotation) is tuple else None
    bounds = [
        *metadata,
        *(one for info in getattr(items, "__metadata__", ()) for one in info.metadata),
    ]
    shown = [f"at least {rule.ge}" for rule in bounds if hasattr(rule, "ge")]
    shown += [f"at most {rule.le}" for rule in bounds if hasattr(rule, "le")]
    choices = next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())
    return (*shown, f"one of {', '.join(map(str, choices))}") if choices else tuple(shown)


def _type_name(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return type(inner[0]).__name__
    if origin is tuple:
        item = get_args(inner[0])[0] if hasattr(inner[0], "__metadata__") else inner[0]
        return f"list of {item.__name__}"
    if origin is dict:
        return "mapping"
    if type(None) in inner:
        return f"{_type_name(inner[0])} | null"
    return "any" if annotation is object else str(annotation.__name__)
