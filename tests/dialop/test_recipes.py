"""Streams of instances in all games: what one depends on, and which options are refused."""

from dataclasses import fields
from typing import Any

import pytest

from dialop.kit import load_kit
from dialop.specs import choices

SMALL: dict[str, dict[str, Any]] = {
    "collab": {},
    "matching": {"size": 2, "scale": False, "max_value": 10},
    "mediation": {"days": 1, "keep_flights": 3, "events": 3},
    "planning": {"sites": 6, "slots": 1, "preferences": 2, "simple": True},
}


@pytest.mark.parametrize("name", SMALL)
def test_an_instance_depends_on_seed_and_index_alone(name: str) -> None:
    kit = load_kit(name)
    options = kit.Options(**SMALL[name])
    whole = kit.generate(options, seed=7, start=0, num=20)
    assert whole[10:15] == kit.generate(options, seed=7, start=10, num=5)
    processes = 2 if name == "matching" else 1  # one function deals the work of all games
    assert whole[3:12] == kit.generate(options, seed=7, start=3, num=9, processes=processes)
    assert len({instance.key for instance in whole}) == 20
    assert kit.generate(options, seed=8, start=0, num=5) != whole[:5]


@pytest.mark.parametrize("name", ["matching", "mediation", "planning"])
def test_negative_seeds_and_counts_are_refused(name: str) -> None:
    kit = load_kit(name)
    for bad, message in (
        ({"seed": -1}, "seed and index must be at least 0, got -1 and 0"),
        ({"num": -1}, "num must be at least 0 and processes 1, got -1 and 1"),
        ({"processes": 0}, "num must be at least 0 and processes 1, got 1 and 0"),
    ):
        with pytest.raises(ValueError, match=message):
            kit.generate(kit.Options(), **{"seed": 0, "start": 0, "num": 1, **bad})


@pytest.mark.parametrize("name", SMALL)
def test_no_option_is_beyond_its_bounds_or_choices(name: str) -> None:
    kit = load_kit(name)
    rules = {each.name: each.metadata for each in fields(kit.Options)}
    wrong = [(n, r["ge"] - 1) for n, r in rules.items() if r.get("ge") is not None]
    wrong += [(n, r["le"] + 1) for n, r in rules.items() if r.get("le") is not None]
    wrong += [(n, "some") for n in choices(kit.Options)]
    assert wrong
    for option, value in wrong:
        with pytest.raises(ValueError, match=f"^{option} must be .*got '?{value}"):
            kit.Options(**{option: value})


def test_options_that_exclude_each_other_are_refused() -> None:
    """A city of simple features has at most three preferences; the default of 10 does not fit."""
    for name, options, rule in (
        ("mediation", {"flights": 3, "keep_flights": 4}, "keep_flights must be .* 0 to 3, got 4"),
        ("mediation", {"events": 25}, "events must be .* 0 to 24"),
        ("planning", {"sites": 3}, "sites must be 4 to 39"),
        ("planning", {"simple": True}, "preferences must be 1 to 3, got 10"),
    ):
        with pytest.raises(ValueError, match=rule):
            load_kit(name).Options(**options)
