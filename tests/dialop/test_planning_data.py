"""Planning instances, generated, stored and read; recorded games, rescored and played on."""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dialop.kit import load_kit
from dialop.planning.board import PlanningOptions
from dialop.planning.city import CATEGORIES, COMMON, FEATURES, NUM_SITES
from dialop.planning.game import PlanningGame
from dialop.planning.generate import PlanningRecipe, generate_instance
from dialop.planning.kit import read, write
from dialop.planning.preferences import meaning, stated_in
from dialop.planning.recorded import instance_from_record
from dialop.planning.score import referenced, tenths_between
from tests.helpers.dialop_boards import human_games
from tests.helpers.planning_cities import HAND
from tests.helpers.recorded_games import begun

generate, replay = load_kit("planning").generate, load_kit("planning").replay

SIMPLE = PlanningRecipe(sites=6, slots=1, preferences=2, distance=False, simple=True)
# What recorded games say of all 113 published games under the rules of the recording, in which
# preferences about parking and takeout never score.
DEAD = ("has parking", "has takeout")


def records() -> list[dict[str, Any]]:
    return [json.loads(line) for line in human_games("planning").read_text().splitlines()]


def test_generated_instances_have_the_figures_of_the_recorded_ones() -> None:
    instances = generate(PlanningRecipe(), seed=11, num=100)
    ranges = [
        referenced(i.key, i.sites, [p for p in i.preferences if p.name not in DEAD], slots=3)
        for i in instances
    ]
    mean = statistics.fmean
    # Tolerances are about four standard errors of a sample of 100 (best 13, worst 25 a game).
    assert mean(r.best for r in ranges) == pytest.approx(31.1, abs=4.5)
    assert mean(r.worst for r in ranges) == pytest.approx(-79.4, abs=8.5)
    random = mean((r.mean - r.worst) / (r.best - r.worst) for r in ranges)
    assert random == pytest.approx(0.515, abs=0.03)
    counts = [len(i.preferences) for i in instances]
    assert counts.count(11) / len(counts) == pytest.approx(0.70, abs=0.15)
    miles = mean(float(tenths_between(i.sites).mean()) * 39 / 38 / 10 for i in instances)
    assert miles == pytest.approx(1.7, abs=0.1)


def test_generated_cities_keep_the_rules_of_the_generator() -> None:
    for instance in generate(PlanningRecipe(), seed=5, num=20):
        assert len(set(instance.names)) == NUM_SITES and instance.slots == 3
        for site in instance.sites:
            category = CATEGORIES[site.category]
            assert site.name in category.names and site.price in category.prices
            assert len(site.features) == 5
            for name, value in site.features.items():
                assert site.category in FEATURES[name].categories
                assert value in FEATURES[name].values
        assert instance.preferences[-1].kind == "distance" and len(instance.preferences) <= 11
        for p in instance.preferences:
            assert 1 <= p.weight <= 10
            said = meaning(p.text)
            assert said is not None
            # Whether an unmet category costs points is the only thing that a sentence hides.
            hidden = {"weight": 1, "penalised": p.kind == "sites" and p.penalised}
            assert said == replace(p, **hidden)
            assert stated_in(f"Hello! {p.text}. Bye") == [said]


def test_small_cities_have_what_every_site_can_have() -> None:
    for instance in generate(SIMPLE, seed=5, num=30):
        assert len(instance.sites) == 6 and len(instance.preferences) == 2
        assert all(set(site.features) == set(COMMON) for site in instance.sites)
        assert {p.name for p in instance.preferences} <= set(COMMON)
        assert instance.best > instance.worst
        assert set(instance.names) == set(generate_instance(SIMPLE, seed=9, index=0).names)
        assert len({site.category for site in instance.sites}) == 6


def test_who_moves_first_changes_nothing_else() -> None:
    user = generate(SIMPLE, seed=5, num=400)
    mixed = generate(replace(SIMPLE, agent_first=0.35), seed=5, num=400)
    assert not any(i.first_seat for i in user)
    # Four standard errors of a share among 400 are 0.095.
    assert sum(i.first_seat for i in mixed) / 400 == pytest.approx(0.35, abs=0.095)
    assert [replace(i, first_seat=0) for i in mixed] == user


def test_the_stream_of_a_seed_does_not_change() -> None:
    instance = generate_instance(PlanningRecipe(), seed=1, index=0)
    assert (instance.best, instance.worst) == (38, -34)
    assert instance.names[:3] == ("Einstein's summer house", "The Cakery", "City Museum of Art")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"best": -6', '"best": 99', "best must be -6, got 99"),
        ('"price": 20', '"price": -1', r"sites.0.price: .* greater than or equal to 0, got -1"),
        ('"category": "bar"', '"category": "pub"', "a category must be one of .*, got 'pub'"),
        ('"has parking": true', '"has parking": 1', "'has parking' must be False, True, got 1"),
        ('"kind": "budget"', '"kind": "cash"', r"preferences.2.kind: .* got 'cash'"),
        ('"name": "The Dive"', '"name": "sauls"', "unique names"),
        ('"name": "The Dive"', '"name": "a\\nb"', "printable text on one line"),
        ('"slots": 3', '"slots": 5', "slots: .* less than or equal to 3, got 5"),
        ('"weight": 4', '"weight": NaN', "not valid JSON"),
        ('"weight": 4', '"weight": 4, "weight": 5', r"valid JSON \(it has key 'weight' twice\)"),
        ('"opening": []', '"opening": [{"seat": 0, "kind": "sing"}]', "opening.0.kind: "),
    ],
)
def test_a_bad_row_is_refused_with_its_place(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "cities.parquet"
    write(path, [HAND])
    row = pq.read_table(path).to_pylist()[0]
    text = row["planning"].replace("sauls", "Saul's").replace(old, new)
    assert text != row["planning"]
    if new == '"name": "sauls"':
        text = text.replace("Saul's", "SAULS", 1)
    pq.write_table(pa.Table.from_pylist([{"key": "x", "planning": text}]), path)
    with pytest.raises(ValueError, match=rf"cities.parquet row 0: .*{message}"):
        read(path)


def test_recorded_games_are_rescored_under_both_rules() -> None:
    lines = [replay(record, index=i) for i, record in enumerate(records())]
    assert len(lines) == 57 and sum(line["agrees"] for line in lines) == 56
    (odd,) = [line for line in lines if not line["agrees"]]
    assert odd["differences"][0] == "score is 0, the recording says 5"
    for line in lines:
        assert all(line["recorded"][name] == line[name] for name in ("best", "worst"))
    mean = statistics.fmean
    assert mean(line["recorded"]["norm"] for line in lines) == pytest.approx(0.890, abs=0.001)
    assert mean(line["norm_here"] for line in lines) == pytest.approx(0.879, abs=0.001)


def test_recorded_games_can_be_played_on_from_every_move() -> None:
    for record in records()[::9]:
        for num in range(len(record["action_log"])):
            game = PlanningGame(begun("planning", record, num), PlanningOptions())
            assert game.seat_to_move is not None
            view = game.view(game.seat_to_move)
            assert len(view.log) == num and game.prompt(0).user and game.prompt(1).user
            assert game.answer_due == (view.pending is not None)
        full = PlanningGame(begun("planning", record, len(record["action_log"])), PlanningOptions())
        assert full.seat_to_move is None and full.outcome().agreed


LONG = {"type": "message", "player": 0, "message": {"data": "\n" * 20_001}}


def test_broken_records_are_refused_in_one_line() -> None:
    good = records()[0]
    for change, message in (
        ({"events": 3}, "events must be a list"),
        ({"events": []}, "sites must be 3 to 39, got 0"),
        ({"preferences": [["a", 3, "Nope", {}]]}, "unknown class 'Nope'"),
        ({"action_log": [{"type": "dance"}]}, "log entry 0 is not a move"),
        ({"action_log": [{"type": "proposal", "proposal": []}]}, "proposal must be 5 slots"),
        ({"action_log": [LONG]}, "message.data must have at most 20000 characters, got 20001"),
    ):
        with pytest.raises(ValueError, match=message):
            instance_from_record(good | change, key="x")
        assert message in replay(good | change, index=0)["error"]
