"""The section `methods`: which methods a step asks, each with settings that it declares itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pydantic import TypeAdapter, with_config
from typing_extensions import TypedDict

from selfplay.config.plugins import PLUGINS, check_name, function_of
from selfplay.config.schema import RULES, Described, described

METHODS = "methods"
# What a method's setting was called before 2026-11-29.
MOVED = {
    "critic": "methods.ppo",
    "algorithm.resample": "methods.resample.instances",
    "algorithm.imitate_best": "methods.best_games.weight",
    "algorithm.old_logprobs": "methods.recompute",
    "algorithm.importance": "methods.recompute.importance",
    "algorithm.importance_cap": "methods.recompute.cap",
    "warm_start.auxiliary_weight": "methods.auxiliary_imitation.weight",
    "warm_start.auxiliary_games": "methods.auxiliary_imitation.games",
}


@dataclass(frozen=True)
class NoOptions:
    """Of a method without settings."""


def options_class(name: str) -> Any:
    """The class of a method's settings. Raises ValueError for a name that is no method's."""
    if check_name(METHODS, name) in PLUGINS[METHODS].built_in:
        return import_module("selfplay.methods.options").OPTIONS[name]
    return getattr(function_of(METHODS, name), "Options", NoOptions)


def typed_options(
    given: Mapping[str, Any], advantage: str, context: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings of each method that is on, by its name: those with a value other than off, and
    the one that `algorithm.advantage` names. With `context` a method of one's own may stay as
    given (`load`)."""
    on = {name: of for name, of in given.items() if of is not None and of is not False}
    on = {name: {} if of is True else of for name, of in on.items()}
    if advantage in PLUGINS[METHODS].built_in:
        on.setdefault(advantage, {})
    found, kinds = dict[str, Any](), dict[str, Any]()
    for name, of in on.items():
        is_built_in = check_name(METHODS, name) in PLUGINS[METHODS].built_in
        if context["imports"] or is_built_in:
            kind = options_class(name)
            context["declared"].append((kind, f"{METHODS}.{name}"))
            if not isinstance(of, kind):
                kinds[name] = with_config(RULES)(kind)
        found[name] = of
    untyped = json.dumps({name: found[name] for name in kinds})
    fields = TypedDict("Methods", kinds)  # type: ignore[misc]
    return found | TypeAdapter[Any](fields).validate_json(untyped)


def described_methods() -> list[Described]:
    """The settings of each built-in method as text."""
    entries = []
    for name in PLUGINS[METHODS].built_in:
        kind, home = options_class(name), f"{METHODS}.{name}"
        entries.append(Described(home, None, "", (), " ".join(kind.__doc__.split())))
        entries += described(kind, home)
    return entries


def of_today(values: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run of any version, with the names of today for what `MOVED` has."""
    old = {name: _taken(values, name) for name in MOVED}
    if all(value is None for value in old.values()):
        return values
    advantage = (values.get("algorithm") or {}).get("advantage")
    on = {
        "recompute": old["algorithm.old_logprobs"] == "recomputed",
        "auxiliary_imitation": old["warm_start.auxiliary_weight"],
        "best_games": old["algorithm.imitate_best"],
        "resample": old["algorithm.resample"],
        "ppo": advantage == "ppo",
    }
    methods: dict[str, Any] = {name: {} for name, is_on in on.items() if is_on}
    for name, value in old.items():
        _, method, *key = MOVED[name].split(".")
        if method in methods and value is not None and name != "algorithm.old_logprobs":
            methods[method] |= {key[0]: value} if key else value
    return {**values, METHODS: methods}


def _taken(values: dict[str, Any], name: str) -> Any:
    """The value of a dotted key, which is taken out; None if it is not there."""
    section, _, key = name.rpartition(".")
    home = values.get(section) if section else values
    return home.pop(key, None) if isinstance(home, dict) else None
