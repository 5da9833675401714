"""How settings are declared, and the declarations as text for --help and the settings page.

A section is a frozen pydantic dataclass with `config=RULES`, which is checked whenever it is made,
by `replace` too. A key's sentence is the docstring below it, a section's is that of its class.
"""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model
from pydantic.dataclasses import is_pydantic_dataclass

from selfplay.config.text import show

# Strict: no text becomes a number. In files, which are read as JSON, lists are tuples all the same.
RULES = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


@lru_cache(maxsize=64)
def model_of(options: Any) -> type[BaseModel]:
    """The pydantic model of a game's options, a dataclass whose fields dialop.kit.option makes."""
    hints, model = get_type_hints(options), dict[str, Any]()
    for field in dataclasses.fields(options):
        rules, default = field.metadata, field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        choices = rules.get("choices")
        kind = hints[field.name] if choices is None else Literal[tuple(choices)]
        model[field.name] = (
            kind,
            Field(
                default,
                ge=rules.get("low"),
                le=rules.get("high"),
                description=rules.get("sentence"),
            ),
        )
    return create_model(options.__name__, __config__=RULES, **model)


def join(prefix: str, name: str) -> str:
    """The dotted name of a key of the section `prefix`, "" for the settings themselves."""
    return f"{prefix}.{name}" if prefix else name


@dataclasses.dataclass(frozen=True, slots=True)
class Described:
    """One key as text. A section has no `kind`; its `default` is "null" if it is absent unless the
    settings contain it, else ""."""

    name: str
    kind: str | None
    default: str
    rules: tuple[str, ...]
    sentence: str


def described(cls: Any, prefix: str = "") -> list[Described]:
    """Every key of a section, or of a game's options: its keys, then its nested sections."""
    schema = TypeAdapter(cls if is_pydantic_dataclass(cls) else model_of(cls)).json_schema()
    return _described(schema, schema.get("$defs", {}), prefix)


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
    """The key or section of this name, and all below it."""
    return [each for each in entries if f"{each.name}.".startswith(f"{name}.")]


def _described(
    schema: Mapping[str, Any], definitions: Mapping[str, Any], prefix: str
) -> list[Described]:
    """The keys of a JSON schema, then its nested sections."""
    keys: list[Described] = []
    sections: list[Described] = []
    for field, facts in schema.get("properties", {}).items():
        name, sentence = join(prefix, field), " ".join(facts.get("description", "").split())
        forms = [facts, *facts.get("anyOf", ())]
        refs = [form["$ref"].rpartition("/")[2] for form in forms if "$ref" in form]
        if refs:
            section, default = definitions[refs[0]], "null" if "anyOf" in facts else ""
            sentence = sentence or " ".join(section["description"].split())
            sections.append(Described(name, None, default, (), sentence))
            sections += _described(section, definitions, name)
        elif _kind(facts) == "any" and facts.get("default") is None:  # declared by the game
            sections.append(Described(name, None, "", (), sentence))
        else:
            default = show(facts.get("default", {}))
            keys.append(Described(name, _kind(facts), default, _rules(facts), sentence))
    return keys + sections


def _kind(facts: Mapping[str, Any]) -> str:
    if "anyOf" in facts:
        return " | ".join(map(_kind, facts["anyOf"]))
    kind = str(facts.get("type", "any"))
    return f"{kind} of {_kind(_items(facts)[0])}" if kind == "array" else kind


def _items(facts: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return facts.get("prefixItems") or [facts.get("items", {})]


def _rules(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """The bounds of a key, or of the items of a list, and its choices."""
    rules = {}
    for form in (facts, *facts.get("anyOf", ()), *_items(facts)[:1]):
        for word, shown in (("minimum", "at least {}"), ("maximum", "at most {}")):
            if word in form:
                rules[word] = shown.format(form[word])
        if "enum" in form:
            rules["enum"] = f"one of {', '.join(map(str, form['enum']))}"
    return tuple(rules.values())
