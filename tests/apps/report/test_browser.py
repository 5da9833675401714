"""The page of a run in a real browser: filters, keys, tables, and texts that stay texts."""

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from playwright.sync_api import Page, expect

from selfplay.apps.report.page import write_report
from selfplay.apps.report.run_files import STAGES, read_run
from tests.helpers.browser import one_browser, open_page
from tests.helpers.run_folders import make_run, record, turn, write_lines
from tests.helpers.tiny_run import RUNS, finished

pytestmark = pytest.mark.slow
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31mred\u202e"


@pytest.fixture(scope="module", autouse=True)
def browser() -> Iterator[None]:
    for settings in (RUNS["plain"], RUNS["branches"], ("observers=[page]",)):
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


def test_a_curve_is_read_with_the_keyboard_and_its_values_leave_with_it(grouped: str) -> None:
    with open_page(
        grouped, reduced_motion="reduce", viewport={"width": 1440, "height": 2400}
    ) as page:
        tip, plot = page.locator("#tip"), page.locator("#curves .plot").first
        label = plot.get_attribute("aria-label")
        assert label and label.startswith("Score, steps 1 to 4: training games from 0.")
        plot.focus()
        for key, step in (("ArrowRight", 1), ("ArrowRight", 2), ("End", 4), ("ArrowLeft", 3)):
            page.keyboard.press(key)
            expect(tip).to_contain_text(f"step {step}\n")
        page.keyboard.press("Enter")
        expect(page.locator("#step")).to_have_value("3")
        expect(tip).to_be_hidden()
        page.evaluate("scrollTo(0, 0)")
        page.wait_for_function("scrollY === 0")
        plot.hover()
        expect(tip).to_contain_text("click: games of step")
        plot.click()
        expect(tip).to_be_hidden()
        page.evaluate("scrollTo(0, 0)")
        page.wait_for_function("scrollY === 0")
        page.mouse.move(0, 0)
        plot.hover()
        expect(tip).to_be_visible()
        page.mouse.wheel(0, 300)
        expect(tip).to_be_hidden()


def test_a_link_to_a_game_that_the_page_has_not_is_answered(grouped: str) -> None:
    with open_page(grouped) as page:
        page.evaluate("location.hash = '#game=training%2F3%2Fgone%2F0'")
        expect(page.locator("#missing")).to_contain_text("no longer has the game training/3/gone/0")
        page.locator("#list li").first.click()
        expect(page.locator("#missing")).to_be_hidden()


# --- geometry -----------------------------------------------------------------------------------

DESK, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}


@pytest.mark.parametrize(("size", "in_a_row"), [(DESK, 8), (PHONE, 2)])
def test_the_health_of_a_run_is_one_row_and_nothing_is_wider_than_the_page(
    size: dict[str, int], in_a_row: int
) -> None:
    with open_page((finished("observers=[page]") / "report.html").as_uri(), viewport=size) as page:
        boxes = [card.bounding_box() for card in page.locator(".health .chart").all()]
        tops = [round(box["y"]) for box in boxes if box]
        assert len(tops) == 8 and tops.count(tops[0]) == in_a_row
        assert page.evaluate("document.documentElement.scrollWidth") == size["width"]


def edges(page: Page, box: Any) -> tuple[float, float]:
    """How bright the left and the right edge of a box are, from 0 to 1, without its border."""
    picture = imread(io.BytesIO(page.screenshot(clip=box)))[:, :, :3]
    return float(picture[:, 3:6].mean()), float(picture[:, -6:-3].mean())


def test_the_scores_fit_a_desk_and_a_phone_shows_where_they_go_on(grouped: str) -> None:
    with open_page(grouped, viewport=DESK) as page:
        width, room = page.evaluate(
            "(e => [e.scrollWidth, e.clientWidth])(document.querySelector('.scroll'))"
        )
        assert width == room
    with open_page(grouped, viewport=PHONE) as page:
        table = page.locator("#scores .scroll")
        table.evaluate("e => e.scrollIntoView({behavior: 'instant', block: 'center'})")
        left, right = edges(page, table.bounding_box())
        assert right < left - 0.05, "it goes on to the right"
        table.evaluate("e => { e.scrollLeft = e.scrollWidth; }")
        left, right = edges(page, table.bounding_box())
        assert left < right - 0.05, "it goes on to the left"


def test_the_strip_of_a_group_shows_the_card_of_the_open_game(grouped: str) -> None:
    with open_page(grouped, viewport=PHONE) as page:
        page.select_option("#source", "training")
        page.select_option("#order", "group")
        for number in range(4):
            page.locator(f"#list li:nth-child({number + 1})").click()
            strip, card = (
                page.locator(one).bounding_box() for one in (".group", ".group [aria-current=true]")
            )
            assert strip and card
            assert strip["x"] - 1 <= card["x"]
            assert card["x"] + card["width"] <= strip["x"] + strip["width"] + 1


# --- the games of before, and the tokens ----------------------------------------------------------


def test_the_worst_game_has_its_twin_and_b_and_j_keep_their_place(tmp_path: Path) -> None:
    """The worst after self-play is not among the first games, and its twin before only among all
    games of before."""
    folder = make_run(tmp_path / "run", num_games=12)
    pages = {stage: json.loads((folder / f"held_out_{stage}.json").read_text()) for stage in STAGES}
    *kept, last = pages["before"]["sampled"]["games"]
    pages["before"]["sampled"] |= {"games": kept, "examples": {}}
    *first, worst = pages["after"]["sampled"]["games"]
    worst["score_norm"] = -0.5
    pages["after"]["sampled"] |= {"games": first, "examples": {"worst": worst}}
    for stage, rows in pages.items():
        (folder / f"held_out_{stage}.json").write_text(json.dumps(rows))
    write_lines(folder / "held_out_before_games.jsonl", [*kept, last])
    write_report([read_run(folder)], tmp_path / "twins.html")
    with open_page((tmp_path / "twins.html").as_uri()) as page:
        heading, marked = page.locator("#game h3"), page.locator("#list [aria-current=true]")
        expect(page.locator("#game .pill").first).to_have_text("score -0.500")
        places = []
        for key, stage in (("b", "before"), ("b", "after"), ("b", "before"), ("j", "after")):
            page.keyboard.press(key)
            expect(heading).to_have_text(f"{stage} self-play")
            expect(marked).to_have_count(1)
            places.append(marked.evaluate("e => [...e.parentNode.children].indexOf(e)"))
        assert places == [0, 0, 0, 1]


@pytest.mark.parametrize("size", [DESK, PHONE])
def test_tokens_are_coloured_by_what_the_update_saw(tmp_path: Path, size: dict[str, int]) -> None:
    """Two tokens of advantages 1 and -0.5, of ratios e^0.2 and e^-0.1; the third did not train."""
    folder = make_run(tmp_path / "run", num_games=2)
    game = record() | {"step": 1}
    game["turns"] = [turn(0, "abc") | {"tokens": [["a", -0.1], ["b", -2.0], ["c", 0.0]]}]
    write_lines(folder / "games.jsonl", [game])
    seen = {"advantages": [1.0, -0.5, None], "mismatch": [0.2, -0.1, None]}
    games = [{"instance": game["instance"], "episode": game["episode"], "turns": [seen]}]
    write_lines(folder / "page.jsonl", [{"step": 1, "memory_gib": 1.5, "games": games}])
    write_report([read_run(folder)], tmp_path / "tokens.html")
    with open_page((tmp_path / "tokens.html").as_uri(), viewport=size) as page:
        page.select_option("#source", "training")
        tokens = page.locator(".token")
        tokens.first.hover()
        for text in ("-0.100 nats", "advantage +1.000", "ratio 1.2214", "mismatch 0.2"):
            expect(page.locator("#tip")).to_contain_text(text)

        def shares() -> list[tuple[str, str]]:
            read = "e => [e.style.getPropertyValue('--hue'), e.style.getPropertyValue('--p')]"
            return [tuple(one.evaluate(read)) for one in tokens.all()]

        assert shares() == [("", "")] * 3
        page.get_by_role("button", name="advantage").click()
        assert shares() == [("var(--good)", "70"), ("var(--bad)", "35"), ("", "")]
        pressed = page.locator(".heat [aria-pressed=true]")
        expect(pressed).to_have_text("advantage")
        expect(page.locator(".scale")).to_have_text("−1+1")
        page.keyboard.press("t")
        expect(pressed).to_have_text("ratio")
        assert shares() == [("var(--s0)", "70"), ("var(--s1)", "35"), ("", "")]
        page.keyboard.press("t")
        assert pressed.count() == 0 and shares() == [("", "")] * 3


def test_ten_seeds_fit_a_screen_and_a_game_stands_beside_its_instance_in_another_run(
    tmp_path: Path,
) -> None:
    """The table shows what differs, and the curves begin on the first screen."""
    make_run(tmp_path / "seed0", num_games=2)
    for seed in range(1, 10):
        shutil.copytree(tmp_path / "seed0", tmp_path / f"seed{seed}")
        config = tmp_path / f"seed{seed}" / "config.yaml"
        config.write_text(config.read_text().replace("\nseed: 0\n", f"\nseed: {seed}\n"))
    write_report([read_run(tmp_path / f"seed{n}") for n in range(10)], tmp_path / "ten.html")
    with open_page((tmp_path / "ten.html").as_uri(), viewport=DESK) as page:
        fits = (
            "e => e.scrollWidth <= e.clientWidth && e.getBoundingClientRect().bottom < innerHeight"
        )
        assert page.locator("#runs .scroll").evaluate(fits)
        row = page.locator(".beside tr").filter(has_text="model.scratch.width")
        expect(row).to_be_hidden()
        expect(
            page.locator(".beside tr").filter(has=page.locator("th", has_text="seed"))
        ).to_have_count(2)
        page.locator("button.all").click()
        expect(row).to_be_visible()
        heading = page.locator("#game h3")
        first = heading.first.inner_text()
        page.get_by_role("button", name="seed4").click()
        expect(heading).to_have_text([first, first.replace("seed0", "seed4")])
        facts = [one.split(" rewards")[0] for one in page.locator("#game .facts").all_inner_texts()]
        assert facts[0] == facts[1] and facts[0].startswith("instance ")
        left, right = (page.locator(".pair > div").nth(n).bounding_box() for n in range(2))
        assert left and right and left["y"] == right["y"] and left["x"] < right["x"]
        page.keyboard.press("j")  # the next game keeps its neighbour
        expect(page.locator("#beside")).to_be_visible()
        page.get_by_role("button", name="seed4").click()
        expect(page.locator("#beside")).to_have_count(0)
