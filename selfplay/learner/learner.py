"""The learner: policy, optimizer, reference and critic, and their forward passes on a micro-batch.

PPO's critic gives the expected return of a seat before each token that it samples. It is a second
model, which starts from the policy's first weights, with a linear head on its last hidden state at
the position whose next token is sampled. The head starts at zero, so the first values are 0, and
computes in fp32 whatever the dtype of the layers.

Shapes: M trained tokens of a micro-batch, D width of the hidden state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfplay.config import Config, CriticConfig, OptimConfig
from selfplay.distributed import (
    World,
    all_reduce_max,
    all_reduce_sum,
    as_forward,
    gather_objects,
    local_part,
    raise_on_all_ranks,
    shard_alone,
)
from selfplay.errors import OwnFault, SettingsError
from selfplay.learner.batch import MicroBatch
from selfplay.learner.optimizer import make_optimizer
from selfplay.model.lora import Adapters, without_adapters
from selfplay.model.policy import (
    DTYPES,
    hidden_states,
    liger_is_here,
    load_sharded,
    policy_logprobs,
)

# Of how many layers one is recomputed in the backward pass, by parallel.checkpointing.
RECOMPUTED = {"none": 0, "half": 2, "full": 1}


@dataclass(slots=True)
class Critic:
    """PPO's critic and its optimizer. `module` holds backbone and head under the names of the
    checkpoint."""

    module: nn.ModuleDict
    backbone: PreTrainedModel
    head: nn.Linear
    optimizer: torch.optim.Optimizer


@dataclass(slots=True)
class Learner:
    """What an update changes (model, optimizer, critic) and what it only reads (the rest).

    The reference of a model with adapters is the model itself, run without them.
    """

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    world: World
    compute_dtype: torch.dtype
    reference: PreTrainedModel | None = None
    critic: Critic | None = None
    adapters: Adapters | None = None


def make_learner(
    config: Config,
    weights: Path,
    world: World,
    *,
    imitation: bool = False,
    as_engine: Callable[[PreTrainedModel], None] | None = None,
) -> Learner:
    """The sharded policy, its optimizer and what the method needs: a reference for the KL, a critic
    for PPO. With adapters only they are trained, and the reference is the same model without them.
    For `imitation` there is neither reference nor critic, and all weights are trained unless
    `warm_start.lora` is set. `as_engine` makes the models compute as the engine does.
    """
    lora = None if imitation and not config.warm_start.lora else config.model.lora
    load = partial(
        load_sharded,
        str(weights),
        world,
        master_dtype=DTYPES[config.optim.master_dtype],
        compute_dtype=DTYPES[config.model.dtype],
        recompute=RECOMPUTED[config.parallel.checkpointing],
        seed=config.seed,
        liger=config.model.liger and world.device.type == "cuda" and liger_is_here(),
        as_engine=as_engine,
    )
    model = load(lora=lora).eval()
    check_finite(model, weights, world)
    reference = critic = None
    if config.algorithm.kl > 0 and not imitation:
        reference = load().requires_grad_(False) if lora is None else model
    kind = config.warm_start.optimizer if imitation else "adamw"
    optimizer = make_optimizer(model, config.optim, seed=config.seed, kind=kind)
    if config.algorithm.advantage == "ppo" and not imitation:
        critic = make_critic(load(), config=config.critic, optim=config.optim, world=world)
    return Learner(
        model=model,
        optimizer=optimizer,
        world=world,
        compute_dtype=DTYPES[config.model.dtype],
        reference=reference,
        critic=critic,
        adapters=None if lora is None else Adapters(lora, weights),
    )


def check_finite(model: PreTrainedModel, weights: Path, world: World) -> None:
    """Raise SettingsError on every rank, with a parameter's name, if one is not finite."""
    names = (n for n, p in model.named_parameters() if not local_part(p).isfinite().all())
    found = list(filter(None, gather_objects(next(names, ""), world)))
    if found:
        raise SettingsError(f"{weights}: weights must be finite, got nan or inf in {found[0]}")


def make_critic(
    backbone: PreTrainedModel, *, config: CriticConfig, optim: OptimConfig, world: World
) -> Critic:
    """A critic on a backbone that is already sharded; its head is sharded over the same ranks."""
    width = backbone.config.hidden_size
    head = nn.utils.skip_init(nn.Linear, width, 1, device=world.device, dtype=torch.float32)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    shard_alone(head, world)
    if not backbone.config.tie_word_embeddings:
        backbone.get_output_embeddings().requires_grad_(False)  # values need no logits
    module = nn.ModuleDict({"head": head, "trunk": backbone})
    return Critic(module, backbone, head, make_optimizer(module, optim, lr=config.lr))


def batch_logprobs(
    learner: Learner,
    model: PreTrainedModel,
    batch: MicroBatch,
    *,
    temperature: float,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probs of the trained tokens and the entropies there, both [M], in nats, at `temperature`.
    The entropies have gradients only if `entropy_grad` is set."""
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
    its base, the same model without them."""
    assert learner.reference is not None
    with torch.no_grad(), without_adapters(learner.reference):
        logprobs_M, _ = batch_logprobs(learner, learner.reference, batch, temperature=temperature)
    return logprobs_M


def batch_values(learner: Learner, batch: MicroBatch) -> Tensor:
    """The critic's values [M], fp32, before each trained token is sampled."""
    critic = learner.critic
    assert critic is not None
    with autocast(learner):
        hidden_MD = hidden_states(critic.backbone, batch.row)
    return _head_values(critic.head, hidden_MD.float())


@as_forward
def _head_values(head: nn.Linear, hidden_MD: Tensor) -> Tensor:
    values_M1: Tensor = nn.Linear.forward(head, hidden_MD)
    return values_M1[:, 0]


def autocast(learner: Learner) -> torch.autocast:
    """Computes in `compute_dtype` in a single CPU process, the only one without a mesh; with a mesh
    FSDP's mixed precision does."""
    enabled = learner.world.mesh is None and learner.compute_dtype != torch.float32
    return torch.autocast(learner.world.device.type, learner.compute_dtype, enabled=enabled)


class TokenMeans:
    """Sums per-token metrics over micro-batches and averages them over all ranks at the end."""

    def __init__(self, world: World) -> None:
        self._world = world
        # Sums stay on the device, because reading one would synchronize host and device.
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, float] = {}
        self._largest: dict[str, Tensor] = {}
        self.faults: list[OwnFault] = []  # why a loss of one's own gave nothing to add

    def add(self, values: dict[str, Tensor], batch: MicroBatch) -> None:
        """Add values [M] under their names; those of a dummy batch count as no value."""
        for name, values_M in values.items():
            total = values_M.detach().sum().double() * (not batch.is_dummy)
            num = 0 if batch.is_dummy else values_M.numel()
            self._sums[name] = self._sums[name] + total if name in self._sums else total
            self._counts[name] = self._counts.get(name, 0.0) + num

    def add_largest(self, name: str, values_M: Tensor, batch: MicroBatch) -> None:
        """Keep the largest of all values under this name, at least 0."""
        value = values_M.detach().max() * (not batch.is_dummy)
        before = self._largest.get(name)
        self._largest[name] = value if before is None else torch.maximum(before, value)

    def means(self) -> dict[str, float]:
        """Means and largest values by name. Every rank must call. Raises the first of `faults` on
        every rank."""
        with raise_on_all_ranks(self._world):
            for fault in self.faults:
                raise fault
        # A loss of one's own may give a metric in some of its calls alone.
        names = sorted({name for of in gather_objects([*self._sums], self._world) for name in of})
        sums = all_reduce_sum([float(self._sums.get(n, 0.0)) for n in names], self._world)
        counts = all_reduce_sum([self._counts.get(n, 0.0) for n in names], self._world)
        means = {n: s / c for n, s, c in zip(names, sums, counts, strict=True) if c}
        largest = {name: max(0.0, float(value)) for name, value in sorted(self._largest.items())}
        return means | {n: all_reduce_max(value, self._world) for n, value in largest.items()}
