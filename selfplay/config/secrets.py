"""Keeps API keys out of settings, where config.yaml, logs and tracebacks would show them.

A key is read from the environment variable that `endpoint.key_variable` names. Anything else that
looks like a key is refused, and no message shows it.
"""

from __future__ import annotations

import json
import re

_ADVICE = "put it in an environment variable and name the variable in endpoint.key_variable"
_NAME = (
    r"(?:x-)?(?:api|access|auth|client|bearer)?[-_]?"
    r"(?:key|token|secret|password|auth|authorization|bearer|credentials?)"
)
_SETTING = re.compile(rf"endpoint(\.body.*)?|(.*\.)?{_NAME}(\..*)?", re.IGNORECASE)
_IN_JSON = re.compile(rf'"({_NAME})": (?!null|"")|"(?:Bearer |Basic |sk-|hf_)\S', re.IGNORECASE)
_PART_OF_URL = re.compile(r"(https?://)\S*@|(https?://[^\s?#]*[?#])\S*")


def hidden(text: str) -> str:
    """The text with `…` for what may be a key in a URL: the user part, the query, the fragment."""
    return _PART_OF_URL.sub(lambda found: f"{found[1] or found[2]}…{'@' if found[1] else ''}", text)


def names_key(dotted: str) -> bool:
    """Whether a setting of this dotted name, valid or not, may contain a key."""
    return _SETTING.fullmatch(dotted) is not None


def check_url(text: str) -> None:
    """Raise ValueError if a URL in a partner's text has an @, a ? or a #: a user part, a query or
    a fragment."""
    if hidden(text) != text:
        raise ValueError(
            "an endpoint's URL must not have a user name, a password, a query or a fragment, got "
            f"{hidden(text)!r}; if that contains a key, {_ADVICE}"
        )


def check_body(body: object) -> None:
    """Raise ValueError for `endpoint.body` that is not JSON, or has a field that is named like a
    key or contains one."""
    try:
        found = _IN_JSON.search(json.dumps(body, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"endpoint.body must be valid JSON: {error}") from None
    if found is not None:
        name = f", got {found[1]}" if found[1] else ""
        raise ValueError(f"endpoint.body must not contain a key{name}; {_ADVICE}")
