"""`engine.fast: false`: turns, pushes and comparisons by SGLang's public calls alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from selfplay.engines.base import Request, Sampling
from selfplay.engines.sglang.fast import private
from selfplay.engines.sglang.plain import PlainEngine
from selfplay.engines.weights import Weights
from tests.helpers import processes
from tests.helpers.tiny_run import metrics_of, run_warm
from tests.sglang import tiny

HERE = Path(__file__).resolve().parent
PROMPT = list(range(10, 50))
SAMPLED = Sampling(1.0, ())


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainEngine]:
    engine = tiny.start(tiny.save(tmp_path_factory.mktemp("model")), fast=False)
    assert isinstance(engine, PlainEngine)
    yield engine
    engine.close()


def test_every_private_name_is_in_the_sglang_that_is_pinned() -> None:
    assert private.missing() is None


def test_turns_and_scores_have_the_logprobs_of_the_weights_that_were_pushed(
    engine: PlainEngine,
) -> None:
    model = tiny.moved(tiny.build(), seed=1)
    engine.load(Weights(model, engine.dtype, bucket_bytes=40_000), 1)
    requests = [Request(PROMPT[:n], 12, n) for n in (1, 7, 40)]
    for request, completion in zip(requests, engine.generate_batch(requests, SAMPLED), strict=True):
        assert completion.version == 1 and len(completion.ids) == 12
        assert tiny.worst_mismatch(model, list(request.prompt_ids), completion) < 1e-4
    [scored] = engine.score([PROMPT])()
    with torch.no_grad():
        logprobs_TV = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    wanted = [logprobs_TV[i, token].item() for i, token in enumerate(PROMPT[1:])]
    assert scored == pytest.approx(wanted, abs=1e-4)


def test_the_comparison_finds_one_element_that_differs(engine: PlainEngine) -> None:
    """Equal weights differ nowhere; one element of one parameter differs once."""
    model = tiny.build()
    engine.load(Weights(model, engine.dtype), 2)
    equal = engine.compare(Weights(model, engine.dtype))
    num = sum(parameter.numel() for parameter in model.parameters())
    assert equal.num_different == 0 and equal.num_elements >= num
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-3
    assert engine.compare(Weights(model, engine.dtype)).num_different == 1


def test_an_engine_that_dies_or_is_silent_faults_and_starts_again(tmp_path: Path) -> None:
    """In a process of its own: SGLang reports a death by a signal to all engines of a process."""
    words = ("public", tiny.save(tmp_path))
    script = processes.start(HERE / "trainer_script.py", *words, path=(HERE, HERE / "stand_ins"))
    said, _ = script.communicate(timeout=processes.HANG_S)
    assert script.returncode == 0, said
    found = processes.marks(said)
    assert "exit code -9" in found["killed"]["error"]
    again = found["again"]
    assert again["error"] == "none" and not again["lost"] and not any(again["alive"])
    assert "silent for 1 s" in found["stopped"]["error"] and found["stopped"]["lost"]


def test_a_run_of_an_sglang_that_lacks_a_name_goes_on_by_its_public_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(private, "PRIVATE", (("managers.scheduler", "Scheduler gone_since"),))
    settings: tuple[Any, ...] = ("engine.kind=sglang", "engine.max_cache_tokens=16384", "steps=2")
    run_warm(tmp_path / "run", *settings)
    said = capfd.readouterr().err
    assert said.count("lacks sglang.srt.managers.scheduler.gone_since; engine.fast is off") == 1
    for line in metrics_of(tmp_path / "run"):
        assert line["sync_check_mismatch"] < 1e-4 and line["mismatch_mean"] < 1e-4
