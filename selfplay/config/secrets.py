"""Keeps API keys out of settings: they would stand in config.yaml, in logs and in tracebacks.

A key is read from the environment variable that `endpoint.key_variable` names. What looks like a
key anywhere else is refused, and no message shows it.
"""

from __future__ import annotations

import re

_ADVICE = "put it into an environment variable and name that in endpoint.key_variable"
_NAME = re.compile(
    r"(x-)?(api|access|auth|client|bearer)?[-_]?"
    r"(key|token|secret|password|auth|authorization|bearer|credentials?)",
    re.IGNORECASE,
)
_VALUE = re.compile(r"(Bearer |Basic |sk-|hf_)\S")
_PART_OF_URL = re.compile(r"(https?://)\S*@|(https?://[^\s?#]*[?#])\S*")


def hidden(text: str) -> str:
    """The text with `…` for what may be a key in a URL: the user part, the query, the fragment."""
    return _PART_OF_URL.sub(lambda found: f"{found[1] or found[2]}…{'@' if found[1] else ''}", text)


def names_key(dotted: str) -> bool:
    """Whether a setting of this dotted name, known or not, may hold a key."""
    own = dotted == "endpoint" or dotted.startswith("endpoint.body")
    return own or any(_NAME.fullmatch(part) for part in dotted.split("."))


def check_url(text: str) -> None:
    """Raise ValueError if a URL in a partner's text has an @, a ? or a #: a user part, a query or
    a fragment."""
    if hidden(text) != text:
        raise ValueError(
            "an endpoint's URL must have no user name, no password, no query and no fragment, got "
            f"{hidden(text)!r}; if that holds a key, {_ADVICE}"
        )


def check_body(value: object, name: str = "endpoint.body") -> None:
    """Raise ValueError for a field of `endpoint.body` that is named like a key, or holds one."""
    if isinstance(value, dict):
        for label, below in value.items():
            check_body(below, f"{name}.{label}")
    elif isinstance(value, (list, tuple)):
        for below in value:
            check_body(below, name)
    elif value not in (None, ""):
        looks = isinstance(value, str) and _VALUE.match(value)
        if looks or _NAME.fullmatch(name.rpartition(".")[2]):
            raise ValueError(f"{name} must not hold a key; {_ADVICE}")


def check_absent(key: str, text: str, *, what: str) -> None:
    """Raise ValueError, which does not show the key, if `text` holds it."""
    if key in text:
        raise ValueError(f"{what} must not hold the key of endpoint.key_variable")
