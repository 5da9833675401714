"""An engine of two processes in bf16, as on a GPU: games, pushes, weights compared bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from selfplay.engines.base import Completion, GameCoroutine, Generate, Request, Sampling
from selfplay.engines.sglang.fast.engine import FastEngine, of_all_ranks
from selfplay.engines.weights import Bucket, Compared, Weights
from selfplay.model.lora import plain_weights
from selfplay.weight_sync.sync_check import FIRST_TURNS, RECHECK_TURNS
from tests.sglang import tiny

pytestmark = pytest.mark.fast_engine

PLAIN = Sampling(1.0, (tiny.STOP,))
PROMPTS = [tuple(range(10 + n, 60 + n)) for n in range(4)]
ROUNDING = 0.01  # nats; bf16 differs from fp32 by 0.002, another context by 0.1 or more


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastEngine]:
    engine = tiny.start(tiny.save(tmp_path_factory.mktemp("model")), dtype="bfloat16", processes=2)
    yield engine
    engine.close()


def game(prompt: tuple[int, ...]) -> GameCoroutine:
    """Three turns of one seat: every prompt and its completion."""

    async def play(generate: Generate) -> list[tuple[list[int], Completion]]:
        ids, turns = list(prompt), []
        for _ in range(3):
            completion = await generate(Request(ids, 8, 0))
            turns.append((ids, completion))
            ids = [*ids, *completion.ids, 7, 8, 9]
        return turns

    return play


def names_of(model: Any) -> list[str]:
    return list(plain_weights(model))


def wrong_elements(model: Any, engine: FastEngine) -> int:
    """How many elements differ in both processes together."""
    return engine.compare(Weights(model, engine.dtype)).num_different


def test_a_group_s_games_share_a_process_its_cache_and_the_true_logprobs(
    engine: FastEngine, policy: Any
) -> None:
    by_process: list[list[Any]] = [[], []]
    counts = []
    for sender, of_process in zip(engine.senders, by_process, strict=True):
        send = sender.send

        async def noted(
            ids: Any, *words: Any, _send: Any = send, _of: Any = of_process, **named: Any
        ):
            _of.append(tuple(ids))
            return await _send(ids, *words, **named)

        sender.send = noted  # type: ignore[method-assign]
    engine.generate_batch(
        [Request(prompt, 1, 0) for prompt in PROMPTS], PLAIN
    )  # the prompts are cached
    for of_process in by_process:
        of_process.clear()
    before = engine.counters.num_cached_tokens
    played = engine.run_games([game(prompt) for prompt in PROMPTS for _ in range(3)], PLAIN)
    for of_process in by_process:
        counts.append({prompt: sum(ids[:50] == prompt for ids in of_process) for prompt in PROMPTS})
        assert len(of_process) == 18  # half of 4 groups x 3 games x 3 turns
    for prompt in PROMPTS:
        assert sorted(count[prompt] for count in counts) == [0, 9]
    # Every turn's prompt but its last new tokens was computed before by the same process.
    assert engine.counters.num_cached_tokens - before >= 36 * 49
    for turns in played:
        for ids, completion in turns:
            assert tiny.worst_mismatch(policy, ids, completion) < ROUNDING
    for sender in engine.senders:
        del sender.send  # type: ignore[attr-defined]


def test_the_processes_sample_from_streams_of_their_own(engine: FastEngine, policy: Any) -> None:
    answers = engine.generate_batch([Request(prompt, 20, 0) for prompt in PROMPTS[:2]], PLAIN)
    again = engine.generate_batch([Request(PROMPTS[0], 20, 0)] * 2, PLAIN)
    assert answers[0].ids != answers[1].ids and again[0].ids != again[1].ids


def test_a_push_reaches_every_process_and_a_process_without_it_is_found(
    engine: FastEngine, policy: Any
) -> None:
    assert wrong_elements(policy, engine) == 0
    moved = tiny.moved(policy, seed=3)
    in_both = wrong_elements(moved, engine)
    assert in_both > 0 and in_both % 2 == 0
    engine.load(Weights(moved, engine.dtype), engine.version + 1)
    assert wrong_elements(moved, engine) == 0
    name, weight = next(iter(plain_weights(moved).items()))
    right = weight.base.detach().flatten().bfloat16()
    buffers = right, right + 1  # which live until the engine has answered
    sent = [Bucket(values, {name: weight.base.shape}) for values in buffers]
    payloads = [payload for one in sent for payload in of_all_ranks(one, "", None, num=1)]
    with engine._update_open("a test"):
        engine._loop.run(engine.read(payloads), what="a test")
    engine.flush_cache("a test")
    assert wrong_elements(moved, engine) == right.numel()  # of the second process alone
    num = 2 * (FIRST_TURNS + RECHECK_TURNS)
    texts = [[*PROMPTS[0], *range(n + 10, n + 20)] for n in range(num)]
    apart = []
    for text, score in zip(texts, engine.score(texts)(), strict=True):
        own = tiny.score(moved, text[:1], text[1:], 1.0)
        apart.append(max(abs(a - b) for a, b in zip(score, own, strict=True)))
    assert max(apart[::2]) < 0.1 < min(apart[1::2])


def test_equal_weights_differ_nowhere_and_comparing_writes_nothing(
    engine: FastEngine, policy: Any
) -> None:
    """Each element is counted once, in one buffer or many. Comparing other weights changes none."""
    num = sum(parameter.numel() for parameter in policy.parameters())
    for bucket_bytes in (2**31, 20_000):
        compared = engine.compare(Weights(policy, engine.dtype, bucket_bytes=bucket_bytes))
        # Each process pads its vocabulary from 301 to 320 rows of 64, which count too.
        assert compared == Compared(2 * (num + 19 * 64), 0)
    assert wrong_elements(tiny.moved(policy, seed=1), engine) > 0.9 * 2 * num
    assert wrong_elements(policy, engine) == 0
    [answer] = engine.generate_batch([Request(PROMPTS[0], 8, 0)], PLAIN)
    assert answer.version == engine.version


def test_one_step_at_the_smallest_rate_shows_in_any_matrix(engine: FastEngine, policy: Any) -> None:
    """AdamW at 1e-6, the smallest rate in configs/. The step changes few elements in bf16, but some
    in every matrix; the next push sends them."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, weight_decay=0.0)
    ids = torch.arange(10, 110)[None]
    policy(ids, labels=ids).loss.backward()
    optimizer.step()
    for name, parameter in policy.named_parameters():
        if parameter.dim() > 1:
            assert engine.compare(Weights(policy, engine.dtype, names=[name])).num_different > 0, (
                name
            )
    engine.load(Weights(policy, engine.dtype), engine.version + 1)
    assert wrong_elements(policy, engine) == 0
