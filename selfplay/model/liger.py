"""liger's fused kernels in a model: where a GPU and the package are there. Knows no tokens."""

from __future__ import annotations

from importlib.util import find_spec

from transformers import PreTrainedModel


def apply_liger(model: PreTrainedModel) -> None:
    """Replace the model's RMSNorm, RoPE and SwiGLU by liger's Triton kernels; before `shard`.

    Norms and MLPs are replaced in this model only. liger can replace RoPE only for all models of
    this architecture in the process, which then have to be on a GPU. Raises ValueError for an
    architecture that liger does not know, ImportError without liger.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ValueError(f"liger must know the architecture, got {kind}; set model.liger to false")
    MODEL_TYPE_TO_APPLY_LIGER_FN[kind](
        rope=True,
        rms_norm=True,
        swiglu=True,
        cross_entropy=False,
        fused_linear_cross_entropy=False,
        model=model,
    )


def liger_is_here() -> bool:
    return find_spec("liger_kernel") is not None
