"""New weights from Python for checkpoints that play as partners, such as a teacher that is a moving
average of the policy.

Each is kept as a Hugging Face folder in the run's `partners/`, which a checkpoint of the run names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from selfplay.atomic import atomic_folder, damage, discard
from selfplay.chat.tokenizer import load_tokenizer
from selfplay.checkpoint import checkpoints
from selfplay.config.player_spec import Spec, parse_spec
from selfplay.distributed import World, on_first_rank
from selfplay.errors import SettingsError
from selfplay.model.lora import full_weights, plain_weights
from selfplay.model.policy import export, load_model
from selfplay.partners.checkpoints import find_source
from selfplay.partners.frozen import FrozenPolicies

GivenWeights = str | Path | Mapping[str, Tensor]  # a model's folder or a run, or tensors by name


class PartnerUpdates:
    """The checkpoints among a run's partners that have got new weights: `steps` has the number of
    finished steps at the newest ones, by spec, equal on every rank."""

    def __init__(self, run: Path, frozen: FrozenPolicies, world: World) -> None:
        self._run, self._frozen, self._world = run, frozen, world
        self.steps: dict[str, int] = {}

    def weights(self, spec: Spec) -> Path:
        """The folder of the partner's weights."""
        if (step := self.steps.get(spec.text)) is not None:
            return self._folder(spec, step)
        return find_source(Path(spec.argument), what=f"partner {spec.text!r}").weights

    def update(self, spec: Spec, weights: GivenWeights, step: int) -> None:
        """Give the partner these weights after `step` steps, save them and compare the engine's bit
        for bit. Every rank must call. Raises SettingsError, before anything changes, for weights of
        another model or another tokenizer."""
        folder = self._folder(spec, step)
        on_first_rank(partial(self._write, self.weights(spec), weights, folder), self._world)
        self._frozen.reload(spec.text, folder, step + 1)
        self.steps[spec.text] = step
        on_first_rank(partial(self._forget, folder.parent), self._world)

    def restore(self, steps: Mapping[str, int]) -> None:
        """Load the weights that a checkpoint names. Raises SettingsError for damaged ones."""
        for text, step in steps.items():
            folder = self._folder(parse_spec(text), step)
            if (found := damage(folder)) is not None:
                raise SettingsError(
                    f"{folder} must be undamaged, because {text} plays with it, got {found}; "
                    "restore a copy"
                )
            self._frozen.reload(text, folder, step + 1)
            self.steps[text] = step

    def _folder(self, spec: Spec, step: int) -> Path:
        """Where the weights given after `step` steps are. The digest keeps partners whose folders
        have the same name apart."""
        name = re.sub(r"\W+", "_", Path(spec.argument).name)
        digest = sha256(spec.text.encode()).hexdigest()[:8]
        return self._run / "partners" / f"{name}_{digest}" / f"step_{step:06d}"

    def _forget(self, home: Path) -> None:
        """Delete the weights that no checkpoint of the run names. They are those from before the
        newest update that the oldest checkpoint has."""
        oldest = min((int(each.name[5:]) for each in checkpoints(self._run)), default=0)
        had = sorted(each for each in home.glob("step_*") if int(each.name[5:]) < oldest)
        for each in had[:-1]:
            discard(each)

    @staticmethod
    def _write(now: Path, weights: GivenWeights, folder: Path) -> None:
        """Save the model in `now` with its weights replaced by these."""
        tokenizer = load_tokenizer(now)
        model = load_model(str(now), device="cpu", dtype=torch.float32)
        if not isinstance(weights, Mapping):
            source = find_source(Path(weights), what="weights").weights
            if load_tokenizer(source).get_vocab() != tokenizer.get_vocab():
                raise SettingsError(
                    f"weights must be of a model with the partner's tokenizer, got {source}"
                )
            given = load_model(str(source), device="cpu", dtype=torch.float32)
            weights = dict(full_weights(given))
        held = {name: weight.base for name, weight in plain_weights(model).items()}
        if wrong := why_other({name: each.shape for name, each in weights.items()}, held):
            raise SettingsError(f"weights must be the partner's {len(held)} tensors, got {wrong}")
        with torch.no_grad():
            for name, parameter in held.items():
                parameter.copy_(weights[name])
        with atomic_folder(folder) as partial_folder:
            export(model, tokenizer, partial_folder)


def why_other(given: Mapping[str, torch.Size], held: Mapping[str, Tensor]) -> str:
    """The first tensor that is missing, unknown or of another shape; "" if all are the same."""
    if missing := held.keys() - given.keys():
        return f"none named {min(missing)}"
    if unknown := given.keys() - held.keys():
        return f"another one, {min(unknown)}"
    for name, shape in given.items():
        if shape != held[name].shape:
            return f"{list(shape)} for {name}, which has {list(held[name].shape)}"
    return ""
