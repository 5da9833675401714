"""How settings are declared: frozen pydantic dataclasses with `config=RULES`.

A key's sentence for the help is the docstring below it, a section's is that of its class. A section
is checked whenever it is made, by `replace` too.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

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
