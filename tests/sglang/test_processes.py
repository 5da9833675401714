"""An engine of two processes with the real SGLang: games, pushes, checks."""

from __future__ import annotations

from typing import Any

import torch

from selfplay.engines.base import Completion, GameCoroutine, Generate, Request, Sampling
from selfplay.engines.sglang import weights as sglang_push
from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.model.lora import plain_weights
from selfplay.weight_sync import push as sync
from selfplay.weight_sync.sync_check import FIRST_TURNS, RECHECK_TURNS
from tests.sglang import tiny

SETTINGS = {"processes": 2}

PLAIN = Sampling(1.0, (tiny.STOP,))
PROMPTS = [tuple(range(10 + n, 60 + n)) for n in range(4)]


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


def wrong_elements(model: Any, engine: SGLangEngine) -> int:
    names = [name for name, _ in sync.named_weights(model)]
    return sync.compare(model, engine, names, dtype=torch.float32).num_different


def test_a_group_s_games_share_a_process_its_cache_and_the_true_logprobs(
    engine: SGLangEngine, policy: Any
) -> None:
    by_process: list[list[Any]] = [[], []]
    counts = []
    for sender, of_process in zip(engine._senders, by_process, strict=True):
        send = sender.send

        async def noted(
            ids: Any, *words: Any, _send: Any = send, _of: Any = of_process, **named: Any
        ):
            _of.append(tuple(ids))
            return await _send(ids, *words, **named)

        sender.send = noted  # type: ignore[method-assign]
    engine.generate([Request(prompt, 1, 0) for prompt in PROMPTS], PLAIN)  # the prompts are cached
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
            assert tiny.worst_mismatch(policy, ids, completion) < 1e-4
    for sender in engine._senders:
        del sender.send  # type: ignore[attr-defined]


def test_the_processes_sample_from_streams_of_their_own(engine: SGLangEngine, policy: Any) -> None:
    answers = engine.generate([Request(prompt, 20, 0) for prompt in PROMPTS[:2]], PLAIN)
    again = engine.generate([Request(PROMPTS[0], 20, 0)] * 2, PLAIN)
    assert answers[0].ids != answers[1].ids and again[0].ids != again[1].ids


def test_a_push_reaches_every_process_and_a_process_without_it_is_found(
    engine: SGLangEngine, policy: Any
) -> None:
    assert wrong_elements(policy, engine) == 0
    moved = tiny.moved(policy, seed=3)
    in_both = wrong_elements(moved, engine)
    assert in_both > 0 and in_both % 2 == 0
    sync.push(moved, engine, version=engine.version + 1, dtype=torch.float32)
    assert wrong_elements(moved, engine) == 0
    send = engine._send
    name, weight = next(iter(plain_weights(policy).items()))
    shape = weight.base.shape
    flat = weight.base.detach().flatten() + 1.0
    right = plain_weights(moved)[name].base.detach().flatten()
    payloads = [
        sglang_push.serialise(values, [name], [shape]) for values in (right, flat.contiguous())
    ]
    send(payloads, load_format="flattened_bucket", flush_cache=True, weight_version=None)()
    assert wrong_elements(moved, engine) == right.numel()  # of the second process alone
    texts = [
        [*PROMPTS[0], *range(n + 10, n + 20)] for n in range(2 * (FIRST_TURNS + RECHECK_TURNS))
    ]
    scores = engine.begin_scoring(texts)()
    wrong = [
        max(
            abs(a - b)
            for a, b in zip(score, tiny.score(moved, text[:1], text[1:], 1.0), strict=True)
        )
        > 1e-3
        for text, score in zip(texts, scores, strict=True)
    ]
    assert wrong == [False, True] * (FIRST_TURNS + RECHECK_TURNS)
