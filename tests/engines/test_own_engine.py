"""An engine of one's own, in a file that no file of the project names, trains a run."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from selfplay.config import load_config
from selfplay.config.text import dump
from selfplay.errors import SettingsError
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


PACED = """
from examples.engine.plain import PlainEngine
from pydantic.dataclasses import dataclass
from selfplay.config import EngineConfig
from selfplay.config.schema import RULES
class Paced(PlainEngine):
    @dataclass(frozen=True, slots=True, config=RULES)
    class Options(EngineConfig):
        pace: int = 1
class Untyped(PlainEngine):
    class Options: ...
"""


def test_an_engine_of_one_s_own_has_settings_of_its_own_beside_the_common_ones(
    tmp_path: Path,
) -> None:
    """They are in the run's settings too, and are left where another kind takes over."""
    file = tmp_path / "paced.py"
    file.write_text(PACED)
    kind = f"engine.kind={file}:Paced"
    config = load_config("tiny", [kind, "engine.pace=3", "engine.max_batch=7"])
    assert (config.engine.pace, config.engine.max_batch) == (3, 7)
    saved = tmp_path / "saved.yaml"
    saved.write_text(dump(config))
    assert load_config(saved).engine == config.engine
    for words, rule in (
        (["engine.pacee=3"], r"unknown key engine\.pacee; nearest is engine\.pace"),
        (["engine.pace=fast"], r"engine\.pace must be a valid integer"),
        (
            ["engine.exact=true"],
            r"engine\.exact must be false with engine\.kind .*:Paced, got true",
        ),
        ([kind.replace("Paced", "Untyped")], r"its Options must be a pydantic\.dataclasses"),
    ):
        with pytest.raises(SettingsError, match=rule):
            load_config("tiny", [kind, *words])


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
