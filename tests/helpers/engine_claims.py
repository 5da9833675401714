"""What every engine outside the trainer's process must do, as tests that each engine's set imports.

The set's `conftest.py` has the fixtures: `engine`, its `engine_settings`, and `policy`, the model
whose weights it holds.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from selfplay.config import EngineConfig, LoraConfig, ParallelConfig, load_config
from selfplay.distributed import init_world
from selfplay.engines.base import Engine, Request, Sampling
from selfplay.engines.weights import Bucket, Weights
from selfplay.learner.learner import make_learner
from selfplay.model.lora import add_adapters
from selfplay.weight_sync.offload import Offload
from selfplay.weight_sync.supervised import SupervisedPolicy
from selfplay.weight_sync.sync_check import FIRST_TURNS, SyncCheck
from tests.helpers.rare_tokens import rare_draws
from tests.sglang import tiny

PROMPT = list(range(10, 50))
PLAIN = Sampling(1.0, (tiny.STOP,))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_full_softmax_after_the_temperature(
    engine: Engine, policy: Any, temperature: float
) -> None:
    requests = [Request(PROMPT[:n], 12, n) for n in (1, 7, 40)]
    for request, completion in zip(
        requests, engine.generate_batch(requests, Sampling(temperature, ())), strict=True
    ):
        assert tiny.worst_mismatch(policy, list(request.prompt_ids), completion, temperature) < 1e-4


def test_a_game_may_use_every_position_of_its_model(engine: Engine, policy: Any) -> None:
    """SGLang itself lets no request end less than two tokens before its context does."""
    prompt = [10 + i % 280 for i in range(500)]
    [completion] = engine.generate_batch([Request(prompt, 12, 0)], Sampling(1.0, ()))
    assert len(completion.ids) == 12
    assert tiny.worst_mismatch(policy, prompt, completion) < 1e-4


def test_rare_tokens_are_drawn_as_often_as_their_probabilities_say(
    engine: Engine, policy: Any
) -> None:
    """Within 4.5 standard deviations; the low temperature makes the distributions sharp."""
    requests = [Request(PROMPT[:n], 200, n) for n in range(1, 33)]
    expected, deviation, count = rare_draws(policy, engine, requests, 0.1, nats=8.0)
    assert expected > 30
    assert abs(count - expected) < 4.5 * deviation


def test_a_completion_ends_with_its_stop_token_or_at_its_length(
    engine: Engine, policy: Any
) -> None:
    [full] = engine.generate_batch([Request(PROMPT, 8, 0)], Sampling(0.0, ()))
    stop = next(i for i in full.ids if i != full.ids[0]) if len(set(full.ids)) > 1 else full.ids[0]
    [cut] = engine.generate_batch([Request(PROMPT, 8, 0)], Sampling(0.0, (stop,)))
    assert (full.finish, len(full.ids), len(full.logprobs)) == ("length", 8, 8)
    assert cut.finish == "stop"
    assert cut.ids == full.ids[: full.ids.index(stop) + 1]
    assert len(cut.logprobs) == len(cut.ids)
    [exact] = engine.generate_batch([Request(PROMPT, len(cut.ids), 0)], Sampling(0.0, (stop,)))
    assert (exact.ids, exact.finish) == (cut.ids, "stop"), "the stop token is the last that fits"


def test_games_do_not_wait_for_each_other(engine: Engine, policy: Any) -> None:
    """A game of two short turns ends while a long turn that was requested first still runs."""
    ended: list[str] = []

    async def long(generate: Any) -> str:
        await generate(Request(PROMPT, 450, 0))
        ended.append("long")
        return "long"

    async def short(generate: Any) -> str:
        for _ in range(2):
            await generate(Request(PROMPT, 2, 0))
        ended.append("short")
        return "short"

    assert engine.run_games([long, short], Sampling(1.0, ())) == ["long", "short"]
    assert ended == ["short", "long"]


def test_a_request_that_does_not_fit_is_refused_and_the_engine_stays_usable(
    engine: Engine, policy: Any
) -> None:
    with pytest.raises(ValueError, match=r"context of 5\d\d tokens, got 40 \+ 481"):
        engine.generate_batch([Request(PROMPT, 481, 0)], PLAIN)
    assert engine.generate_batch([Request(PROMPT, 2, 0)], PLAIN)[0].ids


def test_a_push_merges_adapters(engine: Engine, policy: Any) -> None:
    """The engine has no adapters but generates like the model that has them."""
    adapted = copy.deepcopy(policy)
    add_adapters(adapted, LoraConfig(rank=4), seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # 0 at first
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    engine.load(Weights(adapted, engine.dtype), engine.version + 1)
    [completion] = engine.generate_batch([Request(PROMPT, 12, 0)], PLAIN)
    assert tiny.worst_mismatch(adapted, PROMPT, completion) < 1e-4
    assert tiny.worst_mismatch(policy, PROMPT, completion) > 0.1


@pytest.mark.parametrize("wrong", ["model.layers.1.mlp.down_proj.weight", "all are 2 % too large"])
def test_the_logprob_check_finds_wrong_weights_and_a_push_repairs_them(
    engine: Engine,
    policy: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine_settings: EngineConfig,
    wrong: str,
) -> None:
    """One old matrix of 26, or all too large; bits are not compared here."""
    policy.save_pretrained(tmp_path)
    config = load_config(None, [f"model.path={tmp_path}", "model.scratch=null"])
    learner = make_learner(config, tmp_path, init_world(device="cpu"))
    prompts = [[*range(10 + n, 50 + n)] for n in range(36)]
    answers = engine.generate_batch([Request(prompt, 12, 0) for prompt in prompts], PLAIN)
    turns = [
        ([*prompt, *completion.ids], [0] * len(prompt) + [1] * len(completion.ids))
        for prompt, completion in zip(prompts, answers, strict=True)
    ]
    offload = Offload(learner, ParallelConfig())
    config = replace(config, engine=engine_settings)
    check = SyncCheck(learner, SupervisedPolicy(learner, engine, offload), config, start_bound=0.0)
    check.keep_turns(turns)
    asked: list[int] = []
    score = engine.score

    def counted(texts: Any, **named: Any) -> Any:
        asked.append(len(texts))
        return score(texts, **named)

    monkeypatch.setattr(engine, "score", counted)
    metrics = check.after_push(version=engine.version)
    assert metrics["num_suspected"] == 0.0 and metrics["sync_check_mismatch"] < 1e-5
    assert asked == [FIRST_TURNS]
    held = {name: value.clone() for name, value in policy.named_parameters()}
    if wrong == "all are 2 % too large":
        pushed = {name: 1.02 * value for name, value in held.items()}
    else:
        moved = dict(tiny.moved(policy, seed=5).named_parameters())
        learner.model.load_state_dict(moved, strict=False)
        pushed = moved | {wrong: held[wrong]} if wrong in held else held
    policy.load_state_dict(pushed, strict=False)
    engine.load(Weights(policy, engine.dtype), engine.version + 1)
    assert check.after_push(version=engine.version)["num_suspected"] == 1.0
    metrics = check.after_push(version=engine.version)
    assert metrics["num_suspected"] == 0.0 and metrics["sync_check_mismatch"] < 1e-5


def test_requests_are_refused_until_a_push_is_complete(engine: Engine, policy: Any) -> None:
    class Half(Weights):
        def __iter__(self) -> Iterator[Bucket]:
            yield next(super().__iter__())
            raise KeyError("a gather that fails")

    with pytest.raises(KeyError):
        engine.load(Half(policy, engine.dtype, bucket_bytes=50_000), engine.version + 1)
    with pytest.raises(RuntimeError, match="holds no valid weights"):
        engine.generate_batch([Request(PROMPT, 2, 0)], PLAIN)
    engine.load(Weights(policy, engine.dtype), engine.version + 1)
    assert engine.generate_batch([Request(PROMPT, 2, 0)], PLAIN)[0].ids


def test_an_engine_scores_texts_and_compares_weights_bit_for_bit(
    engine: Engine, policy: Any
) -> None:
    """After a push in many buckets. Equal weights differ nowhere; one element differs once."""
    model = tiny.moved(policy, seed=1)
    engine.load(Weights(model, engine.dtype, bucket_bytes=40_000), version := engine.version + 1)
    assert engine.generate_batch([Request(PROMPT, 2, 0)], PLAIN)[0].version == version
    [scored] = engine.score([PROMPT])()
    assert scored == pytest.approx(tiny.score(model, PROMPT[:1], PROMPT[1:], 1.0), abs=1e-4)
    equal = engine.compare(Weights(model, engine.dtype))
    num = sum(parameter.numel() for parameter in model.parameters())
    assert equal.num_different == 0 and equal.num_elements >= num
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-3
    assert engine.compare(Weights(model, engine.dtype)).num_different == 1
