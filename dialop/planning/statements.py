"""Counts the statements in messages, and how many of them are true.

A user states preferences, by their sentences, and scores, as `label: points` items about the last
proposal. An agent states facts of sites, as `NAME: FIELD VALUE`, separated by commas. Other words
are not read as statements, so most statements in free prose are not counted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dialop.clauses import NUMBER_END, is_stated
from dialop.planning.board import USER, Action, PlanningInstance, Sheet, Site
from dialop.planning.city import FEATURES
from dialop.planning.preferences import stated_in
from dialop.planning.scripted import scores_in, sheet_items

# An item of a site's facts. Items after other words may be about something else.
_FACT = re.compile(
    rf"(?:\A|,)\s*({'|'.join(map(re.escape, FEATURES))}|category|price)"
    rf" (\$?\w{{1,20}}(?:\.\d{{1,3}})?){NUMBER_END}(?!-)"
)

_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def count_true(
    action: Action, instance: PlanningInstance, sheet: Sheet | None, names: Sequence[str]
) -> tuple[int, int]:
    """The number of true statements in a message, and the number of all statements.

    `sheet` and `names` are the score sheet and the names of the last proposal before the message;
    None and () without a proposal.
    """
    if action.seat != USER:
        return _count_facts(action.text, instance)
    own = {p.text for p in instance.preferences}
    scored = scores_in(action.text) if sheet is not None else ()
    labels = {label for label, _ in scored}
    stated = [p.text for p in stated_in(action.text) if p.text not in labels]
    num_true = sum(text in own for text in stated)
    if sheet is not None:
        num_true += sum(item in sheet_items(sheet, names) for item in scored)
    return num_true, len(stated) + len(scored)


def _count_facts(text: str, instance: PlanningInstance) -> tuple[int, int]:
    """True facts of sites in an agent's message, and all facts in it."""
    num_true = num_all = 0
    for site in instance.sites:
        for piece in text.split(f"{site.name}: ")[1:]:
            piece = re.split(r"[:;\n]", piece, maxsplit=1)[0]
            for fact in _FACT.finditer(piece):
                if is_stated(piece, fact.start(1), fact.end()):
                    num_all += 1
                    num_true += _has(site, fact[1], fact[2])
    return num_true, num_all


def _has(site: Site, field: str, value: str) -> bool:
    own = {"category": site.category, "price": site.price}.get(field, site.features.get(field))
    if isinstance(own, int | float) and not isinstance(own, bool):
        said = value.removeprefix("$") if field == "price" else value
        return _NUMBER.fullmatch(said) is not None and float(said) == own
    return value == str(own)
