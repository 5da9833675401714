"""`engine.fast: false`: turns, pushes and comparisons by SGLang's public calls alone."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stderr

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import selfplay
from selfplay.engines.base import Request, Sampling
from selfplay.engines.sglang.fast import private
from selfplay.engines.sglang.plain import PlainEngine
from selfplay.engines.weights import Weights
from tests.helpers.tiny_run import begin_warm, write_tiny
from tests.sglang import tiny

PROMPT = list(range(10, 50))
SAMPLED = Sampling(1.0, ())


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[selfplay.OpenRun, str]]:
    """A run of two steps whose SGLang lacks a name, still open, and what it said."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    begin_warm(folder)
    more = {"engine.kind": "sglang", "engine.max_cache_tokens": 16384, "out": str(folder)}
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch, redirect_stderr(io.StringIO()) as said:
            patch.setattr(private, "PRIVATE", (("managers.scheduler", "Scheduler gone_since"),))
            run = stack.enter_context(selfplay.start(write_tiny(folder), more))
            run.step()
            run.step()
        yield run, said.getvalue()


@pytest.fixture(scope="module")
def engine(ran: tuple[selfplay.OpenRun, str]) -> PlainEngine:
    engine = ran[0].parts.policies[0].engine.engine
    assert isinstance(engine, PlainEngine)
    return engine


@pytest.fixture(scope="module")
def model(ran: tuple[selfplay.OpenRun, str]) -> PreTrainedModel:
    """Other weights of its shape."""
    start = AutoModelForCausalLM.from_pretrained(ran[0].folder / "warm_start")
    return tiny.moved(start.eval(), seed=1)


def test_every_private_name_is_in_the_sglang_that_is_pinned() -> None:
    assert private.missing() is None


def test_a_run_of_an_sglang_that_lacks_a_name_goes_on_by_its_public_calls(
    ran: tuple[selfplay.OpenRun, str],
) -> None:
    run, said = ran
    assert said.count("lacks sglang.srt.managers.scheduler.gone_since; engine.fast is off") == 1
    for line in run.metrics:
        assert line["sync_check_mismatch"] < 1e-4 and line["mismatch_mean"] < 1e-4


def test_turns_and_scores_have_the_logprobs_of_the_weights_that_were_pushed(
    engine: PlainEngine, model: PreTrainedModel
) -> None:
    engine.load(Weights(model, engine.dtype, bucket_bytes=40_000), version := engine.version + 1)
    requests = [Request(PROMPT[:n], 12, n) for n in (1, 7, 40)]
    for request, completion in zip(requests, engine.generate_batch(requests, SAMPLED), strict=True):
        assert completion.version == version
        # By chance one may end before.
        assert len(completion.ids) == 12 or completion.finish == "stop"
        assert tiny.worst_mismatch(model, list(request.prompt_ids), completion) < 1e-4
    [scored] = engine.score([PROMPT])()
    with torch.no_grad():
        logprobs_TV = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    wanted = [logprobs_TV[i, token].item() for i, token in enumerate(PROMPT[1:])]
    assert scored == pytest.approx(wanted, abs=1e-4)
