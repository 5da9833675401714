"""Streams of instances in all games: what one depends on, and which options are refused."""

from __future__ import annotations

from typing import Any

import pytest

from dialop.kit import load_kit

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
    assert whole[3:12] == kit.generate(options, seed=7, start=3, num=9, processes=2)
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


@pytest.mark.parametrize(
    ("name", "option", "value", "rule"),
    [
        ("collab", "max_value", 1, "2 to 10000"),
        ("matching", "size", 1, "2 to 8"),
        ("matching", "size", 9, "2 to 8"),
        ("matching", "p_observed", 1.5, "0.01 to 1.0"),
        ("matching", "p_observed", 0.0, "0.01 to 1.0"),
        ("matching", "max_value", 1, "2 to 10000"),
        ("matching", "hardness", 0.5, "1.0 to 1000.0"),
        ("matching", "keep", "some", "one of both, exactly_one, all"),
        ("matching", "max_tables", -1, "0 to"),
        ("mediation", "days", 0, "1 to 30"),
        ("mediation", "flights", 0, "1 to 200"),
        ("mediation", "keep_flights", 31, "a whole number from 0 to 30"),
        ("mediation", "events", 25, "a whole number from 0 to 24"),
        ("mediation", "p_event", 0.0, "0.01 to 1.0"),
        ("mediation", "p_shared", 1.1, "0.0 to 1.0"),
        ("mediation", "max_price_pref", 21, "0 to 20"),
        ("mediation", "max_arrival_pref", -1, "0 to 10"),
        ("planning", "slots", 4, "1 to 3"),
        ("planning", "sites", 3, "4 to 39"),
        ("planning", "sites", 40, "2 to 39"),
        ("planning", "preferences", 0, "1 to 10"),
        ("planning", "simple", True, ""),
    ],
)
def test_bad_options_are_refused(name: str, option: str, value: Any, rule: str) -> None:
    """A city of simple features has at most three preferences; the default of 10 does not fit."""
    message = f"{option} must be {rule}" if rule else "preferences must be 1 to 3, got 10"
    with pytest.raises(ValueError, match=message):
        load_kit(name).Options(**{option: value})
