"""Parses and renders plans: `[name, name, NULL]`, one entry for each slot."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

from dialop.game import PlayerError
from dialop.planning.board import Plan, plain_name

EMPTY = "NULL"
_MAX_TEXT = 1000  # characters of a proposal
_MAX_NAME = 60  # characters of a name that is compared by similarity
_ALIKE = 0.8


def parse_plan(text: str, names: Sequence[str], *, slots: int) -> Plan:
    """Parse `[A, B, NULL]` as a plan: an index into `names`, or None, for each slot.

    Text around the brackets is ignored, and the brackets may be missing. A name matches if its
    letters and digits are equal (ignoring case), or otherwise if it is more than 80 % similar to
    exactly one name.

    Raises:
        PlayerError: kind "bad_proposal"; the message names the entry and the rule.
    """
    if len(text) > _MAX_TEXT:
        raise _refused(f"it is longer than {_MAX_TEXT} characters", slots)
    opening = text.find("[")
    closing = text.find("]", opening)
    if opening >= 0:
        text = text[opening + 1 : closing if closing >= 0 else len(text)]
    entries = [entry.strip() for entry in text.split(",")]
    if len(entries) != slots:
        raise _refused(f"it has {len(entries)} of {slots} entries", slots)
    plan: list[int | None] = []
    for entry in entries:
        site = None if plain_name(entry) == EMPTY.lower() else _find(entry, names, slots)
        if site is not None and site in plan:
            raise _refused(f"it has {names[site]} twice", slots)
        plan.append(site)
    if all(site is None for site in plan):
        raise _refused("every slot is empty", slots)
    return tuple(plan)


def render_plan(plan: Plan, names: Sequence[str]) -> str:
    """Write a plan in its canonical form."""
    return f"[{', '.join(EMPTY if i is None else names[i] for i in plan)}]"


def _find(entry: str, names: Sequence[str], slots: int) -> int:
    plain = plain_name(entry)
    forms = [plain_name(name) for name in names]
    if plain in forms:
        return forms.index(plain)
    shown = entry if len(entry) <= _MAX_NAME else entry[: _MAX_NAME - 1] + "…"
    if len(plain) > _MAX_NAME:
        raise _refused(f'"{shown}" is no site', slots)
    scores = [SequenceMatcher(None, form, plain, autojunk=False).ratio() for form in forms]
    best = max(scores)
    if best <= _ALIKE:
        near = names[scores.index(best)]
        hint = f"; the most similar is {near}" if best > 0.5 else ""
        raise _refused(f'"{shown}" is no site{hint}', slots)
    if scores.count(best) > 1:
        raise _refused(f'"{shown}" may be more than one site', slots)
    return scores.index(best)


def _refused(problem: str, slots: int) -> PlayerError:
    form = f"[{', '.join(['NAME'] * slots)}]"
    return PlayerError("bad_proposal", f"no valid plan: {problem}. Write {form}; {EMPTY} is empty")
