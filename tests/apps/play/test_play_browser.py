"""A person plays whole games on the page, in a real browser."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from dialop.cli import main as dialop
from tests.helpers.browser import one_browser, open_page
from tests.helpers.chat_server import Answer, chat_server
from tests.helpers.processes import WAIT_S
from tests.helpers.tiny_run import finished

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
EVIL = "<img src=x onerror=alert(1)></script><script>alert(2)</script>\x1b[31mred"


@pytest.fixture(scope="module", autouse=True)
def browser() -> Iterator[None]:
    finished()  # a run needs an event loop of its own
    with one_browser():
        yield


@contextmanager
def started(out: Path, *words: str, run: Path | None = None) -> Iterator[str]:
    """The address that the command prints; the command ends with the block. The run is a tiny one
    unless given."""
    command = [sys.executable, "-m", "selfplay.apps.play", str(run or finished())]
    command += ["--port", "0", "--out", str(out), *words]
    if not any(word.startswith("rollout.max_turns=") for word in words):
        command.append("rollout.max_turns=30")
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout
            line = next(line for line in program.stdout if line.startswith("http://127.0.0.1:"))
            yield line.strip()
        finally:
            program.terminate()


def our_turn(page: Page) -> None:
    expect(page.locator("#status")).to_have_text(re.compile("Your move|over"))


@contextmanager
def a_move(page: Page) -> Iterator[None]:
    """The block makes a move; the page shows it before the block ends."""
    version = page.evaluate("play.drawn")
    yield
    until_s = time.monotonic() + WAIT_S
    while page.evaluate("play.drawn") == version:  # the page forbids to wait in it, with eval
        assert time.monotonic() < until_s
        page.wait_for_timeout(20)


def accept_when_asked(page: Page) -> None:
    """Talk until the partner proposes, then accept."""
    for _ in range(6):
        our_turn(page)
        if page.locator("#accept").is_visible():
            page.click("#accept")
            expect(page.locator("#status")).to_have_text("The game is over")
            return
        page.fill("#words", "Go on.")
        page.press("#words", "Enter")
        expect(page.locator("#words")).to_have_value("")
    raise AssertionError("the partner never proposed")


def test_a_whole_game_with_a_script(tmp_path: Path) -> None:
    out = tmp_path / "played.jsonl"
    with started(
        out, "--partner", "scripted:honest", "--seat", "1", "game.options.size=3"
    ) as address:
        assert address.split("?")[0].startswith("http://127.0.0.1:")
        with open_page(address) as page:
            page.click("#start")
            our_turn(page)
            if page.locator("#words").is_visible():
                page.fill("#words", EVIL)
                page.press("#words", "Enter")
                sent = page.locator("#talk .turn.seat1 .text").last
                expect(sent).to_contain_text("onerror=alert(1)")
                assert "\x1b" not in sent.inner_text()
            accept_when_asked(page)
            expect(page.locator("#before")).to_contain_text("of what was possible")
            expect(page.locator("#ending .pool .cell.best")).to_have_count(3)
            assert page.locator("#ending .view").count() == 2 and page.locator("img").count() == 0
            expect(page.locator("#start")).to_have_text("Play another game")
            page.evaluate(
                "play.state.result.game.seat_scores = [0.25, 1]; drawEnding(play.state)"
            )  # as a competitive game ends
            expect(page.locator("#before")).to_contain_text("Your partner 25 %, you 100 % of what")
            assert "You agreed" not in page.locator("#before").inner_text()
    assert dialop(["replay", str(out)]) == 0


def test_the_builder_cannot_build_an_illegal_proposal(tmp_path: Path) -> None:
    """Three cells in one column, then in one row: never two pairs that clash."""
    out = tmp_path / "played.jsonl"
    words = ("--partner", "scripted:honest:tell=top", "--seat", "0", "game.options.size=3")
    own = ("game.options.brief=false", "rollout.max_game_tokens=192")
    with started(out, *words, *own) as address, open_page(address) as page:
        page.click("#start")
        our_turn(page)
        while page.locator("#accept").is_visible():
            with a_move(page):
                page.click("#reject")
            our_turn(page)
        cell = page.locator("#own button.cell")
        mine = page.locator("#own .cell.mine")
        for place in (0, 3, 6):
            cell.nth(place).click()
            expect(mine).to_have_count(1)
        expect(page.locator("#propose")).to_be_disabled()
        cell.nth(7).click()
        expect(mine).to_have_count(1)
        cell.nth(0).click()  # the last reviewer and the last paper go together
        expect(mine).to_have_count(3)
        chosen = [i for i in range(9) if "mine" in (cell.nth(i).get_attribute("class") or "")]
        assert {i // 3 for i in chosen} == {i % 3 for i in chosen} == {0, 1, 2}
        with a_move(page):
            page.click("#propose")
        our_turn(page)
        assert page.locator("#talk .turn.refused").count() == 0


def bare(folder: Path, game: str) -> tuple[str, str]:
    """Settings of another game than the run's; only a partner that needs no weights fits them."""
    path = folder / "settings.yaml"
    path.write_text(f"game: {{name: {game}}}\nmodel: {{path: x}}\n")
    return "--config", str(path)


def test_a_travel_agent_with_a_chat_model(tmp_path: Path) -> None:
    """The endpoint is the user: it tells, and accepts a full plan that the lists have built."""

    def user(body: dict[str, Any], number: int) -> Answer:
        due = "[propose]" in body["messages"][-1]["content"]
        return Answer("[accept]" if due else f"[message] Parks.\n{EVIL}")

    out = tmp_path / "played.jsonl"
    with chat_server(user) as server:
        partner = f"endpoint:chat@{server.url}"
        words = (*bare(tmp_path, "planning"), "--partner", partner, "--seat", "1")
        with started(out, *words) as address, open_page(address) as page:
            page.click("#start")
            our_turn(page)
            expect(page.locator("#talk .turn.seat0 .text")).to_contain_text("onerror=alert(1)")
            assert "\x1b" not in page.locator("#talk").inner_text()
            page.click("#tabs button:has-text('Search')")
            page.click("#send")
            expect(page.locator("#talk .turn.own .list td").first).to_have_text("name")
            our_turn(page)
            page.click("#tabs button:has-text('Propose')")
            lists = page.locator("#picks select")
            expect(page.locator("#send")).to_be_disabled()
            lists.nth(0).select_option(index=1)
            lists.nth(1).select_option(index=2)
            assert lists.nth(2).locator("option").nth(1).is_disabled(), "no site twice"
            lists.nth(2).select_option(index=3)
            page.click("#send")
            expect(page.locator("#status")).to_have_text("The game is over")
            expect(page.locator("#ending .view .who").nth(0)).to_contain_text("user")
            expect(page.locator("#ending .view .who").nth(1)).to_contain_text("you")
            expect(page.locator("#ending .note", has_text="points").first).to_be_visible()
    assert out.read_text().count("\n") == 1 and len(server.bodies) == 2
