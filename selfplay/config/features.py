"""Settings that features declare: some sections, each method's settings, and each engine kind's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import cache, partial
from typing import Any

from pydantic import TypeAdapter, ValidationInfo, with_config
from pydantic.dataclasses import is_pydantic_dataclass
from typing_extensions import TypedDict

from selfplay.config.plugins import (
    PLUGINS,
    NoOptions,
    at_path,
    check_name,
    has_options,
    options_class,
)
from selfplay.config.schema import RULES, Described, described
from selfplay.config.text import difference, show

METHODS, ENGINE, PLAY = "methods", "engine.kind", "rollout.play"
# The sections of rooms outside the core, and the classes of their settings. One with an `EACH` maps
# names to settings of that class.
SECTIONS = {
    "policies": "selfplay.policies.options:Policies",
    "warm_start": "selfplay.warm_start.options:WarmStartConfig",
    "policy_pool": "selfplay.partners.options:PolicyPoolConfig",
    "endpoint": "selfplay.partners.options:EndpointConfig",
}


def context_of(info: ValidationInfo) -> Mapping[str, Any]:
    """`declared` collects the classes that features add, with their sections' names. Without
    `imports` the user's code is not imported, and its settings stay as given (`load`)."""
    return info.context or {"declared": [], "imports": True}


def typed(kind: Any, home: str, given: Any, context: Mapping[str, Any]) -> Any:
    """The settings of the section `home` as an instance of the class that declares them, which may
    `read` them itself."""
    if isinstance(given, kind):
        return given
    if (read := getattr(kind, "read", None)) is not None:
        return read(given, context)
    context["declared"].append((kind, home))
    return _adapter(kind).validate_json(json.dumps(given))


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Checks the settings of this class: made once, which takes longer than a check."""
    return TypeAdapter[Any](with_config(RULES)(kind))


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """How two whole settings differ, as plain dicts: `text.difference`, which the class of a
    feature's section may replace by a `difference` of its own."""
    lines = list[str]()
    for name, given in now.items():
        kind = section_class(name) if name in SECTIONS else None
        own = getattr(kind, "difference", partial(difference, name=name))
        lines += own(before[name], given)
    return lines


def section_class(name: str) -> Any:
    """The class of the settings of a section."""
    return at_path(SECTIONS[name])


def typed_methods(given: Mapping[str, Any], advantage: str, info: ValidationInfo) -> dict[str, Any]:
    """The settings of each enabled method by name: each that is given and not off, and the one
    that `algorithm.advantage` names."""
    on = {name: of for name, of in given.items() if of is not None and of is not False}
    on = {name: {} if of is True else of for name, of in on.items()}
    if advantage in PLUGINS[METHODS].built_in:
        on.setdefault(advantage, {})
    context = context_of(info)
    found, kinds = dict[str, Any](), dict[str, Any]()
    for name, of in on.items():
        is_built_in = check_name(METHODS, name) in PLUGINS[METHODS].built_in
        if context["imports"] or is_built_in:
            kind = options_class(METHODS, name)
            context["declared"].append((kind, f"{METHODS}.{name}"))
            if not isinstance(of, kind):
                kinds[name] = with_config(RULES)(kind)
        found[name] = of
    untyped = json.dumps({name: found[name] for name in kinds})
    fields = TypedDict("Methods", kinds)  # type: ignore[misc]
    return found | TypeAdapter[Any](fields).validate_json(untyped)


def typed_engine(given: Any, base: Any, info: ValidationInfo) -> Any:
    """The settings of the engine as its kind's class, which extends `base`. Settings of another
    built-in kind are ignored.

    Raises:
        ValueError: for a switch or a choice of another kind that is not at its default.
    """
    context, kind = context_of(info), base
    if isinstance(given, base):
        return given
    name = given.get("kind", base().kind) if isinstance(given, Mapping) else None
    if isinstance(name, str) and (context["imports"] or name in PLUGINS[ENGINE].built_in):
        kind = options_class(ENGINE, name, base)
        if not is_pydantic_dataclass(kind) or not issubclass(kind, base):
            raise ValueError(
                f"engine.kind {name}: its Options must be a pydantic.dataclasses.dataclass that "
                f"extends EngineConfig, got {kind.__qualname__}"
            )
    if isinstance(given, Mapping):
        own = {field.name for field in fields(kind)}
        others = {
            field.name: field
            for each in PLUGINS[ENGINE].built_in
            for field in fields(options_class(ENGINE, each))
            if field.name not in own
        }
        for key in given.keys() & others.keys():
            is_on = given[key] is True or isinstance(given[key], str)
            if is_on and given[key] != (default := others[key].default):
                raise ValueError(
                    f"engine.{key} must be {show(default)} with engine.kind {name}, got "
                    f"{show(given[key])}"
                )
        is_read = own if kind is base and not context["imports"] else given.keys() - others.keys()
        given = {key: value for key, value in given.items() if key in is_read}
    return typed(kind, "engine", given, context)


def all_described(
    config: Any, methods: Iterable[str] = (), engines: Iterable[str] = ()
) -> list[Described]:
    """Every key of the settings as text: of `config` with the features' sections, of each built-in
    method and play, and of each engine kind alone. `methods` and `engines` name further ones."""
    entries = []
    for entry in described(config):
        name = entry.name
        is_section = name in SECTIONS and entry.kind is None
        entries += _section(name, section_class(name), name) if is_section else [entry]
    for name in SECTIONS:
        if (each := getattr(section_class(name), "EACH", None)) is not None:
            entries += _section(f"{name}.NAME", each, f"{name}.NAME")
    for name in dict.fromkeys((*PLUGINS[METHODS].built_in, *methods)):
        home = f"{METHODS}.{name}"
        entries += _section(home, options_class(METHODS, name), home)
    for name in dict.fromkeys((*PLUGINS[ENGINE].built_in, *engines)):
        if (kind := options_class(ENGINE, name)) is NoOptions:
            continue
        common = {f"engine.{field.name}" for field in fields(kind.__base__)}
        own = _section(f"{ENGINE} {name}", kind, "engine")
        entries += [each for each in own if each.name not in common]
    for name in filter(partial(has_options, PLAY), PLUGINS[PLAY].built_in):
        entries += _section(f"{PLAY} {name}", options_class(PLAY, name), "rollout.options")
    return entries


def _section(title: str, kind: Any, home: str) -> list[Described]:
    """The class of a section's settings as text: its title and sentence, then its keys."""
    sentence = " ".join((kind.__doc__ or "").split())
    return [Described(title, None, "", (), sentence), *described(kind, home)]
