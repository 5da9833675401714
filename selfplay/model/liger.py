"""liger's fused kernels in a model, for GPUs with the package installed. Knows no tokens."""

from __future__ import annotations

from importlib.util import find_spec

from transformers import PreTrainedModel


def apply_liger(model: PreTrainedModel) -> None:
    """Replace the model's RMSNorm, RoPE and SwiGLU with liger's Triton kernels; before `shard`.

    Norms and MLPs are replaced in this model only. RoPE is replaced for all models of this
    architecture in the process, which must then be on a GPU. Raises ValueError for an architecture
    that liger does not support, ImportError without liger.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ValueError(
            f"liger does not support the architecture {kind}; set model.liger to false"
        )
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
