"""engine.exact on a GPU: engine and trainer have the same bits in every step of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from selfplay.engines.sglang.launch import pick_attention_backend
from tests.gpu import small

SHAPES = {  # an architecture and a width; four heads
    "qwen2, heads of 64": ("qwen2", 256),
    "qwen2, heads of 128": ("qwen2", 512),
    "qwen3, heads of 64": ("qwen3", 256),
    "qwen3, heads of 128": ("qwen3", 512),
}


@pytest.mark.one_gpu
@pytest.mark.parametrize(("arch", "width"), SHAPES.values(), ids=SHAPES)
def test_every_log_prob_has_the_engines_bits(arch: str, width: int, tmp_path: Path) -> None:
    """Games of several turns, whose prompts the update shares, in three steps that change the
    weights. Some transcripts are longer than a block of 128 keys."""
    if pick_attention_backend("cuda") != "fa3":
        pytest.skip("needs FlashAttention 3 of sglang-kernel")
    words = ("engine.exact=true", "engine.attention=auto", "steps=3", "save_every=3")
    shape = (f"model.scratch.arch={arch}", f"model.scratch.width={width}")
    small.run(tmp_path / "run", *words, *shape)
    for step in small.steps_of(tmp_path / "run", 3):
        assert step["grad_norm"] > 0
        assert step["mismatch_max"] == 0.0 and step["mismatch_ess"] == 1.0
        assert step["sync_check_mismatch"] == 0.0
