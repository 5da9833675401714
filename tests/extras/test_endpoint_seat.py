"""A seat behind an endpoint: another program plays, and the tokens are those that the engine
sampled."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from dialop.matching.game import MatchingGame
from selfplay.apps.play.__main__ import main as play_command
from selfplay.apps.play.limits import left_of, taken_by
from selfplay.chat.rendering import Rendering, make_rendering
from selfplay.config import RolloutConfig
from selfplay.engines.base import Completion, Request
from selfplay.errors import RunEnds, SettingsError
from selfplay.extras.endpoint_seat import EndpointSeat
from selfplay.extras.endpoint_seat import server as seats
from selfplay.rollout.driver import play_games
from selfplay.rollout.episode import Episode, GameSetup, Position
from selfplay.rollout.players import PolicyPlayer
from tests.helpers.chat_families import ANEW, FAMILIES, make_tokenizer, tokenizer_of
from tests.helpers.dialop_boards import BEST, BRIEF, SMALL
from tests.helpers.house import ROOT
from tests.helpers.scripted_engine import StreamEngine, WaveEngine
from tests.helpers.small_games import GAMES, LIMITS, MESSAGE, SAMPLING, prepared, tokens
from tests.helpers.tiny_run import finished, metrics_of, run_tiny, run_warm

if TYPE_CHECKING:
    from openai import OpenAI  # for 0.6 s, which only the process that runs this file needs

KEY = "the-runs-key"
Play = Callable[["OpenAI", dict[str, Any]], Any]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@dataclass
class Program:
    """Threads that take turns and move by `play`, which may change; None makes no move."""

    url: str
    play: Play | None = None
    errors: list[Exception] = field(default_factory=list)

    def work(self) -> None:
        import openai

        with httpx.Client(timeout=30) as http:
            while True:
                if (got := http.get(f"{self.url}/turn", headers=bearer(KEY))).status_code == 204:
                    continue
                turn = got.json()
                client = openai.OpenAI(
                    base_url=self.url, api_key=turn["key"], max_retries=0, http_client=http
                )
                try:
                    assert self.play is not None
                    move = self.play(client, turn)
                except Exception as error:  # noqa: BLE001
                    self.errors.append(error)
                    move = {"error": repr(error)}
                if move is not None:
                    body = move if isinstance(move, dict) else {"move": move}
                    http.post(f"{self.url}/move", json=body, headers=bearer(turn["key"]))


@pytest.fixture(scope="module", autouse=True)
def program() -> Iterator[Program]:
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {seats.PORT: "0", seats.KEY: KEY, seats.TIMEOUT: "30"}.items():
            environment.setenv(name, value)
        seats.the_server.cache_clear()
        program = Program(seats.the_server().url)
        for _ in range(3):
            threading.Thread(target=program.work, daemon=True).start()
        yield program
        seats.the_server.cache_clear()


@pytest.fixture
def play(program: Program, rendering: Rendering) -> Callable[..., Any]:
    """Games that the program plays by a function."""

    def played(
        play: Play, *games: Any, engine: Any = WaveEngine, by: Any = None, **room: int
    ) -> Any:
        program.play, program.errors[:] = play, []
        done = play_games(
            setups(EndpointSeat, by or rendering, len(games), **room),
            engine(by or rendering, prepared(*games)),
            sampling=SAMPLING,
            limits=LIMITS,
        )
        assert not program.errors, program.errors
        return done

    return played


def forward(client: OpenAI, turn: dict[str, Any], **more: Any) -> Any:
    """The policy's answer to the messages as they are."""
    answer = client.chat.completions.create(model="policy", messages=turn["messages"], **more)
    return answer.choices[0].message.content


def setups(kind: Any, rendering: Rendering, num: int, **room: int) -> list[GameSetup]:
    room = {"max_new_tokens": 100, "max_game_tokens": 900} | room
    return [
        GameSetup(
            MatchingGame(SMALL, BRIEF),
            tuple(kind(rendering, seed_names=("hand", i), **room) for _ in (0, 1)),
            SMALL.key,
            i,
        )
        for i in range(num)
    ]


def alone(rendering: Rendering, *games: Any, engine: Any = WaveEngine, **room: int) -> Any:
    return play_games(
        setups(PolicyPlayer, rendering, len(games), **room),
        engine(rendering, prepared(*games)),
        sampling=SAMPLING,
        limits=LIMITS,
    )


def records(episodes: list[Episode]) -> list[Any]:
    return [
        (each.ended, each.turns, [(tokens(t), t.starts) for t in each.transcripts if t])
        for each in episodes
    ]


@pytest.mark.parametrize("engine", [WaveEngine, StreamEngine])
def test_a_program_that_forwards_messages_plays_as_the_built_in_player(
    play: Any, rendering: Rendering, engine: Any
) -> None:
    """Ids, masks, log-probs, spans and turns, with invalid and cut-off moves, games in parallel;
    tokens are counted the same."""
    ours, counted = play(forward, *GAMES, engine=engine)
    built_in, expected = alone(rendering, *GAMES, engine=engine)
    assert records(ours) == records(built_in)
    assert replace(counted, engine_s=0.0) == replace(expected, engine_s=0.0)


@pytest.mark.parametrize("name", [*FAMILIES, *ANEW])
def test_so_it_does_with_every_chat_template(play: Any, name: str) -> None:
    """Also with one that rewrites old turns, where each turn is a sequence of its own."""
    by = make_rendering(tokenizer_of(name), template_kwargs=(FAMILIES | ANEW)[name].kwargs)
    ours, built_in = play(forward, GAMES[1], by=by)[0], alone(by, GAMES[1])[0]
    assert records(ours) == records(built_in) and ours[0].ended == "finished"


def test_a_limit_of_the_game_ends_it_as_for_the_built_in_player(
    play: Any, rendering: Rendering
) -> None:
    import openai

    def patient(client: OpenAI, turn: dict[str, Any]) -> Any:
        try:
            return forward(client, turn)
        except openai.BadRequestError as error:
            assert error.code == "context_length_exceeded"
            return None

    (whole,), _ = alone(rendering, GAMES[1])
    longest, ends = max(len(t.ids) for t in whole.transcripts), set()
    for room in (longest - 36, longest - 24, longest - 4, longest):
        (ours,), _ = play(patient, GAMES[1], max_game_tokens=room)
        (built_in,), _ = alone(rendering, GAMES[1], max_game_tokens=room)
        assert (ours.ended, ours.turns) == (built_in.ended, built_in.turns)
        for one, other in zip(ours.transcripts, built_in.transcripts, strict=True):
            # The built-in player has read what it has no token left to answer.
            assert other.ids[: len(one)] == one.ids and sum(other.mask) == sum(one.mask)
        ends.add(ours.ended)
    assert ends == {"tokens", "finished"}


def test_calls_without_end_use_up_the_seats_tokens(play: Any, rendering: Rendering) -> None:
    """Each is short, a chat of its own; all that they sample in one turn is limited."""
    import openai

    class Chatty(WaveEngine):
        def answer(self, request: Request) -> Completion:
            self.texts = {request.seed: "yes"}
            return super().answer(request)

    def calls(client: OpenAI, turn: dict[str, Any]) -> Any:
        with pytest.raises(openai.BadRequestError) as caught:
            while True:
                forward(client, {"messages": [said("again")]})
                asked.append(True)
        assert caught.value.code == "context_length_exceeded"

    asked: list[bool] = []
    ((episode,), stats) = play(calls, GAMES[0], engine=Chatty, max_game_tokens=60)
    assert episode.ended == "tokens" and 10 < len(asked) <= 60 and stats.num_void == 0
    assert sum(episode.transcripts[0].mask) == 60


def test_each_seats_policy_answers_by_its_name(program: Program, rendering: Rendering) -> None:
    """With several policies a turn names its seat's, and its key does not reach the other."""
    import openai

    def named(client: OpenAI, turn: dict[str, Any]) -> Any:
        ours, other = turn["model"], {"left": "right", "right": "left"}[turn["model"]]
        with pytest.raises(openai.NotFoundError, match=f"model must be '{ours}', got '{other}'"):
            client.chat.completions.create(model=other, messages=turn["messages"])
        answer = client.chat.completions.create(model=ours, messages=turn["messages"])
        return answer.choices[0].message.content

    program.play, program.errors[:] = named, []
    (setup,) = setups(EndpointSeat, rendering, 1)
    for player, name in zip(setup.players, ("left", "right"), strict=True):
        player._model = player._named = name
    engine = WaveEngine(rendering, prepared(GAMES[1]))
    play_games([setup], engine, sampling=SAMPLING, limits=LIMITS)
    assert not program.errors, program.errors
    models = [("left", "right")[seat] for seat, _ in GAMES[1]]
    assert [request.model for request in engine.asked] == models and len(set(models)) == 2


def test_a_stream_gives_the_same_answer(play: Any, rendering: Rendering) -> None:
    def streams(client: OpenAI, turn: dict[str, Any]) -> str:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        parts = client.chat.completions.create(model="policy", messages=turn["messages"], **options)
        chunks = list(parts)
        assert chunks[-2].choices[0].finish_reason in ("stop", "length")
        assert not chunks[-1].choices and chunks[-1].usage.completion_tokens > 0
        return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)

    assert records(play(streams, *GAMES)[0]) == records(alone(rendering, *GAMES)[0])


def said(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


THOUGHT, TOLD = "I value Ava most.", "Now your move."
SEVERAL = [(0, THOUGHT), (0, MESSAGE), (1, BEST), (0, "[accept]")]


def thinking(later: Callable[[list[Any], str], list[Any]], cached: list[int]) -> Play:
    """A program that asks twice in the first turn: then with `later` of its messages and its first
    answer. `cached` gets how many ids of each later prompt continue the seat's sequence."""

    def thinks(client: OpenAI, turn: dict[str, Any]) -> Any:
        messages = turn["messages"]
        if not cached:
            answer = client.chat.completions.create(model="policy", messages=messages)
            messages = later(messages, answer.choices[0].message.content)
        answer = client.chat.completions.create(model="policy", messages=messages)
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        return answer.choices[0].message.content

    return thinks


def test_several_calls_of_a_turn_are_one_turn(
    play: Any, rendering: Rendering, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first seat thinks, then moves: one span from the first sampled token to the last, every
    sampled token trained and none of what it read between."""
    cached: list[int] = []
    seats.tell.cache_clear()
    asked = thinking(lambda read, thought: [*read, said(thought, "assistant"), said(TOLD)], cached)
    ((episode,), _) = play(asked, SEVERAL)
    transcript, span = episode.transcripts[0], episode.transcripts[0].spans[0]
    thought, move = rendering.action_ids(THOUGHT), rendering.action_ids(MESSAGE)
    between = rendering.following(TOLD, closed=True)
    assert transcript.ids[span.start : span.end] == [*thought, *between, *move]
    flags = [1] * len(thought) + [0] * len(between) + [1] * len(move)
    assert transcript.mask[span.start : span.end] == flags
    sampled = [float(-n) for ids in (thought, move) for n in range(1, len(ids) + 1)]
    assert [nats for nats in transcript.logprobs[span.start : span.end] if nats] == sampled
    assert episode.turns[0].num_tokens == len(thought) + len(move)
    assert [len(t.spans) for t in episode.transcripts] == [2, 1]
    # The next turn's messages have the move after the opening, without the thought: a new sequence.
    assert cached[0] == span.start + len(thought) and cached[2] == 0
    assert transcript.starts == [span.end] and "new sequence" in capfd.readouterr().err


Later = Callable[[list[Any], str], list[Any]]
CHANGES: dict[str, tuple[Later, Callable[[str, str], tuple[Any, ...]]]] = {
    "edited": (
        lambda read, thought: [*read, said("Hm.", "assistant"), said(TOLD)],
        lambda system, user: (system, [user, TOLD], ["Hm."]),
    ),
    "asked again": (lambda read, thought: read, lambda system, user: (system, [user], [])),
    "another chat": (
        lambda read, thought: [said("Be brief."), said(TOLD)],
        lambda system, user: ("", [f"Be brief.\n\n{TOLD}"], []),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_call_that_does_not_continue_the_last_one_starts_a_sequence(
    play: Any, rendering: Rendering, name: str
) -> None:
    """Each sequence has its prompt as the template shows it, then the sampled ids."""
    cached: list[int] = []
    later, shown = CHANGES[name]
    ((episode,), _) = play(thinking(later, cached), SEVERAL)
    transcript, prompt = episode.transcripts[0], episode.prompts[0]
    thought, move = rendering.action_ids(THOUGHT), rendering.action_ids(MESSAGE)
    opening = rendering.first(system=prompt.system, user=prompt.user)
    changed = rendering.conversation(*shown(prompt.system, prompt.user))
    first, end = transcript.starts[0], transcript.spans[0].end
    assert cached[0] == 0 and transcript.ids[:first] == [*opening, *thought]
    assert transcript.ids[first:end] == [*changed, *move]
    assert sum(transcript.mask[:end]) == len(thought) + len(move) == episode.turns[0].num_tokens


@pytest.mark.parametrize(
    "later",
    [
        lambda read, thought: [*read, said(f" {thought}\n", "assistant"), said(TOLD)],
        lambda read, thought: [*read, said(thought, "assistant"), said("a"), said("b")],
        lambda read, thought: [
            *read,
            said(thought, "assistant"),
            {"role": "user", "content": [{"type": "text", "text": TOLD}]},
        ],
    ],
    ids=["outer spaces", "two users", "parts"],
)
def test_these_continue_it(play: Any, rendering: Rendering, later: Later) -> None:
    cached: list[int] = []
    ((episode,), _) = play(thinking(later, cached), SEVERAL)
    span = episode.transcripts[0].spans[0]
    assert cached[0] == span.start + len(rendering.action_ids(THOUGHT))


def test_an_earlier_point_of_a_chat_keeps_its_sampled_ids(play: Any, rendering: Rendering) -> None:
    """Back to an answer after another chat: its prompt has the ids that were sampled, though the
    template would spell that text with other ids."""

    class Odd(WaveEngine):
        """Spells each answer letter by letter."""

        def answer(self, request: Request) -> Completion:
            text = self.texts[request.seed]
            ids = [i for letter in text for i in rendering.action_ids(letter)[:-1]]
            ids.append(rendering.end_id)
            return Completion(ids, [-1.0] * len(ids), "stop", self.version)

    def returns(client: OpenAI, turn: dict[str, Any]) -> Any:
        def ask(*messages: Any) -> str:
            return forward(client, {"messages": list(messages)})

        if seen:
            return ask(*turn["messages"])
        seen.append(True)
        thought = ask(*turn["messages"])
        ask(said("another chat"))
        return ask(*turn["messages"], said(thought, "assistant"), said(TOLD))

    seen: list[bool] = []
    moves = [(0, THOUGHT), (0, "aside"), *SEVERAL[1:]]
    ((episode,), _) = play(returns, moves, engine=Odd)
    ids, (first, third, *_) = episode.transcripts[0].ids, episode.transcripts[0].starts
    assert ids[third : third + first] == ids[:first]
    num = len(rendering.action_ids(THOUGHT))
    assert ids[first - num : first] != rendering.action_ids(THOUGHT)
    assert episode.ended == "finished"


def test_a_stop_text_ends_the_sampled_ids(play: Any, rendering: Rendering) -> None:
    def stops(client: OpenAI, turn: dict[str, Any]) -> Any:
        seen.append(True)
        return forward(client, turn, **({"stop": [" Ava"]} if len(seen) == 1 else {}))

    seen: list[bool] = []
    ((episode,), _) = play(stops, [(0, MESSAGE), (1, BEST), (0, "[accept]")])
    transcript, span = episode.transcripts[0], episode.transcripts[0].spans[0]
    assert episode.turns[0].text == "[message] BLEU"
    sampled, whole = transcript.ids[span.start : span.end], rendering.action_ids(MESSAGE)
    assert sampled == whole[: len(sampled)] and " Ava" in rendering.decode(sampled)
    assert " Ava" not in rendering.decode(sampled[:-1])
    assert transcript.logprobs[span.start : span.end] == [
        -float(n + 1) for n in range(len(sampled))
    ]
    assert transcript.ids[span.end] == rendering.end_id and transcript.mask[span.end] == 0


TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("template", "system"), [("qwen2_5", ("Use tools.",)), ("qwen3_instruct_2507", ())]
)
def test_tools_are_called_and_answered_in_the_text_of_qwens_template(
    play: Any, template: str, system: tuple[str, ...]
) -> None:
    """What the policy reads is, as text, what the model's own template shows for these messages,
    with a system text and without one."""
    tokenizer = make_tokenizer(FAMILIES["qwen2.5"])
    trl: Any = find_spec("trl")  # it has the models' templates
    path = Path(trl.origin).parent / "chat_templates" / f"{template}.jinja"
    tokenizer.chat_template = path.read_text()
    by = make_rendering(tokenizer)
    asked: list[dict[str, Any]] = []

    def calls(client: OpenAI, turn: dict[str, Any]) -> Any:
        if asked:
            return forward(client, turn)
        asked.extend([*({"role": "system", "content": text} for text in system), *turn["messages"]])
        answer = client.chat.completions.create(model="policy", messages=asked, tools=[TOOL])
        assert answer.choices[0].finish_reason == "tool_calls"
        message = answer.choices[0].message
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
        asked.append(message.model_dump(exclude_none=True))
        asked.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
        return forward(client, {"messages": asked}, tools=[TOOL])

    ((episode,), _) = play(calls, [(0, CALLED), *SEVERAL[1:]], by=by)
    transcript, span = episode.transcripts[0], episode.transcripts[0].spans[0]
    shown: Any = [dict(each) for each in asked]
    shown[-2]["content"] = ""
    shown[-2]["tool_calls"][0]["function"]["arguments"] = {"a": 1}
    text = tokenizer.apply_chat_template(
        shown, tools=[TOOL], tokenize=False, add_generation_prompt=True
    )
    move = len(by.action_ids(MESSAGE))
    assert by.readable(transcript.ids[: span.end - move]) == text
    assert episode.ended == "finished"


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"model": "gpt-4"}, 404, "model must be 'policy', got 'gpt-4'"),
        ({"n": 2}, 400, "n must be 1, got 2"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format must be"),
        ({"messages": []}, 400, "messages must"),
        ({"messages": "hello"}, 400, "messages must"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, 400, "users and assistant in turn"),
        ({"messages": [said("a"), said("b", "assistant")]}, 400, "users and assistant in turn"),
        ({"messages": [said("a"), said("b", "system")]}, 400, "a later message of system"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url"),
        ({"max_tokens": "many"}, 400, "max_tokens must be an integer"),
        ({"max_completion_tokens": -1}, 400, "of at least 1, got -1"),
        ({"stop": [""]}, 400, "stop must be a text"),
        ({"stop": 3}, 400, "stop must be a text"),
        ({"move": 3}, 400, "move must be a text, got 3"),
        ({"move": "[accept]"}, 409, "an answer of the policy before its move"),
    ],
    ids=str,
)
def test_what_cannot_be_answered_is_refused_in_one_line(
    play: Any, body: dict[str, Any], status: int, words: str
) -> None:
    refusals: list[httpx.Response] = []

    def asks(client: OpenAI, turn: dict[str, Any]) -> Any:
        if not refusals:
            asked = {"model": "policy", "messages": turn["messages"]} | body
            path = "move" if "move" in body else "chat/completions"
            url, headers = f"{client.base_url}{path}", bearer(client.api_key)
            refusals.append(httpx.post(url, json=asked, headers=headers))
        return forward(client, turn)

    ((episode,), _) = play(asks, GAMES[0])
    (refused,) = refusals
    told = refused.json()["error"]["message"]
    assert refused.status_code == status and words in told and "\n" not in told
    assert episode.ended == "finished"  # nothing of it is in the game


def test_no_key_no_answer_and_only_this_machine_is_heard(program: Program) -> None:
    for key, path in (("x", "turn"), (KEY[:-1], "turn"), (KEY, "chat/completions"), ("x", "move")):
        method = "GET" if path == "turn" else "POST"
        got = httpx.request(method, f"{program.url}/{path}", headers=bearer(key), content="{}")
        assert got.status_code == 401 and "the key must be" in got.json()["error"]["message"]
    assert httpx.get(f"{program.url}/turn").status_code == 401
    assert httpx.get(f"{program.url}/models", headers=bearer(KEY)).status_code == 404
    port = int(program.url.split(":")[2].split("/")[0])
    others = {each[4][0] for each in socket.getaddrinfo(socket.gethostname(), None)}
    for address in [*others - {"127.0.0.1"}, "127.0.0.2"]:
        with pytest.raises(OSError), socket.create_connection((address, port), timeout=2):
            pass


def test_a_program_that_gives_up_or_is_silent_aborts_its_game_alone(
    play: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(seats.the_server(), "timeout_s", 0.5)
    first: list[str] = []

    def fails(client: OpenAI, turn: dict[str, Any]) -> Any:
        first.append(turn["key"])
        if turn["key"] == first[0]:
            return {"error": "no idea"}
        if turn["key"] == next(key for key in first if key != first[0]):
            forward(client, turn)
            return None  # it has died
        return forward(client, turn)

    episodes, stats = play(fails, *[GAMES[0]] * 4)
    assert [each.ended for each in episodes] == ["finished"] * 2 and stats.num_void == 2
    told = capfd.readouterr().err
    assert "it gave up: no idea" in told and "it was silent for 0.5 s" in told


def test_an_answer_that_was_lost_is_given_again(play: Any, rendering: Rendering) -> None:
    """A client that closes its connection and repeats the call gets the same answer: one turn."""
    import openai

    slow = threading.Event()

    class Slow(WaveEngine):
        def generate_batch(self, requests: Any, sampling: Any) -> Any:
            slow.wait(10)
            return super().generate_batch(requests, sampling)

    def impatient(client: OpenAI, turn: dict[str, Any]) -> Any:
        if not slow.is_set():
            with pytest.raises(openai.APITimeoutError):
                forward(client.with_options(timeout=0.3), turn)
            threading.Timer(0.2, slow.set).start()
        return forward(client, turn)

    ours, _ = play(impatient, GAMES[0], engine=Slow)
    assert records(ours) == records(alone(rendering, GAMES[0])[0])


def test_a_run_without_a_program_ends_in_one_line(rendering: Rendering) -> None:
    (setup,) = setups(EndpointSeat, rendering, 1)
    for player in setup.players:
        player._server = seats.Server(0, KEY, 0.2)  # to which no program comes
    with pytest.raises(
        RunEnds, match=r"no program took a turn at http://127.0.0.1:\d+/v1 for 0.2 s"
    ):
        play_games([setup], WaveEngine(rendering, {}), sampling=SAMPLING, limits=LIMITS)


def test_a_port_that_is_taken_is_refused_before_a_run_writes_anything(
    program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: Any
) -> None:
    monkeypatch.setenv(seats.PORT, program.url.split(":")[2].split("/")[0])
    seats.the_server.cache_clear()
    assert run_tiny(tmp_path / "run", "rollout.player=endpoint_seat") == 2
    told = capfd.readouterr().err.splitlines()
    assert told[-1].startswith("train.py: SELFPLAY_SEAT_PORT must be a free port")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        (seats.PORT, "web", "SELFPLAY_SEAT_PORT must be an integer from 0 to 65000, got 'web'"),
        (seats.TIMEOUT, "-1", "SELFPLAY_SEAT_TIMEOUT_S must be"),
        (seats.PORT, "taken", "must be a free port of 127.0.0.1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    program: Program, monkeypatch: pytest.MonkeyPatch, name: str, value: str, rule: str
) -> None:
    port = program.url.split(":")[2].split("/")[0]
    monkeypatch.setenv(name, value.replace("taken", port))
    with pytest.raises(SettingsError, match=rule):
        seats.the_server.__wrapped__()


def test_what_is_left_of_a_game_with_a_person_says_nothing_of_what_a_program_reads(
    rendering: Rendering,
) -> None:
    """Nor is its turn offered to one."""
    (setup,) = setups(EndpointSeat, rendering, 1)
    position = Position(setup, LIMITS)
    assert left_of(position, RolloutConfig()).tokens == {}
    assert set(taken_by(position, MESSAGE)) == set() and not seats.the_server()._open


def test_a_fork_has_a_key_and_a_chat_of_its_own(play: Any, rendering: Rendering) -> None:
    (setup,) = setups(EndpointSeat, rendering, 1)
    one = setup.players[0]
    twin = one.fork("again")
    assert twin._key != one._key and twin._seed_names == ("hand", 0, "again")
    assert twin._known is not one._known and twin.transcript is not one.transcript


def beside(name: str, program: Program, monkeypatch: pytest.MonkeyPatch) -> subprocess.Popen[bytes]:
    """A program of `examples/agent/` beside a run of this process, on a port of their own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv(seats.PORT, str(port))
    seats.the_server.cache_clear()
    return subprocess.Popen([sys.executable, ROOT / "examples" / "agent" / name], env=os.environ)


def games_of(run: Path, step: int) -> list[Any]:
    """Each turn's text and tokens in the games of a step."""
    games = [json.loads(line) for line in (run / "games.jsonl").read_text().splitlines()]
    turns = [game["turns"] for game in games if game["step"] == step]
    return [[(t["text"], [piece for piece, _ in t["tokens"]]) for t in game] for game in turns]


@pytest.mark.slow
def test_a_run_with_openais_client_is_the_built_in_players_run(
    program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first step's games have the same tokens, and all steps train. Log-probs may differ by
    rounding: the answers share other batches."""
    with beside("program.py", program, monkeypatch) as other:
        try:
            run = run_warm(tmp_path / "run", "rollout.player=endpoint_seat")
        finally:
            other.kill()
    for name in (
        "turns",
        "score",
        "num_prompt_tokens",
        "num_generated_tokens",
        "num_trained_tokens",
    ):
        assert metrics_of(run)[0][name] == metrics_of(finished())[0][name]
    assert games_of(run, 1) == games_of(finished(), 1)
    assert len(metrics_of(run)) == 4 and metrics_of(run)[-1]["num_void"] == 0


AGENT = (
    *(
        "warm_start.num_games=0",
        "algorithm.advantage=ema",
        "model.scratch.max_positions=8192",
        "rollout.max_turns=2",
    ),
    *("rollout.max_game_tokens=8192", "rollout.instances=1", "rollout.group_size=2"),
    *("eval.num_games=1", "eval.final_games=1", "steps=2", "save_every=2"),
    *("optim.tokens_per_microbatch=8192", "rollout.player=endpoint_seat"),
)


def test_a_game_at_the_terminal_ends_in_one_line_if_no_program_plays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished(), run)
    words = (run / "config.yaml").read_text()
    assert "\n  player: policy\n" in words
    replaced = words.replace("\n  player: policy\n", "\n  player: endpoint_seat\n")
    (run / "config.yaml").write_text(replaced)
    monkeypatch.setenv(seats.PORT, "0")
    monkeypatch.setenv(seats.TIMEOUT, "1")
    monkeypatch.setattr("sys.stdin", io.StringIO("[message] hi\n\n"))
    seats.the_server.cache_clear()
    assert play_command([str(run), "--terminal", "--seat", "0"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("selfplay.apps.play: rollout.player endpoint_seat: no program took a")


@pytest.mark.slow
def test_a_run_of_two_policies_with_a_program_is_the_built_in_players(
    program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each seat is answered by its policy's weights: from the second step they differ, and all
    steps have the same tokens."""
    policies = "policies={left: {seats: [0]}, right: {seats: [1], optim: {lr: 3.0e-4}}}"
    with beside("program.py", program, monkeypatch) as other:
        try:
            run = run_warm(tmp_path / "run", "rollout.player=endpoint_seat", policies)
        finally:
            other.kill()
    built_in = run_warm(tmp_path / "built_in", policies)
    for step in range(1, 5):
        assert games_of(run, step) == games_of(built_in, step) != []


@pytest.mark.slow
def test_an_agent_of_smolagents_trains(
    program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The package's own loop: it asks several times a turn, and each sampled token trains."""
    with beside("smol.py", program, monkeypatch) as other:
        try:
            assert run_tiny(tmp_path / "run", *AGENT) == 0
        finally:
            other.kill()
    steps = metrics_of(tmp_path / "run")
    assert [step["num_void"] for step in steps] == [0, 0]
    assert all(step["num_trained_tokens"] == step["num_generated_tokens"] > 0 for step in steps)
    assert all(step["mismatch_max"] < 1e-3 for step in steps)


def test_a_turn_waits_for_a_program_that_is_busy_with_another() -> None:
    """Untaken turns outlast the time-out while a call of any game waits for the engine."""
    server = seats.Server(0, KEY, 0.2)
    one, other = (seats.OpenTurn(key, {}, lambda: None) for key in ("one", "other"))
    server.offer(one)
    ours, programs = socket.socketpair()
    with ours, programs:
        assert server.take(ours) == {} and one.taken
        call = server.called("one", seats.Call(seats.CHAT, b"", {}, ours))
        server.offer(other)
        time.sleep(0.3)
        assert server.next_call(one)[0] is call and server.next_call(other) == (None, 0.2)
        server.delivered("one", call)
    assert server.next_call(other)[1] < 0 and server.next_call(one)[1] < 0
