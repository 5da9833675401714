"""Makes scripted players from specs such as "honest:tell=top,slip=0.05"; suggests near names."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

from dialop.game import Lesson

S = TypeVar("S", bound="ScriptedBase")


@dataclass(frozen=True, slots=True)
class ScriptedBase:
    """A scripted player; a subclass defines `lesson` and options made by `option`.
    `OPTIONS` maps the names of its players to their options."""

    name: str
    seed: int

    OPTIONS: ClassVar[Mapping[str, Sequence[str]]]

    @property
    def seat(self) -> int | None:
        """The only seat that this player can take; None for any seat."""
        return None

    def check_turn(self, view: Any) -> None:
        """Raise ValueError unless the view belongs to this player's seat, the seat is to move, and
        the game allows the player's private text."""
        if self.seat not in (None, view.seat):
            raise ValueError(
                f"{self.name} plays seat {self.seat}, got the view of seat {view.seat}"
            )
        if view.to_move != view.seat:
            raise ValueError(f"seat {view.seat} is not to move, but seat {view.to_move}")
        think = getattr(self, "think", "no")
        if think != "no" and not view.options.private_reasoning:
            raise ValueError(f"think={think} needs a game with private_reasoning")

    def lesson(self, view: Any) -> Lesson:
        """The next move as an example to imitate."""
        raise NotImplementedError

    def act(self, view: Any) -> str:
        """The player's next move as text. `view` must belong to the seat to move."""
        return self.lesson(view).text

    def reseeded(self, seed: int) -> Self:
        """The same player with another seed."""
        return replace(self, seed=seed)


def made(kind: type[S], spec: str, *, seed: int) -> S:
    """The player of a spec such as "honest:tell=top,slip=0.05".

    Raises:
        ValueError: as `parse_spec`, and for an invalid value of a field; names the rule.
    """
    name, given = parse_spec(spec, kind.OPTIONS)
    values: dict[str, Any] = {}
    for each in fields(kind):
        if each.name in given:
            values[each.name], whole = given[each.name], type(each.default) is int
            with suppress(ValueError):  # `_check_values` reports it
                number = float(given[each.name])
                if number.is_integer() or not whole:
                    values[each.name] = int(number) if whole else number
    _check_values(kind, values)
    return kind(name, seed, **values)


def option(
    default: Any,
    sentence: str = "",
    *,
    low: float | None = None,
    high: float | None = None,
    play: bool = False,
) -> Any:
    """One field of a game's `Options` or of a scripted player: its default, its sentence for --help
    and its bounds. A field with choices has a `Literal` type.

    `play` marks a setting of how games are played, not of how instances are drawn. The metadata
    otherwise uses the names of pydantic's `Field`, with which the trainer reads settings.
    """
    rules = {"description": sentence, "ge": low, "le": high, "play": play}
    return field(default=default, metadata=rules)


def check_options(options: Any) -> None:
    """Raise ValueError if a field made by `option` is not one of its choices or is out of bounds.

    The message names the field, its rule and the value.
    """
    values = {each.name: getattr(options, each.name) for each in fields(options)}
    _check_values(type(options), values)


def _check_values(kind: Any, values: Mapping[str, Any]) -> None:
    valid = choices(kind)
    for each in (one for one in fields(kind) if one.name in values):
        value, low, high = values[each.name], each.metadata.get("ge"), each.metadata.get("le")
        said = f", got {value!r}"
        if value not in (among := valid.get(each.name, (value,))):
            near = nearest(str(value), among)
            raise ValueError(f"{each.name} must be one of {', '.join(among)}{said}{near}")
        if value is None or (low is None and high is None):
            continue
        if not isinstance(value, int | float):
            number = "an integer" if type(each.default) is int else "a number"
            raise ValueError(f"{each.name} must be {number}{said}")
        above, below = low is None or value >= low, high is None or value <= high
        if not (above and below):
            bounds = f"at most {high}" if low is None else f"at least {low}"
            bounds = bounds if low is None or high is None else f"{low} to {high}"
            raise ValueError(f"{each.name} must be {bounds}{said}")


@cache
def choices(kind: Any) -> dict[str, tuple[str, ...]]:
    """The choices of each field with a `Literal` type in a dataclass."""
    hints = get_type_hints(kind).items()
    return {name: get_args(hint) for name, hint in hints if get_origin(hint) is Literal}


def parse_spec(spec: str, options: Mapping[str, Sequence[str]]) -> tuple[str, dict[str, str]]:
    """The name and the options of a spec. `options` maps each valid name to its valid options.

    Raises:
        ValueError: for an unknown name or option; names the valid ones.
    """
    name, _, rest = (part.strip() for part in spec.partition(":"))
    if name not in options:
        raise ValueError(unknown("scripted player", name, tuple(options)))
    values: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        option, _, value = (piece.strip() for piece in part.partition("="))
        if not options[name]:
            raise ValueError(f"{name} takes no options, got {part!r}")
        if option not in options[name]:
            raise ValueError(unknown(f"option of {name}", option, options[name]))
        values[option] = value
    return name, values


def unknown(what: str, got: str, valid: Sequence[str]) -> str:
    """An error text with the valid choices and the one closest to `got`."""
    return f"unknown {what} {got!r}: choose one of {', '.join(valid)}{nearest(got, valid)}"


def folded(text: str) -> str:
    """A text in the form for comparing names: case-folded, with İ and ı as i."""
    return text.casefold().replace("i\u0307", "i").replace("ı", "i")


def nearest(got: str, valid: Iterable[str]) -> str:
    """The end of an error text: the valid word closest to `got`, "" if none is similar."""
    near = closest(got, valid)
    return f"; nearest is {near}{other_form(got, near)}" if near else ""


def other_form(got: str, near: str) -> str:
    """The text after `near` if it differs from `got` only in its Unicode form, else ""."""
    same = unicodedata.normalize("NFC", got) == unicodedata.normalize("NFC", near)
    return ", which is written in another Unicode form (NFC, NFD)" if same and got != near else ""


def closest(got: str, valid: Iterable[str]) -> str | None:
    """The valid word closest to `got`, ignoring case; None if none is similar."""
    lowered = {word.lower(): word for word in valid}
    near = difflib.get_close_matches(got.lower(), lowered, n=1)
    return lowered[near[0]] if near else None
