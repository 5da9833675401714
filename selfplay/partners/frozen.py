"""Policies that do not train, each in its own engine.

Each keeps a complete model in memory on every rank that plays, for the whole run; rank 0 prints its
size at the start. The pool's engines, whose weights change, and a checkpoint that reads chats use
transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import compress
from pathlib import Path

import torch
from transformers import AutoConfig

from selfplay.chat.rendering import Rendering, make_rendering
from selfplay.chat.tokenizer import load_tokenizer
from selfplay.config import Config
from selfplay.config.player_spec import Spec
from selfplay.distributed import World
from selfplay.engines.base import Completion, Engine, Request, Sampling
from selfplay.engines.hf import HFEngine
from selfplay.engines.kinds import engine_kind
from selfplay.engines.weights import Weights
from selfplay.errors import EngineDisagrees
from selfplay.learner.method import Ask
from selfplay.model.families import max_positions
from selfplay.model.hub import WEIGHTS, described_in, file_digest
from selfplay.model.policy import DTYPES, empty_model, end_ids
from selfplay.model.stored import Stored
from selfplay.partners.checkpoints import (
    Source,
    find_policies,
    find_source,
    seated,
    template_of,
)
from selfplay.partners.router import Frozen
from selfplay.rollout.players import FrozenPlayer, Player, PolicyPlayer
from selfplay.rollout.seating import MakePlayer, Partner
from selfplay.weight_sync.start import load_partner_engine, load_whole


class FrozenPolicies:
    """The frozen policies of a run. `engines` are this rank's engines by name; only ranks that play
    games have any."""

    def __init__(self, config: Config, rendering: Rendering, world: World) -> None:
        """`rendering` is the run's own."""
        self._config, self._rendering, self._world = config, rendering, world
        self._plays = world.replica.leads
        self.engines: dict[str, Frozen] = {}
        self._here: dict[str, HFEngine] = {}  # the engines that compute in this process
        self._loaded: set[str] = set()  # the checkpoints, the same on every rank
        self._read_from: dict[str, Path] = {}  # the weights of each checkpoint, by its name

    def checkpoint(self, spec: Spec, *, own_engine: bool, seats: Sequence[int]) -> Partner:
        """A checkpoint as a partner, in transformers unless it may have its `own_engine`; of a run
        with several policies, those of these `seats`. Raises SettingsError if it is missing."""
        what = f"partner {spec.text!r}"
        found = find_policies(Path(spec.argument), what=what)
        of_seat = seated(found, self._config.game.kit.ROLES, what=what, seats=seats)
        sources = dict.fromkeys(of_seat.values())
        players = {}
        for source in sources:
            model = spec.text if len(sources) == 1 else f"{spec.text}, {source.policy}"
            players[source] = self._checkpoint(spec.text, model, source, own_engine=own_engine)
        return Partner(spec.text, lambda names, seat: players[of_seat[seat]](names, seat))

    def _checkpoint(self, text: str, model: str, source: Source, *, own_engine: bool) -> MakePlayer:
        """The player of a policy on disk, with the engine `model`, which is started here if it is
        new."""
        weights, rendering, max_positions = self._read(model, source)
        if model not in self._loaded:
            self._loaded.add(model)
            engine: Engine | None = None
            if own_engine and not engine_kind(self._config.engine.kind).in_trainer:
                engine = load_partner_engine(self._config, weights, self._world)
                if engine is not None:
                    self._report(model, engine.num_weight_bytes, "in its own engine", weights)
            elif self._plays:
                engine = self._here[model] = self._load(model, weights)
            if engine is not None:
                self.engines[model] = Frozen(engine, rendering.stop_ids)
        return self._seated(text, model, rendering, max_positions)

    def snapshot(self, name: str, slot: str) -> Partner:
        """The policy whose weights `hold` loaded into this slot."""
        return Partner(name, self._seated(name, slot, self._rendering, None))

    def hold(self, slot: str, folder: Path, version: int) -> None:
        """Load the run's weights in a folder into the engine of a slot, created at first use."""
        if not self._plays:
            return
        if slot in self._here:
            self._here[slot].update_weights(snapshot_weights(folder), version)
            return
        engine = self._here[slot] = self._load("the policy pool", folder)
        self.engines[slot] = Frozen(engine, self._rendering.stop_ids)

    def reload(self, name: str, folder: Path, version: int) -> None:
        """Replace the weights of the partner of this name by those in a folder, and compare them
        bit for bit; an engine that is restarted gets them too. Raises EngineDisagrees."""
        if (frozen := self.engines.get(name)) is None:
            return
        engine, dtype = frozen.engine, DTYPES[self._config.model.dtype]
        model = load_whole(folder, self._config, self._world, dtype=dtype).requires_grad_(False)
        weights = Weights(model, engine.dtype)
        with weights.all_taken():
            engine.load(weights, version)
        weights = Weights(model, engine.dtype)
        with weights.all_taken():
            compared = engine.compare(weights)
        expected = engine.num_copies * weights.num_elements
        if compared.num_different or compared.num_elements < expected:
            raise EngineDisagrees(
                f"{name} must have the weights of {folder}: of {expected} elements "
                f"{compared.num_elements} were compared and {compared.num_different} differ"
            )
        frozen.reload = partial(self.reload, name, folder, version)

    def reader(self, spec: Spec) -> Ask:
        """Answers chats outside games greedily, with a checkpoint that is loaded here unless it
        also plays. A chat that is too long for it has the finish "void"."""
        source = find_source(Path(spec.argument), what=f"partner {spec.text!r}")
        weights, rendering, max_positions = self._read(spec.text, source)
        own = self._here.get(spec.text)
        if self._plays and own is None:
            own = self._load(spec.text, weights)
        frozen = own and Frozen(own, rendering.stop_ids)

        def read(requests: Sequence[Request]) -> list[Completion]:
            asked = [replace(each, prompt_ids=_chat_ids(rendering, each)) for each in requests]
            limit = max_positions or math.inf
            fits = [len(each.prompt_ids) + each.max_new_tokens <= limit for each in asked]
            fitting = list(compress(asked, fits))
            answers: Iterator[Completion] = iter(())
            if fitting:  # never on a rank that plays no games, which loads no model
                assert frozen is not None
                sampling = Sampling(0.0, rendering.stop_ids)
                answers = iter(frozen.generate_batch(fitting, sampling))
            too_long = Completion([], [], "void", 0, text="its chat is too long")
            found = [next(answers) if fit else too_long for fit in fits]
            return [replace(each, text=each.text or rendering.decode(each.ids)) for each in found]

        return read

    def close(self) -> None:
        for frozen in self.engines.values():
            frozen.engine.close()

    def digests(self) -> dict[str, str]:
        """The sha256 of the weights of each checkpoint that this run reads, by its name. Only from
        the files of weights, so a checkpoint may move; a 7B takes ten seconds.

        Raises OSError if they are gone.
        """
        return {
            name: sha256(b"".join(map(file_digest, sorted(folder.glob(WEIGHTS))))).hexdigest()
            for name, folder in self._read_from.items()
        }

    def _read(self, name: str, source: Source) -> tuple[Path, Rendering, int | None]:
        """The weights' folder, the rendering and the context length of a checkpoint."""
        weights, own = source.weights, template_of(source)
        self._read_from[name] = weights
        rendering = make_rendering(
            load_tokenizer(weights),
            template_kwargs=self._config.model.chat_template if own is None else own,
            ends=end_ids(weights),
        )
        return weights, rendering, max_positions(AutoConfig.from_pretrained(described_in(weights)))

    def _seated(
        self, name: str, model: str, rendering: Rendering, max_positions: int | None
    ) -> MakePlayer:
        """The player of a seat; `model` is its engine's name in the router, `max_positions` the
        model's longest transcript in tokens."""
        rollout = self._config.rollout
        max_game_tokens = min(rollout.max_game_tokens, max_positions or rollout.max_game_tokens)

        def sit(names: tuple[object, ...], seat: int) -> Player:
            policy = PolicyPlayer(
                rendering,
                seed_names=names,
                max_new_tokens=rollout.max_new_tokens,
                max_game_tokens=max_game_tokens,
                model=model,
            )
            return FrozenPlayer(policy, name=name)

        return sit

    def _load(self, what: str, weights: Path) -> HFEngine:
        """A complete, unsharded model, in `model.dtype`."""
        dtype = DTYPES[self._config.model.dtype]
        model = load_whole(weights, self._config, self._world, dtype=dtype).requires_grad_(False)
        engine = HFEngine(model, max_batch=self._config.engine.max_batch)
        self._report(what, engine.num_weight_bytes, f"on {model.device}", weights)
        return engine

    def _report(self, what: str, num_bytes: int, place: str, weights: Path) -> None:
        if self._world.rank == 0:
            size = f"{num_bytes / 2**20:.3g} MiB of additional weights"
            print(f"{what}: {size} {place} for the whole run, from {weights}", flush=True)


def _chat_ids(rendering: Rendering, request: Request) -> tuple[int, ...]:
    """The prompt of a chat of a system and a user message."""
    system, user = (message.content for message in request.messages)
    return tuple(rendering.conversation(system, [user], []))


def snapshot_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a Hugging Face folder as (the model's parameter name, tensor), read one by
    one."""
    model = empty_model(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    stored = Stored(folder, model)
    for name, parameter in model.named_parameters():
        yield name, stored.read(name, tuple(slice(0, size) for size in parameter.shape))
