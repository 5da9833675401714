"""The partners of a run: their players, their engines, the policy pool.

A frozen checkpoint, or the policy pool, keeps one more complete model in memory on each rank that
plays, for the whole run; rank 0 prints its size at the start. The pool, whose weights change, and a
checkpoint that is the judge play in transformers. Names and the pool are the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedTokenizerBase

from selfplay.chat.rendering import Rendering, make_rendering
from selfplay.chat.tokenizer import load_tokenizer
from selfplay.checkpoint import export_atomically, snapshot_folder
from selfplay.config import Config, GameConfig
from selfplay.config.player_spec import CHECKPOINT, ENDPOINT, POOL, SELF, Spec, parse_shares
from selfplay.data.seeds import named_seed
from selfplay.distributed import World, gather_objects
from selfplay.engines.base import Completion, Engine, GameRunner, Message, Request, Sampling
from selfplay.engines.hf import HFEngine
from selfplay.engines.kinds import engine_kind
from selfplay.errors import RunEnds, SettingsError
from selfplay.learner.learner import Learner
from selfplay.metrics.step import add_up
from selfplay.model.families import max_positions
from selfplay.model.hub import described_in
from selfplay.model.policy import DTYPES, empty_model, end_ids
from selfplay.model.stored import Stored
from selfplay.partners.checkpoints import check_same_game, find_source, template_of
from selfplay.partners.endpoint import Endpoint, endpoint_key
from selfplay.partners.opponents import Opponents, drawn
from selfplay.partners.router import EngineRouter, Frozen
from selfplay.rollout.players import FrozenPlayer, Player, PolicyPlayer
from selfplay.rollout.seat_rules import chosen_seats
from selfplay.rollout.seating import SELF_PLAY, Partner, scripted_partner
from selfplay.rollout.text_players import EndpointPlayer
from selfplay.weight_sync.start import load_partner_engine, load_whole


def try_endpoints(config: Config, rendering: Rendering, world: World) -> None:
    """Ask the endpoints of `rollout.partners` for a first move, before a new run trains. Raises
    SettingsError for one that gives no answer."""
    specs = [spec for spec, _ in parse_shares(config.rollout.partners) if spec.kind == ENDPOINT]
    if not specs or (Path(config.out) / "metrics.jsonl").exists():
        return
    kit, options = config.game.kit, config.game.options
    (instance,) = kit.generate(kit.easy(options), seed=0, num=1)
    prompt = kit.new_game(instance, options).prompt(0)
    chat = [("system", prompt.system), ("user", prompt.user)]
    request = Request(
        prompt_ids=(),
        max_new_tokens=config.endpoint.max_new_tokens,
        seed=named_seed("endpoint", instance.key),
        messages=tuple(Message(role, text) for role, text in chat if text),
    )
    with closing(Partners((), config, rendering=rendering, world=world)) as partners:
        for spec in specs:
            (answer,) = partners.reader(spec)([request])
            if answer.finish == "void":
                raise SettingsError(
                    f"rollout.partners must answer before the run: {spec.text}: {answer.text}"
                )


class Partners:
    """The partners of a run or an evaluation. Only ranks that play games hold engines.

    `specs` are those that `opponents` may draw in training. Beside SGLang a checkpoint of them has
    an engine of its own, which takes half a minute to start and answers many games at once; one
    that is added later plays in transformers.

    Raises:
        SettingsError: for a checkpoint or an API key that is missing.
    """

    def __init__(
        self,
        specs: Sequence[Spec],
        config: Config,
        *,
        rendering: Rendering,
        world: World,
    ) -> None:
        self._config, self._world, self._plays = config, world, world.replica.leads
        self._folder, self._rendering = Path(config.out), rendering
        self._frozen: dict[str, Frozen] = {}
        self._here: dict[str, HFEngine] = {}  # those of `_frozen` that compute in this process
        self._loaded_checkpoints: set[str] = set()  # the same on every rank
        self._endpoints: dict[str, Endpoint] = {}
        self._partners = {
            spec.text: self._partner(spec, own_engine=True) for spec in specs if spec.kind != POOL
        }
        kinds = {spec.kind for spec in specs}
        self._has_pool = POOL in kinds
        self._needs_router = bool(kinds & {POOL, CHECKPOINT, ENDPOINT})
        self._members: list[int] = []
        self._loaded: dict[str, int] = {}  # the pool member whose weights each engine holds
        self._drawn: tuple[int, list[tuple[Partner, float]]] | None = None  # the last draw's step

    def for_step(self, step: int, opponents: Opponents) -> list[tuple[Partner, float]]:
        """The partners that are drawn for this step with their shares, once a step; loads the
        weights of those from the pool. Every rank must call."""
        if self._drawn is None or self._drawn[0] != step:
            names = {f"{POOL}:{member}": member for member in self._members}
            shares = drawn(opponents, step, [*names], self._world)
            self._load_members([names[name] for name, _ in shares if name in names])
            self._drawn = step, [(self.named(name), share) for name, share in shares]
        return self._drawn[1]

    def named(self, name: str) -> Partner:
        """The partner of this spec, or the loaded member of the pool of this name."""
        if name in self._partners:
            return self._partners[name]
        slot = next(slot for slot, member in self._loaded.items() if name == f"{POOL}:{member}")
        return Partner(name, self._seat(name, slot, self._rendering, None))

    def held_out_partner(self) -> Partner:
        """The partner in held-out games: the policy itself, or the first training partner where the
        policy does not play all seats."""
        if chosen_seats(self._config.game, self._config.rollout) is None:
            return SELF_PLAY
        first, _ = parse_shares(self._config.rollout.partners)[0]
        return self._partners.get(first.text, SELF_PLAY)

    def add(self, spec: Spec) -> Partner:
        """One more partner, for games outside training; a checkpoint is loaded here."""
        self._needs_router = self._needs_router or spec.kind in (CHECKPOINT, ENDPOINT)
        return self._partner(spec, own_engine=False)

    def routed(self, engine: GameRunner) -> GameRunner:
        """A router over the policy's engine and the partners' engines; the policy's engine itself
        if no partner needs one."""
        if not self._needs_router:
            return engine
        return EngineRouter(engine, frozen=self._frozen, endpoints=self._endpoints)

    def restore(
        self, state: Mapping[str, Any], learner: Learner, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Restore `state()` of a checkpoint. At the start of a run the first weights become the
        first member of the pool.

        Raises SettingsError for a member whose snapshot is damaged."""
        self._members = list(state.get("pool", []))
        if self._has_pool and not self._members:
            self._join(0, learner, tokenizer)

    def add_to_pool(self, step: int, learner: Learner, tokenizer: PreTrainedTokenizerBase) -> None:
        """Every `policy_pool.every` steps, add the policy after `step` steps to the pool. Every
        rank must call."""
        if self._has_pool and step % self._config.policy_pool.every == 0:
            self._join(step, learner, tokenizer)

    def take_usage(self) -> dict[str, float]:
        """All ranks' endpoint usage since the last call, as metrics. Every rank must call."""
        return add_up(gather_objects(self._usage(), self._world))

    def state(self) -> dict[str, Any]:
        """The part of the trainer state that `restore` takes, as plain values."""
        return {"pool": self._members}

    def close(self) -> None:
        for endpoint in self._endpoints.values():
            endpoint.close()
        for frozen in self._frozen.values():
            frozen.engine.close()

    def _partner(self, spec: Spec, *, own_engine: bool) -> Partner:
        if spec.kind == SELF:
            return SELF_PLAY
        if spec.kind == CHECKPOINT:
            return self._checkpoint(spec, own_engine=own_engine)
        if spec.kind == ENDPOINT:
            return self._endpoint(spec)
        return Partner(
            spec.text,
            lambda names, seat: scripted_partner(spec.argument, names, seat, self._config.game),
        )

    def reader(self, spec: Spec) -> Callable[[Sequence[Request]], list[Completion]]:
        """Answers chats outside games, by an endpoint or by a checkpoint, which is loaded here and
        answers greedily. A chat without an answer has the finish "void", as one too long for the
        checkpoint. Usage is counted by `take_usage`."""
        if spec.kind == ENDPOINT:
            self._endpoint(spec)

            def ask(requests: Sequence[Request]) -> list[Completion]:
                sent = [self._endpoints[spec.text].submit(request) for request in requests]
                return [answer.result() for answer in sent]

            return ask
        weights, rendering, max_positions = self._read_checkpoint(spec)
        own = self._here.get(spec.text)  # a partner too
        if self._plays and own is None:
            own = self._load(spec.text, weights)
        frozen = own and Frozen(own, rendering.stop_ids)

        def read(requests: Sequence[Request]) -> list[Completion]:
            asked = [replace(each, prompt_ids=_chat_ids(rendering, each)) for each in requests]
            limit = max_positions or math.inf
            fits = [len(each.prompt_ids) + each.max_new_tokens <= limit for each in asked]
            fitting = list(compress(asked, fits))
            answers: Iterator[Completion] = iter(())
            if fitting:  # never on a rank that plays no games, which loads nothing
                assert frozen is not None
                sampling = Sampling(0.0, rendering.stop_ids)
                answers = iter(frozen.generate_batch(fitting, sampling))
            too_long = Completion([], [], "void", 0, text="its chat is too long")
            found = [next(answers) if fit else too_long for fit in fits]
            return [replace(each, text=each.text or rendering.decode(each.ids)) for each in found]

        return read

    def _checkpoint(self, spec: Spec, *, own_engine: bool) -> Partner:
        weights, rendering, max_positions = self._read_checkpoint(spec)
        if spec.text not in self._loaded_checkpoints:
            self._loaded_checkpoints.add(spec.text)
            engine: Engine | None = None
            if own_engine and not engine_kind(self._config.engine.kind).in_trainer:
                engine = load_partner_engine(self._config, weights, self._world)
                if engine is not None:
                    self._tell(spec.text, engine.num_weight_bytes, "in its own engine", weights)
            elif self._plays:
                engine = self._here[spec.text] = self._load(spec.text, weights)
            if engine is not None:
                self._frozen[spec.text] = Frozen(engine, rendering.stop_ids)
        return Partner(spec.text, self._seat(spec.text, spec.text, rendering, max_positions))

    def _read_checkpoint(self, spec: Spec) -> tuple[Path, Rendering, int | None]:
        """The weights' folder, the rendering and the largest context of a checkpoint."""
        source = find_source(Path(spec.argument), what=f"partner {spec.text!r}")
        weights, own = source.weights, template_of(source)
        rendering = make_rendering(
            load_tokenizer(weights),
            template_kwargs=self._config.model.chat_template if own is None else own,
            ends=end_ids(weights),
        )
        return weights, rendering, max_positions(AutoConfig.from_pretrained(described_in(weights)))

    def _endpoint(self, spec: Spec) -> Partner:
        settings = self._config.endpoint
        model, url = spec.address
        key = endpoint_key(settings)
        if self._plays and spec.text not in self._endpoints:
            self._endpoints[spec.text] = Endpoint(model, url, settings=settings, key=key)

        def sit(names: tuple[object, ...], seat: int) -> Player:
            return EndpointPlayer(
                name=spec.text, seed_names=names, max_new_tokens=settings.max_new_tokens
            )

        return Partner(spec.text, sit)

    def _load_members(self, members: Sequence[int]) -> None:
        """Give each of these members of the pool an engine with its weights.

        Engines of members that play no more get other weights; one more model is loaded only where
        more members play than in any step before. Raises RunEnds for a snapshot that is gone.
        """
        for member in members:
            if member in self._loaded.values():
                continue
            folder = snapshot_folder(self._folder, member)
            if not folder.is_dir():
                raise RunEnds(f"{folder} must stay while its run goes on, got no such folder")
            free = (slot for slot, held in self._loaded.items() if held not in members)
            slot = next(free, f"{POOL} {len(self._loaded) + 1}")
            self._loaded[slot] = member
            if not self._plays:
                continue
            if slot in self._here:
                self._here[slot].update_weights(snapshot_weights(folder), member)
            else:
                engine = self._here[slot] = self._load("the policy pool", folder)
                self._frozen[slot] = Frozen(engine, self._rendering.stop_ids)

    def _seat(
        self, name: str, model: str, rendering: Rendering, max_positions: int | None
    ) -> Callable[[tuple[object, ...], int], Player]:
        """The `make_player` of a frozen policy. `model` is its engine's name in the router,
        `max_positions` the longest transcript that the model can read, in tokens."""
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
        self._tell(what, engine.num_weight_bytes, f"on {model.device}", weights)
        return engine

    def _tell(self, what: str, num_bytes: int, place: str, weights: Path) -> None:
        if self._world.rank == 0:
            mib = num_bytes / 2**20
            print(
                f"{what}: {mib:.3g} MiB of weights more {place} for the whole run, from {weights}",
                flush=True,
            )

    def _join(self, step: int, learner: Learner, tokenizer: PreTrainedTokenizerBase) -> None:
        """Add the policy to the pool."""
        folder = snapshot_folder(self._folder, step)
        export_atomically(learner.model, tokenizer, folder, world=learner.world)
        self._members = joined(self._members, step, size=self._config.policy_pool.size)

    def _usage(self) -> dict[str, float]:
        """This rank's endpoint usage since the last call, summed over endpoints."""
        usages = [endpoint.take_usage() for endpoint in self._endpoints.values()]
        return add_up(
            {
                "num_endpoint_requests": usage.num_requests,
                "num_endpoint_retries": usage.num_retries,
                "num_endpoint_prompt_tokens": usage.num_prompt_tokens,
                "num_endpoint_tokens": usage.num_new_tokens,
            }
            for usage in usages
        )


def _chat_ids(rendering: Rendering, request: Request) -> tuple[int, ...]:
    """The prompt of a chat of a system and a user message."""
    system, user = (message.content for message in request.messages)
    return tuple(rendering.conversation(system, [user], []))


def joined(members: list[int], step: int, *, size: int) -> list[int]:
    """The pool after the policy of `step` joined: the first member and the newest others.

    The first member stays because it has the language of the warm start. `size` 0 keeps all.
    """
    pool = sorted({*members, step})
    if size == 0 or len(pool) <= size:
        return pool
    return [pool[0], *pool[len(pool) - (size - 1) :]] if size > 1 else [pool[-1]]


def snapshot_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a Hugging Face folder as (the model's parameter name, tensor), one at
    a time."""
    model = empty_model(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    stored = Stored(folder, model)
    for name, parameter in model.named_parameters():
        yield name, stored.read(name, tuple(slice(0, size) for size in parameter.shape))


def check_partners(partners: Sequence[str], game: GameConfig, *, out: str) -> None:
    """Raise SettingsError, before anything starts, for a checkpoint that is missing or was trained
    on another game. The run's own warm start may be missing, because the run creates it."""
    for spec, _ in parse_shares(partners):
        if Path(spec.argument) != Path(out) / "warm_start":
            check_spec(spec, game, out=out, what="rollout.partners")


def check_spec(spec: Spec, game: GameConfig, *, out: str, what: str) -> None:
    """Raise SettingsError, which names the key `what`, for a checkpoint that is missing or was
    trained on another game."""
    if spec.kind == CHECKPOINT:
        what = f"{what}: {spec.text}"
        source = find_source(Path(spec.argument), what=what)
        check_same_game(source, game, what=what, played=out)
