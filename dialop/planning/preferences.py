"""The kinds of preferences and their sentences, which `meaning` parses back into preferences.

A user reads sentences without weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field

from dialop.clauses import NEGATED, NUMBER_END, is_stated
from dialop.planning.city import BOOLS, CATEGORIES, FEATURES, RATINGS, Value
from dialop.values import Text

Values = tuple[Value, ...]
Kind = Literal["feature", "sites", "category", "budget", "distance"]


@dataclass(frozen=True, slots=True)
class Preference:
    """One preference of the user; `weight` is a positive number of points.

    - "feature": each site of the plan gains the weight if its feature `name` has a value in
      `liked`, and loses it if the value is in `disliked`.
    - "sites": the plan gains the weight if it has one of `sites`; if not, it loses the weight if
      `penalised` and nothing otherwise.
    - "category": the same for a site of the category `name`.
    - "budget": the plan loses the weight if its prices sum to more than `budget` dollars.
    - "distance": each leg loses weight x miles, rounded towards 0.
    """

    kind: Kind
    text: Text
    weight: Annotated[int, Field(ge=0, le=10)]
    name: str = ""
    liked: Values = ()
    disliked: Values = ()
    sites: tuple[str, ...] = ()
    budget: Annotated[int, Field(ge=0)] = 0
    penalised: bool = False

    @property
    def of_plan(self) -> bool:
        """Whether the preference is scored once for the plan, not for each site or leg."""
        return self.kind in ("sites", "category", "budget")


_NO, _YES = BOOLS[:1], BOOLS[1:]
_POOR = tuple(r for r in RATINGS if isinstance(r, float) and r <= 2.5)


def _about(name: str, text: str, liked: Values, disliked: Values) -> Preference:
    """A preference about a feature, with weight 1."""
    return Preference("feature", text, 1, name=name, liked=liked, disliked=disliked)


def _above(least: float) -> Values:
    return tuple(r for r in RATINGS if isinstance(r, float) and r >= least)


# The sentences of the released generator, with weight 1. Some features have several sentences.
TEMPLATES: tuple[Preference, ...] = (
    _about("rating", "prefer places rated above 3 stars", _above(3), _POOR),
    _about("rating", "prefer ratings above 4", _above(4), _POOR),
    _about("rating", "prefer ratings above 4.5", _above(4.5), _POOR),
    _about("has parking", "renting a car so preferably places with parking", _YES, _NO),
    _about(
        "has parking",
        "renting a car so preferably places with parking, but street parking also ok",
        _YES,
        (),
    ),
    _about("touristy", "want to go to all the classic touristy spots!", _YES, ()),
    _about("touristy", "hidden spots much better than tourist traps", _NO, _YES),
    _about("touristy", "seeing hidden, non-touristy spots would be cool", _NO, ()),
    _about(
        "good for groups", "group of 7, best if we could go to places good for groups", _YES, _NO
    ),
    _about("good for kids", "family trip, best to go to places that are good for kids", _YES, _NO),
    _about("has takeout", "prefer just eating takeout", _YES, _NO),
    _about(
        "accepts reservations", "would be great if everything is reservable in advance", _YES, _NO
    ),
    _about("outdoor seating", "COVID conscious, outdoor seating places would be best", _YES, _NO),
    _about("vegetarian options", "generally like eating vegetarian options", _YES, _NO),
    _about("vegan options", "generally like eating vegan options", _YES, _NO),
    _about("live music", "check out live music!", _YES, _NO),
    _about("live music", "no live music places, generally too loud", _NO, _YES),
    _about("has wifi", "find a place with wifi to do some work at some point", _YES, _NO),
    _about("viewpoint", "would love to see some panoramic views of the city", _YES, _NO),
)
LISTED = ("cuisine", "alcohol type")  # features with lists of liked or disliked values
TRAVEL = "minimize travel distance"
BUDGETS = tuple(range(30, 100, 10))
DISLIKE = "don't like"


def listed_text(liked: Sequence[Value], disliked: Sequence[Value]) -> str:
    """The sentence of a preference about a listed feature."""
    parts = [(DISLIKE, disliked), ("like", liked)]
    return ", ".join(f"{verb}: {', '.join(map(str, v))}" for verb, v in parts if v)


def sites_text(sites: Sequence[str], *, category: str, penalised: bool) -> str:
    """The sentence of a preference for one or more sites; `category` is only used for several."""
    if len(sites) == 1:
        start = "definitely want to go to " if penalised else "heard good things about "
        return start + sites[0]
    names = ", ".join(sites)
    if penalised:
        return f"definitely want to check out Dan's recommendations: {names}"
    return f"heard these {category}s were good: {names}"


def stated_in(message: str) -> list[Preference]:
    """The preferences that a message states, in order. Other words are ignored, but a sentence in a
    clause with a negation states nothing.

    They have weight 1 and are not penalised unless the sentence says so.
    """
    found = _pattern().finditer(message)
    stated_ones = (m[0] for m in found if is_stated(message, *m.span(), vague=NEGATED))
    sentences = (" ".join(sentence.split()) for sentence in stated_ones)
    return [stated for sentence in sentences if (stated := meaning(sentence)) is not None]


@lru_cache(maxsize=8192)
def meaning(sentence: str) -> Preference | None:
    """The preference that a sentence states, with weight 1; None for any other sentence."""
    if template := next((each for each in TEMPLATES if each.text == sentence), None):
        return template
    if sentence == TRAVEL:
        return Preference("distance", sentence, 1)
    if match := re.fullmatch(r"keep budget below \$(\d{1,6})", sentence):
        return Preference("budget", sentence, 1, budget=int(match[1]))
    if match := re.fullmatch(r"go to at least one (\w+)", sentence):
        return Preference("category", sentence, 1, name=match[1])
    if match := re.fullmatch(r"(like|don't like) (\w+) places", sentence):
        liked, disliked = ((match[2],), ()) if match[1] == "like" else ((), (match[2],))
        return _about("ambience", sentence, liked, disliked)
    if match := re.fullmatch(_LISTED, sentence):
        disliked, liked = (tuple(g.split(", ")) if g else () for g in match.groups())
        for name in LISTED:
            if set(liked) | set(disliked) <= set(FEATURES[name].values):
                return _about(name, sentence, liked, disliked)
        return None
    for start, penalised in _SITES_STARTS:
        if match := re.match(start, sentence):
            names = tuple(sentence[match.end() :].split(", "))
            return Preference("sites", sentence, 1, sites=names, penalised=penalised)
    return None


_LISTED = r"(?:don't like: (\w+(?:, \w+)*?))?(?:(?:, )?like: (\w+(?:, \w+)*))?"
_SITES_STARTS = (
    ("definitely want to go to ", True),
    ("heard good things about ", False),
    ("definitely want to check out Dan's recommendations: ", True),
    (r"heard these \w+s were good: ", False),
)


@lru_cache(maxsize=1)
def _pattern() -> re.Pattern[str]:
    """A pattern for every sentence that the generator can write, the longest first."""
    values = [str(v) for name in LISTED for v in FEATURES[name].values]
    a_list = rf"(?:{'|'.join(values)})(?:, (?:{'|'.join(values)}))*"
    names = sorted((n for c in CATEGORIES.values() for n in c.names), key=len, reverse=True)
    site = "(?:" + "|".join(map(re.escape, names)) + ")"
    ambience = "|".join(map(str, FEATURES["ambience"].values))
    templates = sorted((t.text for t in TEMPLATES), key=len, reverse=True)
    parts = [
        *map(re.escape, templates),
        rf"don't like: {a_list}(?:, like: {a_list})?",
        rf"like: {a_list}",
        rf"(?:don't like|like) (?:{ambience}) places",
        rf"(?:{'|'.join(start for start, _ in _SITES_STARTS)}){site}(?:, {site})*",
        rf"go to at least one (?:{'|'.join(CATEGORIES)})",
        rf"keep budget below \$\d{{1,6}}{NUMBER_END}",
        re.escape(TRAVEL),
    ]
    return re.compile(rf"(?<!\w)(?:{'|'.join(parts)})(?!\w)")
