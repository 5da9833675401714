"""How a section of settings is declared: a frozen pydantic dataclass with `config=RULES`.

Its fields are made by `key` and `section`. It is checked whenever it is made, by `replace` too.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any, Literal, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.fields import FieldInfo

# Strict: no text becomes a number. In files, which are read as JSON, lists are tuples all the same.
RULES = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def key(
    default: Any, sentence: str, *, within: tuple[float | None, float | None] = (None, None)
) -> Any:
    """One setting: its default, its sentence for the help, and its inclusive bounds."""
    return Field(default, description=sentence, ge=within[0], le=within[1])


def section(cls: type, sentence: str, *, optional: bool = False) -> Any:
    """A nested group of settings. An optional one is None unless the settings contain it."""
    if optional:
        return Field(None, description=sentence)
    return Field(default_factory=cls, description=sentence)


def fields_of(cls: Any) -> dict[str, FieldInfo]:
    """The fields of a section, or of a game's options, by name."""
    declared = cls if hasattr(cls, "__pydantic_fields__") else model_of(cls)
    fields: dict[str, FieldInfo] = declared.__pydantic_fields__
    return fields


@lru_cache(maxsize=64)
def model_of(options: Any) -> type[BaseModel]:
    """The pydantic model of a game's options, a dataclass whose fields dialop.kit.option makes."""
    hints, model = get_type_hints(options), dict[str, Any]()
    for field in dataclasses.fields(options):
        rules, default = field.metadata, field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        choices, kind = rules.get("choices"), hints[field.name]
        if choices is not None:
            kind = Literal[tuple(choices)]
        within = (rules.get("low"), rules.get("high"))
        model[field.name] = (kind, key(default, rules.get("sentence", ""), within=within))
    return create_model(options.__name__, __config__=RULES, **model)


def section_in(info: FieldInfo) -> type | None:
    """The section that a field holds, or holds unless it is null; None without one."""
    kinds = [info.annotation, *get_args(info.annotation)]
    return next((kind for kind in kinds if hasattr(kind, "__pydantic_fields__")), None)


def names_of(cls: type, prefix: str = "") -> list[str]:
    """The dotted names of all keys and sections below a section."""
    names = []
    for name, info in fields_of(cls).items():
        names.append(join(prefix, name))
        if inner := section_in(info):
            names += names_of(inner, names[-1])
    return names


def join(prefix: str, name: str) -> str:
    """The dotted name of a key of the section `prefix`, "" for the settings themselves."""
    return f"{prefix}.{name}" if prefix else name
