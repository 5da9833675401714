"""A policy behind SGLang's own chat server plays the games that it plays in the trainer."""

from __future__ import annotations

import json
import pathlib
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import httpx
import pytest

import eval as evaluation
from tests.helpers import processes
from tests.helpers.tiny_run import finished

ROOT = pathlib.Path(__file__).resolve().parents[2]
# What a server without a GPU needs beside.
ON_A_CPU = (
    "--device cpu --dtype float32 --attention-backend torch_native --sampling-backend pytorch "
    "--grammar-backend none --disable-cuda-graph --max-total-tokens 16384"
)
STAND_INS = pathlib.Path(__file__).resolve().parent / "stand_ins"


@pytest.fixture(scope="module")
def run() -> pathlib.Path:
    """A finished warm start."""
    return finished("steps=0", "eval.final_games=16")


@pytest.fixture(scope="module")
def partner(run: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`endpoint:MODEL@URL` of the server that docs/sharing.md starts, on a CPU."""
    page = (ROOT / "docs" / "sharing.md").read_text("utf-8")
    (words,) = re.findall(r"-m sglang\.launch_server ((?:.*\\\n)*.*)", page)
    log = tmp_path_factory.mktemp("serve") / "log.txt"
    with log.open("w") as output, processes.free_port() as port:
        words = (
            words.replace("\\\n", " ").replace("30000", str(port)).replace("runs/talk", str(run))
        )
        started = pathlib.Path(find_spec("sglang.launch_server").origin)
        server = processes.start(
            started, *words.split(), *ON_A_CPU.split(), path=(STAND_INS,), output=output
        )
        try:
            while not healthy(f"http://127.0.0.1:{port}/health"):
                assert server.poll() is None, log.read_text()
                time.sleep(0.5)
            yield f"endpoint:talk@http://127.0.0.1:{port}/v1"
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(processes.HANG_S)


def healthy(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(url, timeout=60).status_code == 200
    return False


def test_greedy_games_with_the_served_policy_are_those_of_self_play(
    run: pathlib.Path, partner: str, tmp_path: pathlib.Path
) -> None:
    greedy: Any = json.loads((run / "held_out_after.json").read_text())["greedy"]
    words = [str(run), "--games", "generated", "--temperature", "0"]
    settings = ["endpoint.max_new_tokens=24", "endpoint.body={temperature: 0}"]
    assert (
        evaluation.main([*words, "--partner", partner, "--out", str(tmp_path / "out"), *settings])
        == 0
    )
    page = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    (row,) = (row for name, row in page["rows"].items() if name.startswith("policy"))
    assert row["scores"] == greedy["scores"]


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
