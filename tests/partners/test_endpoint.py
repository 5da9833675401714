"""Endpoints as partners, with a local server: answers, errors, time-outs, dead endpoints."""

import asyncio
import gzip
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dialop.collab.game import CollabGame
from dialop.collab.task import CollabOptions
from dialop.matching.game import MatchingGame
from dialop.tags import MAX_MOVE
from selfplay.chat.rendering import Rendering
from selfplay.config import Config
from selfplay.config.player_spec import parse_spec
from selfplay.distributed import init_world
from selfplay.engines.base import Completion, Message, Request, Sampling
from selfplay.partners.endpoint import MAX_BYTES, Endpoint
from selfplay.partners.opponents import Shares
from selfplay.partners.options import EndpointConfig
from selfplay.partners.partners import Partners
from selfplay.rollout.driver import RolloutStats, play_games
from selfplay.rollout.episode import Episode, GameSetup, Limits
from tests.helpers.chat_server import Answer, ChatServer, Script, chat_server
from tests.helpers.collab_tasks import NUMBER, THOUGHTS
from tests.helpers.dialop_boards import FULL, SMALL
from tests.helpers.processes import WAIT_S
from tests.helpers.scripted_engine import WaveEngine
from tests.helpers.small_games import (
    Lines,
    Proposes,
    ProposesInAStream,
    boards,
    config_of,
    games_of,
)
from tests.helpers.tiny_run import metrics_of, run_tiny, run_warm

LONGEST_S = 0.05
FAST = EndpointConfig(retries=2)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of hundredths of a second before a retry and after an endpoint's death."""
    monkeypatch.setattr("selfplay.partners.endpoint.BACKOFF_S", 0.01)
    monkeypatch.setattr("selfplay.partners.endpoint.LONGEST_BACKOFF_S", LONGEST_S)


@contextmanager
def served(
    script: Script, settings: EndpointConfig = FAST, key: str | None = None
) -> Iterator[tuple[Endpoint, ChatServer]]:
    """An endpoint, and the server behind it, which does as the script says."""
    with chat_server(script) as server:
        endpoint = Endpoint("small", server.url, settings=settings, key=key)
        yield endpoint, server
        endpoint.close()


def always(answer: Answer) -> Script:
    return lambda body, number: answer


def ask(endpoint: Endpoint, text: str = "Hello", seed: int = 0) -> Completion:
    messages = (Message("system", "Be kind."), Message("user", text))
    request = Request((), 50, seed, model="endpoint:x", messages=messages)
    return endpoint.submit(request).result()


def test_an_answer_is_a_completion_and_its_tokens_are_counted() -> None:
    settings = EndpointConfig(body={"temperature": 0.7, "top_p": 0.5})
    with served(lambda body, number: Answer("[message] hi"), settings, key="sk-1") as (
        endpoint,
        server,
    ):
        completion = ask(endpoint)
    assert (completion.text, completion.finish, completion.ids) == ("[message] hi", "stop", [])
    assert server.bodies == [
        {
            "model": "small",
            "messages": [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": "Hello"},
            ],
            "max_tokens": 50,
            "temperature": 0.7,
            "top_p": 0.5,
        }
    ]
    assert server.headers[0]["authorization"] == "Bearer sk-1"
    assert server.headers[0]["accept-encoding"] == "identity"
    assert [*endpoint.take_usage().values()] == [1, 0, 100, 7]
    assert [*endpoint.take_usage().values()] == [0, 0, 0, 0], "counted once"


@pytest.mark.parametrize(
    "failure",
    [
        Answer(status=500),
        Answer(status=429, headers={"Retry-After": "0.05"}),
        Answer(status=429, headers={"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}),
        Answer(status=429, headers={"Retry-After": "soon"}),
        Answer(body=b"<html>"),
        Answer(body=b'{"choices": []}'),
    ],
    ids=["500", "429", "429 with a date", "429 with a word", "no JSON", "no choice"],
)
def test_a_temporary_failure_is_retried(failure: Answer) -> None:
    with served(lambda body, number: failure if number < 2 else Answer("ok")) as (endpoint, server):
        completion = ask(endpoint)
    assert (completion.text, completion.finish, len(server.bodies)) == ("ok", "stop", 3)
    assert endpoint.take_usage()["num_endpoint_retries"] == 2


def test_silence_is_retried() -> None:
    """On a busy machine the answer too can come late, and is asked for again."""
    settings = EndpointConfig(timeout_s=0.5, retries=100)
    silent = Answer(wait_s=WAIT_S)
    with served(lambda body, number: Answer("ok") if number else silent, settings) as (
        endpoint,
        server,
    ):
        completion = ask(endpoint)
    assert (completion.text, completion.finish) == ("ok", "stop")
    assert endpoint.take_usage()["num_endpoint_retries"] == len(server.bodies) - 1 > 0


def answered(text: str = '"ok"', *, usage: str = "{}", finish: str = "stop") -> bytes:
    """A chat completion, of JSON as given."""
    message = f'{{"message": {{"content": {text}}}, "finish_reason": "{finish}"}}'
    return f'{{"choices": [{message}], "usage": {usage}}}'.encode()


LARGE = answered() + b" " * MAX_BYTES
# Bodies that are no chat completion, with their encodings.
NO_ANSWERS = {
    "deep lists": (b"[" * 10**5, ""),
    "deep objects": (b'{"a":' * 10**5, ""),
    "deep inside": (answered(usage="[" * 10**5 + "]" * 10**5), ""),
    "a number of 5,000 digits": (answered(usage="9" * 5000), ""),
    "null": (answered("null"), ""),
    "a list": (answered('["ok"]'), ""),
    "no UTF-8": (answered('"x"').replace(b"x", b"\xe9"), ""),
    "too large": (LARGE, ""),
    "an encoding that was not asked for": (gzip.compress(answered()), "gzip"),
    "a part that is an image": (answered('[{"type": "image_url", "text": "ok"}]'), ""),
    "a part without text": (answered('[{"type": "text"}]'), ""),
    "false": (answered("false"), ""),
    **{
        f"an end by {end}": (answered(finish=end), "")
        for end in ("error", "abort", "content_filter", "tool_calls", "function_call", "\\u001b[2J")
    },
    "an end that is a number": (answered().replace(b'"stop"', b"1"), ""),
}


@pytest.mark.parametrize("name", NO_ANSWERS)
def test_what_is_no_answer_is_void_in_one_line(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    body, encoding = NO_ANSWERS[name]
    hostile = Answer(body=body, headers={"Content-Encoding": encoding} if encoding else {})
    with served(always(hostile)) as (endpoint, _):
        assert ask(endpoint).finish == "void"
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert [*endpoint.take_usage().values()] == [1, FAST.retries, 0, 0]


@pytest.mark.parametrize(
    "usage",
    [
        *('{"prompt_tokens": Infinity, "completion_tokens": 1e999}', '{"prompt_tokens": NaN}'),
        *('{"prompt_tokens": -5}', '{"prompt_tokens": 1%s}' % ("0" * 400), "[1]", "3", "null"),
        *('{"prompt_tokens": "many"}', '{"prompt_tokens": {}, "completion_tokens": true}'),
    ],
)
def test_usage_that_is_no_number_counts_nothing(usage: str) -> None:
    with served(always(Answer(body=answered(usage=usage)))) as (endpoint, _):
        assert ask(endpoint).text == "ok"
    assert [*endpoint.take_usage().values()] == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("body", "text", "finish"),
    [
        (answered("null", finish="length"), "", "length"),
        (b'{"choices": [{"message": {}, "finish_reason": "length"}]}', "", "length"),
        (answered('"a\\ud800b"'), "a?b", "stop"),
        (answered('"\\ude00\\ud83d"'), "??", "stop"),
        (answered('"\\ud83d\\ude00"'), "😀", "stop"),
        (answered('"x"').replace(b"x", b"\xed\xa0\x80"), "?", "stop"),
        (answered('""'), "", "stop"),
        (
            answered('[{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]'),
            "a b",
            "stop",
        ),
        (answered('[{"type": "output_text", "text": "ok"}]'), "ok", "stop"),
        (
            answered('[{"type": "thinking", "thinking": [1]}, {"type": "text", "text": "ok"}]'),
            *("ok", "stop"),
        ),
        (answered('[{"type": "thinking", "thinking": "5"}]'), "", "length"),
        (answered('null, "reasoning_content": "my number is 5"'), "", "length"),
        (answered('"", "reasoning": "my number is 5"'), "", "length"),
        (answered('"ok", "reasoning_content": "my number is 5"'), "ok", "stop"),
        (answered('"<think>5</think>ok", "reasoning_content": null'), "ok", "stop"),
        *(
            (answered(finish=end), "ok", "stop")
            for end in ("STOP", "eos", "eos_token", "end_turn", "stop_sequence", "")
        ),
        (answered().replace(b'"stop"', b"null"), "ok", "stop"),
        (b'{"choices": [{"message": {"content": "ok"}}]}', "ok", "stop"),
        *(
            (answered(finish=end), "ok", "length")
            for end in ("max_tokens", "model_length", "MAX_TOKENS", "max_output_tokens")
        ),
        (answered('"%s"' % ("\\n" * MAX_MOVE + "b")), "\n" * MAX_MOVE, "length"),
        (answered('"%sok"' % ("<think>5</think>" * MAX_MOVE)), "ok", "stop"),
    ],
)
def test_an_odd_answer_is_one_answer(body: bytes, text: str, finish: str) -> None:
    """A null text that a limit cut off or that followed a thought is a cut-off move, half of a
    surrogate pair is a `?`, parts of text are joined, an answer has at most MAX_MOVE characters."""
    with served(always(Answer(body=body))) as (endpoint, server):
        completion = ask(endpoint)
    assert (completion.text, completion.finish, len(server.bodies)) == (text, finish, 1)
    assert "authorization" not in server.headers[0]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (Answer(finish="error"), "its answer has finish_reason 'error'"),
        (Answer(finish="\x1b[2J"), "its answer has finish_reason '\\\\x1b[2J'"),
        (Answer(finish="max_tokens"), "cut off by finish_reason max_tokens (endpoint.max_new_tok"),
        (Answer("<think> 5"), "cut off by the end of the answer inside a thought (endpoint."),
        (Answer("x" * (MAX_MOVE + 1)), f"cut off by the limit of {MAX_MOVE} characters (endpoint"),
    ],
)
def test_what_is_no_whole_answer_is_named_once(
    answer: Answer, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(always(answer), EndpointConfig(retries=0)) as (endpoint, _):
        finishes = {ask(endpoint).finish for _ in range(2)}
    assert finishes < {"void", "length"}
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"endpoint {endpoint.name}") and why in line and line.isprintable()


def test_a_server_that_drips_has_the_time_of_one_request() -> None:
    """In its body, its headers and its interim answers, each byte long before the limit. They would
    end after seconds, the body with a complete answer."""
    settings = EndpointConfig(timeout_s=0.4, retries=0)

    def took_s(url: str) -> float:
        endpoint, began_s = Endpoint("small", url, settings=settings, key=None), time.monotonic()
        completion = ask(endpoint)
        endpoint.close()
        assert (completion.finish, completion.text) == ("void", "no complete answer in 0.4 s")
        return time.monotonic() - began_s

    with chat_server(always(Answer(drip_s=0.05))) as server:
        assert took_s(server.url) >= 0.4
    for drop in (b"HTTP/1.1 200 OK\r\nX: a", b"HTTP/1.1 100 Continue\r\n\r\n"):
        with socket.create_server(("127.0.0.1", 0)) as listening:

            def serve(listening: socket.socket = listening, drop: bytes = drop) -> None:
                caller, _ = listening.accept()
                with caller, suppress(OSError):
                    caller.recv(2**16)
                    for _ in range(100):
                        caller.sendall(drop)
                        drop = drop if drop.endswith(b"\n") else b"a"
                        time.sleep(0.05)

            threading.Thread(target=serve, daemon=True).start()
            assert took_s(f"http://127.0.0.1:{listening.getsockname()[1]}/v1") >= 0.4


def test_a_retry_waits_as_long_as_retry_after_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfplay.partners.endpoint.LONGEST_BACKOFF_S", 5.0)
    slow = EndpointConfig(retries=1)
    too_many = Answer(status=429, headers={"Retry-After": "0.4"})
    with served(lambda body, number: Answer("ok") if number else too_many, slow) as (
        endpoint,
        server,
    ):
        began_s = time.monotonic()
        assert ask(endpoint).finish == "stop"
        assert time.monotonic() - began_s >= 0.4
    assert len(server.bodies) == 2


def test_a_client_error_is_not_retried(capsys: pytest.CaptureFixture[str]) -> None:
    refusal = Answer(status=404, body=b"no such model")
    with served(always(refusal), key="sk-secret") as (endpoint, server):
        completion = ask(endpoint)
    assert completion.finish == "void" and completion.text == "HTTP 404: no such model"
    assert len(server.bodies) == 1
    message = capsys.readouterr().err
    assert "HTTP 404" in message and "sk-secret" not in message


def test_a_dead_endpoint_gets_no_requests_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr("selfplay.partners.endpoint.time", clock)
    settings = EndpointConfig(retries=0)
    with served(lambda body, n: Answer("ok") if n >= 3 else Answer(status=500), settings) as (
        endpoint,
        server,
    ):
        assert [ask(endpoint).finish for _ in range(5)] == ["void"] * 5
        assert len(server.bodies) == 3, "the last two requests were not sent"
        now_s = LONGEST_S
        assert ask(endpoint).finish == "stop"


def test_concurrency_limits_the_requests_at_a_time() -> None:
    """Three wait until all are there; a fourth would have the time of their answers to come."""
    settings, three = EndpointConfig(concurrency=3), threading.Barrier(3)

    def answer(body: dict[str, Any], number: int) -> Answer:
        three.wait(WAIT_S)
        return Answer(wait_s=0.05)

    with served(answer, settings) as (endpoint, server):
        request = Request((), 5, 0, messages=(Message("user", "hi"),))
        waiting = [endpoint.submit(request) for _ in range(12)]
        assert all(answer.result().finish == "stop" for answer in waiting)
    assert (len(server.bodies), server.busiest) == (12, 3)


# --- in games -----------------------------------------------------------------------------------


def partners_of(url: str, rendering: Rendering, *overrides: str) -> tuple[Config, Partners]:
    fast = ["endpoint.retries=1", "game.options.brief=false"]
    spec = parse_spec(f"endpoint:small@{url}")
    config = config_of(*fast, f"rollout.partners=[{spec.text}]", *overrides)
    world = init_world(device="cpu")
    return config, Partners([spec], config, rendering=rendering, world=world)


def play(
    config: Config, partners: Partners, engine: WaveEngine, *, num_boards: int
) -> tuple[Sequence[GameSetup], list[Episode], RolloutStats]:
    """The games of a step on these boards, their episodes and statistics."""
    drawn = partners.for_step(0, Shares(config))
    games = games_of(boards(num_boards), engine.rendering, config, drawn)
    router = partners.routed(engine)
    episodes, stats = play_games(games, router, sampling=Sampling(1.0, ()), limits=Limits(8, 1))
    partners.close()
    return games, episodes, stats


def plays(body: dict[str, Any], number: int) -> Answer:
    """A partner that makes one illegal move if it moves first, then lets the other propose."""
    prompt = body["messages"][-1]["content"]
    if "You can only answer" in prompt:
        return Answer("[accept]")
    return Answer("[message] You propose." if "Error:" in prompt else "I propose")


@pytest.mark.parametrize("kind", [Proposes, ProposesInAStream])
def test_a_chat_model_plays_and_gets_the_same_texts_as_any_seat(
    kind: type[Proposes], rendering: Rendering
) -> None:
    with chat_server(plays) as server:
        config, partners = partners_of(server.url, rendering)
        _, episodes, stats = play(config, partners, kind(rendering, {}), num_boards=2)
    assert len(episodes) == 8 and stats.num_void == 0
    assert [e.outcome.score_norm for e in episodes] == [1.0] * 8
    for episode in episodes:
        seat = episode.players.index("policy")
        assert episode.transcripts[seat] is not None and episode.transcripts[1 - seat] is None
        assert episode.players[1 - seat] == f"endpoint:small@{server.url}"
    # A game in which it moves first: rules, its view, its illegal move, the error message.
    longest = max((body["messages"] for body in server.bodies), key=len)
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    assert [message["role"] for message in longest] == roles
    assert longest[0]["content"].startswith("You and a partner assign 2 reviewers")
    assert "Ava Li,3," in longest[1]["content"] or "Daniel Nguyen,1," in longest[1]["content"]
    assert longest[2]["content"] == "I propose" and longest[3]["content"].startswith("Error:")


@pytest.mark.parametrize("form", THOUGHTS)
def test_a_user_who_thinks_tells_the_assistant_no_thought(form: str, rendering: Rendering) -> None:
    """Neither one that is closed, nor one that is open, which is a move that was cut off."""
    thought, opening = form.format("5 it is. "), form.partition("{}")[0]
    said = [f"{opening}5 it is.", "I think so."] if opening else ["I think so."]
    for answers in (said, [f"{thought}Hi."]):
        with chat_server(lambda body, number, answers=answers: Answer(answers[number])) as server:
            _, partners = partners_of(server.url, rendering)
            user = partners.named(f"endpoint:small@{server.url}").make_player(("x",), 0)  # type: ignore[misc]
            setup = GameSetup(
                CollabGame(NUMBER, CollabOptions()), (user, Lines("What?")), NUMBER.key, 0
            )
            (episode,), _ = play_games(
                [setup],
                partners.routed(Proposes(rendering, {})),
                sampling=Sampling(1.0, ()),
                limits=Limits(2, 1),
            )
            partners.close()
        kinds = [turn.error_kind for turn in episode.turns]
        assert kinds == [None, *["cut_off"] * (len(answers) - 1), None]
        assert "5" not in "".join(turn.observations[1] for turn in episode.turns)
        assert episode.turns[-1].observations[1].endswith(("I think so.", "Hi."))


def test_a_run_with_an_endpoint_that_dies(tmp_path: Path) -> None:
    """In the second step the endpoint never answers, so only games that the policy lost before its
    partner's first turn count. Without one the run ends with status 1, after a save."""
    with chat_server(lambda body, n: Answer("[accept]")) as server:
        settings = (
            f"rollout.partners=[endpoint:small@{server.url}]",
            "endpoint.retries=0",
            "eval.final_games=4",
            "save_every=1",
        )
        folder = tmp_path / "run"
        run_warm(folder, *settings, "steps=1")
    status = run_tiny(folder, *settings, "steps=2", "optim.schedule=linear")
    first, second = metrics_of(folder)
    assert status == (0 if second["num_games"] else 1)
    assert first["num_void"] == 0 and first["num_games"] == 16
    assert first["num_endpoint_requests"] > 0
    assert first["num_endpoint_tokens"] > 0
    assert second["num_void"] > 8 and second["num_games"] + second["num_void"] == 16
    assert second["num_endpoint_retries"] == second["num_endpoint_tokens"] == 0


def test_an_endpoint_reads_only_its_own_seats_cells(rendering: Rendering) -> None:
    requests: list[Request] = []

    async def generate(request: Request) -> Completion:
        requests.append(request)
        return Completion([], [], "void", 0)

    with chat_server(plays) as server:
        _, partners = partners_of(server.url, rendering)
        player = partners.named(f"endpoint:small@{server.url}").make_player(("x",), 0)  # type: ignore[misc]
        asyncio.run(player.move(MatchingGame(SMALL, FULL), 0, "", generate))
        partners.close()
    (request,) = requests
    assert request.messages[1].content.endswith("You move first.")
    assert "7" not in request.messages[1].content, "only seat 1 may see the 7"
