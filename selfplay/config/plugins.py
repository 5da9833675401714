"""The keys that take a function: a built-in name, or your own as module:name or file.py:name.

A built-in name stands for an import path, so `function_of` resolves both in the same way.
docs/your_method.md describes the signatures.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from operator import attrgetter
from typing import Any

from pydantic import AfterValidator

from dialop.game import wrong_state
from dialop.modules import own_module
from dialop.shown import error_line, line_of
from dialop.specs import nearest
from selfplay.errors import EngineFault, EnginesFailed, OwnFault, RunEnds, own_fault


@dataclass(frozen=True, slots=True)
class Plugin:
    """What a key takes: the required parameters of its function, or of its class's method
    `called`, and the import paths of the built-in ones by name."""

    parameters: tuple[str, ...]
    built_in: Mapping[str, str]
    what: str = "a function"
    called: str = ""
    typed: bool = False  # whether it declares the section's `options` as settings
    options: str = ""  # the module whose `OPTIONS` has the built-in ones' classes or their paths


_LOSS, _ADVANTAGES = "selfplay.learner.loss", "selfplay.advantages.advantages"
_REWARDS, _METHODS = "selfplay.advantages.rewards", "selfplay.methods"
PLUGINS = {
    "algorithm.loss": Plugin(
        ("logprobs_M", "batch", "algorithm"),
        {
            "clip": f"{_LOSS}:clipped_surrogate",
            "gspo": f"{_LOSS}:gspo",
            "cispo": f"{_LOSS}:cispo",
            "reinforce": f"{_LOSS}:reinforce",
        },
    ),
    "algorithm.advantage": Plugin(
        ("samples", "state", "algorithm"),
        {
            name: f"{_ADVANTAGES}:{name}"
            for name in ("grpo", "dr_grpo", "rloo", "turns", "reinforce_pp", "ema", "ppo")
        },
    ),
    "rollout.player": Plugin(
        ("rendering", "seed_names", "max_new_tokens", "max_game_tokens"),
        {
            "policy": "selfplay.rollout.players:PolicyPlayer",
            "endpoint_seat": "selfplay.extras.endpoint_seat:EndpointSeat",
        },
        "a subclass of PolicyPlayer",
    ),
    "methods": Plugin(
        ("options", "parts"),
        {
            "judge": f"{_METHODS}.judge:Judge",
            "recompute": f"{_METHODS}.recompute:Recompute",
            "kl_reference": f"{_METHODS}.kl_reference:KLReference",
            "legal_moves": "selfplay.league.legal_moves:LegalMoves",
            "auxiliary_imitation": f"{_METHODS}.auxiliary_imitation:AuxiliaryImitation",
            "best_games": f"{_METHODS}.best_games:BestGames",
            "resample": f"{_METHODS}.resample:Resample",
            "ppo": f"{_METHODS}.ppo:PPO",
        },
        "a subclass of Method",
        options=f"{_METHODS}.options",
    ),
    "rollout.opponents": Plugin(
        ("config",),
        {
            "shares": "selfplay.partners.opponents:Shares",
            "league": "selfplay.league.opponents:League",
        },
        "a subclass of Opponents",
        typed=True,
        options="selfplay.league.options",
    ),
    "rollout.play": Plugin(
        ("position", "generate"),
        {
            "plain": "selfplay.rollout.episode:play_turns",
            "branches": "selfplay.rollout.branches:play_branched",
        },
        typed=True,
        options="selfplay.rollout.options",
    ),
    "data.train": Plugin(
        ("step", "numbers", "config"),
        {"generated": "selfplay.data.stream:generated_instances"},
        typed=True,
    ),
    "reward.function": Plugin(
        ("episode",),
        {
            name: f"{_REWARDS}:{name}"
            for name in ("score_norm", "accept", "regret", "message_credit")
        },
    ),
    "observers": Plugin(
        ("config", "world"),
        {
            "console": "selfplay.apps.console:Console",
            "page": "selfplay.apps.report.observer:Page",
            "wandb": "selfplay.apps.trackers:WandB",
            "tensorboard": "selfplay.apps.trackers:TensorBoard",
            "exploitability": "selfplay.league.observer:Exploitability",
            "league": "selfplay.league.results:Results",
        },
        "a subclass of Observer",
    ),
    "engine.kind": Plugin(
        ("config", "weights", "world"),
        {
            "hf": "selfplay.engines.hf:HFEngine",
            "sglang": "selfplay.engines.sglang.engine:SGLangEngine",
            "vllm": "selfplay.extras.vllm:VLLMEngine",
        },
        "a subclass of Engine",
        called="start",
        options="selfplay.engines.options",
    ),
}


def names_function(name: str) -> bool:
    """Whether a text has the form module:name or my_file.py:name."""
    module, _, attribute = name.rpartition(":")
    return bool(module) and attribute.isidentifier()


def check_name(key: str, name: str) -> str:
    """The value of a key that takes a function, checked without opening a file.

    Raises:
        ValueError: for a text that is neither a built-in name nor of the form module:name.
    """
    built_in = PLUGINS[key].built_in
    if name not in built_in and not names_function(name):
        raise ValueError(
            f"{key} must be one of {', '.join(built_in)}, or {PLUGINS[key].what} as my_module:name "
            f"or my_file.py:name, got {name!r}{nearest(name, built_in)}"
        )
    return name


def function_for(key: str) -> AfterValidator:
    """The validator of a key's field, as `check_name`."""
    return AfterValidator(partial(check_name, key))


def check_options(section: str, values: Any) -> None:
    """Raise ValueError for `options` of a section whose functions take none."""
    keys = [key for key in PLUGINS if key.startswith(f"{section}.")]
    names = [getattr(values, key.partition(".")[2]) for key in keys]
    takes = any(
        name not in PLUGINS[key].built_in or has_options(key, name)
        for key, name in zip(keys, names, strict=True)
    )
    if values.options and not takes:
        raise ValueError(
            f"{section}.options must be settings of a custom {' or '.join(keys)}, got "
            f"{', '.join(values.options)} for {', '.join(names)}"
        )


class WrongParameters(ValueError):
    """A function's parameters differ from the ones that its key requires."""


def function_of(key: str, name: str) -> Callable[..., Any]:
    """The function that a key names.

    Raises:
        ValueError: one line, if its module cannot be imported or its parameters are wrong.
    """
    return _function_at(key, PLUGINS[key].built_in.get(name, name))


@lru_cache(maxsize=64)
def _function_at(key: str, path: str) -> Callable[..., Any]:
    """The function at this path, with its parameters checked."""
    plugin = PLUGINS[key]
    module_name, _, attribute = path.rpartition(":")
    expected = f"a function as my_module:name or my_file.py:name; there is no module {module_name}"
    module = own_module(module_name, what=key, expected=expected)
    function = getattr(module, attribute, None)
    if not callable(function):
        names = [each for each, value in vars(module).items() if callable(value)]
        raise ValueError(
            f"{key} must name a function of {module.__name__}, got {attribute!r}"
            f"{nearest(attribute, names)}"
        )
    called = getattr(function, plugin.called, None) if plugin.called else function
    parameters = inspect.signature(called).parameters.values() if called else ()
    required = [each.name for each in parameters if each.default is each.empty]
    if tuple(required) != plugin.parameters:
        method = f" whose {plugin.called} is" if plugin.called else ""
        raise WrongParameters(
            f"{key} must be {plugin.what}{method} of ({', '.join(plugin.parameters)}), got "
            f"{attribute}({', '.join(required)})"
        )
    return function


@contextmanager
def own_call(key: str, name: str) -> Iterator[None]:
    """Turn an error in a call of the function that a key names, or in the checks of its result,
    into an OwnFault of one line: the key, the function, the error and its file and line. An exit
    counts as an error. Errors of a built-in function pass unchanged."""
    try:
        yield
    except (Exception, SystemExit) as error:
        fault, prefix = own_fault(error), f"{key} {name}: "
        if fault is error and str(error).startswith(prefix):  # from a nested call
            raise
        of_project = isinstance(error, SystemExit | RunEnds | EngineFault | EnginesFailed)
        if fault is None and (name in PLUGINS[key].built_in or of_project):
            raise
        where = line_of(function_of(key, name)) if isinstance(error, OwnFault) else ""
        raise OwnFault(f"{prefix}{fault or error_line(error)}{where}") from error


@dataclass(frozen=True)
class NoOptions:
    """The settings of a method without any."""


def options_class(key: str, name: str, default: Any = NoOptions) -> Any:
    """The class of the settings of a key's value. Raises ValueError for an invalid name."""
    if check_name(key, name) in PLUGINS[key].built_in:
        found = import_module(PLUGINS[key].options).OPTIONS[name]
        return at_path(found) if isinstance(found, str) else found
    return getattr(function_of(key, name), "Options", default)


def at_path(path: str) -> Any:
    """What a path of the form module:name names in this package."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def has_options(key: str, name: str) -> bool:
    """Whether a key's value is built in and has settings."""
    module = PLUGINS[key].options
    return bool(module) and name in import_module(module).OPTIONS


def plain_state(key: str, name: str, state: Callable[[], Any]) -> Any:
    """The state that a key's code adds to a checkpoint; a copy if the code is custom. Raises
    OwnFault for a state that JSON cannot represent."""
    if name in PLUGINS[key].built_in:
        return state()
    with own_call(key, name):
        if wrong := wrong_state(given := state()):
            raise OwnFault(f"state() {wrong}")
        return json.loads(json.dumps(given))


def key_of(name: str) -> str:
    """The key with this built-in name, else the key whose parameters the named function has.

    Raises:
        ValueError: one line, if there is no such function or no key has its parameters.
    """
    for key, plugin in PLUGINS.items():
        if name in plugin.built_in:
            return key
    for key in PLUGINS:
        try:
            function_of(key, check_name(key, name))
        except WrongParameters:
            continue
        except ValueError as error:
            raise ValueError(f"the function{str(error).removeprefix(key)}") from error
        return key
    rules = "; ".join(f"{key} ({', '.join(each.parameters)})" for key, each in PLUGINS.items())
    raise ValueError(f"{name} must take the parameters of one of {rules}")


def methods_of(config: Any) -> list[tuple[str, Any, Any]]:
    """The name, the class and the settings of each method, in the order of their calls."""
    return [(name, function_of("methods", name), of) for name, of in config.methods.items()]


def as_setting(key: str, name: str) -> str:
    """The `key=value` that selects only this function."""
    one = {"methods": f"{{{name}: {{}}}}", "observers": f"[{name}]"}
    return f"{key}={one.get(key, name)}"


def own_functions(config: Any) -> Iterator[tuple[str, str]]:
    """Each key whose function is custom, and its value, for each entry of a list or mapping."""
    for key, plugin in PLUGINS.items():
        value = attrgetter(key)(config)
        for name in [value] if isinstance(value, str) else [named(each)[0] for each in value]:
            if name not in plugin.built_in and names_function(name):
                yield key, name


def named(entry: Any) -> tuple[str, Mapping[str, Any]]:
    """The name and the options of an entry of `observers`, NAME or {NAME: {KEY: VALUE}}.

    Raises ValueError for anything else."""
    match entry:
        case str():
            return entry, {}
        case Mapping() if len(entry) == 1:
            ((name, options),) = entry.items()
            if isinstance(name, str) and isinstance(options, Mapping):
                return name, options
    raise ValueError(f"observers must list NAME or {{NAME: {{KEY: VALUE}}}}, got {entry!r}")
