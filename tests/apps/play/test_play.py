"""Playing against a person: what the page may ask, what the person sees, how games are kept."""

import io
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from dialop.cli import main as dialop
from dialop.forms import Form
from dialop.kit import load_kit
from dialop.matching.board import MatchingInstance
from dialop.matching.game import MatchingGame
from dialop.matching.kit import read as read_instances
from dialop.matching.recorded import instance_from_record, moves_from_record, record_of
from dialop.scaffold import Instance as SumOfTwo
from selfplay.apps.play.__main__ import began_at_random, bound, play_here
from selfplay.apps.play.__main__ import main as play_program
from selfplay.apps.play.games import Opponent, Session, keep_game, result_of, seats_for_a_person
from selfplay.apps.play.server import MAX_BODY, MAX_TEXT, TOKEN_HEADER, make_app
from selfplay.apps.play.table import NotNow, SeatedPerson, Table
from selfplay.apps.play.talk import own_move, spoken, tags_of
from selfplay.config import Config, load_config
from selfplay.config.text import dump
from selfplay.evaluation.plan import ITSELF
from selfplay.rollout.players import ScriptedPartner
from selfplay.rollout.seating import scripted_partner
from tests.helpers.dialop_boards import BEST, FULL, SCALED, SMALL, WORST
from tests.helpers.processes import WAIT_S
from tests.helpers.run_folders import bare_weights, settings
from tests.helpers.small_games import Lines

ROOT = Path(__file__).resolve().parents[3]
TOKEN = "the-token"
FACTS = {"opponent": "honest", "title": "A game", "rules": "<b>Talk.</b>", "understands": "All."}
FACTS["limits"] = "None."
EVIL = "</script><script>alert(1)</script>\x1b[2J\u202e"


def honest(config: Config) -> Opponent:
    def sit(names: tuple[object, ...], seat: int) -> ScriptedPartner:
        return scripted_partner(config.game.kit.BASELINES[0], names, seat, config.game)

    return Opponent("scripted:honest", None, None, sit)


def session(config: Config, instance: Any, opponent: Opponent, seat: int = 0) -> Session:
    return Session([instance], opponent, [seat], config.game, config.rollout, config.seed)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return settings(
        tmp_path / "run",
        "game.options.size=2",
        "game.options.scale=false",
        "game.options.max_value=10",
    )


class Running:
    """A game and its server in threads, as the page's program runs them, with a client."""

    def __init__(
        self, config: Config, instance: Any, *, seat: int = 0, opponent: Opponent | None = None
    ) -> None:
        self.session = session(config, instance, opponent or honest(config), seat)
        self.table = Table(self.session)
        self.episodes: list[Any] = []
        self.thread = threading.Thread(target=self._play)
        socket = bound(0)
        self.port = socket.getsockname()[1]
        self.here = f"http://127.0.0.1:{self.port}"
        app = make_app(self.table, token=TOKEN, port=self.port, facts=FACTS)
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        self.serving = threading.Thread(target=self.server.run, kwargs={"sockets": [socket]})
        self.client = httpx.Client(base_url=self.here, timeout=120, trust_env=False)
        self.thread.start()
        self.serving.start()

    def _play(self) -> None:
        person = SeatedPerson(self.table)
        while self.table.wait_for_start():
            episode = self.session.play(0, person, self.table.begin, self.table.follow)
            self.episodes.append(episode)
            result = {} if episode is None else result_of(episode, self.session)
            self.table.finish(result)

    def post(self, path: str, body: Any, **headers: str) -> Any:
        given = {TOKEN_HEADER: TOKEN, "origin": self.here, **headers}
        content = body if isinstance(body, str | bytes) else json.dumps(body)
        return self.client.post(path, content=content, headers=given)

    def state(self) -> dict[str, Any]:
        return self.client.get("/state", headers={TOKEN_HEADER: TOKEN}).json()

    def wait(self, phase: str) -> dict[str, Any]:
        until_s = time.monotonic() + WAIT_S
        while self.table.state()["phase"] != phase:
            assert time.monotonic() < until_s, f"never {phase}: {self.table.state()}"
            time.sleep(0.01)
        return self.state()

    def close(self) -> None:
        self.table.close()
        self.client.close()
        self.server.should_exit = True  # it looks ten times a second
        CLOSED.append(self)


CLOSED: list[Running] = []


@pytest.fixture(scope="module", autouse=True)
def ended() -> Iterator[None]:
    """All games and servers end, beside the tests that follow."""
    yield
    for game in CLOSED:
        for thread in (game.thread, game.serving):
            thread.join(WAIT_S)
            assert not thread.is_alive()


@pytest.fixture
def running(config: Config) -> Iterator[Running]:
    game = Running(config, SMALL)
    yield game
    game.close()


def test_a_whole_game_and_what_it_shows(running: Running) -> None:
    assert running.post("/start", {}).status_code == 200
    state = running.wait("yours")
    # Seat 0 sees the diagonal alone, and nothing of the other table.
    assert state["board"]["cells"] == [[3, None], [None, 9]] and state["result"] is None
    assert "7" not in json.dumps(state["board"]["cells"])
    assert running.post("/move", {"text": f"[message] {EVIL}"}).status_code == 200
    for _ in range(6):
        state = running.wait("yours")
        if state["forms"][0]["name"] == "Accept":
            break
        assert running.post("/move", {"text": "[message] go on"}).status_code == 200
    assert state["talk"][0]["text"].startswith("</script>") and "\x1b" not in json.dumps(state)
    assert running.post("/move", {"text": "[message] hm"}).status_code == 200, "refused by the game"
    state = running.wait("yours")
    assert "answer the proposal" in state["talk"][-1]["error"]
    assert running.post("/move", {"text": "[accept]"}).status_code == 200
    game = running.wait("over")["result"]["game"]
    assert game["board"]["cells"] == [[3, 7], [1, 9]] and game["agreed"]
    assert game["seats"][0]["player"] == "person" and game["num_errors"] == 1


def test_only_the_page_of_this_start_is_answered(running: Running) -> None:
    client = running.client
    here = running.here
    good = {TOKEN_HEADER: TOKEN, "origin": here}
    assert client.get("/", params={"token": TOKEN}).status_code == 200
    assert client.get("/").status_code == client.get("/state").status_code == 403
    for headers, status in (
        ({**good, TOKEN_HEADER: "the-tokem"}, 403),
        ({**good, TOKEN_HEADER: "tokén"}, 403),
        ({TOKEN_HEADER: TOKEN}, 403),
        ({**good, "origin": "http://evil.example"}, 403),
        ({**good, "origin": "null"}, 403),
        ({**good, "origin": f"{here}0"}, 403),
        ({**good, "host": "evil.example"}, 421),
        ({**good, "host": f"evil.example:{running.port}"}, 421),
    ):
        sent = {name: value.encode() for name, value in headers.items()}
        answer = client.post("/start", content="{}", headers=sent)
        assert answer.status_code == status, headers
    assert running.table.state()["phase"] == "idle"
    assert client.get("/nothing").status_code == 404 and client.put("/start").status_code == 405
    page = client.get("/", params={"token": TOKEN})
    assert page.headers["x-frame-options"] == "DENY" and page.headers["cache-control"] == "no-store"
    assert "default-src 'none'" in page.text and "unsafe-eval" not in page.text
    assert "&lt;b&gt;Talk" in page.text, "facts are no markup"


def test_the_size_and_the_form_of_a_move_are_limited(running: Running) -> None:
    running.post("/start", {})
    running.wait("yours")
    assert running.post("/move", {"text": "x" * (MAX_TEXT + 1)}).status_code == 400
    assert running.post("/move", {"text": "x" * MAX_BODY}).status_code == 413
    for body in ("no json", "[1]", "[" * 5000, b"\xff", {}, {"text": " "}, {"text": 1}):
        assert running.post("/move", body).status_code == 400
    assert running.state()["phase"] == "yours"


def test_a_person_who_leaves_ends_the_game_without_a_result(running: Running) -> None:
    assert running.post("/move", {"text": "[message] hi"}).status_code == 409
    running.post("/start", {})
    running.wait("yours")
    assert running.post("/start", {}).status_code == 409
    assert running.post("/move", {"leave": True}).status_code == 200
    assert running.wait("over")["result"] == {} and running.episodes == [None]
    with pytest.raises(NotNow):
        running.table.leave()


def test_a_game_is_seen_and_played_by_the_visitor_who_started_it_alone(running: Running) -> None:
    """Until it ends; a page that is loaded again, which brings its cookie, goes on."""
    cookie = running.post("/start", {}).headers["set-cookie"]
    assert "; HttpOnly" in cookie and "; SameSite=strict" in cookie
    mine = running.wait("yours")
    with httpx.Client(base_url=running.here, trust_env=False) as other:
        headers = {TOKEN_HEADER: TOKEN, "origin": running.here}
        assert "set-cookie" not in other.get("/", params={"token": TOKEN}).headers
        seen = other.get("/state", headers=headers).json()
        assert seen == {"version": mine["version"], "game": 0, "phase": "taken"}
        for path, body in (
            ("/move", {"text": "[message] hi"}),
            ("/move", {"leave": True}),
            ("/taken", {"text": "[message] hi"}),
            ("/start", {}),
        ):
            answer = other.post(path, json=body, headers=headers)
            assert answer.status_code == 409 and set(answer.json()) == {"error"}
        assert running.client.get("/", params={"token": TOKEN}).status_code == 200
        assert running.state() == mine
        running.post("/move", {"leave": True})
        running.wait("over")
        assert other.get("/state", headers=headers).json()["phase"] == "idle"
        assert other.post("/start", headers=headers).status_code == 200
        until_s = time.monotonic() + WAIT_S
        while other.get("/state", headers=headers).json()["phase"] != "yours":
            assert time.monotonic() < until_s
        assert set(running.state()) == set(seen) and running.state()["phase"] == "taken"
        assert other.post("/move", json={"leave": True}, headers=headers).status_code == 200


@pytest.mark.parametrize("name", ["matching", "dialop.scaffold"])
def test_a_refused_try_is_marked_and_a_partners_words_are_shown_at_the_end(
    name: str, config: Config
) -> None:
    """With the talk of a board, and with the texts that a seat reads."""
    instance: Any = SMALL
    if name != "matching":
        config = load_config(None, ["model.path=x", f"game.name={name}"])
        instance = SumOfTwo("a", (4, 7))
    tries = ("Daniel Electra [propose]", "[message] Daniel Electra 7")
    opponent = Opponent("lines", None, None, lambda names, seat: Lines(*tries))
    game = Running(config, instance, opponent=opponent)
    try:
        game.post("/start", {})
        game.wait("yours")
        game.post("/move", {"text": "[message] hi"})
        talk = game.wait("yours")["talk"]
        assert [turn["seat"] for turn in talk] == [0, 1, 1]
        assert "invalid" in talk[1]["error"] and talk[1]["text"] == ""
        assert "error" not in talk[0] and "error" not in talk[2]
        for number in range(config.rollout.max_retries + 1):
            left = game.wait("yours")["left"][1]
            assert left.startswith(("3", "2", "one")[number]), left
            game.post("/move", {"text": "hm"})
        state = game.wait("over")
        assert [turn["text"] for turn in state["talk"] if turn.get("error")] == ["", "hm", "hm"]
        turns = state["result"]["game"]["turns"]
        refused = [turn["text"] for turn in turns if turn.get("error")]
        assert refused == [tries[0], "hm", "hm", "hm"]
        limit = "too many invalid moves in a row (rollout.max_retries)"
        assert state["result"]["limit"] == limit
    finally:
        game.close()


@pytest.mark.parametrize("board", [SMALL, SCALED])
def test_a_kept_game_is_an_instance_and_a_recording(
    board: MatchingInstance, config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Replayed by the command, read as an instance, and continued from any of its moves."""
    first = board.first_seat
    game = MatchingGame(board, FULL)
    for seat, text in (
        (first, f"[message] {EVIL}"),
        (1 - first, WORST),
        (first, "[reject]"),
        (first, BEST),
        (1 - first, "[accept]"),
    ):
        assert game.step(seat, text).error is None
    log = game.view(0).log
    record = json.loads(json.dumps(record_of(board, log)))
    path = tmp_path / "played.jsonl"
    path.write_text(json.dumps(record) + "\n")
    assert dialop(["replay", str(path)]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["agrees"] and line["norm"] == 1.0 and line["score"] == 12
    (again,) = read_instances(path)
    same = ("size", "table", "masks", "scales", "first_seat", "best", "max_value", "reviewers")
    assert all(getattr(again, name) == getattr(board, name) for name in same)
    assert tuple(moves_from_record(record, again)) == log
    (recorded,) = load_kit("matching").read_recorded(path)
    assert recorded.start_after(3, uniform=0.0).opening == log[:3]
    assert instance_from_record(record, key="k").unknown == board.unknown


class Talker(io.StringIO):
    """A person at the terminal: tells all they see, accepts a proposal, leaves after one game."""

    def __init__(self, screen: io.StringIO) -> None:
        super().__init__()
        self._screen, self._read = screen, 0

    def readline(self, size: int | None = -1) -> str:
        shown = self._screen.getvalue()
        new, self._read = shown[self._read :], len(shown)
        if "saved in" in new:
            return ""
        return (
            "[accept]\n"
            if "Partner: [propose]" in new
            else "[message] Ava BLEU 3, Daniel Electra 9\n"
        )


def test_the_terminal_plays_the_same_game(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, out = io.StringIO(), tmp_path / "games.jsonl"
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr("sys.stdin", Talker(screen))
    assert play_here(session(config, SMALL, honest(config)), out) == 0
    assert dialop(["replay", str(out)]) == 0
    monkeypatch.undo()
    said = screen.getvalue()
    assert "Both tables together" in said and "best 12; last proposal 12 (1.000)." in said
    (record,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert record["players"] == ["person", "scripted:honest"] and record["proposal_reward"] == 12


def test_the_terminal_tells_what_was_hidden_in_a_game_without_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each player sees a number; nothing that is printed speaks of another game's moves."""
    config = load_config(None, ["model.path=x", "game.name=dialop.scaffold"])
    instance = SumOfTwo("a", (4, 7))
    screen = io.StringIO()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr("sys.stdin", io.StringIO("[message] what is yours?\n[answer] 11\n"))
    assert play_here(session(config, instance, honest(config)), tmp_path / "games.jsonl") == 0
    monkeypatch.undo()
    before, over, after = screen.getvalue().partition("The game is over: agreed, 1.000 of the best")
    assert over and "your number: 4" in before and "your number: 7" not in before
    assert "your number: 7\n" in after and "propos" not in before + after


HAGGLE = """
game: {name: haggle.py}
model: {scratch: {}}
device: cuda
engine: {kind: sglang}
rollout: {max_turns: 6, max_game_tokens: 500}
"""


def test_a_game_is_played_with_its_script_before_any_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example of a split, with unequal roles; no weights and no GPU are needed."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "examples/split/split.py").read_text()
    named = text.replace('("player", "player")', '("seller", "buyer")')
    (tmp_path / "haggle.py").write_text(named)
    (tmp_path / "haggle.yaml").write_text(HAGGLE)
    monkeypatch.setattr("sys.stdin", io.StringIO("[message] hi\n" * 3))
    words = ["scripted:fair", "--config", "haggle.yaml", "--terminal"]
    assert play_program([*words, "--seat", "buyer"]) == 0
    assert "rollout.max_turns" in capsys.readouterr().out
    (game,) = map(json.loads, (tmp_path / "played.jsonl").read_text().splitlines())
    assert [seat["player"] for seat in game["seats"]] == ["scripted:fair", "person"]
    for wrong, rule in {
        "--seat byer": "--seat must be one of 0, 1, seller, buyer, got byer; nearest is buyer",
        "--watch": "scripted:fair needs only --config FILE",
    }.items():
        assert play_program([*words[:3], *wrong.split()]) == 2
        assert rule in capsys.readouterr().err
    assert play_program(["scripted:fai", *words[1:]]) == 2
    assert "nearest is fair" in capsys.readouterr().err


def test_a_run_that_goes_on_from_random_weights_began_with_them(tmp_path: Path) -> None:
    for name, words in (
        ("first", ["model.scratch={}", "rollout.max_game_tokens=1000"]),
        ("second", [f"model.path={tmp_path / 'first' / 'final'}"]),
        ("third", [f"model.path={tmp_path / 'second'}"]),
        ("other", ["model.path=ORG/NAME"]),
    ):
        bare_weights(tmp_path / name / "final")
        (tmp_path / name / "config.yaml").write_text(dump(load_config(None, words)))
        assert began_at_random(tmp_path / name / "config.yaml") == (name != "other")
    assert not began_at_random(None)


def test_a_game_of_another_kind_is_kept_whole(tmp_path: Path) -> None:
    config = settings(
        tmp_path / "run",
        "game.name=collab",
        "game.options=null",
        "rollout.partners=[scripted:user]",
    )
    both = replace(config.rollout, policy_seats=("user", "assistant"))
    assert seats_for_a_person(config.game, config.rollout, ITSELF) == [0], (
        "the policy can have only the other seat"
    )
    assert seats_for_a_person(config.game, both, ITSELF) == [0, 1]
    (task,) = config.game.kit.generate(config.game.options, seed=0, start=0, num=1)
    sit = lambda names, seat: scripted_partner("ask", names, seat, config.game)  # noqa: E731
    games = session(config, task, Opponent("scripted:ask", None, None, sit))
    table = Table(games)
    for _ in range(100):
        table._moves.put("[message] It is 3.")
    episode = games.play(0, SeatedPerson(table), table.begin)
    state = table.state()
    assert state["board"] is None and any("text" in turn for turn in state["talk"])
    keep_game(episode, config.game.kit, tmp_path / "played.jsonl")
    (line,) = (tmp_path / "played.jsonl").read_text().splitlines()
    (tmp_path / "played.jsonl").write_text(line)  # without the end of the line
    keep_game(episode, config.game.kit, tmp_path / "played.jsonl")
    assert (tmp_path / "played.jsonl").read_text() == f"{line}\n{line}\n"
    kept = json.loads(line)
    assert kept["state"]["game"] == "collab" and kept["seats"][0]["player"] == "person"


@contextmanager
def dealt(seat: int, name: str) -> Iterator[Running]:
    """A started game of another kind with scripts in the other seats."""
    config = load_config(None, ["model.path=x", f"game.name={name}"])
    kit = config.game.kit
    (instance,) = kit.generate(kit.easy(config.game.options), seed=0, start=0, num=1)
    game = Running(config, instance, seat=seat)
    try:
        game.post("/start", {})
        yield game
    finally:
        game.close()


def filled(form: dict[str, Any], words: str = "") -> dict[str, Any]:
    """A form as the page sends it; of each list the choice of its own place."""
    chosen = [options[place][0] for place, (_, options) in enumerate(form["choices"])]
    return {"text": form["before"] + (form["between"].join(chosen) or words) + form["after"]}


def to_the_end(game: Running, words: str) -> dict[str, Any]:
    """Write until an answer is due, accept; every form of the moment is a legal move."""
    for _ in range(12):
        state = game.wait("yours")
        form = state["forms"][0]
        game.post("/move", filled(form, words))
        if form["button"]:
            break
    return game.wait("over")


def test_a_traveller_is_told_their_role_and_the_score_sheet() -> None:
    with dealt(0, "planning") as game:
        state = game.wait("yours")
        assert state["names"] == ["user", "agent"] and state["board"] is None
        assert [form["name"] for form in state["forms"]] == ["Say"]
        assert "preferences" in state["prompt"]["user"]
        end = to_the_end(game, f"I like parks.\n{EVIL}\nAgent: [propose] all")
        said = end["talk"]
        assert said[0] == {"seat": 0, "kind": "message", "text": said[0]["text"]}
        assert "\nAgent: [propose]" in said[0]["text"], "no line of the person's is the agent's"
        (plan, *_) = [turn for turn in said if turn["kind"] == "propose"]
        assert plan["seat"] == 1 and "Total" in plan["note"] and "Total" not in plan["text"]
        assert end["result"]["game"]["agreed"] and "\x1b" not in json.dumps(end)


def test_the_rooms_are_apart_in_the_brief_style() -> None:
    """Whose lines have no tag, and where a line of a player that looks like a name is indented."""
    read = "User 0:\n0 -15\n  user 1:\nUser 1:\n0 -1\n[off] Your move."
    first, second = spoken(read, ["user 0", "user 1", "agent"], rooms=["user 0", "user 1"])
    assert (first["room"], first["text"], first["note"]) == (0, "0 -15\nuser 1:", "")
    assert (second["room"], second["text"], second["note"]) == (1, "0 -1", "[off] Your move.")
    (said,) = spoken("Agent:\nSeat 1: [accept]", ["user 0", "user 1", "agent"], rooms=[])
    assert (said["seat"], said["text"]) == (2, "Seat 1: [accept]"), "a player names no other seat"


@pytest.mark.parametrize(
    ("text", "rooms", "kind", "words"),
    [
        ("[answer] 4", [], "answer", "4"),
        ("[4]", [], "", "[4]"),
        ("Plan: [answer] 4", [], "", "Plan: [answer] 4"),
        ("1: [message] hi", ["user 0", "user 1"], "message", "hi"),
        ("²: [message] hi", ["user 0", "user 1"], "message", "hi"),
    ],
)
def test_only_a_tag_of_the_forms_is_cut(text: str, rooms: list[str], kind: str, words: str) -> None:
    tags = tags_of([Form("", "[answer] "), Form("", "0: [message] "), Form("")])
    assert tags == {"answer", "message"}
    move = own_move(text, rooms=rooms, tags=tags)
    assert (move["kind"], move["text"]) == (kind, words)


def test_a_script_says_what_it_would_do() -> None:
    """Each suggestion is a legal move of the seat, and is offered at the person's move alone."""
    for seat, name in ((0, "planning"), (2, "mediation")):
        with dealt(seat, name) as game:
            state = game.wait("yours")
            while state["phase"] == "yours":
                assert state["suggestion"]
                game.post("/move", {"text": state["suggestion"]})
                while (state := game.state())["phase"] == "theirs":
                    assert state["suggestion"] == ""
                    threading.Event().wait(0.02)
            assert state["result"]["game"]["agreed"] and not state["result"]["game"]["num_errors"]


def test_a_user_of_mediation_sees_the_own_room_alone() -> None:
    with dealt(1, "mediation") as game:
        end = to_the_end(game, "Not before noon.")
        assert end["rooms"] == [] and {turn["seat"] for turn in end["talk"]} == {1, 2}
        (offer, *_) = [turn for turn in end["talk"] if turn["kind"] == "propose"]
        assert offer["note"], "the own flight's points"
        assert [seat["role"] for seat in end["result"]["game"]["seats"]] == end["names"]
