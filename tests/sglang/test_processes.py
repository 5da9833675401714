"""An engine of two processes with the real SGLang: games, pushes, checks, faults, restarts."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import pytest
import torch

from selfplay.engines.base import Ask, Completion, Request, Sampling
from selfplay.engines.sglang import weights as sglang_push
from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.errors import EngineFault
from selfplay.model.lora import plain_weights
from selfplay.weight_sync import push as sync
from selfplay.weight_sync.sync_check import FIRST_TURNS, RECHECK_TURNS
from tests.sglang import tiny

SETTINGS = {"processes": 2}

PLAIN = Sampling(1.0, (tiny.STOP,))
PROMPTS = [tuple(range(10 + n, 60 + n)) for n in range(4)]


def game(prompt: tuple[int, ...]) -> Callable[[Ask], Awaitable[list[tuple[list[int], Completion]]]]:
    """Three turns of one seat: every prompt and its completion."""

    async def play(ask: Ask) -> list[tuple[list[int], Completion]]:
        ids, turns = list(prompt), []
        for _ in range(3):
            completion = await ask(Request(ids, 8, 0))
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
    for asker, of_process in zip(engine._askers, by_process, strict=True):
        ask = asker.ask

        async def noted(
            ids: Any, *words: Any, _ask: Any = ask, _of: Any = of_process, **named: Any
        ):
            _of.append(tuple(ids))
            return await _ask(ids, *words, **named)

        asker.ask = noted  # type: ignore[method-assign]
    engine.generate([Request(prompt, 1, 0) for prompt in PROMPTS], PLAIN)  # the prompts are cached
    for of_process in by_process:
        of_process.clear()
    before = engine.served.num_cached_tokens
    played = engine.stream([game(prompt) for prompt in PROMPTS for _ in range(3)], PLAIN)
    for of_process in by_process:
        counts.append({prompt: sum(ids[:50] == prompt for ids in of_process) for prompt in PROMPTS})
        assert len(of_process) == 18  # half of 4 groups x 3 games x 3 turns
    for prompt in PROMPTS:
        assert sorted(count[prompt] for count in counts) == [0, 9]
    # Every turn's prompt but its last new tokens was computed before by the same process.
    assert engine.served.num_cached_tokens - before >= 36 * 49
    for turns in played:
        for ids, completion in turns:
            assert tiny.worst_mismatch(policy, ids, completion) < 1e-4
    for asker in engine._askers:
        del asker.ask  # type: ignore[attr-defined]


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


def test_a_killed_process_is_a_fault_and_a_restart_starts_all(
    engine: SGLangEngine, policy: Any
) -> None:
    schedulers = [
        p.pid
        for p in engine._loop.processes
        if "scheduler" in " ".join(psutil.Process(p.pid).cmdline())
    ]
    assert len(schedulers) == 2

    async def dies(ask: Ask) -> None:
        await ask(Request(PROMPTS[0], 4, 0))
        os.kill(schedulers[1], signal.SIGKILL)
        while True:
            await ask(Request(PROMPTS[1], 4, 0))

    with pytest.raises(EngineFault, match=str(schedulers[1])):
        engine.stream([dies, game(PROMPTS[1])], PLAIN)
    with pytest.raises(EngineFault):
        engine.generate([Request(PROMPTS[0], 4, 0)], PLAIN)
    engine.restart()
    assert not set(schedulers) & {p.pid for p in engine._loop.processes}
    sync.push(policy, engine, version=1, dtype=torch.float32)
    requests = [Request(prompt, 6, 0) for prompt in PROMPTS]
    for request, completion in zip(requests, engine.generate(requests, PLAIN), strict=True):
        assert completion.version == 1
        assert tiny.worst_mismatch(policy, list(request.prompt_ids), completion) < 1e-4
