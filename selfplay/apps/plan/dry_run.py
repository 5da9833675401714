"""`train.py --dry-run`: whether it fits, memory by phase, the first prompt and the settings.

Reads the model's config and tokenizer, never its weights. Writes no files.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PretrainedConfig

from selfplay.apps.plan.memory import (
    Demand,
    Shape,
    estimate,
    estimate_policies,
    gpu_gib,
    remedy,
    shape_of,
    why_not,
    why_not_policies,
)
from selfplay.chat.rendering import Rendering, make_rendering
from selfplay.config import Config, DataConfig, GameConfig, LoraConfig
from selfplay.config.text import dump
from selfplay.data.instances import HELD_OUT, evaluation_instances
from selfplay.errors import SettingsError
from selfplay.learner.optimizer import matrices_inside
from selfplay.preflight.model import no_room, skeleton_of
from selfplay.preflight.run import described_model, start_warnings
from selfplay.preflight.seats import who_plays
from selfplay.rollout.players import opening_ids
from selfplay.warm_start.imitation import chat_samples, scratch_tokenizer

_MOST_GB = 10_000  # of one GPU


def dry_run(config: Config, rendering: Rendering, *, gpu_gb: float | None) -> None:
    """Print whether the run fits, then its memory, first prompt and settings. `rendering` comes
    from `check_run`. `gpu_gb` is the nominal size of a GPU in GB; None takes this machine's GPU, if
    there is one.

    A scratch model's tokenizer is trained as the run would train it. If prompts or memory do not
    fit, raises SettingsError with the settings that would make them fit.
    """
    if gpu_gb is not None and not 1 <= gpu_gb <= _MOST_GB:
        raise SettingsError(f"--gpu must be from 1 to {_MOST_GB} GB, got {gpu_gb:g}")
    if config.model.path is None:
        # One process: generating 500 instances is faster than starting more processes.
        single = replace(config, data=replace(config.data, processes=1))
        rendering = make_rendering(
            scratch_tokenizer(single), template_kwargs=config.model.chat_template
        )
    total, demands = _gib(gpu_gb), dict[str, Demand]()
    for name in config.policy_names:
        own = config.of_policy(name)
        described = described_model(own.model)
        problem = no_room(described, rendering, own)
        if problem is not None:
            raise SettingsError(problem)
        shape = model_shape(described, own.model.lora)
        demands[name] = Demand.of(own, shape, total=total or 0.0)
    demand, several = next(iter(demands.values())), len(demands) > 1
    why = None
    if total is not None:
        why = why_not_policies(demands) if several else why_not(demand)
    answer = "it fits" if why is None else f"it does not fit: {why}"
    print(
        "no GPU here; to plan its memory, give --gpu GB, e.g. --gpu 80" if total is None else answer
    )
    for name, each in demands.items():
        shape = each.shape
        trained = (
            "" if shape.trained == shape.parameters else f", {shape.trained:,} of them trained"
        )
        what = f"policy {name}" if name else described.model_type
        print(f"{what}: {shape.parameters:,} weights{trained}, {each.ranks} GPU(s)")
    if total is not None:
        print((estimate_policies(demands) if several else estimate(demand)).table())
    for warning in start_warnings(config, rendering):
        print(f"warning: {warning}")
    if roles := who_plays(config):
        print(f"who plays in training: {roles}")
    if config.warm_start.chats is not None:
        chat_samples(config, rendering, rank=0)  # prints how many there are and are too long
    print(f"\n{first_prompts(config.game, config.data, rendering)}\n\n{dump(config)}", flush=True)
    if why is not None:
        words = [] if several else remedy(demand)
        needs = "it needs more GPUs, adapters (model.lora) or a smaller model"
        raise SettingsError(f"{why}; {'it fits with ' + ' '.join(words) if words else needs}")


def first_prompts(game: GameConfig, data: DataConfig, rendering: Rendering) -> str:
    """The first prompt of the first seat to move in the first held-out game, and of one seat of
    each other role: the text, its number of tokens, its ids. A seat that moves later also reads the
    earlier messages."""
    (instance,) = evaluation_instances(HELD_OUT, num=1, game=game, data=data)
    new_game, roles = game.kit.new_game(instance, game.options), game.kit.ROLES
    first = new_game.seat_to_move
    assert first is not None
    seats = [first, *(roles.index(role) for role in dict.fromkeys(roles) if role != roles[first])]
    shown = []
    for seat in seats:
        ids = opening_ids(rendering, new_game.prompt(seat))
        shown.append(
            f"first prompt, {len(ids)} tokens (seat {seat}, {roles[seat]}, of instance "
            f"{instance.key}):\n{rendering.readable(ids)}\ntokens: {' '.join(map(str, ids))}"
        )
    return "\n".join(shown)


def model_shape(described: PretrainedConfig, lora: LoraConfig | None) -> Shape:
    """The shape of the model; adapters, if any, are all that is trained."""
    skeleton = skeleton_of(described)
    base = sum(parameter.numel() for parameter in skeleton.parameters())
    adapters = 0
    if lora is not None:
        adapters = sum(
            lora.rank * (module.in_features + module.out_features)
            for name, module in skeleton.named_modules()
            if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in lora.targets
        )
    matrices = sum(parameter.numel() for parameter in matrices_inside(skeleton))
    return shape_of(described.get_text_config(), base=base, adapters=adapters, matrices=matrices)


def _gib(gpu_gb: float | None) -> float | None:
    """The memory of one GPU in GiB; None without a GPU."""
    if gpu_gb is not None:
        return gpu_gib(gpu_gb)
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(0).total_memory / 2**30
