"""The engines of two policies on the real vLLM: the claims of `helpers/pair_claims.py`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.pair_claims import *  # noqa: F403
from tests.helpers.pair_claims import Kind
from tests.vllm import tiny


def be_patient(engine: Any, seconds: float) -> None:
    engine._timeout_s = seconds


@pytest.fixture(scope="module")
def kind() -> Kind:
    return Kind(
        start=tiny.start,
        process=lambda engine: engine._children[0].pid,
        children=lambda engine: {process.pid for process in engine._children},
        num_turns=lambda engine: engine.num_requests,
        be_patient=be_patient,
        settings={"engine.kind": "vllm", "model.scratch.heads": 1, "model.scratch.kv_heads": 1},
        warm=tiny.RUN_HEADS,
        heads=lambda hidden_size: {  # of 32 dimensions
            "num_attention_heads": hidden_size // 32,
            "num_key_value_heads": 1,
        },
    )
