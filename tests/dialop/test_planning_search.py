"""The search tool: exact answers, clear refusals, and time that stays linear."""

import time
import unicodedata

import pytest

from dialop.game import PlayerError
from dialop.planning.board import Site, plain_name
from dialop.planning.generate import PlanningRecipe, generate_instance
from dialop.planning.search import MAX_QUERY, NO_RESULTS, search
from tests.helpers.planning_cities import SITES

NOTHING: list[str] = []
CITY = generate_instance(PlanningRecipe(), seed=1, index=0).sites


def rows(query: str, sites: tuple[Site, ...] = SITES) -> list[str]:
    """The result's lines below the count, without the header."""
    return search(query, sites).splitlines()[2:]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("Search(filters=[category == park])", ["Atlas Park"]),
        ("Search(filters=[category != park, price < 60])", ["Saul's", "The Dive"]),
        ("Search(filters=[price >= 30])", ["The Dive", "The Mall"]),
        ("Search(filters=[price <= $20])", ["Saul's", "Atlas Park"]),
        ("Search(filters=[price > 30, price < 61])", ["The Mall"]),
        ("Search(filters=[rating >= 4])", ["Atlas Park"]),
        ("search(filters=[Has_Parking == yes])", ["Saul's", "The Mall"]),
        ("Search(filters=[live music == False])", ["The Mall"]),
        # A site without the feature meets no condition on it.
        ("Search(filters=[live music != True])", ["The Mall"]),
        ('Search(filters=[name == "Saul\'s"])', ["Saul's"]),
        ("Search(filters=[distance_to(Saul's) <= 0.5])", ["Saul's", "The Dive"]),
        ("Search(text_query=live music)", ["The Dive"]),
        ("Search(text_query='LIVE  Music')", ["The Dive"]),
        ("Search(text_query=mall)", ["The Mall"]),
        # Quotes protect commas, brackets, arguments and "and".
        ('Search(text_query="mall, limit=1")', NOTHING),
        ("Search(limit=1, text_query='live music', fields=[price])", ["The Dive|price 30"]),
        ('Search(text_query="The Mall], limit=9", limit=1)', NOTHING),
        ("Search(text_query=“the, mall” , limit=3)", ["The Mall"]),
        ("Search(text_query=‘Saul's’, limit=1)", ["Saul's"]),
        ("Search(filters=[name == 'Saul's', price < 60])", ["Saul's"]),
        (
            'Search(filters=[distance_to("The, Mall") < 1], sort_by=["price" desc])',
            ["The Mall|price 60", "The Dive|price 30"],
        ),
        # Filters are joined by commas or "and".
        ("Search(filters=[price >= 20 and category != bar])", ["Saul's", "The Mall"]),
        ("Search(filters=[price > 0 AND price < 61 and name == 'The Mall'])", ["The Mall"]),
        ('Search(filters=["price > 20", "price < 60 and live music == yes"])', ["The Dive"]),
        ("Search(filters=[price < .5])", ["Atlas Park"]),
        ("Search(text_query=park)", ["Atlas Park"]),  # a word, not a part of "parking"
        ("Search(sort_by=[price], limit=2)", ["Atlas Park|price 0", "Saul's|price 20"]),
        ("Search(sort_by=[price desc], limit=1)", ["The Mall|price 60"]),
        (
            "Search(fields=[rating], sort_by=[rating desc])",  # sites without a rating come last
            ["Atlas Park|rating 4.5", "Saul's", "The Dive", "The Mall"],
        ),
        (
            "Search(sort_by=[distance_to(The Mall)])",
            ["The Mall|0", "The Dive|0.7", "Saul's|1", "Atlas Park|4.2"],
        ),
        (
            "Search(fields=[touristy, category], filters=[category==bar], )",
            ["The Dive|category bar"],
        ),
        (
            "Search(sort_by=[category, price desc], filters=[price > 0])",
            [
                "The Dive|category bar|price 30",
                "Saul's|category restaurant|price 20",
                "The Mall|category shop|price 60",
            ],
        ),
    ],
)
def test_answers(query: str, expected: list[str]) -> None:
    assert rows(query) == expected


def test_the_form_of_an_answer() -> None:
    assert search("Search(filters=[price > 999])", SITES) == NO_RESULTS
    assert search("Search(fields=[price, name], limit=1)", SITES).splitlines() == [
        "Search results (1 of 4):",
        "name|price",
        "Saul's|price 20",
    ]


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("", "a query has the form Search("),
        ("Search(fields=[price]", "a query has the form Search("),
        ("Search(fields=[price)", "fields has no closing bracket ]"),
        ("Search(field=[price])", '"field=[price]" is no argument; use fields, filters'),
        ("Search(limit=1, limit=2)", "limit is given twice"),
        ("Search(limit=two)", 'limit is a whole number from 1, not "two"'),
        ("Search(fields=[price] limit=2)", 'a comma is missing before "limit=2"'),
        ("Search(fields=[cost])", '"cost" is no field; use one of name'),
        ("Search(fields=[vegan option])", "did you mean vegan options?"),
        ("Search(filters=[price])", '"price" is no filter'),
        ("Search(filters=[price = 3])", '"price = 3" is no filter'),
        ("Search(filters=[price < cheap])", 'price is compared with a number, not "cheap"'),
        *(
            (f"Search(filters=[price < {number}])", "price is compared with a number")
            for number in (
                *("nan", "1_000", "1_0.5", "٣٠", "３０", "3²"),
                *("1e3", "inf", "0x10", "1 0", ""),
            )
        ),
        ("Search(limit=1_0)", "limit is a whole number"),
        ("Search(filters=[price < 3 or price > 5])", 'not "3 or price > 5"'),
        ("Search(filters=[name == Mall and Dive])", '"Mall and Dive" is no site'),
        ("Search(filters=[and price < 3])", '"" is no filter'),
        *(
            (f"Search(text_query={text})", f"text_query must have a letter or digit, got {text}")
            for text in ('"!!!"', "'…'", "☃", '""', "' - '")
        ),
        *(
            (f"Search(text_query={text})", f"text_query must end with its quote, got {text}")
            for text in ('"mall" limit=2', "'live music", "“mall")
        ),
        ('Search(text_query="mall, limit=2)', "text_query must end with its quote"),
        ("Search(text_query=)", "text_query must have a letter or digit, got nothing"),
        ("Search(filters=[has parking == 1])", 'has parking is True or False, not "1"'),
        ("Search(filters=[has parking > False])", "has parking is no number"),
        ("Search(filters=[cuisine == tai])", "did you mean thai?"),
        ("Search(filters=[category == concert])", '"concert" is no category'),
        ("Search(sort_by=[distance_to(The)])", "may be one of The Dive, The Mall"),
        ("Search(sort_by=[distance_to(Moon)])", '"Moon" is no site'),
        ("Search(" + "x" * MAX_QUERY + ")", "the query is longer than 2000 characters"),
        ("__import__('os').system('true')", "a query has the form Search("),
    ],
)
def test_what_does_not_parse_is_refused_with_a_reason(query: str, problem: str) -> None:
    with pytest.raises(PlayerError) as caught:
        search(query, SITES)
    assert caught.value.kind == "bad_query" and problem in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["Harper and Rye", "Salt, Lime", "Cafe (north)", "A and B, C (d)"])
def test_a_name_in_distance_to_may_hold_what_parts_conditions(name: str) -> None:
    """With and without quotes, alone and beside other conditions, as filter, field and sort key."""
    sites = (*SITES[:2], Site(name, "park", 0, (3.0, 4.0), {}))
    for said in (name, f'"{name}"'):
        to = f"distance_to({said})"
        assert rows(f"Search(filters=[{to} < 0.05])", sites) == [name]
        assert rows(f"Search(filters=[price >= 0 and {to} < 0.05 and price < 99])", sites) == [name]
        assert rows(f"Search(filters=[{to} < 0.05, price < 99], limit=1)", sites) == [name]
        (first, *_) = rows(f"Search(sort_by=[{to} asc, price], fields=[{to}], limit=3)", sites)
        assert first.startswith(f"{name}|0")


def test_every_site_of_a_city_is_found_by_its_distance() -> None:
    for site in CITY:
        assert site.name in rows(f"Search(filters=[distance_to({site.name}) < 0.05])", CITY)


@pytest.mark.parametrize("unit", ['"', "='", ', "', "and “", '"and"', "‘’,"])
def test_quotes_that_do_not_close_take_no_time(unit: str) -> None:
    """Ten of the longest queries in less than a second."""
    began_s = time.process_time()
    for _ in range(10):
        with pytest.raises(PlayerError):
            search(f"Search(filters=[{unit * ((MAX_QUERY - 20) // len(unit))}])", SITES)
    assert time.process_time() - began_s < 1


@pytest.mark.parametrize("op", ["==", "!=", "<", "<=", ">", ">="])
def test_filters_agree_with_python_on_a_whole_city(op: str) -> None:
    for field in ("price", "rating"):
        found = set(rows(f"Search(filters=[{field} {op} 3])", CITY))
        for site in CITY:
            value = float(site.price) if field == "price" else site.features.get("rating")
            expected = value is not None and eval(f"{value} {op} 3")
            assert (site.name in found) == expected


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
@pytest.mark.parametrize(
    ("name", "plain"),
    [("Caf\u00e9 Mu\u0308ller", "caf\u00e9 m\u00fcller"), ("İNCİ Kısa", "inci kisa")],
)
def test_a_name_is_found_in_every_unicode_form(name: str, plain: str, form: str) -> None:
    assert plain_name(unicodedata.normalize(form, name)) == plain
