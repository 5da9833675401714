"""The policy pool: snapshots of the policy after earlier steps, as partners."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from selfplay.atomic import damage
from selfplay.checkpoint import export_atomically
from selfplay.config import Config
from selfplay.config.player_spec import POOL
from selfplay.errors import RunEnds, SettingsError
from selfplay.learner.learner import Learner
from selfplay.partners.frozen import FrozenPolicies
from selfplay.rollout.seating import Partner


class PolicyPool:
    """The members by step, the same on every rank: each is a snapshot in the run's folder, and has
    an engine of `frozen` while it plays."""

    def __init__(self, config: Config, frozen: FrozenPolicies, *, policy: str = "") -> None:
        """`policy` is the name of the policy if there are several."""
        self._settings, self._folder = config.policy_pool, Path(config.out)
        self._frozen, self._policy = frozen, policy
        self.members: list[int] = []
        self._loaded: dict[str, int] = {}  # the member held by each slot

    @property
    def names(self) -> dict[str, int]:
        """The members by name, such as "pool:20", oldest first."""
        return {f"{POOL}:{member}": member for member in self.members}

    def restore(
        self, members: Sequence[int], learner: Learner, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Continue with these members. At the start of a run the initial policy is the first."""
        self.members = list(members)
        if not self.members:
            self.join(0, learner, tokenizer)

    def add(self, step: int, learner: Learner, tokenizer: PreTrainedTokenizerBase) -> None:
        """Add the policy after `step` steps if `step` is a multiple of `policy_pool.every`. Every
        rank must call."""
        if step % self._settings.every == 0:
            self.join(step, learner, tokenizer)

    def join(self, step: int, learner: Learner, tokenizer: PreTrainedTokenizerBase) -> None:
        """Add the policy after `step` steps."""
        folder = snapshot_folder(self._folder, step, self._policy)
        export_atomically(
            learner.model, tokenizer, folder, world=learner.world, policy=learner.policy
        )
        self.members = joined(self.members, step, size=self._settings.size)

    def load(self, names: Sequence[str]) -> dict[str, Partner]:
        """The members of these names as partners, each with an engine that has its weights.

        Engines of members that no longer play are reused; a further model is loaded only if more
        members play than in any earlier step. Raises RunEnds for a missing snapshot.
        """
        members = [self.names[name] for name in names]
        for member in members:
            if member in self._loaded.values():
                continue
            folder = snapshot_folder(self._folder, member, self._policy)
            if not folder.is_dir():
                raise RunEnds(f"{folder} must stay in place during its run, got no such folder")
            free = (slot for slot, held in self._loaded.items() if held not in members)
            slot = next(free, f"{POOL} {self._policy}{len(self._loaded) + 1}")
            self._loaded[slot] = member
            self._frozen.hold(slot, folder, member)
        slots = {member: slot for slot, member in self._loaded.items()}
        return {
            name: self._frozen.snapshot(name, slots[member])
            for name, member in zip(names, members, strict=True)
        }


def snapshot_folder(run: Path, step: int, policy: str = "") -> Path:
    """The folder of a run's policy after `step` steps. Snapshots stay on disk after they leave the
    pool."""
    return run / "policy_pool" / policy / f"step_{step:06d}"


def check_members(run: Path, members: Sequence[int], policy: str = "") -> None:
    """Raise SettingsError for a member whose snapshot is damaged."""
    for member in members:
        folder = snapshot_folder(run, member, policy)
        if (found := damage(folder)) is not None:
            raise SettingsError(
                f"{folder} must be undamaged, because the policy pool draws from it, got {found}; "
                "restore a copy"
            )


def joined(members: list[int], step: int, *, size: int) -> list[int]:
    """The pool after the policy of `step` joined: the first member and the newest others.

    The first member stays because it has the language of the warm start. `size` 0 keeps all.
    """
    pool = sorted({*members, step})
    if size == 0 or len(pool) <= size:
        return pool
    return [pool[0], *pool[1 - size :]] if size > 1 else [pool[-1]]
