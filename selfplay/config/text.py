"""Settings as YAML text, and their differences from the defaults or from another run."""

from __future__ import annotations

import math
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

# Plain decimal numbers: YAML 1.1 reads 1e-5 as text, 010 as 8 and 1:30 as 90.
_NUMBERS = {
    "int": re.compile(r"[-+]?([0-9][0-9_]*|0x[0-9a-fA-F]+)$"),
    "float": re.compile(
        r"[-+]?([0-9][0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)?|\.[0-9]+([eE][-+]?[0-9]+)?|\.inf)$|\.nan$"
    ),
}


class Loader(yaml.SafeLoader):
    """Reads numbers as plain decimals, a date as text, and ~ as the home folder."""

    def construct_number(self, node: yaml.ScalarNode) -> float:
        """Raises MarkedYAMLError for a number that is not finite."""
        value = node.value.replace("_", "")
        if node.tag.endswith(":int"):
            return int(value, 16 if "x" in value else 10)
        if not math.isfinite(number := float(value.replace(".inf", "inf").replace(".nan", "nan"))):
            raise yaml.MarkedYAMLError(
                problem=f"a number must be finite, got {node.value}", problem_mark=node.start_mark
            )
        return number

    def construct_text(self, node: yaml.ScalarNode) -> str:
        """Expands ~: a shell leaves it unchanged in out=~/runs."""
        text: str = self.construct_scalar(node)
        return str(Path(text).expanduser()) if text.startswith("~/") else text


class _Dumper(yaml.SafeDumper):
    """Quotes text that `Loader` would read as another value."""


_ELSE = ("timestamp", "int", "float")
Loader.add_constructor("tag:yaml.org,2002:str", Loader.construct_text)
Loader.yaml_implicit_resolvers = {
    first: [each for each in resolvers if not each[0].endswith(_ELSE)]
    for first, resolvers in Loader.yaml_implicit_resolvers.items()
}
for _name, _pattern in _NUMBERS.items():
    Loader.add_constructor(f"tag:yaml.org,2002:{_name}", Loader.construct_number)
    for _class in (Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, [*"-+.0123456789"])


def dump(config: Any) -> str:
    """All settings as YAML. `load` of this text returns an equal object."""
    return _yaml(config, sort_keys=False, width=100)


def show(value: Any) -> str:
    """A value as YAML in one line."""
    text = _yaml(value, default_flow_style=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


def difference(a: Any, b: Any, name: str = "") -> list[str]:
    """The dotted keys whose values differ, each as `name: value in a -> value in b`. For different
    engine kinds only the keys of both."""
    a, b = plain(a), plain(b)
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return [] if a == b else [f"{name}: {show(a)} -> {show(b)}"]
    same = a.get("kind") == b.get("kind")
    keys = dict.fromkeys([*a, *b] if same else [key for key in a if key in b])
    lines = [difference(a.get(key), b.get(key), f"{name}.{key}".lstrip(".")) for key in keys]
    return [line for each in lines for line in each]


def changed(given: Any, default: Any, name: str = "") -> list[tuple[str, str, str]]:
    """(dotted key, default, value) of each setting that differs from its default. A section that is
    absent by default, or has options of another class, is compared with its class's defaults; the
    value is {} if it has only these."""
    if isinstance(given, dict) and any(map(is_dataclass, given.values())):  # methods
        return [each for key, of in given.items() for each in changed(of, None, f"{name}.{key}")]
    if not is_dataclass(given) or isinstance(given, type):
        return [] if given == default else [(name, show(default), show(given))]
    home = default if type(default) is type(given) else type(given)()
    found: list[tuple[str, str, str]] = []
    for last in (field.name for field in fields(given)):
        key = f"{name}.{last}".lstrip(".")
        found += changed(getattr(given, last), getattr(home, last), key)
    return found or ([(name, show(None), "{}")] if default is None else [])


def _yaml(value: Any, **style: Any) -> str:
    return str(yaml.dump(plain(value), Dumper=_Dumper, allow_unicode=True, **style))


def plain(value: Any) -> Any:
    """The value with every section as a dict, at every depth."""
    return TypeAdapter(Any).dump_python(value)
