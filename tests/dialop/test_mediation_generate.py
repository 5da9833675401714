"""Generated mediation instances: their distribution, their stream, their files."""

import statistics
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dialop.kit import load_kit
from dialop.mediation.generate import MediationRecipe
from dialop.mediation.kit import read, write
from dialop.mediation.score import conflicts, pair_scores, referenced
from tests.helpers.mediation_games import SMALL

generate = load_kit("mediation").generate

TINY = MediationRecipe(days=1, keep_flights=3, events=3, p_shared=0.0, max_price_pref=0)


def test_the_full_game_has_the_figures_of_the_recorded_ones() -> None:
    """Published over all 162 recorded games: best 2.0, worst -250.3, flights left 21.8 and 22.9,
    events 12.8, shared 9.3, a random pair 0.596."""
    num = 200
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
    ("path", "value", "message"),
    [
        (("best",), 0, "best must be -3, computed from its flights, got 0"),
        (("arrival_pref",), 11, "arrival_pref: .* less than or equal to 10, got 11"),
        (("users",), [], "users.0: Field required"),
        (("users", 0, "flights"), [], "users.0.flights: .* at least 1 item"),
        (("users", 1, "events", 0, "importance"), 0, "users.1.events.0.importance: "),
        (("users", 1, "flights", 1, "end"), 0, "users.1.flights.1: start must be before end"),
        (("users", 0, "events", 0, "shared"), None, "users.0.events.0.shared: .* valid boolean"),
    ],
)
def test_a_damaged_row_is_named_with_its_field(
    tmp_path: Path, path: tuple[Any, ...], value: Any, message: str
) -> None:
    file = tmp_path / "games.parquet"
    write(file, [SMALL])
    rows = data = pq.read_table(file).to_pylist()
    *names, last = (0, *path)
    for name in names:
        data = data[name]
    data[last] = value
    pq.write_table(pa.Table.from_pylist(rows), file)
    with pytest.raises(ValueError, match=rf"games\.parquet row 0: {message}"):
        read(file)
