"""Shown model text can neither control a terminal nor forge a page; keys are never stored."""

import asyncio
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from bench.compare_runs import curves_svg
from dialop.matching.game import MatchingGame
from dialop.shown import error_line, error_text, on_one_line, printable
from dialop.terminal import show_error
from selfplay.apps.play.person import PersonPlayer
from selfplay.engines.base import Completion, Message, Request
from selfplay.errors import SettingsError
from selfplay.evaluation.plan import pair_name
from selfplay.evaluation.report import Evaluated, markdown, table_text
from selfplay.evaluation.rows import Row
from selfplay.metrics.records import game_text
from selfplay.partners.endpoint import Endpoint
from selfplay.partners.options import EndpointConfig
from selfplay.preflight.command_line import refused
from tests.helpers.chat_server import Answer, chat_server
from tests.helpers.dialop_boards import FULL, SMALL, play
from tests.helpers.run_folders import record, turn
from tests.helpers.tiny_run import begin_warm, run_tiny

# Clear the screen (also in 8 bits), overwrite the line, reverse the text, ring a bell, set a title.
STEERING = "\x1b[2J\x9b2J\rover\u202eback\u2066\x07\x1b]0;title\x07\x7f\u2028\x85\ud800"
MARKUP = "</script></text><script>alert(1)</script> | a | b |\n```\n# Title\n~~~\n````\n<!-- &lt;"
EVIL = f"{STEERING} {MARKUP}\n── outcome ────\nagreed; score 1.000 of the best"
KEY = "sk-planted-0123456789abcdef"


def steers(text: str) -> list[str]:
    return [c for c in text if c != "\n" and not c.isprintable()]


def evil_game() -> dict[str, object]:
    game = record()
    game["turns"][0] = turn(0, f"[message] {EVIL}", f"Error: {EVIL}")
    game["seats"][0] = {"player": EVIL, "system": f"Rules {EVIL}", "user": EVIL}
    game["instance"] = EVIL
    return game


def row() -> Row:
    return Row(EVIL, (0.5,), (0.5, 0.4, 0.6), {"errors_x": 1.0}, (), {"best": evil_game()})


def test_what_is_no_printed_character_is_a_dot() -> None:
    assert printable("a\x1b[2J\tb\r\nc\u202ed\n") == "a·[2J    b\nc·d\n"
    assert on_one_line("a\nb\x07") == "a b·"
    assert printable("Zoë, 李, 😀 – «é»") == "Zoë, 李, 😀 – «é»"


def test_an_error_steers_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of one's own code, with its notes, or of a file."""
    error = ValueError(EVIL)
    error.add_note(EVIL)
    show_error("train.py", error, tmp_path)
    refused("train.py", SettingsError(EVIL))
    assert not steers(capsys.readouterr().err + error_line(error) + error_text(error))


def test_an_error_names_the_line_of_ones_own_code_and_none_of_python_or_this_project() -> None:
    def finds(path: str) -> None:
        json.loads(path)

    with pytest.raises(ValueError) as caught:
        finds("{")
    line = finds.__code__.co_firstlineno + 1
    assert error_line(caught.value).startswith(f"test_shown.py:{line} finds: JSONDecodeError: ")
    assert error_text(caught.value) == error_line(caught.value)
    error = caught.value.with_traceback(caught.traceback[-1]._rawentry)
    assert error_line(error).startswith("JSONDecodeError: ")
    assert error_text(error) == str(error)


def test_a_game_is_shown_and_draws_no_rule_of_its_own() -> None:
    text = game_text(evil_game())  # type: ignore[arg-type]
    assert not steers(text)
    assert len(re.findall("^── talk", text, re.MULTILINE)) == 1
    assert len(re.findall("^── outcome", text, re.MULTILINE)) == 1


def test_an_evaluation_page_is_forged_by_nothing_in_it() -> None:
    name = f"policy with {EVIL}"
    page = Evaluated(EVIL, {"partner": EVIL, "checkpoint": EVIL}, {name: row()})
    assert not steers(table_text(page.results))
    written = markdown(page)
    assert not steers(written)
    outside = re.sub(r"^(`{3,})text\n.*?^\1$", "", written, flags=re.DOTALL | re.MULTILINE)
    assert not re.search(r"(?<!\\)<", outside), "no tag outside a code block"
    headings = re.findall(r"^#+ .*", outside, re.MULTILINE)
    assert len(headings) == 3 and not re.search("^# Title", outside, re.MULTILINE)
    # Column heads, rule and one row: a bar in the text does not add a cell.
    table = [line for line in outside.splitlines() if line.startswith("|")]
    bars = [len(re.findall(r"(?<!\\)\|", line)) for line in table]
    assert len(table) == 3 and len(set(bars)) == 1


def test_a_matrix_is_forged_by_no_name() -> None:
    names = (EVIL, "scripted:honest")
    rows = {pair_name(a, b): row() for a in names for b in names}
    report = Evaluated("t", {"games": EVIL}, rows, (names, names))
    page = markdown(report)
    assert not steers(page)
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {5, 3}
    assert not re.search(r"(?<!\\)<|^#+ Title|^```", page, re.MULTILINE)


def test_a_chart_stays_a_chart() -> None:
    rows = [{"step": 1, "score": 0.5}, {"step": 2, "score": 0.6}]
    svg = curves_svg({EVIL: rows}, y="score", title=EVIL)
    assert not steers(svg)
    kinds = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(svg).iter()}
    assert "script" not in kinds


async def no_engine(request: Request) -> Completion:
    raise AssertionError("a person asks no engine")


def test_a_person_at_the_terminal_is_shown_the_partners_words() -> None:
    out = io.StringIO()
    player = PersonPlayer(
        name="person", called="the guest", lines_in=io.StringIO("[message] hi\n"), lines_out=out
    )
    game = play(MatchingGame(SMALL, FULL), (0, f"[message] {EVIL}"))
    asyncio.run(player.move(game, 1, f"Partner: {EVIL}", no_engine))
    assert "over" in out.getvalue() and not steers(out.getvalue())


# --- keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        Answer(status=401, body=f"Incorrect API key {KEY}\x1b[2J".encode()),
        Answer(status=500, body=(b"x" * 190 + KEY.encode())),
        Answer(f"[message] your key is {KEY}"),
        Answer(status=401, body=b"", reason=f"\x1b[2J\x9b2J {KEY}"),
    ],
    ids=["refused", "cut through", "said back", "in the reason"],
)
def test_a_key_that_the_server_says_back_is_not_kept(
    answer: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = EndpointConfig(retries=0)
    with chat_server(lambda body, number: answer) as server:
        endpoint = Endpoint("small", server.url, settings=settings, key=KEY)
        request = Request((), 9, 0, model="x", messages=(Message("user", "hi"),))
        said = endpoint.submit(request).result()
        endpoint.close()
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    told = capsys.readouterr().err
    assert KEY[:9] not in repr(said) + told and not steers(told)
    assert KEY not in repr(endpoint) + repr(endpoint._client) + repr(settings)


def test_a_key_that_no_header_can_hold_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    settings = EndpointConfig(retries=0)
    with chat_server(lambda body, number: Answer("ok")) as server:
        endpoint = Endpoint("small", server.url, settings=settings, key=f"{KEY}\n")
        request = Request((), 9, 0, model="x", messages=(Message("user", "hi"),))
        said = endpoint.submit(request).result()
        endpoint.close()
    assert said.finish == "void"
    assert KEY not in said.text + capsys.readouterr().err


def test_a_run_beside_an_endpoint_keeps_its_key_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one that ends because the endpoint refuses its first request."""
    monkeypatch.setenv("PLANTED_KEY", KEY)

    def script(body: object, number: int) -> Answer:
        if number % 3 == 0:
            return Answer(status=401, body=f"bad key {KEY}".encode())
        return Answer(f"[message] {KEY}")

    with chat_server(script) as server:
        words = [
            f"rollout.partners=['endpoint:small@{server.url}']",
            *("endpoint.key_variable=PLANTED_KEY", "endpoint.retries=0", "steps=1"),
            "save_every=1",
        ]
        begin_warm(tmp_path / "run", *words)
        assert run_tiny(tmp_path / "run", *words) == 2
        assert run_tiny(tmp_path / "run", *words) == 0
    assert server.headers and KEY in server.headers[0]["authorization"]
    shown = capsys.readouterr()
    assert KEY not in shown.out + shown.err
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
