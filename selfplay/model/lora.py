"""Low-rank adapters (LoRA, arXiv 2106.09685) in the policy: W + alpha / rank * B A, with only A and
B trained.

peft's layers are inserted into the model in place; the update and the hf engine run them with
`adapted_forward`. Weight sync and export read weights under Hugging Face names, merged one
parameter at a time, so a second full copy never exists.

Several policies can share a base: the model then has a set of adapters for each, under the policy's
name. Functions that read weights take that name. The model computes with the set that was last
chosen by `use_adapters`, also when a backward pass recomputes.

Shapes: N tokens, O and I output and input width of a linear layer, R rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfplay.config import LoraConfig
from selfplay.data.seeds import named_seed
from selfplay.distributed import World, full_tensor, plus_product, reshard
from selfplay.errors import SettingsError
from selfplay.model.hub import write_base

ONLY = "default"  # peft's name for the adapters of a single policy, whose name is ""
_MATRIX = re.compile(r"(.+\.lora_([AB]))\.([^.]+)\.weight")
MERGED_FROM = 8  # tokens per unit of rank; above, merging costs at most 1/8 of W's own product


@dataclass(frozen=True, slots=True)
class Adapters:
    """A learner's adapter settings, the folder of the base weights, the policy that the model has
    them for ("" for a single one), and the digest of the base weights that were loaded."""

    config: LoraConfig
    base: Path
    policy: str = ""
    digest: str = ""


@dataclass(slots=True)
class AdapterSets:
    """A model's sets of adapters, by peft's names, and which one it computes with: `used`, or none
    while `off`."""

    names: list[str]
    used: str
    off: bool = False

    @classmethod
    def of(cls, model: nn.Module) -> AdapterSets | None:
        """The sets that `add_adapters` has added to a model; None without."""
        return getattr(model, "adapter_sets", None)


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of the model without adapters, merged on request.

    `base` is the parameter. `layer` is its linear layer if that has adapters in the set of this
    name, otherwise None.
    """

    base: Tensor
    layer: Any = None
    name: str = ONLY

    def merged(self) -> Tensor:
        """W + alpha / rank * B A, sharded like W. Gathers A, so every rank must call."""
        base = self.base.detach()
        if self.layer is None:
            return base
        a_RI = self.layer.lora_A[self.name].weight.detach()
        b_OR = self.layer.lora_B[self.name].weight.detach()
        return plus_product(base, b_OR, a_RI, scale=self.layer.scaling[self.name])


def add_adapters(
    model: PreTrainedModel, config: LoraConfig, *, seed: int, policy: str = ""
) -> None:
    """Add the adapters of a policy to the linear layers named in `targets` and freeze everything
    but adapters, in place.

    Call it before `shard`, once for each policy. On the meta device `first_value` fills the
    adapters later. A is drawn from peft's distribution and B is 0, so the first policy is the base.
    Raises SettingsError for a target that the model does not have.
    """
    from peft import inject_adapter_in_model  # here, because the import takes seconds

    check_targets(model, config)
    added = _set_name(policy)
    vars(model).pop("peft_config", None)  # of an earlier set: peft would warn of a second one
    with torch.random.fork_rng(devices=[]):  # peft's own draws are replaced below
        inject_adapter_in_model(
            peft_config(config), model, added, low_cpu_mem_usage=model.device.type == "meta"
        )
    sets = AdapterSets.of(model) or AdapterSets([], added)
    sets.names.append(added)
    model.adapter_sets = sets
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.adapter_sets = sets
            module.forward = MethodType(adapted_forward, module)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if is_adapter(name, policy) and not parameter.is_meta:
            with torch.no_grad():
                parameter.copy_(first_value(name, parameter.shape, seed=seed))


def adapted_forward(layer: Any, x: Tensor) -> Tensor:
    """x [..., I] times W + scale B A, [..., O], instead of peft's forward.

    The layer's matrices are merged first, as for the engine, which then plays the same rounded
    weights, and nothing of size N x O is scaled or added. For few tokens, as in a decode step of
    the hf engine, that product costs more than multiplying them by A and B in turn.
    """
    base, name = layer.base_layer, layer.adapter_sets.used
    if layer.adapter_sets.off or name not in layer.lora_A:
        out: Tensor = base(x)
        return out
    a_RI, b_OR = layer.lora_A[name].weight, layer.lora_B[name].weight
    scale = layer.scaling[name]
    if x.numel() < MERGED_FROM * len(a_RI) * x.shape[-1]:
        out = base(x) + functional.linear(functional.linear(x, a_RI), b_OR) * scale
    else:
        out = _Merged.apply(x, base.weight, base.bias, a_RI, b_OR, scale)
    return out


class _Merged(torch.autograd.Function):
    """x (W + scale B A)^T + bias with gradients of x, A and B; W and bias are frozen.

    The merged matrix is not kept: the backward pass, which needs it for x, merges again.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_OI: Tensor, bias: Tensor | None, a_RI: Tensor, b_OR: Tensor,
        scale: float,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight_OI, a_RI, b_OR)
        ctx.scale = scale
        return functional.linear(x, _merge(weight_OI, a_RI, b_OR, scale), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI, a_RI, b_OR = ctx.saved_tensors
        grad_NO, dtype = grads[0].flatten(0, -2), grads[0].dtype  # lower than W's under autocast
        x_NI = x.flatten(0, -2).to(dtype)
        grad_x = None
        if ctx.needs_input_grad[0]:
            merged_OI = _merge(weight_OI, a_RI, b_OR, ctx.scale).to(dtype)
            grad_x = (grad_NO @ merged_OI).view(x.shape).to(x.dtype)
        grad_a = (grad_NO @ b_OR.to(dtype)).mT @ x_NI * ctx.scale
        grad_b = grad_NO.mT @ (x_NI @ a_RI.to(dtype).mT) * ctx.scale
        return grad_x, None, None, grad_a.to(a_RI.dtype), grad_b.to(b_OR.dtype), None


def _merge(weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
    """W + scale B A, rounded once to W's dtype."""
    with torch.autocast(weight_OI.device.type, enabled=False):
        return torch.addmm(weight_OI, b_OR, a_RI, alpha=scale)


def check_targets(model: PreTrainedModel, config: LoraConfig) -> None:
    """Raise SettingsError for a target that the model does not have."""
    every = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".lora_" not in n]
    linear = {name.removesuffix(".base_layer").rpartition(".")[2] for name in every}
    for target in config.targets:
        if target not in linear - {"lm_head"}:
            raise SettingsError(
                f"model.lora.targets must be linear layers of the model's blocks, got {target!r}; "
                f"available: {', '.join(sorted(linear - {'lm_head'}))}"
            )


def check_mergeable(model: PreTrainedModel, own: set[str], *, folder: str) -> None:
    """Raise SettingsError for another program's adapters that `Weight.merged` cannot merge into the
    model's `own` parameters: of an embedding or a tied head, with biases, or whole modules."""
    names = {name for name, _ in model.named_parameters()}
    others = {n for n in names if plain_name(n) not in own and not is_adapter(n)}
    head = model.get_output_embeddings()
    if hasattr(head, "lora_A") and model.config.get_text_config().tie_word_embeddings:
        others.add("lm_head, whose weight is also the embedding's")
    if others:
        raise SettingsError(
            f"{folder} must hold pairs of matrices for linear layers, as model.lora trains them, "
            f"got {min(others)}; merge the adapters with the program that trained them"
        )


def first_value(name: str, shape: torch.Size, *, seed: int) -> Tensor:
    """The initial matrix of an adapter: A uniform in ±1 / sqrt(I), B zero; the same on any mesh and
    for every policy."""
    found = _MATRIX.fullmatch(name)
    assert found is not None
    if found[2] == "B":
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(named_seed(seed, "lora", f"{found[1]}.{ONLY}.weight"))
    return (2.0 * torch.rand(shape, generator=generator) - 1.0) / math.sqrt(shape[1])


def is_adapter(name: str, policy: str | None = None) -> bool:
    """Whether a parameter of this name is a matrix of adapters: of any, or of a policy's."""
    found = _MATRIX.fullmatch(name)
    return found is not None and (policy is None or found[3] == _set_name(policy))


def own_parameters(model: nn.Module, policy: str = "") -> dict[str, nn.Parameter]:
    """What a policy trains, by name in the model's order: its adapters if the model has any,
    otherwise all parameters that are not frozen."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {n: p for n, p in trained.items() if is_adapter(n, policy) or not is_adapter(n)}


def _set_name(policy: str, model: nn.Module | None = None) -> str:
    """peft's name for the adapters of a policy, which `model` must have if it has any. Unlike a
    policy's, it is never the name of an attribute of peft's dictionaries, such as "values"."""
    name = f"policy_{policy}" if policy else ONLY
    sets = None if model is None else AdapterSets.of(model)
    assert sets is None or name in sets.names, f"adapters of {name}, the model has {sets.names}"
    return name


def plain_name(name: str) -> str:
    """A parameter's name in the model without adapters."""
    return name.replace(".base_layer.", ".")


def plain_weights(model: nn.Module, policy: str = "") -> dict[str, Weight]:
    """The parameters of the model without adapters, in its order, each merged on request with the
    adapters of `policy`."""
    own = _set_name(policy, model)
    layers = {n: m for n, m in model.named_modules() if own in getattr(m, "lora_A", ())}
    weights = {}
    for name, parameter in model.named_parameters():
        stem = name.removesuffix(".base_layer.weight")
        if not is_adapter(name):
            layer = layers.get(stem) if stem != name else None
            weights[plain_name(name)] = Weight(parameter, layer, own)
    return weights


def full_weights(model: nn.Module, policy: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every full parameter of the model with the adapters of `policy` merged, one at a time, by
    Hugging Face name; tied ones once. Under FSDP all ranks must iterate together."""
    reshard(model)
    for name, weight in plain_weights(model, policy).items():
        yield name, full_tensor(weight.merged())


def use_adapters(model: nn.Module, policy: str) -> None:
    """Have the model compute with the adapters of `policy` from now on, if it has adapters.

    Call it before each pass: another policy may have computed since. It stays after the pass,
    because the backward pass may recompute it.
    """
    sets = AdapterSets.of(model)
    if sets is not None:
        sets.used = _set_name(policy, model)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside the block, the model computes without adapters. A backward pass outside the block
    recomputes with them."""
    sets = AdapterSets.of(model)
    if sets is not None:
        sets.off = True
    try:
        yield
    finally:
        if sets is not None:
            sets.off = False


def export_adapters(
    model: PreTrainedModel,
    adapters: Adapters,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    *,
    world: World,
) -> None:
    """Write the adapters in peft's format, the base's digest and the tokenizer. The format names
    the folder of the base weights, so transformers loads both from here. All ranks must call; rank
    0 writes."""
    tensors = {}
    for name, parameter in model.named_parameters():
        if is_adapter(name, adapters.policy):
            stored = _MATRIX.sub(r"base_model.model.\1.weight", name)
            tensors[stored] = full_tensor(parameter.detach()).cpu().contiguous()
    if world.rank != 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    exported = peft_config(adapters.config)
    exported.base_model_name_or_path = str(adapters.base.resolve())
    exported.inference_mode = True
    exported.save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    write_base(folder, adapters.base, adapters.digest)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def peft_config(config: LoraConfig) -> Any:
    """The settings as a config of peft."""
    from peft import LoraConfig as PeftLoraConfig

    return PeftLoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=list(config.targets),
    )
