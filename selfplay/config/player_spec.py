"""Who may sit beside the policy, as people write it: one grammar for settings and eval.py.

    self                    the policy itself, in both seats
    scripted:NAME:opt=v     a scripted player
    checkpoint:PATH         a frozen policy: a run folder, a part of one, or a Hugging Face folder
    pool                    the run's own past policies, a rated pool
    endpoint:MODEL@URL      a chat model behind an OpenAI-compatible address
    person                  whoever sits at the terminal

In settings an entry may end in `*SHARE`. Looks at words only; opens no file and no connection.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

SELF, SCRIPTED, CHECKPOINT, POOL, ENDPOINT, PERSON = (
    "self",
    "scripted",
    "checkpoint",
    "pool",
    "endpoint",
    "person",
)
MAX_SHARE = 1e6  # of a partner against the others
_SHAPES = {
    SELF: "self",
    SCRIPTED: "scripted:NAME",
    CHECKPOINT: "checkpoint:PATH",
    POOL: "pool",
    ENDPOINT: "endpoint:MODEL@URL",
    PERSON: "person",
}


@dataclass(frozen=True, slots=True)
class Spec:
    """A partner as written: `text` is its name everywhere, `argument` stands after the kind."""

    kind: str
    argument: str
    text: str

    @property
    def address(self) -> tuple[str, str]:
        """An endpoint's model and URL, the URL without a slash at its end."""
        model, _, url = self.argument.partition("@")
        return model, url.rstrip("/")


def parse_spec(text: str, scripts: Sequence[str] = ()) -> Spec:
    """Raises ValueError for a partner that is none, with the nearest valid one, which may be one of
    the game's `scripts`. Whether a script or a folder exists is for others to find out."""
    kind, colon, argument = text.strip().partition(":")
    shape = _SHAPES.get(kind)
    if shape is None or bool(colon) != (":" in shape):
        near = _nearest(text.strip(), kind, scripts)
        raise ValueError(f"a partner must be {_any_of()}, got {text!r}{near}")
    if colon and not argument:
        raise ValueError(f"a partner must be {shape}, got {text!r}")
    spec = Spec(kind, argument, text.strip())
    if kind == ENDPOINT:
        model, url = spec.address
        if not model or not url.startswith(("http://", "https://")):
            raise ValueError(
                "an endpoint must be endpoint:MODEL@URL with a URL that starts with http:// or "
                f"https://, as in endpoint:small@http://127.0.0.1:8000/v1, got {text!r}"
            )
    return spec


def parse_shares(entries: Sequence[str]) -> list[tuple[Spec, float]]:
    """Each entry's partner and its share of the games, the shares adding up to 1.

    An entry is "spec" or "spec*share"; shares count against each other and need not add up.

    Raises:
        ValueError: for an entry that is none, a partner that stands twice, or no positive share.
    """
    found: list[tuple[Spec, float]] = []
    for entry in entries:
        text, star, share_text = entry.rpartition("*")
        try:
            share = float(share_text) if star else 1.0
        except ValueError:
            raise ValueError(
                f"the share in {entry!r} must be a number, as in 'scripted:honest*0.5'"
            ) from None
        if not 0 <= share <= MAX_SHARE:
            raise ValueError(f"the share in {entry!r} must be from 0 to {MAX_SHARE:g}")
        spec = parse_spec(text if star else entry)
        if any(spec.text == other.text for other, _ in found):
            raise ValueError(f"partner {spec.text!r} must stand once, with one share")
        found.append((spec, share))
    whole = sum(share for _, share in found)
    if whole <= 0:
        raise ValueError(f"partners need one positive share, got {list(entries)}")
    return [(spec, share / whole) for spec, share in found]


def _any_of() -> str:
    shapes = [repr(shape) for shape in _SHAPES.values()]
    return f"{', '.join(shapes[:-1])} or {shapes[-1]}, as in 'scripted:honest'"


def _nearest(text: str, kind: str, scripts: Sequence[str]) -> str:
    """The end of an error message. A script's name alone most likely lacks its kind."""
    if kind in scripts:
        return f"; nearest is {SCRIPTED}:{text}"
    near = difflib.get_close_matches(kind, _SHAPES, n=1)
    return f"; nearest is {_SHAPES[near[0]]}" if near else ""
