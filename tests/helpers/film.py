"""Makes the film of a run's page and its pictures in docs/figures, in Chromium.

.venv/bin/python -m tests.helpers.film runs/talk
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page

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
    for key in ("b", "b", "j", "b", "b", "t"):  # before, after; the next game; its log-probs
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run folder with report.html")
    given = parser.parse_args()
    film(given.run, FIGURES / "viewer.webp")
    stills(given.run, FIGURES)
