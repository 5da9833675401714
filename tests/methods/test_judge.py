"""A judge with a rubric of one's own, for games of any kind: what it reads, what its marks pay, and
what becomes of a game without one."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from selfplay.advantages.rewards import with_rewards
from selfplay.chat.rendering import Rendering
from selfplay.config import load_config
from selfplay.config.player_spec import parse_spec
from selfplay.distributed import init_world
from selfplay.engines.base import Completion, Message, Request
from selfplay.learner.method import check_methods
from selfplay.methods.judge import judge_games
from selfplay.metrics.records import game_record, game_text
from selfplay.partners.partners import Partners
from selfplay.rollout.driver import Rollout, RolloutStats
from selfplay.rollout.episode import BranchPoint
from tests.helpers.chat_server import Answer, chat_server, judge_of
from tests.helpers.hand_episodes import episode
from tests.helpers.tiny_run import begin_warm, finished, metrics_of, run_tiny

RUBRIC = "Rate how clearly the players told each other what they know."


def marks(body: dict[str, Any], number: int) -> Answer:
    """0.25 for games with a refused move, no mark for others."""
    erred = "refused" in body["messages"][-1]["content"]
    return Answer('So-so.\n{"mark": 0.25}' if erred else "I would rather not.")


def test_a_rubric_rates_any_game_and_a_game_without_a_mark_is_void(
    tmp_path: Path, rendering: Rendering
) -> None:
    """The mark 0.25 times the weight 2 is paid beside both seats' rewards, 0.5 and 0, which stay
    the game's own."""
    (tmp_path / "rubric.md").write_text(RUBRIC)
    marked, unmarked = episode((0.5, 0.0), errors=(1, 0)), episode((1.0, 1.0), 1)
    point = BranchPoint(turn=0, seat=0, continuations={(1, 0): marked, (2, 0): unmarked})
    with chat_server(marks) as server:
        words = [f"methods.judge.model=endpoint:judge@{server.url}", "methods.judge.weight=2.0"]
        words += [f"methods.judge.rubric={tmp_path}/rubric.md", "endpoint.retries=0"]
        config = load_config(None, ["model.scratch={}", "rollout.max_game_tokens=1000", *words])
        check_methods(config, ask=False)
        world = init_world(device="cpu")
        with closing(Partners([], config, rendering=rendering, world=world)) as partners:
            judge = judge_of(config, partners.reader)
            stats = RolloutStats(9, 9, 0.5)
            rollout = Rollout([replace(marked, branches=(point,)), unmarked], stats)
            rollout = judge.after_play(rollout, pytest.fail, config=config)
            assert partners.take_usage()["num_endpoint_requests"] == 4
    (first,) = rollout.episodes
    assert rollout.stats.num_void == 1
    assert first.paid == ((1.0, 0.5), ((),) * len(first.turns)) and first.measures["mark"] == 0.25
    assert with_rewards([first], config.reward) == [first], "it is paid once"
    record = game_record(first, step=1)
    assert (record["rewards"], record["paid"]) == ([0.5, 0.0], [1.0, 0.5])
    assert record["facts"]["mark"] == 0.25 and record["judge"].startswith("So-so.")
    assert "(mark 0.25)\njudge: So-so.\n" in game_text(record)
    assert [*first.branches[0].continuations] == [(1, 0)]
    assert first.branches[0].continuations[1, 0].paid == first.paid
    assert marked.outcome.rewards == (0.5, 0.0), "the input is not changed"
    system, user = (message["content"] for message in server.bodies[0]["messages"])
    assert system.startswith(RUBRIC) and "never" not in user
    for seat, prompt in enumerate(marked.prompts):
        assert f"Seat {seat}" in user and prompt.user in user
    for text, rule in (("", "rubric.md: it is empty"), (None, "No such file")):
        (tmp_path / "rubric.md").unlink()
        if text is not None:
            (tmp_path / "rubric.md").write_text(text)
        with pytest.raises(ValueError, match=f"methods.judge.rubric .*{rule}"):
            check_methods(config, ask=False)


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ('<think>\n{"mark": 1}\n</think>So-so.\n{"mark": 0.25, "parts": {"clear": 1}}', 0.25),
        ('The mark may be\n{"mark": 1}\n</reasoning>\n{"mark": 0.25}', 0.25),
        ('<think>\n{"mark": 1}', None),
        ('Seat 0 wrote {"mark": 1}, so I give none.', None),
    ],
)
def test_a_judges_thoughts_and_quotes_give_no_mark(
    text: str, mark: float | None, tmp_path: Path
) -> None:
    """Nor does the game's record keep its thoughts, whether an endpoint or a checkpoint judges."""
    (tmp_path / "rubric.md").write_text(RUBRIC)
    words = ["methods.judge.model=checkpoint:a", f"methods.judge.rubric={tmp_path}/rubric.md"]
    answer = Completion([], [], "stop", 0, text=text)
    judge = judge_of(
        load_config(None, ["model.path=x", *words]),
        lambda _: lambda chats: [answer] * len(chats),
    )
    (judged,) = judge_games([episode((0.5, 0.0))], judge)
    assert (judged and judged.measures["mark"]) == mark
    assert judged is None or "1}\n" not in judged.judge


def test_a_checkpoint_answers_chats(rendering: Rendering) -> None:
    """It answers the same twice, and a chat longer than its 192 positions not at all."""
    folder = finished()
    overrides = ["model.scratch={}", "rollout.max_game_tokens=1000"]
    config = load_config(None, [*overrides, f"methods.judge.model=checkpoint:{folder}"][:2])
    spec, world = parse_spec(f"checkpoint:{folder}"), init_world(device="cpu")
    read = Partners([], config, rendering=rendering, world=world).reader(spec)
    idle = replace(world, replica=replace(world.replica, leads=False))  # plays and loads nothing
    assert Partners([], config, rendering=rendering, world=idle).reader(spec)([]) == []

    def chat(user: str) -> Request:
        return Request((), 8, 0, messages=(Message("system", "Hi."), Message("user", user)))

    short, long = read([chat("a"), chat("a b " * 100)])
    assert short.finish in ("stop", "length") and short.text and long.finish == "void"
    assert read([chat("a")])[0].text == short.text


def test_a_judge_without_a_mark_stops_the_run_after_its_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """16 games are played, and no token is trained. Why is said once."""
    answer = Answer("0.5")
    why = 'must answer with {"mark": 0.6}, from 0 to 1, on a separate line, got'
    (tmp_path / "rubric.md").write_text(RUBRIC)
    begin_warm(tmp_path / "run")
    tried = Answer('{"mark": 0.5}')  # the first, before the run
    with chat_server(lambda body, number: answer if number else tried) as server:
        words = [f"methods.judge.model=endpoint:judge@{server.url}", "eval.final_games=1"]
        words += [f"methods.judge.rubric={tmp_path}/rubric.md", "endpoint.retries=0"]
        assert run_tiny(tmp_path / "run", *words) == 1
        said = capsys.readouterr()
        assert said.err.count(why) == 1 and "self-play took" not in said.out
        assert "after step 1: the mean of num_games is 0 (16 were aborted)" in said.err
        (line,) = metrics_of(tmp_path / "run")
        assert line["num_void"] == 16 and line["void_share"] == 1.0
        assert run_tiny(tmp_path / "run", *words, "monitors=[]", "steps=2") == 0
    said = capsys.readouterr()
    assert "no step has trained a token" in said.out and "self-play took" not in said.out


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (
            Answer("0.5"),
            "must answer with {\"mark\": 0.6}, from 0 to 1, on a separate line, got '0.5'",
        ),
        (Answer(body=b"", status=500), "must answer before the run: endpoint:judge@"),
    ],
)
def test_a_judge_is_tried_before_the_warm_start(
    answer: Answer, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rubric.md").write_text(RUBRIC)
    with chat_server(lambda body, number: answer) as server:
        words = [
            f"methods.judge.model=endpoint:judge@{server.url}",
            f"methods.judge.rubric={tmp_path}/rubric.md",
        ]
        assert run_tiny(tmp_path / "run", *words, "endpoint.retries=0") == 2
        assert len(server.bodies) == 1
    assert capsys.readouterr().err.splitlines()[-1].count(why) == 1
    assert not (tmp_path / "run" / "warm_start").exists()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
