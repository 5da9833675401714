"""Environments of verifiers as games, and a game as one, with the real library. It needs another
version of OpenAI's client than the tests of other bridges, so it has an environment of its own
(docs/verifiers.md); elsewhere these tests are skipped."""

import asyncio
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dialop.game import GameError
from dialop.kit import Kit, load_kit
from tests.helpers.house import ROOT

if find_spec("verifiers") is None:
    pytest.skip("verifiers is not installed", allow_module_level=True)

from selfplay.config import load_config
from selfplay.errors import SettingsError
from selfplay.extras import verifiers as bridge
from tests.helpers.tiny_run import metrics_of

HERE = str(ROOT / "examples" / "verifiers")
TASKS = """
import verifiers.v1 as vf
__all__ = ["Echo"]

class Data(vf.TaskData):
    answer: str

class Say(vf.Task[Data]):
    @vf.stop
    async def once(self, trace): return trace.num_turns >= 1
    @vf.reward(weight=2.0)
    async def same(self, trace): return float(trace.last_reply == self.data.answer)
    @vf.metric
    async def length(self, trace): return float(len(trace.last_reply))

class Echo(vf.Taskset[Say, vf.TasksetConfig]):
    def load(self):
        rows = [{"prompt": f"Say {n}.", "answer": str(n)} for n in range(3)]
        return [Say(Data(system_prompt="Echo.", **row)) for row in rows]
"""
NEEDS = {
    "NEEDS_CONTAINER = True": "a sandbox",
    "async def setup(self, trace, runtime): pass": "a sandbox for its set-up",
    "toolsets = classmethod(lambda cls, config: [1])": "servers of tools",
    "@vf.reward\n    async def ran(self, runtime): return 1.0": "a sandbox for its rewards",
    "async def finalize(self, trace, runtime): pass": "a sandbox for its end",
    "@vf.intercept\n    async def a(self, request: vf.Request): pass": "to read or change requests",
}
IMAGE = 'vf.ImageUrlContentPart(image_url=vf.ImageUrlSource(url="data:,"))'
CALLS = """
class Config(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(harness={{"id": "{harness}"}})

class Calls(vf.Env[Config]):
    async def run(self, task, agents):
        try:
            async with agents.agent.interaction(vf.Task(vf.TaskData(prompt=None))) as talk:
                {call}
        except Exception:
            pass
"""
WHOLE = {  # what a module needs, if the first text is replaced by the second in it
    "servers of tools": (
        "    def load",
        "    toolsets = classmethod(lambda *_: [1])\n    def load",
    ),
    "the harness rlm": ('["Echo"]', f'["Echo", "Calls"]{CALLS.format(harness="rlm", call="pass")}'),
    "images": ('"prompt": f"Say {n}."', f'"prompt": [vf.UserMessage(content=[{IMAGE}])]'),
}
MORE = {
    "await talk.steer('x')": "'steer' of an interaction",
    "await agents.agent.provision(task).__aenter__()": "'provision' of an agent",
    "await agents.agent.run(task, collect_artifacts=True)": "'collect_artifacts' of an agent",
    f"await talk.turn([vf.UserMessage(content=[{IMAGE}])])": "images",
}


@pytest.fixture(autouse=True)
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "echoes.py").write_text(TASKS)
    yield
    sys.modules.pop("echoes", None)
    for cached in (load_kit, bridge._env_of, bridge._tasks_of):
        cached.cache_clear()


def start(kit: Kit, *, index: int = 0, **options: Any) -> Any:
    given = kit.Options(**options)
    (instance,) = kit.generate(given, seed=0, start=index, num=1)
    return kit.new_game(instance, given)


def test_two_agents_are_two_seats_that_talk_and_are_paid() -> None:
    kit = load_kit("verifiers:secret_number")
    assert kit.ROLES == ("teller", "guesser") and kit.POLICY_SEATS == (0, 1)
    game = start(kit)
    number = game.prompt(0).user[-2]
    assert game.prompt(0).system == "Tell your number." and game.seat_to_move == 0
    told = game.step(0, f"It is {number}")
    assert told.action == "message" and told.observations[1] == f"The other says: It is {number}"
    assert game.step(0, "again").error_kind == "not_your_turn"
    wrong = game.clone()
    assert game.step(1, f" {number}\n").action == "move" and game.seat_to_move is None
    assert game.outcome().rewards == (1.0, 1.0) and game.outcome().over
    assert wrong.seat_to_move == 1 and wrong.step(1, "none").error is None
    assert wrong.outcome().rewards == (0.0, 0.0)
    for each in (game, wrong):
        again = kit.restore(json.loads(json.dumps(each.state())))
        assert again.outcome() == each.outcome()
        assert f"It is {number}" in again.prompt(1).user


def test_instances_depend_on_the_seed_and_the_index_alone() -> None:
    kit = load_kit("verifiers:secret_number")
    options = kit.Options(num_tasks=20)
    first = kit.generate(options, seed=3, num=8)
    assert first == kit.generate(options, seed=3, num=8) != kit.generate(options, seed=4, num=8)
    assert first[5:] == kit.generate(options, seed=3, start=5, num=3)
    assert {instance.position for instance in first} <= set(range(20))


def test_a_taskset_without_an_environment_is_a_game_of_one_seat() -> None:
    """Its reward has its weight; its stop lets it answer once."""
    kit = load_kit("verifiers:echoes")
    game = start(kit, highest=2.0)
    number = game.prompt(0).user[4]
    assert kit.ROLES == ("agent",) and game.prompt(0).system == "Echo."
    game.step(0, number)
    assert game.seat_to_move is None and game.outcome().rewards == (2.0,)
    assert game.outcome().score_norm == 1.0


def test_a_user_simulator_does_not_train_and_ends_the_talk() -> None:
    kit = load_kit("verifiers:echoes:user-sim")
    assert kit.ROLES == ("assistant", "user") and kit.POLICY_SEATS == (0,)
    game = start(kit)
    assert game.seat_to_move == 1 and "Say " in game.prompt(1).system
    number = game.prompt(1).system.partition("Say ")[2][0]
    asked = game.step(1, "Echo for me, please.")
    assert asked.action == "message" and asked.observations[0] == "Echo for me, please."
    game.step(0, number)
    game.step(1, "###DONE###")
    assert game.seat_to_move is None and game.outcome().rewards == (2.0, 0.0)


@pytest.mark.parametrize("line", NEEDS)
def test_what_needs_more_than_texts_is_refused_in_one_line(line: str, tmp_path: Path) -> None:
    body = TASKS.replace("    @vf.stop\n", f"    {line}\n    @vf.stop\n")
    (tmp_path / "echoes.py").write_text(body)
    with pytest.raises(GameError, match=f"cannot be a game: it needs {NEEDS[line]}") as caught:
        start(load_kit("verifiers:echoes"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("need", WHOLE)
def test_so_is_what_a_whole_taskset_needs(need: str, tmp_path: Path) -> None:
    (tmp_path / "echoes.py").write_text(TASKS.replace(*WHOLE[need]))
    with pytest.raises(GameError, match=f"verifiers:echoes cannot be a game: it needs {need}"):
        start(load_kit("verifiers:echoes"))


def calling(tmp_path: Path, call: str) -> Any:
    """A game of an environment that makes this call."""
    body = TASKS.replace('["Echo"]', '["Echo", "Calls"]') + CALLS.format(harness="null", call=call)
    (tmp_path / "echoes.py").write_text(body)
    return start(load_kit("verifiers:echoes"))


@pytest.mark.parametrize("call", MORE)
def test_a_call_that_needs_more_than_texts_ends_the_game_though_it_is_caught(
    call: str, tmp_path: Path
) -> None:
    with pytest.raises(GameError) as caught:
        calling(tmp_path, call)
    assert str(caught.value).startswith(
        f"game.name verifiers:echoes cannot be a game: it needs {MORE[call]}"
    )


def test_a_turn_of_several_messages_is_their_texts(tmp_path: Path) -> None:
    text = 'vf.UserMessage(content=[vf.TextContentPart(text="b")])'
    messages = f'[{{"role": "user", "content": "a"}}, {text}]'
    game = calling(tmp_path, f"await talk.turn({messages})")
    assert game.prompt(0).user == "a\n\nb"


def test_settings_that_do_not_fit_are_refused_with_their_keys() -> None:
    kit = load_kit("verifiers:secret_number")
    with pytest.raises(GameError, match=r"game.options.config must fit .*: taskset.level: Extra"):
        start(kit, config={"taskset": {"level": 3}})
    with pytest.raises(GameError, match="verifiers:secret_number cannot be opened: TypeError"):
        start(kit, config={"taskset": 3})
    with pytest.raises(ValueError, match="lowest must be below highest"):
        kit.Options(lowest=1.0)


def test_a_name_that_is_not_installed_is_refused_in_one_line() -> None:
    with pytest.raises(SettingsError, match="must be a taskset that is installed here") as caught:
        load_config(None, ["game.name=verifiers:nothing_here", "model.path=x"])
    assert "\n" not in str(caught.value)


def test_an_environment_that_fails_pays_nothing_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "echoes.py").write_text(TASKS.replace("trace.last_reply ==", "1 / 0 =="))
    game = start(load_kit("verifiers:echoes"))
    game.step(0, "1")
    assert game.outcome().rewards == (0.0,) and game.measures([0]) == {"failed_environments": 1.0}
    assert "its seats get 0: " in capfd.readouterr().err


def test_episodes_end_with_their_games() -> None:
    games = [start(load_kit("verifiers:secret_number"), index=index) for index in range(5)]
    held = [game._held.play._future for game in games]
    assert not any(future.done() for future in held)
    del games
    gc.collect()
    assert all(future.cancelled() for future in held)
    idle = asyncio.run_coroutine_threadsafe(asyncio.sleep(0.1), bridge._loop())
    idle.result(5)


@pytest.mark.slow
def test_a_process_may_end_within_a_game() -> None:
    """It ends at once and prints nothing."""
    body = "from dialop.kit import load_kit; kit = load_kit('verifiers:secret_number'); "
    body += "(one,) = kit.generate(kit.Options(), seed=0, num=1); "
    body += "game = kit.new_game(one, kit.Options()); print(game.seat_to_move)"
    done = subprocess.run(
        [sys.executable, "-c", body],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": HERE},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("0\n", "", 0)


def test_a_game_of_ours_is_an_environment_with_the_same_texts_and_rewards() -> None:
    """Through both bridges a scripted game reads and pays what it does without them."""
    own = load_kit("matching")
    given = {"size": 2, "brief": True}
    kit = load_kit("verifiers:selfplay_game")
    config = {"taskset": {"game": "matching", "options": given}}
    for position in range(4):
        options = kit.Options(config=config, num_tasks=4)
        game = kit.new_game(SimpleNamespace(key="x", position=position), options)
        (instance,) = own.generate(own.Options(**given), seed=0, start=position, num=1)
        plain = own.new_game(instance, own.Options(**given))
        script = own.make_script("honest", seed=1)
        while (seat := plain.seat_to_move) is not None:
            assert (
                game.seat_to_move == seat and game.prompt(seat).system == plain.prompt(seat).system
            )
            move = script.act(plain.view(seat))
            plain.step(seat, move)
            game.step(seat, move)
        assert game.seat_to_move is None and game.outcome().rewards == plain.outcome().rewards


RUNS = {
    "secret_number": (),
    "echoes": (),
    "echoes:user-sim": ("rollout.policy_seats=[assistant,user]",),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_environments_train(name: str, tmp_path: Path) -> None:
    """Some steps of a scratch model, whose rewards vary if its games do."""
    from train import main

    words = [
        *(f"out={tmp_path / 'run'}", "steps=3", "device=cpu", "threads=1", "warm_start=off"),
        *(f"game.name=verifiers:{name}", "model.scratch.width=32", "model.scratch.layers=2"),
        *("rollout.max_new_tokens=8", "rollout.max_game_tokens=1500", "rollout.group_size=4"),
        *("model.scratch.heads=2", "model.scratch.kv_heads=2", "rollout.instances=2"),
        *(
            "algorithm.advantage=ema",
            "model.scratch.max_positions=2048",
            "eval.final_games=2",
            "rollout.max_turns=6",
        ),
    ]
    assert main(["--config", f"{HERE}/secret_number.yaml", *words, *RUNS[name]]) == 0
    steps = metrics_of(tmp_path / "run")
    assert len(steps) == 3 and all(step["num_trained_tokens"] > 0 for step in steps)
