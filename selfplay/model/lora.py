"""Low-rank adapters (LoRA, arXiv 2106.09685) in the policy: W + alpha / rank * B A, only A and B
trained.

peft's layers are put into the model in place, so that whoever runs the model (the update, the hf
engine) speaks with them. Whoever wants weights under Hugging Face names (a push, an export) takes
them merged, one parameter at a time: a second whole copy never exists. Knows no games and no text.

Shapes: O and I output and input width of a linear layer, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfplay.config import LoraConfig
from selfplay.config.settings import SettingsError
from selfplay.data.seeds import named_seed
from selfplay.distributed import World, full_tensor, plus_product, reshard

NAME = "default"  # peft's own name for the only adapter
A, B = f".lora_A.{NAME}.", f".lora_B.{NAME}."


@dataclass(frozen=True, slots=True)
class Adapters:
    """What a learner's adapters are, and the folder of the weights they stand on."""

    config: LoraConfig
    base: Path


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter as a model without adapters has it, to be computed when it is wanted.

    `layer` is the adapted linear layer whose matrix it is, None for a parameter that is its own.
    """

    base: Tensor
    layer: Any = None

    def merged(self) -> Tensor:
        """W + alpha / rank * B A, sharded like W; every rank must call, for A is gathered."""
        base = self.base.detach()
        if self.layer is None:
            return base
        a_RI = self.layer.lora_A[NAME].weight.detach()
        b_OR = self.layer.lora_B[NAME].weight.detach()
        return plus_product(base, b_OR, a_RI, scale=self.layer.scaling[NAME])


def add_adapters(model: PreTrainedModel, config: LoraConfig, *, seed: int) -> None:
    """Put adapters into the linear layers named in `targets` and freeze all else, in place.

    Before `shard`, also on the meta device, whose adapters `first_value` fills. A is drawn as peft
    draws it and B is 0, so the first policy is the base. Raises SettingsError for a target that the
    model lacks.
    """
    from peft import inject_adapter_in_model  # late: it takes seconds and few runs need it

    check_targets(model, config)
    with torch.random.fork_rng(devices=[]):  # peft's own draws, which are replaced, leave no trace
        inject_adapter_in_model(
            peft_config(config), model, low_cpu_mem_usage=model.device.type == "meta"
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if is_adapter(name) and not parameter.is_meta:
            with torch.no_grad():
                parameter.copy_(first_value(name, parameter.shape, seed=seed))


def check_targets(model: PreTrainedModel, config: LoraConfig) -> None:
    """Raises SettingsError for a target that the model lacks."""
    linear = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    for target in config.targets:
        if target not in linear - {"lm_head"}:
            raise SettingsError(
                f"model.lora.targets must be linear layers of the model's blocks, got {target!r}; "
                f"there are {', '.join(sorted(linear - {'lm_head'}))}"
            )


def first_value(name: str, shape: torch.Size, *, seed: int) -> Tensor:
    """A new adapter's matrix: A uniform within 1 / sqrt(I), B zero; the same on any mesh."""
    if B in name:
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(named_seed(seed, "lora", name))
    return (2.0 * torch.rand(shape, generator=generator) - 1.0) / math.sqrt(shape[1])


def is_adapter(name: str) -> bool:
    return A in name or B in name


def plain_name(name: str) -> str:
    """The name that a parameter of an adapted model has in the model without adapters."""
    return name.replace(".base_layer.", ".")


def plain_weights(model: nn.Module) -> dict[str, Weight]:
    """The parameters of the model without adapters, in its order, each to be merged when wanted.

    For a model that has none these are its parameters.
    """
    layers = {n: m for n, m in model.named_modules() if hasattr(m, "lora_A")}
    found = {}
    for name, parameter in model.named_parameters():
        stem = name.removesuffix(".base_layer.weight")
        if not is_adapter(name):
            found[plain_name(name)] = Weight(parameter, layers.get(stem) if stem != name else None)
    return found


def full_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of the model without adapters, whole and merged, one at a time, under its
    Hugging Face name; tied ones once. Under FSDP all ranks must walk along."""
    reshard(model)
    for name, weight in plain_weights(model).items():
        yield name, full_tensor(weight.merged())


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, the model is its base: adapters are weighed 0. What has no adapters stays as it is.

    Their weights are not touched, and neither is what a backward pass outside will recompute.
    """
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "lora_A")]
    for layer in layers:
        layer.set_scale(NAME, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(NAME, 1.0)


@contextmanager
def named_dropout(*names: object, config: LoraConfig | None, world: World) -> Iterator[None]:
    """Dropout inside draws by these names and the rank; the global generators stay as they were."""
    if config is None or config.dropout == 0.0:
        yield
        return
    devices = [world.device] if world.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(named_seed(*names, "dropout", world.dp_rank))
        yield


def export_adapters(
    model: PreTrainedModel, adapters: Adapters, folder: Path, *, world: World
) -> None:
    """Write the adapters in peft's format, which names the folder of the weights they stand on:
    transformers loads the pair by this folder's name. All ranks must call; rank 0 writes."""
    tensors = {}
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            stored = f"base_model.model.{name.replace(f'.{NAME}.', '.')}"
            tensors[stored] = full_tensor(parameter.detach()).cpu().contiguous()
    if world.rank != 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    described = peft_config(adapters.config)
    described.base_model_name_or_path = str(adapters.base.resolve())
    described.inference_mode = True
    described.save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def peft_config(config: LoraConfig) -> Any:
    """The settings in peft's words."""
    from peft import LoraConfig as PeftLoraConfig

    return PeftLoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=list(config.targets),
    )
