"""Weights compared inside the real engine: equal ones show no difference, others always do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from selfplay.engines.base import Request, Sampling
from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.weight_sync import push as sync
from tests.sglang import tiny

SETTINGS = {"dtype": "bfloat16"}  # as on a GPU, so that the comparison includes a cast

PLAIN = Sampling(1.0, (tiny.STOP,))


def names_of(model: Any) -> list[str]:
    return [name for name, _ in sync.named_weights(model)]


def test_equal_weights_differ_nowhere_and_comparing_writes_nothing(
    engine: SGLangEngine, policy: Any
) -> None:
    """Each element is counted once, in one buffer or many. Comparing other weights changes none."""
    num = sum(parameter.numel() for parameter in policy.parameters())
    for bucket_bytes in (2**31, 20_000):
        compared = sync.compare(policy, engine, names_of(policy), bucket_bytes=bucket_bytes)
        # The engine pads its vocabulary from 301 to 320 rows of 64, which count too.
        assert compared == sync.Compared(num + 19 * 64, 0)
    other = tiny.moved(policy, seed=1)
    assert sync.compare(other, engine, names_of(other)).num_different > 0.9 * num
    assert sync.compare(policy, engine, names_of(policy)).num_different == 0
    [answer] = engine.generate([Request(list(range(10, 50)), 8, 0)], PLAIN)
    assert answer.version == engine.version


@pytest.mark.parametrize("layer", ["q_proj", "down_proj", "o_proj", "up_proj"])
def test_one_step_at_the_smallest_rate_shows_in_any_matrix(
    engine: SGLangEngine, policy: Any, layer: str
) -> None:
    """AdamW at 1e-6, the smallest rate in configs/. The step changes few elements in bf16, but some
    in every matrix; the next push sends them."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, weight_decay=0.0)
    ids = torch.arange(10, 110)[None]
    policy(ids, labels=ids).loss.backward()
    optimizer.step()
    name = next(n for n in names_of(policy) if layer in n and n.endswith("weight"))
    assert sync.compare(policy, engine, [name]).num_different > 0
    sync.push(policy, engine, version=engine.version + 1)
    assert sync.compare(policy, engine, names_of(policy)).num_different == 0


def test_weights_two_per_cent_too_large_show_in_every_matrix(
    engine: SGLangEngine, policy: Any
) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.02)
    for name, parameter in policy.named_parameters():
        if parameter.dim() > 1:
            assert sync.compare(policy, engine, [name]).num_different > 0.5 * parameter.numel()
