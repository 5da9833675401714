"""A policy behind SGLang's own chat server plays the games that it plays in the trainer."""

from __future__ import annotations

import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import eval as evaluation
from selfplay.apps.serve import __main__ as serve
from tests.helpers import processes
from tests.helpers.tiny_run import finished

ROOT = pathlib.Path(__file__).resolve().parents[2]
STAND_INS = pathlib.Path(__file__).resolve().parent / "stand_ins"


@pytest.fixture(scope="module")
def run() -> pathlib.Path:
    """A finished warm start."""
    return finished("steps=0", "eval.final_games=16")


@pytest.fixture(scope="module")
def partner(run: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server's `endpoint:MODEL@URL`, as the command prints it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log.txt"
    words = (str(run), "--port", str(port), "--name", "tiny", "engine.max_cache_tokens=16384")
    with log.open("w") as output:
        server = processes.start(
            ROOT / "selfplay/apps/serve/__main__.py", *words, path=(STAND_INS,), output=output
        )
        try:
            for _ in range(480):
                assert server.poll() is None, log.read_text()
                try:
                    if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                        break
                except httpx.HTTPError:
                    time.sleep(0.5)
            else:
                raise AssertionError(log.read_text())
            (spec,) = re.findall(r"--partner (endpoint:\S+)", log.read_text())
            yield spec
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(60)


def test_greedy_games_with_the_served_policy_are_those_of_self_play(
    run: pathlib.Path, partner: str, tmp_path: pathlib.Path
) -> None:
    greedy: Any = json.loads((run / "held_out_after.json").read_text())["greedy"]
    words = ["--checkpoint", str(run), "--games", "generated", "--temperature", "0"]
    settings = ["endpoint.max_new_tokens=24", "endpoint.body={temperature: 0}"]
    assert (
        evaluation.main([*words, "--partner", partner, "--out", str(tmp_path / "out"), *settings])
        == 0
    )
    page = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    (row,) = (row for name, row in page["rows"].items() if name.startswith("policy"))
    assert row["scores"] == greedy["scores"]


def test_a_person_plays_with_the_served_policy(
    run: pathlib.Path, partner: str, tmp_path: pathlib.Path
) -> None:
    """Two whole games through the page's addresses, a script's moves in the person's seat."""
    out = tmp_path / "played.jsonl"
    command = [sys.executable, "-m", "selfplay.apps.play", "--checkpoint", str(run), "--port", "0"]
    command += ["--partner", partner, "--out", str(out), "endpoint.max_new_tokens=24"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout
            page = next(line for line in program.stdout if line.startswith("http://127.0.0.1:"))
            here, token = page.strip().split("/?token=")
            headers = {"x-play-token": token, "origin": here}
            with httpx.Client(
                base_url=here, headers=headers, timeout=60, trust_env=False
            ) as client:
                for _ in range(2):
                    state = client.post("/start", json={}).json()
                    while state["phase"] != "over":
                        time.sleep(0.6)  # the page's limits: 20 moves in 10 s
                        state = client.get("/state").json()
                        if state["phase"] == "yours":
                            client.post("/move", json={"text": state["suggestion"]})
                    players = {seat["player"] for seat in state["result"]["game"]["seats"]}
                    assert players == {"person", partner}
        finally:
            program.terminate()
    assert len(out.read_text().splitlines()) == 2


def test_only_this_machine_reaches_the_server(partner: str) -> None:
    assert "@http://127.0.0.1:" in partner
    port = int(partner.split(":")[-1].split("/")[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; finds this machine's own address
        except OSError:
            pytest.skip("this machine has no address but loopback")
        own = probe.getsockname()[0]
    with pytest.raises(OSError), socket.create_connection((own, port), timeout=5):
        pass


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{run}", "--port", "80"], "--port must be from 1024 to 65535, got 80"),
        (["{run}x"], "RUN must be a run folder"),
        (["{run}", "engine.tp=2"], "unknown key engine.tp"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], said: str, run: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main([word.format(run=run) for word in words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
