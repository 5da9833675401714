"""The engine settings that `auto` stands for, by what the engine has to do."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from selfplay.config import load_config
from selfplay.distributed import init_world
from selfplay.engines.options import ChosenEngine, SGLangOptions
from selfplay.engines.sglang.choose import Load, burst_share, choose, load_of
from selfplay.weight_sync.start import choose_engine

SGLANG = SGLangOptions(kind="sglang")
HALF_A_BILLION, SEVEN_BILLION = 494_000_000, 7_600_000_000
LOAD: dict[str, Any] = {
    "num_weights": HALF_A_BILLION,
    "games": 512,
    "turn_tokens": 45.0,
    "continues": True,
    "cores": 16,
    "gpu": True,
}


def chosen(config: SGLangOptions = SGLANG, **changes: Any) -> tuple[int, float, bool, bool]:
    engine = choose(config, Load(**{**LOAD, **changes}))
    return engine.processes, engine.burst_share, engine.sessions, engine.prefill_graphs


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"turn_tokens": 10.0}, (3, 0.5, True, True)),
        ({"turn_tokens": 25.0}, (2, 0.25, True, True)),
        ({"turn_tokens": 45.0}, (2, 0.25, True, True)),
        ({"turn_tokens": 400.0}, (1, 0.125, True, True)),
        ({"turn_tokens": 400.0, "num_weights": 135_000_000}, (1, 0.125, True, True)),
        ({"turn_tokens": 300.0, "num_weights": 26_000_000}, (2, 0.25, True, True)),
        ({"turn_tokens": 10.0, "num_weights": 26_000_000}, (3, 0.5, True, True)),
        ({"num_weights": 1_544_000_000}, (1, 0.125, True, True)),
        ({"num_weights": SEVEN_BILLION}, (1, 0.125, True, False)),
        ({"num_weights": SEVEN_BILLION, "turn_tokens": 10.0}, (1, 0.5, True, False)),
        # A core for each process besides the trainer's, and games enough to fill it.
        ({"cores": 3}, (2, 0.25, True, True)),
        ({"cores": 2}, (1, 0.125, True, True)),
        ({"cores": 1}, (1, 0.125, True, True)),
        ({"games": 127}, (1, 0.125, True, True)),
        ({"games": 8}, (1, 0.125, True, True)),
        # A prompt that continues no other one, and a CPU.
        ({"continues": False}, (2, 0.25, False, True)),
        ({"gpu": False}, (1, 0.125, True, False)),
    ],
)
def test_the_measured_choices(
    changes: dict[str, Any], expected: tuple[int, float, bool, bool]
) -> None:
    assert chosen(**changes) == expected


def test_an_engine_of_several_gpus_is_one() -> None:
    assert chosen(SGLangOptions(kind="sglang", tp_size=2), turn_tokens=10.0)[0] == 1


def test_an_exact_engine_is_deterministic_and_as_fast_as_it_can() -> None:
    assert choose(SGLangOptions(kind="sglang", exact=True), Load(**LOAD)).deterministic
    assert chosen(SGLangOptions(kind="sglang", exact=True)) == chosen()
    uncached = {"deterministic": True, "attention": "flashinfer"}
    assert not choose(SGLangOptions(kind="sglang", **uncached), Load(**LOAD)).sessions


def test_what_is_given_stays_and_bursts_follow_the_given_processes() -> None:
    given = {"processes": 4, "sessions": False, "prefill_graphs": False, "max_batch": 77}
    engine = choose(SGLangOptions(kind="sglang", **given), Load(**LOAD))
    assert {name: getattr(engine, name) for name in given} == given
    assert (engine.burst_share, engine.adapts) == (0.5, True)
    fixed = choose(SGLangOptions(kind="sglang", burst_share=0.0), Load(**LOAD))
    assert (fixed.processes, fixed.burst_share, fixed.adapts) == (2, 0.0, False)
    assert type(fixed) is ChosenEngine
    assert choose(fixed, Load(**{**LOAD, "turn_tokens": 10.0})) == fixed


def test_bursts_follow_the_length_of_turns_up_to_half_of_a_process() -> None:
    assert [burst_share(num, 10.0) for num in (1, 2, 3)] == [0.5] * 3
    assert [burst_share(num, 16.0) for num in (1, 2, 3, 8)] == [0.125, 0.25, 0.375, 0.5]


def test_the_load_of_a_run() -> None:
    """64 instances of groups of 8 over 2 engines; a quarter of the 384 tokens of a turn; a branch
    leaves no prompt that continues the last one."""

    def of(*words: str, continues: bool = True) -> Load:
        config = load_config(
            None,
            ["model.path=m", "rollout={instances: 64, group_size: 8, max_new_tokens: 384}", *words],
        )
        return load_of(config, 7, replicas=2, continues=continues, cores=5, gpu=False)

    assert of() == Load(7, games=256, turn_tokens=96.0, continues=True, cores=5, gpu=False)
    assert not of(continues=False).continues
    assert not of("rollout.play=branches", "engine.kind=sglang").continues


def test_a_run_prints_what_it_chose_and_notes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU, for a model with random weights."""
    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2,
                tie_word_embeddings=True).save_pretrained(tmp_path)  # fmt: skip
    config = load_config(None, [f"model.path={tmp_path}", "engine.kind=sglang"])
    notes = tmp_path / "code.txt"
    found, engine = choose_engine(
        config, tmp_path, init_world(device="cpu"), rewritten="", notes=notes
    )
    assert found.engine == engine and isinstance(engine, ChosenEngine)
    assert engine.processes == 1 and engine.sessions
    said = capsys.readouterr().out
    assert said == notes.read_text(encoding="utf-8")
    assert said.startswith(
        "engine: processes 1, burst_share 0.125, sessions on, prefill_graphs off"
    )
    anew = choose_engine(config, tmp_path, init_world(device="cpu"), rewritten="it drops thoughts")
    assert not getattr(anew[1], "sessions", True)
