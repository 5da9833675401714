"""The page of a run in a real browser: filters, keys, tables, and texts that stay texts."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from selfplay.apps.report.page import write_report
from selfplay.apps.report.run_files import read_run
from tests.helpers.browser import one_browser, open_page
from tests.helpers.run_folders import make_run, write_lines
from tests.helpers.tiny_run import RUNS, finished

pytestmark = pytest.mark.slow
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31mred\u202e"


@pytest.fixture(scope="module", autouse=True)
def browser() -> Iterator[None]:
    for settings in (RUNS["plain"], RUNS["branches"]):
        finished(*settings)  # a run needs an event loop of its own
    with one_browser():
        yield


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a run with one hostile game, the worst of its training games."""
    folder = make_run(tmp_path_factory.mktemp("pages") / "run", num_games=12)
    games = read_run(folder).games
    games[0] |= {"score_norm": -1.0, "instance": EVIL}
    games[0]["turns"][0] |= {"text": f"[message] {EVIL}", "error": EVIL, "error_kind": EVIL}
    games[0]["seats"][0] |= {"player": EVIL, "user": EVIL}
    write_lines(folder / "games.jsonl", games)
    write_report([read_run(folder)], folder / "report.html")
    return (folder / "report.html").as_uri()


def scores(page: Page) -> list[float]:
    return [float(text) for text in page.locator("#list li > b").all_inner_texts()]


def test_filters_and_orders(address: str) -> None:
    with open_page(address) as page:
        expect(page.locator("#source")).to_have_value("after")
        assert scores(page) == sorted(scores(page)) and len(scores(page)) == 12
        page.select_option("#order", "best")
        assert scores(page) == sorted(scores(page), reverse=True)
        page.select_option("#order", "changed")
        texts = page.locator("#list li em.up, #list li em.down").all_inner_texts()
        changes = [abs(float(text)) for text in texts]
        assert changes and changes == sorted(changes, reverse=True)
        page.select_option("#source", "training")
        assert scores(page) == []  # training games have no twin
        expect(page.locator("#game")).to_contain_text("No game fits")
        page.select_option("#order", "worst")
        page.select_option("#show", "errors")
        num_errors = len(scores(page))
        page.select_option("#show", "all")
        assert 0 < num_errors <= len(scores(page)) == 12
        page.fill("#search", "onerror=alert")
        assert scores(page) == [-1.0]


def test_hostile_texts_stay_texts(address: str) -> None:
    with open_page(address) as page:
        page.select_option("#source", "training")
        expect(page.locator("#list li b").first).to_have_text("-1.000")
        shown = page.locator("#game").inner_text()
        assert "<script>alert(1)</script>" in shown and "onerror=alert(2)" in shown
        assert "\x1b" not in shown and "\u202e" not in shown and "·[31mred·" in shown
        assert page.locator("img").count() == 0 and page.locator("script").count() == 2


def test_branch_points_and_tokens(tmp_path: Path) -> None:
    write_report([read_run(finished(*RUNS["branches"]))], tmp_path / "branches.html")
    with open_page((tmp_path / "branches.html").as_uri()) as page:
        page.select_option("#source", "training")
        page.select_option("#show", "branches")
        expect(page.locator(".branch").first).to_contain_text("3 turns tried here")
        assert page.locator(".branch").first.locator(".val").count() == 3
        page.locator(".token").first.hover()
        expect(page.locator("#tip")).to_contain_text("nats")
        page.locator(".plot").first.hover()
        expect(page.locator("#tip")).to_contain_text("step")


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a run that keeps the groups of its steps 1 and 4."""
    page = tmp_path_factory.mktemp("groups") / "groups.html"
    write_report([read_run(finished())], page)
    return page.as_uri()


def test_a_point_of_a_curve_leads_to_its_games_and_a_link_to_one_survives_a_reload(
    grouped: str,
) -> None:
    with open_page(grouped) as page:
        plot = page.locator(".plot").first
        box = plot.bounding_box()
        assert box
        plot.click(position={"x": box["width"] * 0.97, "y": box["height"] / 2})
        expect(page.locator("#step")).to_have_value("4")
        expect(page.locator("#count")).to_contain_text("16 of")
        assert "step 4" in page.locator("#game h3").inner_text()
        cards = page.locator(".group .card")
        expect(cards).to_have_count(4)
        cards.nth(2).click()
        expect(cards.nth(2)).to_have_attribute("aria-current", "true")
        assert page.url.endswith("%2F2") and "#game=training%2F4%2F" in page.url
        shown = page.locator("#game").inner_text()
        page.reload()
        expect(page.locator(".group .card").nth(2)).to_have_attribute("aria-current", "true")
        assert page.locator("#game").inner_text() == shown
        page.evaluate("location.hash = location.hash.replace(/2$/, '0')")
        expect(page.locator(".group .card").first).to_have_attribute("aria-current", "true")
        page.evaluate("location.hash = '#game=nothing%'")
        expect(page.locator(".group .card").first).to_have_attribute("aria-current", "true")
