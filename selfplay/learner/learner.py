"""The learner: policy, optimizer and reference, and their forward passes on a micro-batch.

Shapes: M trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfplay.chat.rendering import Rendering
from selfplay.config import Config, LoraConfig
from selfplay.config.player_spec import Spec
from selfplay.distributed import (
    World,
    all_reduce_max,
    all_reduce_sum,
    gather_objects,
    local_part,
    on_first_rank,
)
from selfplay.errors import SettingsError
from selfplay.learner.batch import MicroBatch
from selfplay.learner.method import Ask, Method, Parts, Trained, make_methods
from selfplay.learner.optimizer import make_optimizer
from selfplay.model.hub import weights_digest
from selfplay.model.lora import Adapters, use_adapters, without_adapters
from selfplay.model.policy import DTYPES, liger_is_here, load_sharded, policy_logprobs

# Every n-th layer is recomputed in the backward pass, by parallel.checkpointing.
RECOMPUTED = {"none": 0, "half": 2, "full": 1}


class Base(NamedTuple):
    """The folder of a policy's first weights and how a learner holds them. Policies with equal ones
    share what they do not train: the model of their adapters, or the reference."""

    weights: Path
    dtypes: tuple[str, str]
    checkpointing: str
    liger: bool
    kernels: str

    @classmethod
    def of(cls, config: Config, weights: Path) -> Base:
        return cls(
            weights,
            (config.optim.master_dtype, config.model.dtype),
            config.parallel.checkpointing,
            config.model.liger,
            config.engine.kernels,
        )


@dataclass(slots=True)
class Learner:
    """What an update changes (model, optimizer, modules of methods) and what it only reads.

    The reference of a model with adapters is the model itself, run without them. Learners whose
    adapters have the same base share the model, each with its own set in it.
    """

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    world: World
    compute_dtype: torch.dtype
    reference: PreTrainedModel | None = None
    adapters: Adapters | None = None
    methods: Sequence[Method] = ()
    base: Base | None = None
    reference_digest: str = ""  # of the weights that a later start reads as the reference again

    @property
    def policy(self) -> str:
        """Whose adapters of the model it trains; "" for a single policy's, and without adapters."""
        return "" if self.adapters is None else self.adapters.policy

    def parts(self) -> Iterator[Trained]:
        """What an update trains: the policy, then the modules of methods."""
        yield Trained(self.model, self.optimizer)
        yield from (trained for _, trained in self.method_modules())

    def method_modules(self) -> Iterator[tuple[str, Trained]]:
        """The modules that methods train along with the policy, by name."""
        for method in self.methods:
            yield from method.trained.items()


def make_learner(
    config: Config,
    weights: Path,
    world: World,
    *,
    imitation: str = "",
    adapters: bool = True,
    rendering: Rendering | None = None,
    reader: Callable[[Spec], Ask] | None = None,
    name: str = "",
    seats: Sequence[int] = (),
    beside: Sequence[Learner] = (),
    later: Mapping[str, tuple[Config, Path]] = MappingProxyType({}),
) -> Learner:
    """The sharded policy, its optimizer, a reference for the KL and the methods of the settings.
    With adapters only they are trained, and the reference is the same model without them.
    `imitation` names the optimizer of a warm start, which has neither reference nor methods.
    Without `adapters` all weights are trained.

    With several policies `name` and `seats` are this one's, `beside` are the learners made before,
    and `later` has the settings and weights of the policies whose learners come after it, by name.
    Those with adapters on the same base share one model, which the first of them loads with the
    adapters of all: a model that is sharded cannot get more. Policies that train all weights from
    the same ones share one reference.
    """
    lora, base = config.model.lora if adapters else None, Base.of(config, weights)
    load = partial(
        load_sharded,
        str(weights),
        world,
        master_dtype=DTYPES[config.optim.master_dtype],
        compute_dtype=DTYPES[config.model.dtype],
        recompute=RECOMPUTED[config.parallel.checkpointing],
        seed=config.seed,
        liger=config.model.liger and world.device.type == "cuda" and liger_is_here(),
        kernels="" if imitation else config.engine.kernels,
    )
    read_again = not imitation and (lora is not None or config.algorithm.kl > 0)  # at a resume
    digest = on_first_rank(partial(weights_digest, weights), world) if read_again else ""
    alike = [each for each in beside if each.base == base and bool(each.adapters) is bool(lora)]
    if lora is not None and alike:
        model = alike[0].model
    else:
        sets = {} if lora is None else {name: lora, **_adapters_on(base, later)}
        model = load(adapters=sets).eval()
        check_finite(model, weights, world)
    optimizer = make_optimizer(
        model, config.optim, seed=config.seed, kind=imitation or "adamw", policy=name
    )
    learner = Learner(
        model=model,
        optimizer=optimizer,
        world=world,
        compute_dtype=DTYPES[config.model.dtype],
        adapters=None if lora is None else Adapters(lora, weights, name, digest),
        base=base,
    )
    if not imitation:
        learner.methods = make_methods(Parts(config, learner, load, rendering, reader, name, seats))
        if config.algorithm.kl > 0 and not any(each.has_reference for each in learner.methods):
            same = [model] if lora is not None else [each.reference for each in alike]
            held = [each for each in same if each is not None]
            learner.reference = held[0] if held else load().requires_grad_(False)
            learner.reference_digest = digest
    return learner


def _adapters_on(base: Base, policies: Mapping[str, tuple[Config, Path]]) -> dict[str, LoraConfig]:
    """The settings of the adapters that these policies train on a base."""
    return {
        name: config.model.lora
        for name, (config, weights) in policies.items()
        if config.model.lora is not None and Base.of(config, weights) == base
    }


def check_finite(model: PreTrainedModel, weights: Path, world: World) -> None:
    """Raise SettingsError on every rank, with the parameter's name, if one is not finite."""
    names = (n for n, p in model.named_parameters() if not local_part(p).isfinite().all())
    found = list(filter(None, gather_objects(next(names, ""), world)))
    if found:
        raise SettingsError(f"{weights}: weights must be finite, got nan or inf in {found[0]}")


def batch_logprobs(
    learner: Learner,
    model: PreTrainedModel,
    batch: MicroBatch,
    *,
    temperature: float,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probs of the trained tokens and the entropies there, both [M], in nats, at `temperature`.
    The entropies have gradients only if `entropy_grad` is set. A model with adapters computes with
    the learner's."""
    use_adapters(model, learner.policy)
    with autocast(learner):
        return policy_logprobs(
            model,
            batch.row,
            batch.targets_M,
            temperature=temperature,
            entropy_grad=entropy_grad,
        )


def reference_logprobs(learner: Learner, batch: MicroBatch, *, temperature: float) -> Tensor:
    """The reference's log-probs [M], without gradients. For a policy with adapters the reference is
    its base, the same model without them; a method may have computed others in `prepare`."""
    if "reference" in batch.columns:
        return batch.columns["reference"]
    assert learner.reference is not None
    with torch.no_grad(), without_adapters(learner.reference):
        logprobs_M, _ = batch_logprobs(learner, learner.reference, batch, temperature=temperature)
    return logprobs_M


def autocast(learner: Learner) -> torch.autocast:
    """Autocast to `compute_dtype` in a single CPU process, the only one without a mesh; with a mesh
    FSDP's mixed precision does that."""
    enabled = learner.world.mesh is None and learner.compute_dtype != torch.float32
    return torch.autocast(learner.world.device.type, learner.compute_dtype, enabled=enabled)


class TokenMeans:
    """Sums per-token metrics over micro-batches and averages them over all ranks at the end."""

    def __init__(self, world: World) -> None:
        self._world = world
        # Sums stay on the device, because reading one synchronizes host and device.
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, float] = {}
        self._largest: dict[str, Tensor] = {}

    def add(self, values: dict[str, Tensor], batch: MicroBatch) -> None:
        """Add values [M] under their names; the values of a dummy batch do not count. For a name
        that ends with _max the largest value is kept, at least 0."""
        for name, values_M in values.items():
            if name.endswith("_max"):
                value = values_M.detach().max() * (not batch.is_dummy)
                before = self._largest.get(name, value)
                self._largest[name] = torch.maximum(before, value)
                continue
            total = values_M.detach().sum().double() * (not batch.is_dummy)
            num = 0 if batch.is_dummy else values_M.numel()
            self._sums[name] = self._sums.get(name, 0.0) + total
            self._counts[name] = self._counts.get(name, 0.0) + num

    def means(self) -> dict[str, float]:
        """Means and largest values by name. Every rank must call."""
        # A custom loss may return a metric in only some of its calls.
        had = gather_objects((list(self._sums), list(self._largest)), self._world)
        names, of_largest = (sorted({*chain(*of_ranks)}) for of_ranks in zip(*had, strict=True))
        sums = all_reduce_sum([float(self._sums.get(n, 0.0)) for n in names], self._world)
        counts = all_reduce_sum([self._counts.get(n, 0.0) for n in names], self._world)
        means = {n: s / c for n, s, c in zip(names, sums, counts, strict=True) if c}
        largest = {n: max(0.0, float(self._largest.get(n, 0.0))) for n in of_largest}
        return means | {n: all_reduce_max(value, self._world) for n, value in largest.items()}
