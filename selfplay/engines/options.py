"""The settings of the built-in engines, in addition to those of every engine. Imports no torch.

They are part of the section `engine`; `engine.kind` selects the class. `check` raises ValueError
for settings of other sections that do not fit.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from selfplay.config import Config
from selfplay.config.hardware import EngineConfig
from selfplay.config.schema import RULES
from selfplay.config.text import show

Auto = Literal["auto"]

DRAFTS = "the log-probs of speculative decoding's drafts are not checked"
# Settings that need SGLang's private names, and their value without them.
NEED_FAST: dict[str, Any] = {
    "processes": 1,
    "burst_share": 0.0,
    "sessions": False,
    "prefill_graphs": False,
    "deterministic": False,
    "exact": False,
}


@dataclass(frozen=True, slots=True, config=RULES)
class HFOptions(EngineConfig):
    """Settings that exist only with engine.kind hf."""

    device_map: Literal["auto"] | None = None
    """auto: outside of training, accelerate splits the models over all GPUs of this process, then
    the host's memory and disk; null: each model is on one device"""


@dataclass(frozen=True, slots=True, config=RULES)
class SGLangOptions(EngineConfig):
    """Settings that exist only with engine.kind sglang."""

    mem_fraction: float = Field(default=0.7, ge=0.05, le=0.95)
    """fraction of the free GPU memory taken for weights and KV cache"""
    attention: Literal["auto", "fa3", "flashinfer", "triton"] = "auto"
    """attention backend"""
    fast: bool = True
    """use private names of SGLang for speed (selfplay/engines/sglang/fast/private.py lists them);
    false, or an SGLang that lacks one of them: public calls only, one process, slower"""
    processes: Annotated[int, Field(ge=1, le=16)] | Auto = "auto"
    """engines on one GPU, for a small model: each has a scheduler on its own CPU core, a copy of
    the weights and an equal part of engine.mem_fraction, engine.max_batch and the games; above
    1 only with engine.tp_size=1; auto chooses by the model's size, the cores, the games of a step
    and rollout.max_new_tokens"""
    burst_share: Annotated[float, Field(ge=0.0, le=1.0)] | Auto = "auto"
    """hold requests back until their number is this share of the requests in SGLang, then send
    them together, so that their prefills share a batch and interrupt decoding less often; 0 sends
    each at once; auto follows the processes and, after the first rollout, its turns' length"""
    sessions: bool | Auto = "auto"
    """keep each seat's context in SGLang between its turns (a streaming session), so that a
    turn sends only its new tokens and skips the prefix cache, which saves scheduler time;
    sessions fill at most 0.8 of the KV cache, and further games run without; not with branches,
    nor with a chat template that rewrites old turns; auto uses them wherever possible"""
    prefill_graphs: bool | Auto = "auto"
    """capture prefills of at most 2,048 tokens as CUDA graphs, which saves scheduler time in each
    turn after the first; auto does so for models of at most 3B weights"""
    max_cache_tokens: int = Field(default=0, ge=0, le=1_000_000_000)
    """size of the KV cache in tokens; 0 uses all memory that engine.mem_fraction leaves"""
    deterministic: bool = False
    """use SGLang's batch-invariant kernels and a seed for each request; slower"""
    exact: bool = False
    """make the trainer's log-probs equal the engine's bit for bit, for qwen2 and qwen3 in bf16 on a
    Hopper GPU: both compute with SGLang's batch-invariant kernels, and any difference stops the
    run; implies engine.deterministic; slower"""
    server_args: dict[str, object] = Field(default_factory=dict)
    """extra arguments of SGLang's server, under SGLang's names; they override the arguments set
    by this project"""

    @property
    def kernels(self) -> str:
        return "selfplay.extras.exact" if self.exact else ""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Raise ValueError for engine settings that contradict each other."""
        if self.processes not in ("auto", 1) and self.tp_size > 1:
            raise ValueError(
                f"engine.processes must be 1 with engine.tp_size {self.tp_size}, got "
                f"{self.processes}: several engines can share only a single GPU"
            )
        for name in (name for name in self.server_args if name.startswith("speculative_")):
            raise ValueError(
                f"engine.server_args must leave out {name}, got {show(self.server_args[name])}: "
                f"{DRAFTS}"
            )
        for name, plain in () if self.fast else NEED_FAST.items():
            if (value := getattr(self, name)) not in ("auto", plain):
                raise ValueError(
                    f"engine.{name} must be {show(plain)} with engine.fast false, got {show(value)}"
                )
        if self.exact and self.tp_size > 1:
            raise ValueError(f"engine.tp_size must be 1 with engine.exact, got {self.tp_size}")
        if self.exact and self.attention not in ("auto", "fa3"):
            raise ValueError(
                f"engine.attention must be auto or fa3 with engine.exact, got {self.attention}"
            )
        return self

    def check(self, config: Config) -> None:
        """Raise ValueError for settings of other sections that do not fit."""
        rollout, model = config.rollout, config.model
        if rollout.forks and self.sessions is True:
            raise ValueError(
                f"engine.sessions must be false with rollout.play {rollout.play}, got true: a fork "
                "continues from a turn that only the session of the original game holds"
            )
        if self.exact and (model.lora is not None or config.parallel.tp > 1):
            raise ValueError(
                "engine.exact must be false with model.lora and with parallel.tp above 1, got "
                "true: the engine multiplies by merged, unsplit weights, which rounds differently"
            )
        if self.exact and model.dtype != "bfloat16":
            raise ValueError(f"model.dtype must be bfloat16 with engine.exact, got {model.dtype}")


@dataclass(frozen=True, slots=True, config=RULES)
class ChosenEngine(SGLangOptions):
    """SGLang's settings with each `auto` replaced (`selfplay/engines/sglang/choose.py`)."""

    processes: int = 1
    burst_share: float = 0.0
    sessions: bool = False
    prefill_graphs: bool = False
    adapts: bool = False
    """whether burst_share is adapted to the turns of the first rollout"""
    alone: bool = False
    """whether it has an event loop of its own, which another thread may run"""

    @property
    def copies(self) -> int:
        return self.processes


# vLLM's are read only for a run with it.
OPTIONS = {
    "hf": HFOptions,
    "sglang": SGLangOptions,
    "vllm": "selfplay.extras.vllm_options:VLLMOptions",
}
