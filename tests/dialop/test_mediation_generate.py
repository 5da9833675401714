"""Generated mediation instances: their distribution, their stream, their files."""

import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dialop.kit import load_kit
from dialop.mediation.generate import MediationRecipe
from dialop.mediation.score import conflicts, pair_scores
from dialop.mediation.search import referenced
from dialop.mediation.store import instance_from_dict, plain, read_instances, write_instances
from tests.helpers.mediation_games import SMALL

generate = load_kit("mediation").generate

TINY = MediationRecipe(days=1, keep_flights=3, events=3, p_shared=0.0, max_price_pref=0)


def test_the_full_game_has_the_figures_of_the_recorded_ones() -> None:
    """Published over all 162 recorded games: best 2.0, worst -250.3, flights left 21.8 and 22.9,
    events 12.8, shared 9.3, a random pair 0.596."""
    num = 400
    instances = generate(MediationRecipe(), seed=11, num=num)
    users = [user for instance in instances for user in instance.users]

    def mean_is(values: list[float], published: float, *, of: int) -> None:
        # Four standard errors of the difference of a mean of `num` and one of `of` values.
        spread = statistics.stdev(values)
        slack = 4 * spread * (1 / len(values) + 1 / of) ** 0.5
        assert statistics.fmean(values) == pytest.approx(published, abs=slack)

    mean_is([float(i.best) for i in instances], 2.0, of=162)
    mean_is([float(i.worst) for i in instances], -250.3, of=162)
    mean_is([float(len(user.flights)) for user in users], (21.8 + 22.9) / 2, of=324)
    mean_is([float(len(user.events)) for user in users], 12.8, of=324)
    mean_is([float(sum(e.shared for e in user.events)) for user in users], 9.3, of=324)
    random = [i.norm(float(pair_scores(i.users, i.arrival_pref).mean())) for i in instances]
    mean_is(random, 0.596, of=162)


def test_every_instance_keeps_the_rules_of_the_generator() -> None:
    for instance in generate(MediationRecipe(), seed=2, num=40):
        assert referenced(instance) == instance
        assert 1 <= instance.arrival_pref <= 10
        for user in instance.users:
            assert 1 <= user.price_pref <= 20 and 50 <= user.mean_price < 1000
            assert sum(e.shared for e in user.events) == int(0.75 * len(user.events))
            for before, after in zip(user.events, user.events[1:], strict=False):
                assert before.end <= after.start
            for event in user.events:
                assert event.start % 30 == 0 and 9 * 60 <= event.start % 1440 <= 20 * 60 + 30
                assert event.end - event.start in (30, 60, 120, 240)
                assert 1 <= event.importance <= 10
            assert [f.end for f in user.flights] == sorted(f.end for f in user.flights)
            hours = {(f.end - f.start) // 60 for f in user.flights}
            assert len(hours) == 1 and 1 <= min(hours) <= 10
            for flight in user.flights:
                assert 9 * 60 <= flight.start < 2 * 1440 + 19 * 60 and flight.price >= 50
                assert conflicts(user, flight)


def test_small_instances_have_the_sizes_asked_for() -> None:
    for instance in generate(TINY, seed=1, num=60):
        assert all(len(user.flights) == 3 == len(user.events) for user in instance.users)
        assert all(user.price_pref == 0 for user in instance.users)
        assert not any(event.shared for user in instance.users for event in user.events)
        assert all(f.start < 19 * 60 for user in instance.users for f in user.flights)
        assert instance.best > instance.worst and instance.max_price_pref == 0


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("users",), None, "no users"),
        (("best",), 0, "best in 'hand/0' must be -3"),
        (("worst",), -27, "worst in 'hand/0' must be -26"),
        (("arrival_pref",), 11, "arrival_pref must be a whole number from 0 to 10"),
        (("users",), [1, 2, 3], "users must be a list of 2 items, got 3"),
        (("users", 0, "flights"), [], "user 0: flights must be a list of 1 to 200"),
        (("users", 1, "events", 0, "importance"), 0, "user 1, event 0: importance must be"),
        (("users", 1, "flights", 1, "end"), 0, "user 1, flight 1: end must be"),
        (("users", 0, "flights", 1, "carrier"), "a\nb", "user 0, flight 1: carrier must be"),
        (("opening",), "hi", "opening must be a list"),
        (("opening",), ["hi"], "a move has no kind"),
        (("opening",), [{"seat": 2, "kind": "message", "text": "hi"}], "a move's room must be"),
        (
            ("opening",),
            [{"seat": 2, "kind": "propose", "text": "", "flights": [0, 9]}],
            "a proposal's flight must be",
        ),
        (("users", 0, "events", 0, "shared"), None, "user 0, event 0 has no shared"),
    ],
)
def test_damaged_instances_say_what_is_wrong(
    place: tuple[Any, ...], value: Any, message: str
) -> None:
    """The value at this place is another one, or is gone."""
    data = part = plain(asdict(SMALL))
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    if value is None:
        del part[place[-1]]
    with pytest.raises(ValueError, match=message):
        instance_from_dict(data)


def test_a_damaged_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "games.parquet"
    write_instances(path, [SMALL])
    table = pq.read_table(path)
    column = table.schema.get_field_index("best")
    pq.write_table(table.set_column(column, "best", [[5]]), path)
    with pytest.raises(ValueError, match=r"games\.parquet row 0: best in 'hand/0' must be -3"):
        read_instances(path)
