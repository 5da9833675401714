"""How settings and eval.py name a partner. Only parses text; opens no file and no connection.

    self                    the policy itself, in all seats
    scripted:NAME:opt=v     a scripted player
    checkpoint:PATH         a frozen policy: a run folder, a part of one, or a Hugging Face folder
    pool                    the policy pool: earlier snapshots of this run
    endpoint:MODEL@URL      a chat model behind an OpenAI-compatible URL

In settings an entry may end in `*SHARE`, its share of the games.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from dialop.specs import closest
from selfplay.config.secrets import check_url

SELF, SCRIPTED, CHECKPOINT = "self", "scripted", "checkpoint"
POOL, ENDPOINT = "pool", "endpoint"
WARM_START = "warm_start"  # the policy at the start of self-play; only in eval.partners
MAX_WEIGHT = 1e6  # of a partner or a teacher in a mixture
_SHAPES = {
    SELF: "self",
    SCRIPTED: "scripted:NAME",
    CHECKPOINT: "checkpoint:PATH",
    POOL: "pool",
    ENDPOINT: "endpoint:MODEL@URL",
}


@dataclass(frozen=True, slots=True)
class Spec:
    """A parsed partner: KIND or KIND:ARGUMENT. `text` is its name in logs and reports."""

    kind: str
    argument: str
    text: str

    @property
    def address(self) -> tuple[str, str]:
        """The model and the URL of an endpoint, the URL without a trailing slash."""
        model, _, url = self.argument.partition("@")
        return model, url.rstrip("/")


def parse_spec(text: str, scripts: Sequence[str] = ()) -> Spec:
    """The partner that `text` names. Does not check that the script or the folder exists.

    Raises:
        ValueError: for invalid text. The message suggests the nearest valid spec, including the
            game's scripted players if `scripts` names them.
    """
    check_url(text)
    kind, colon, argument = text.strip().partition(":")
    shape = _SHAPES.get(kind)
    if shape is None or bool(colon) != (":" in shape):
        shapes = _SHAPES | {name: f"{SCRIPTED}:{name}" for name in scripts}
        near = shapes.get(closest(kind, shapes) or "")
        raise ValueError(
            f"a partner must be one of {', '.join(_SHAPES.values())}, got {text!r}"
            + (f"; nearest is {near}" if near else "")
        )
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


def weighted(entry: str, *, what: str, example: str) -> tuple[str, float]:
    """The text and the number of "text*number"; the number is 1 if absent.

    Raises ValueError, which calls the number `what`, for an invalid number or one out of range.
    """
    text, star, number = entry.rpartition("*")
    try:
        value = float(number) if star else 1.0
    except ValueError:
        raise ValueError(f"the {what} in {entry!r} must be a number, as in {example!r}") from None
    if not 0 <= value <= MAX_WEIGHT:
        raise ValueError(f"the {what} in {entry!r} must be from 0 to {MAX_WEIGHT:g}")
    return (text if star else entry), value


def parse_shares(entries: Sequence[str]) -> list[tuple[Spec, float]]:
    """Each entry's partner with its share of the games, normalised to sum to 1.

    An entry is "spec" or "spec*share"; the share defaults to 1.

    Raises:
        ValueError: for an invalid entry, a partner listed twice, or shares that sum to 0.
    """
    return [*_shares(tuple(entries))]


@lru_cache(maxsize=256)
def _shares(entries: tuple[str, ...]) -> Sequence[tuple[Spec, float]]:
    """Read once: each step asks for the partners of the settings."""
    partners: list[tuple[Spec, float]] = []
    for entry in entries:
        check_url(entry)
        text, share = weighted(entry, what="share", example="scripted:honest*0.5")
        spec = parse_spec(text)
        if any(spec.text == other.text for other, _ in partners):
            raise ValueError(f"a partner must be listed only once, got {spec.text!r} twice")
        partners.append((spec, share))
    total = sum(share for _, share in partners)
    if total <= 0:
        raise ValueError(f"partners must have at least one positive share, got {list(entries)}")
    return [(spec, share / total) for spec, share in partners]
