"""Makes the film of a run's page and the pictures of the pages in docs/figures, in Chromium.

.venv/bin/python -m docs.tools.film runs/talk [--planning runs/tiny_planning] [--split runs/split]
"""

from __future__ import annotations

import argparse
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from playwright.sync_api import FloatRect, Page, expect

from tests.apps.play.test_play_browser import accept_when_asked, our_turn, started
from tests.helpers.browser import open_page

FIGURES = Path(__file__).resolve().parents[2] / "docs" / "figures"
SIZE, SHOWN_SIZE = {"width": 1280, "height": 800}, (960, 600)
SHOWN_MS = 2000  # of each picture
# Each still picture: its width and height in pixels, its theme, the section that it begins with.
STILLS = {
    "report_light": (1180, 760, "light", ".tiles"),
    "report_dark": (1180, 860, "dark", "#games"),
    "report_phone": (390, 844, "light", "#game"),
}


def scenes(page: Page) -> Iterator[None]:
    """Move the page from picture to picture: the result, its curves, games before and after."""
    yield
    page.mouse.wheel(0, 700)
    yield
    page.locator("#games").evaluate("part => part.scrollIntoView({behavior: 'instant'})")
    page.select_option("#order", "changed")
    for key in ("b", "b", "j", "b", "b"):  # before, after; the next game
        page.keyboard.press(key)
        yield


def film(run: Path, out: Path) -> None:
    """Write the pictures of the run's report.html to `out`, as an animated WebP that repeats."""
    pictures = []
    with open_page((run / "report.html").resolve().as_uri(), viewport=SIZE) as page:
        for _ in scenes(page):
            page.wait_for_timeout(200)
            picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            pictures.append(picture.resize(SHOWN_SIZE, Image.Resampling.LANCZOS))
    first, *rest = pictures
    first.save(
        out, save_all=True, append_images=rest, duration=SHOWN_MS, loop=0, quality=80, method=6
    )
    print(f"{out}: {len(pictures)} pictures, {out.stat().st_size / 1e6:.1f} MB")


def stills(run: Path, folder: Path) -> None:
    """Write the pictures of STILLS, of the game that self-play changed most."""
    for name, (width, height, theme, section) in STILLS.items():
        size = {"width": width, "height": height}
        address = (run / "report.html").resolve().as_uri()
        with open_page(address, viewport=size, color_scheme=theme) as page:
            page.select_option("#order", "changed")
            if section != ".tiles":
                page.locator(section).evaluate("part => part.scrollIntoView({behavior: 'instant'})")
            page.wait_for_timeout(200)
            page.screenshot(path=folder / f"{name}.png")


def planning(run: Path, folder: Path) -> None:
    """Write the picture of a game of planning, the one that self-play changed most."""
    size = {"width": 1180, "height": 820}
    with open_page((run / "report.html").resolve().as_uri(), viewport=size) as page:
        page.select_option("#order", "changed")
        page.locator("#games").evaluate("part => part.scrollIntoView({behavior: 'instant'})")
        page.wait_for_timeout(200)
        page.screenshot(path=folder / "report_planning.png")


def split(run: Path, folder: Path) -> None:
    """Write the picture of a game whose seats are paid apart: the first four curves, and below them
    a group of games."""
    size = {"width": 1180, "height": 900}
    with open_page((run / "report.html").resolve().as_uri(), viewport=size) as page:
        page.select_option("#source", "training")
        page.select_option("#order", "group")
        page.locator(".group .card").nth(2).click()
        box = page.locator("#curves .charts").bounding_box()
        end = page.locator("#curves .chart").nth(3).bounding_box()
        assert box and end
        top = box["y"] + page.evaluate("scrollY")
        height = end["y"] + end["height"] - box["y"]
        clip: FloatRect = {"x": box["x"], "y": top, "width": box["width"], "height": height}
        curves = page.screenshot(full_page=True, clip=clip)
        group = page.locator(".panel:has(.group)").screenshot()
        parts = [Image.open(io.BytesIO(each)).convert("RGB") for each in (curves, group)]
        whole = Image.new("RGB", (max(p.width for p in parts), 12 + sum(p.height for p in parts)))
        whole.paste("#f6f5f2", (0, 0, *whole.size))
        whole.paste(parts[0], (0, 0))
        whole.paste(parts[1], (0, parts[0].height + 12))
        whole.save(folder / "report_split.png")


def games(run: Path, folder: Path) -> None:
    """Write the pictures of games that a person plays against scripts; the run is not read."""
    for name, (settings, (width, height, theme), moves) in PLAYED.items():
        with tempfile.TemporaryDirectory() as home:
            (Path(home) / "settings.yaml").write_text(f"game: {settings[0]}\nmodel: {{path: x}}\n")
            words = ("--config", f"{home}/settings.yaml", *settings[1:])
            size = {"width": width, "height": height}
            with (
                started(Path(home) / "played.jsonl", *words, run=run) as address,
                open_page(address, viewport=size, color_scheme=theme) as page,
            ):
                page.click("#start")
                our_turn(page)
                moves(page)
                page.wait_for_timeout(300)
                page.screenshot(path=folder / f"{name}.png")


def _say(page: Page, text: str) -> None:
    page.fill("#words", text)
    page.press("#words", "Enter")
    expect(page.locator("#words")).to_have_value("")
    our_turn(page)


def _until_asked(page: Page) -> None:
    texts = iter(["My Ava is best on GLUE, at 47.", "What would you propose?"])
    while not page.locator("#accept").is_visible():
        _say(page, next(texts, "Go on."))


def _to_the_end(page: Page) -> None:
    accept_when_asked(page)
    page.evaluate("scrollTo(0, 0)")


def _propose(page: Page, *places: int) -> None:
    page.click("#tabs button:has-text('Propose')")
    for number, place in enumerate(places):
        page.locator("#picks select").nth(number).select_option(index=place)


def _in_two_rooms(page: Page) -> None:
    for user in (0, 1):
        page.click(f"#tabs button:has-text('To user {user}')")
        _say(page, "Which of your events could you miss?")
    _propose(page, 3, 4)


def _search(page: Page) -> None:
    page.click("#tabs button:has-text('Search')")
    words = "fields=[price, rating], filters=[category == cafe], sort_by=[rating desc], limit=5"
    page.fill("#words", f"Search({words})")
    page.click("#send")
    our_turn(page)
    _propose(page, 1, 2, 3)
    page.evaluate("scrollTo(0, document.body.scrollHeight)")


_MATCHING = "{name: matching, options: {size: 4, max_value: 10, keep: exactly_one}}"
# Each game: its settings and the command's words; width, height and theme; the moves.
PLAYED = {
    "play_light": (
        (_MATCHING, "--partner", "scripted:honest", "--seat", "1"),
        (1120, 800, "light"),
        _until_asked,
    ),
    "play_dark": (
        (_MATCHING, "--partner", "scripted:honest:tell=top", "--seat", "1"),
        (1120, 1000, "dark"),
        _to_the_end,
    ),
    "play_rooms": (
        ("{name: mediation}", "--partner", "scripted:honest", "--seat", "2"),
        (1180, 900, "light"),
        _in_two_rooms,
    ),
    "play_phone": (
        ("{name: planning}", "--partner", "scripted:searcher", "--seat", "1"),
        (390, 844, "light"),
        _search,
    ),
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run folder with report.html")
    parser.add_argument("--planning", type=Path, help="a run of planning with report.html")
    parser.add_argument("--split", type=Path, help="a run of examples/split with report.html")
    given = parser.parse_args()
    film(given.run, FIGURES / "viewer.webp")
    stills(given.run, FIGURES)
    games(given.run, FIGURES)
    if given.planning:
        planning(given.planning, FIGURES)
    if given.split:
        split(given.split, FIGURES)
