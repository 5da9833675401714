"""An engine of one's own, in a file that no file of the project names, trains a run."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from selfplay.preflight.functions import findings
from tests.helpers.small_updates import config_of
from tests.helpers.tiny_run import RUN_GAP, finished, metrics_of, run_tiny

ROOT = Path(__file__).resolve().parents[2]
PLAIN = f"{ROOT}/examples/engine/plain.py:PlainEngine"


def test_an_engine_of_one_s_own_plays_and_gets_the_weights_of_each_step() -> None:
    """Its log-probs are the trainer's in the second step too, so the first push reached it."""
    run = finished(f"engine.kind={PLAIN}", "steps=2", "eval.final_games=2", "eval.talk_games=0")
    first, second = metrics_of(run)
    assert max(first["mismatch_max"], second["mismatch_max"]) < RUN_GAP
    assert first["num_engine_restarts"] == 0 and second["num_games"] > 0
    begin, end = (load_file(run / part / "model.safetensors") for part in ("warm_start", "final"))
    assert any((begin[name] != tensor).any() for name, tensor in end.items())
    kept = json.loads((run / "code" / "own_files.json").read_text("utf-8"))["named"]
    assert f"engine.kind {PLAIN}" in kept


HALF = """
from selfplay.engines.base import Engine
class Half(Engine):
    @classmethod
    def start(cls, config, weights, world): return cls()
    def run_games(self, games, sampling, partners=None): ...
    def generate_batch(self, requests, sampling): ...
    def load(self, weights, version): ...
class Loose:
    @classmethod
    def start(cls, config, weights, world): return cls()
"""


@pytest.mark.parametrize(("name", "named"), [("Half", "compare"), ("Loose", "subclass of")])
def test_a_class_that_is_no_whole_engine_is_refused_before_the_run(
    name: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "half.py").write_text(HALF)
    kind = f"engine.kind={tmp_path}/half.py:{name}"
    assert run_tiny(tmp_path / "run", kind) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "engine.kind" in line and named in line
    assert not (tmp_path / "run").exists()


def test_the_check_command_passes_the_example() -> None:
    assert list(findings("engine.kind", PLAIN, config_of(f"engine.kind={PLAIN}")))
