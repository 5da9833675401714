"""A real browser for the pages' tests: headless Chromium, driven by Playwright."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.helpers.processes import WAIT_S

NAMES = ("chromium", "chromium-browser", "google-chrome")


_running: list[Browser] = []  # at most one


@contextmanager
def one_browser() -> Iterator[None]:
    """Inside, all pages are opened in one browser, whose start takes seconds. Python's own event
    loops do not run meanwhile."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    with sync_playwright() as playwright:
        # Without an installed browser Playwright takes its own, or says how to get it.
        chromium = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        _running.append(chromium)
        try:
            yield
        finally:
            _running.remove(chromium)
            chromium.close()


@contextmanager
def open_page(address: str, **options: Any) -> Iterator[Page]:
    """The page at an address, in a fresh profile without a network; `options` as in Playwright's
    `new_context`. Ends in an error if the page's script had one, asked for another address, or
    opened a dialog."""
    troubles: list[str] = []
    with nullcontext() if _running else one_browser():
        context = _running[0].new_context(**options)
        page = context.new_page()
        page.set_default_timeout(1000 * WAIT_S)
        expect.set_options(timeout=1000 * WAIT_S)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on(
            "console", lambda line: troubles.append(line.text) if line.type == "error" else None
        )
        page.on("dialog", lambda dialog: troubles.append(f"dialog {dialog.message}"))
        home = address.split("?")[0]
        page.on(
            "request",
            lambda ask: None if ask.url.startswith(home) else troubles.append(f"asked {ask.url}"),
        )
        page.goto(address)
        yield page
        context.close()
    assert not troubles, troubles
