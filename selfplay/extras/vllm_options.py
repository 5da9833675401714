"""The settings of the vLLM engine (`selfplay/extras/vllm.py`). Imports no torch."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from selfplay.config.hardware import EngineConfig
from selfplay.config.schema import RULES
from selfplay.config.text import show
from selfplay.engines.options import DRAFTS

# Arguments of vLLM that would change what an answer is, and why they are refused.
FIXED_IN_VLLM = {
    "speculative_config": DRAFTS,
    "logprobs_mode": "log-probs are after the temperature",
    "tensor_parallel_size": "an engine has one GPU",
    "pipeline_parallel_size": "an engine has one GPU",
    "data_parallel_size": "an engine has one GPU",
}


@dataclass(frozen=True, slots=True, config=RULES)
class VLLMOptions(EngineConfig):
    """Settings that exist only with engine.kind vllm."""

    mem_fraction: float = Field(default=0.7, ge=0.05, le=0.95)
    """fraction of the free GPU memory taken for weights and KV cache"""
    server_args: dict[str, object] = Field(default_factory=dict)
    """extra arguments of vLLM, under the names of its AsyncEngineArgs; they override the arguments
    set by this project"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Raise ValueError for settings that the engine does not support."""
        if self.tp_size > 1:
            raise ValueError(
                f"engine.tp_size must be 1 with engine.kind vllm, got {self.tp_size}; sglang "
                "splits a model over GPUs"
            )
        for name in FIXED_IN_VLLM.keys() & self.server_args:
            raise ValueError(
                f"engine.server_args must leave out {name}, got {show(self.server_args[name])}: "
                f"{FIXED_IN_VLLM[name]}"
            )
        return self
