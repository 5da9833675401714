"""Settings of a custom function or class, from the `options` of its section."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict, fields, make_dataclass
from functools import lru_cache, partial
from typing import Any

from selfplay.config.load import typed_options
from selfplay.config.plugins import PLUGINS, function_of, has_options, options_class


def options_at(key: str, config: Any) -> Any:
    """The settings of a key's value: a class's dataclass `Options`, or a dataclass of a function's
    parameters with defaults. The options unchanged if a class declares none.

    Raises:
        ValueError: one line for an unknown option, unless other custom code in the section may
            take it, and for a value of the wrong type.
    """
    section, _, field = key.partition(".")
    values = getattr(config, section)
    name, options = getattr(values, field), values.options
    is_declared = has_options(key, name)
    kind = options_class(key, name) if is_declared else _kind(function_of(key, name))
    if kind is None:
        return options
    own, others = {each.name for each in fields(kind)}, set[str]()
    for other in (each for each in PLUGINS if each != key and each.startswith(f"{section}.")):
        if has_options(other, chosen := getattr(values, other.partition(".")[2])):
            others |= {each.name for each in fields(options_class(other, chosen))}
        elif chosen not in PLUGINS[other].built_in:
            others |= options.keys()
    options = {each: value for each, value in options.items() if each in own or each not in others}
    return typed_options(kind, options, what=f"{section}.options")


@lru_cache(maxsize=64)
def _kind(function: Callable[..., Any]) -> Any:
    """The dataclass of a function's or class's settings: a class's `Options` (None without one), or
    one made of the function's parameters with defaults."""
    if isinstance(function, type):
        return getattr(function, "Options", None)
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    own = [
        (each.name, Any if each.annotation is each.empty else each.annotation, each.default)
        for each in parameters
        if each.default is not each.empty
    ]
    return make_dataclass("Options", own, frozen=True)


def with_options(key: str, config: Any) -> Callable[..., Any]:
    """The function that a key names, bound to its settings. Raises ValueError as `options_at`."""
    section, _, field = key.partition(".")
    values = getattr(config, section)
    function = function_of(key, getattr(values, field))
    return partial(function, **asdict(options_at(key, config))) if values.options else function
