"""The search tool: parses `Search(...)` and answers it exactly from a city's sites.

    Search(fields=[price, rating], filters=[category == cafe, rating >= 4], text_query="live music",
           sort_by=[rating desc, distance_to(The Mall)], limit=5)

All arguments are optional. No part of a query is evaluated as code. The time is linear in the
length of the query, which is limited, times the number of sites.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dialop.game import PlayerError
from dialop.planning.board import Site, plain_name
from dialop.planning.city import CATEGORIES, FEATURES, Value, shown
from dialop.planning.score import tenths

MAX_QUERY = 2000  # characters
NO_RESULTS = "Search results: none"
BASE_FIELDS = ("name", "category", "price")
ARGUMENTS = ("fields", "filters", "text_query", "sort_by", "limit")

_CALL = re.compile(r"search\s*\(", re.IGNORECASE)
_ARGUMENT = re.compile(r"([A-Za-z_]+)\s*=(?!=)\s*")
_NEXT_ARGUMENT = re.compile(r",\s*[A-Za-z_]+\s*=(?!=)")
_OPERATOR = re.compile(r"==|!=|<=|>=|<|>|=")
_DISTANCE = re.compile(r"distance_to\s*\((.*)\)", re.IGNORECASE)
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_TRUTH = {"true": True, "yes": True, "false": False, "no": False}
_ALIASES = {"etype": "category", "type": "category", "est_price": "price", "est price": "price"}
_QUOTES = {'"': '"', "'": "'", "“": "”", "‘": "’"}
# A whole quoted value: the 's of a name neither opens nor closes one.
_QUOTED = re.compile(
    r"(?:\A|[=<>\[(,]|\band\b)\s*(\".*?\"|'.*?'|“.*?”|‘.*?’)(?=\s*(?:\Z|[=<>!,)\]]|\b(?:and|asc|desc)\b))",
    re.DOTALL | re.IGNORECASE,
)
# The name in distance_to(NAME), which may contain an "and", a comma or brackets.
_TO = re.compile(
    r"distance_to\s*\((.*?)\)(?=\s*(?:\Z|[=<>!,\]]|\b(?:and|asc|desc)\b))",
    re.DOTALL | re.IGNORECASE,
)
_COMMA = re.compile(",")
_AND = re.compile(r"\band\b", re.IGNORECASE)
_PLAIN_NUMBER = re.compile(r"\$?\s*([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))")


@dataclass(frozen=True, slots=True)
class Field:
    """A column: one of `BASE_FIELDS`, a feature, or the distance in miles to site `to`."""

    name: str
    to: int | None = None


@dataclass(frozen=True, slots=True)
class Filter:
    """A condition on a field. A site without the field never meets it, whatever the operator."""

    field: Field
    op: str
    value: Value


@dataclass(frozen=True, slots=True)
class Query:
    """A parsed query. `sort_by` has (field, whether descending), the main key first. `limit` is
    None for all results."""

    fields: tuple[Field, ...] = ()
    filters: tuple[Filter, ...] = ()
    text_query: str = ""
    sort_by: tuple[tuple[Field, bool], ...] = ()
    limit: int | None = None


def search(text: str, sites: Sequence[Site]) -> str:
    """Answer a query: a line with the number of results, a header, and a line for each site.

    Values are separated by `|`. The first column is the name, then the requested fields, then the
    sort keys. All values except names and distances follow their field's name, as in `live music
    True`, and missing features are left out, so that a cell means the same in every place.

    Raises:
        PlayerError: kind "bad_query", for an invalid query; gives the reason and valid values.
    """
    query = parse_query(text, [site.name for site in sites])
    found = [i for i, site in enumerate(sites) if _matches(site, query, sites)]
    for field, descending in reversed(query.sort_by):
        known = [i for i in found if _value(sites[i], field, sites) is not None]
        unknown = [i for i in found if _value(sites[i], field, sites) is None]
        known.sort(key=lambda i: _order(_value(sites[i], field, sites)), reverse=descending)
        found = known + unknown
    if not found:
        return NO_RESULTS
    listed = found if query.limit is None else found[: query.limit]
    count = str(len(found)) if len(listed) == len(found) else f"{len(listed)} of {len(found)}"
    columns = list(dict.fromkeys((Field("name"), *query.fields, *(f for f, _ in query.sort_by))))
    lines = [f"Search results ({count}):"]
    titles = [f"distance_to({sites[f.to].name})" if f.to is not None else f.name for f in columns]
    lines.append("|".join(titles))
    for i in listed:
        row = [(field, _value(sites[i], field, sites)) for field in columns]
        lines.append("|".join(cell(field, value) for field, value in row if value is not None))
    return "\n".join(lines)


def cell(field: Field, value: Value) -> str:
    """A value in the form of an answer, such as `live music True`."""
    titled = field.to is None and field.name != "name"
    return f"{field.name} {shown(value)}" if titled else shown(value)


def parse_query(text: str, names: Sequence[str]) -> Query:
    """Parse a query about sites with these names. Raises PlayerError as `search` does."""
    text = text.strip()
    if len(text) > MAX_QUERY:
        raise _refused(f"the query is longer than {MAX_QUERY} characters")
    call = _CALL.match(text)
    if call is None or not text.endswith(")"):
        raise _refused("a query has the form Search(fields=[...], filters=[...])")
    given = _arguments(text[call.end() : -1])
    sort_by = [_direction(item) for item in _items(given.get("sort_by", ""))]
    said = given.get("text_query", "")
    words, got = plain_name(_unquoted(said)), _short(said) or "nothing"
    if "text_query" in given and not words:
        raise _refused(f"text_query must have a letter or digit, got {got}")
    if said[:1] in _QUOTES and _unquoted(said) == said:
        raise _refused(f"text_query must end with its quote, got {got}")
    return Query(
        fields=tuple(_field(item, names) for item in _items(given.get("fields", ""))),
        filters=tuple(_filter(item, names) for item in _conditions(given.get("filters", ""))),
        text_query=words,
        sort_by=tuple((_field(item, names), descending) for item, descending in sort_by),
        limit=_limit(given["limit"]) if "limit" in given else None,
    )


def _arguments(body: str) -> dict[str, str]:
    """The text of each argument within the brackets of a call."""
    given: dict[str, str] = {}
    plain = _blanked(body)
    at, end = 0, len(body)
    while at < end and body[at:].strip():
        at += len(body[at:]) - len(body[at:].lstrip())
        match = _ARGUMENT.match(plain, at)
        name = match[1].lower() if match else ""
        if match is None or name not in ARGUMENTS:
            got = _short(body[at : at + 40])
            raise _refused(f'"{got}" is no argument; use {", ".join(ARGUMENTS)}')
        if name in given:
            raise _refused(f"{name} is given twice")
        at = match.end()
        if plain.startswith("[", at):
            close = plain.find("]", at)
            if close < 0:
                raise _refused(f"{name} has no closing bracket ]")
            close += 1
        else:
            following = _NEXT_ARGUMENT.search(plain, at)
            close = following.start() if following else end
        given[name] = body[at:close].strip()
        rest = body[close:].lstrip()
        if rest and not rest.startswith(","):
            raise _refused(f'a comma is missing before "{_short(rest)}"')
        at = end - len(rest) + 1 if rest else end
    return given


def _items(text: str) -> list[str]:
    """The items of a list, or of a single value without brackets."""
    if text.startswith("["):
        text = text[1:-1]
    return [_unquoted(item) for item in _split(text, _COMMA) if item.strip()]


def _conditions(text: str) -> list[str]:
    """The filters of a list, joined by commas or "and". An "and" without a later operator is part
    of a name."""
    conditions: list[str] = []
    for item in _items(text):
        first, *more = _split(item, _AND)
        conditions.append(first)
        for part in more:
            if _OPERATOR.search(_blanked(part)):
                conditions.append(part)
            else:
                conditions[-1] += f"and{part}"
    return [condition.strip() for condition in conditions]


def _blanked(text: str) -> str:
    """The text with each quoted value and each name in distance_to(NAME) replaced by letters of the
    same number, so that they contain no comma, bracket, "and" or argument."""
    for whole in (_QUOTED, _TO):
        text = whole.sub(lambda m: m[0].replace(m[1], "x" * len(m[1])) if m[1] else m[0], text)
    return text


def _split(text: str, mark: re.Pattern[str]) -> list[str]:
    """The parts of a text between marks outside quotes."""
    spans = [match.span() for match in mark.finditer(_blanked(text))]
    starts, ends = [0, *(end for _, end in spans)], [*(start for start, _ in spans), len(text)]
    return [text[start:end] for start, end in zip(starts, ends, strict=True)]


def _unquoted(text: str) -> str:
    text = text.strip()
    if len(text) > 1 and text[0] in _QUOTES and text[-1] == _QUOTES[text[0]]:
        return text[1:-1].strip()
    return text


def _direction(item: str) -> tuple[str, bool]:
    """A sort key without its direction, and whether the direction is descending."""
    head, _, last = item.rpartition(" ")
    if head and last.lower() in ("asc", "desc"):
        return head.strip(), last.lower() == "desc"
    return item, False


def _field(text: str, names: Sequence[str]) -> Field:
    text = _unquoted(text)
    match = _DISTANCE.fullmatch(text)
    if match is not None:
        return Field("distance", _site(_unquoted(match[1]), names))
    name = " ".join(text.lower().replace("_", " ").split())
    name = _ALIASES.get(name, name)
    if name in BASE_FIELDS or name in FEATURES:
        return Field(name)
    valid = [*BASE_FIELDS, *FEATURES, "distance_to(NAME)"]
    raise _refused(f'"{_short(text)}" is no field; {_nearest(name, valid)}')


def _site(text: str, names: Sequence[str]) -> int:
    """The only site with this name, or whose name contains it."""
    plain = plain_name(text)
    forms = [plain_name(name) for name in names]
    if plain in forms:
        return forms.index(plain)
    holding = [i for i, form in enumerate(forms) if plain and plain in form]
    if len(holding) == 1:
        return holding[0]
    if holding:
        several = ", ".join(names[i] for i in holding[:5])
        raise _refused(f'"{_short(text)}" may be one of {several}')
    raise _refused(f'"{_short(text)}" is no site; {_nearest(text, names)}')


def _filter(text: str, names: Sequence[str]) -> Filter:
    match = _OPERATOR.search(text)
    if match is None or match[0] not in _COMPARE:
        raise _refused(f'"{_short(text)}" is no filter; write FIELD {" | ".join(_COMPARE)} VALUE')
    field = _field(text[: match.start()].strip(), names)
    value, op = _unquoted(text[match.end() :]), match[0]
    feature = FEATURES.get(field.name)
    if field.name in ("price", "distance") or (feature and feature.is_number):
        return Filter(field, op, _number(value, field.name))
    if op not in ("==", "!="):
        raise _refused(f"{field.name} is no number, so it takes == or !=, not {op}")
    if field.name == "name":
        return Filter(field, op, names[_site(value, names)])
    valid = CATEGORIES if feature is None else feature.values
    if feature and feature.is_bool:
        if value.lower() not in _TRUTH:
            raise _refused(f'{field.name} is True or False, not "{_short(value)}"')
        return Filter(field, op, _TRUTH[value.lower()])
    if value.lower() not in valid:
        choices = [str(choice) for choice in valid]
        raise _refused(f'"{_short(value)}" is no {field.name}; {_nearest(value, choices)}')
    return Filter(field, op, value.lower())


def _number(text: str, name: str) -> float:
    number = _PLAIN_NUMBER.fullmatch(text)
    if number is None:
        raise _refused(f'{name} is compared with a number, not "{_short(text)}"')
    return float(number[1])


def _limit(text: str) -> int:
    text = _unquoted(text)
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and int(text) > 0):
        raise _refused(f'limit is a whole number from 1, not "{_short(text)}"')
    return int(text)


def _matches(site: Site, query: Query, sites: Sequence[Site]) -> bool:
    for condition in query.filters:
        value = _value(site, condition.field, sites)
        if value is None or not _COMPARE[condition.op](value, condition.value):
            return False
    return not query.text_query or f" {query.text_query} " in _document(site)


def _document(site: Site) -> str:
    """The words of a site for text search: name, category, values that are text, and the names of
    the yes-or-no features that it has. A feature that is False is not mentioned."""
    parts = [site.name, site.category]
    parts += [value for value in site.features.values() if isinstance(value, str)]
    parts += [name for name, value in site.features.items() if value is True]
    return " | ".join(["", *map(plain_name, parts), ""])


def _value(site: Site, field: Field, sites: Sequence[Site]) -> Value | None:
    """A site's value of a field, None if the site does not have the field."""
    if field.to is not None:
        return tenths(site, sites[field.to]) / 10
    own = {**site.features, "name": site.name, "category": site.category}
    return float(site.price) if field.name == "price" else own.get(field.name)


def _order(value: Value | None) -> Any:
    return value.casefold() if isinstance(value, str) else value


def _nearest(got: str, valid: Sequence[str]) -> str:
    """The valid choices, the one closest to `got` first."""
    near = difflib.get_close_matches(got[:60], valid, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{hint}use one of {', '.join(valid)}"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 40 else text[:39] + "…"


def _refused(problem: str) -> PlayerError:
    return PlayerError("bad_query", problem)
