"""The engine on GPUs: same log-probs, exact pushes, memory that comes back, no orphans."""

from __future__ import annotations

import pathlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from selfplay.engines.base import Request
from selfplay.engines.sglang.fast.engine import FastEngine
from selfplay.engines.weights import Weights
from tests.gpu import small
from tests.helpers import processes
from tests.helpers.engine_layout import expected_hashes, held_hashes
from tests.helpers.rare_tokens import rare_draws

HERE = pathlib.Path(__file__).resolve().parent
MIB, GIB = 2**20, 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small.save_config(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="module")
def engine(folder: str) -> Iterator[FastEngine]:
    engine = small.start(folder)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def model(engine: FastEngine) -> PreTrainedModel:
    return small.build(torch.device("cuda"))


def push(model: PreTrainedModel, engine: FastEngine) -> None:
    engine.load(Weights(model, engine.dtype), engine.version + 1)


def wrong_tensors(model: PreTrainedModel, engine: FastEngine) -> tuple[int, int]:
    """How many tensors were compared by hash, and how many of them differ."""
    [wanted], [held] = expected_hashes(model), held_hashes(engine)
    return len(wanted), sum(wanted[name] != held.get(name) for name in wanted)


def test_engine_and_trainer_agree_in_bf16(engine: FastEngine, model: PreTrainedModel) -> None:
    """Mean gap under 0.03 nats; the KL a token, estimated as exp(d) - d - 1, under 0.01."""
    push(model, engine)
    apart_T = small.differences(model, engine)
    assert apart_T.abs().mean() < 0.03
    assert (apart_T.exp() - apart_T - 1).mean() < 0.01


def test_rare_tokens_are_drawn_as_often_as_their_probabilities_say(
    engine: FastEngine, model: PreTrainedModel
) -> None:
    """Within 4.5 standard deviations of the sampling, and 5 % for what bf16 moves at 1/0.2."""
    push(model, engine)
    requests = [Request(prompt, 800, n) for n, prompt in enumerate(small.PROMPTS * 8)]
    for nats in (8.0, 10.0):
        expected, deviation, count = rare_draws(model, engine, requests, 0.2, nats=nats)
        assert expected > 30, nats
        assert abs(count - expected) < 4.5 * deviation + 0.05 * expected, nats


def test_what_auto_chooses_for_a_small_model_changes_no_log_prob(
    engine: FastEngine, folder: str, model: PreTrainedModel
) -> None:
    """Two processes, bursts, sessions and prefill graphs: three turns of 16 games, each turn after
    64 tokens more, are as far from the trainer's log-probs as those of a plain engine."""
    settings = {"processes": 2, "burst_share": 0.25, "sessions": True, "prefill_graphs": True}
    chosen = small.start(folder, **settings)
    try:
        means = []
        for each in (engine, chosen):
            push(model, each)
            apart_T = small.game_differences(model, each)
            assert len(apart_T) == 16 * 3 * 32
            means.append(float(apart_T.abs().mean()))
    finally:
        chosen.close()
    assert max(means) < 0.03
    assert means[1] < 1.5 * means[0]


def test_a_push_changes_every_tensor_to_the_trainers_exactly(
    engine: FastEngine, model: PreTrainedModel
) -> None:
    push(model, engine)
    other = small.build(torch.device("cuda"), seed=1)
    num_tensors, num_wrong = wrong_tensors(other, engine)
    assert num_tensors > 20
    assert num_wrong > num_tensors / 2  # the norms are ones in both
    assert small.differences(other, engine).abs().mean() > 0.1
    push(other, engine)
    assert wrong_tensors(other, engine) == (num_tensors, 0)
    assert small.differences(other, engine).abs().mean() < 0.03


def test_sleep_gives_memory_back_and_waking_needs_a_push(
    engine: FastEngine, model: PreTrainedModel
) -> None:
    awake = small.used_bytes()
    for _ in range(5):
        engine.sleep()
        asleep = small.used_bytes()
        with pytest.raises(RuntimeError, match="the engine sleeps"):
            engine.generate_batch([Request(small.PROMPTS[0], 4, 0)], small.PLAIN)
        engine.wake("weights")
        push(model, engine)
        engine.wake("kv_cache")
        assert small.differences(model, engine).abs().mean() < 0.03
    assert awake - asleep > 10 * GIB
    assert abs(small.used_bytes() - awake) < 512 * MIB


def test_waking_twice_or_out_of_order_does_not_kill_the_process(
    engine: FastEngine, model: PreTrainedModel
) -> None:
    engine.wake("kv_cache")
    engine.sleep()
    engine.sleep()
    engine.wake("kv_cache")
    engine.wake("kv_cache")
    with pytest.raises(RuntimeError, match="weights sleep"):
        push(model, engine)
    engine.wake("weights")
    push(model, engine)
    assert small.differences(model, engine).abs().mean() < 0.03


def test_two_hundred_pushes_hold_memory_flat(engine: FastEngine, model: PreTrainedModel) -> None:
    for _ in range(20):
        push(model, engine)
    after_a_tenth = small.used_bytes()
    for _ in range(180):
        push(model, engine)
    assert small.used_bytes() - after_a_tenth < 64 * MIB


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_trainer_leaves_no_process_and_no_memory(folder: str, number: int) -> None:
    process = processes.start(HERE / "gpu_trainer_script.py", folder, path=(HERE,))
    processes.read_until(process, "MARK training")
    everyone = processes.tree(process)
    assert small.used_bytes(everyone) > GIB
    process.send_signal(number)
    began_s = time.perf_counter()
    assert processes.left(everyone, limit_s=10) == []
    while small.used_bytes(everyone) and time.perf_counter() - began_s < 10:
        time.sleep(0.1)
    assert small.used_bytes(everyone) == 0
    process.communicate(timeout=10)


@pytest.mark.parametrize(
    ("num", "tp", "end"),
    [
        pytest.param(2, 1, "raise", id="fsdp2", marks=pytest.mark.two_gpus),
        pytest.param(4, 2, "kill", id="fsdp2xtp2", marks=pytest.mark.four_gpus),
    ],
)
def test_shards_arrive_exactly_in_wide_engines_and_one_rank_s_end_ends_all(
    num: int, tp: int, end: str, folder: str
) -> None:
    """Engines two GPUs wide, every tensor compared by hash; then rank 1 fails, or is killed, while
    the others wait for it."""
    process = processes.start(
        HERE / "gpu_trainer_script.py", folder, str(tp), end, torchrun=num, path=(HERE,)
    )
    output = processes.read_until(process, "MARK failing")
    everyone = processes.tree(process)[1:]
    assert processes.left(everyone, limit_s=10) == []
    for leader in range(0, num, 2):
        measured = processes.marks(output)[f"wide {leader}"]
        assert measured["wrong"] == []
        assert measured["num_tensors"] > 40
        assert measured["gap"] < 0.03
        assert measured["kl"] < 0.01
        assert measured["grown"] < 64 * MIB
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert small.used_bytes(everyone) == 0


@pytest.mark.parametrize(
    "settings", [{}, {"processes": 2, "sessions": True, "prefill_graphs": True}]
)
def test_deterministic_mode_repeats_a_seed_in_any_batch_and_tells_seeds_apart(
    settings: dict[str, Any], folder: str
) -> None:
    """In games of three turns."""
    engine = small.start(folder, deterministic=True, attention="auto", **settings)
    try:
        push(small.build(torch.device("cuda")), engine)
        prompt = small.PROMPTS[0]
        [alone] = engine.run_games([small.game(prompt, 7)], small.PLAIN)
        crowd = [small.game(prompt, seed) for seed in range(24)]
        crowd += [small.game(other, 99) for other in small.PROMPTS]
        together = [
            [turn.ids for _, turn in turns] for turns in engine.run_games(crowd, small.PLAIN)
        ]
        assert together[7] == [turn.ids for _, turn in alone]
        for turn in range(3):
            assert len({tuple(turns[turn]) for turns in together[:24]}) == 24
    finally:
        engine.close()
