"""All who may sit beside the policy: their players, the engines they speak through, their ratings.

What it costs is said when it starts: a frozen checkpoint or the pool of past policies is one more
whole model on each rank that plays, beside the policy's for the whole run. Names, ratings and the
pool are the same on every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from selfplay.chat.rendering import Rendering, make_rendering
from selfplay.checkpoint import export_atomically
from selfplay.config import Config
from selfplay.config.player_spec import CHECKPOINT, ENDPOINT, PERSON, POOL, SELF, Spec, parse_shares
from selfplay.config.settings import SettingsError
from selfplay.distributed import World, gather_objects
from selfplay.engines.base import Engine
from selfplay.engines.endpoint import Endpoint, endpoint_key
from selfplay.engines.hf import HFEngine
from selfplay.engines.router import EngineRouter, Frozen
from selfplay.games import kit_of
from selfplay.learner.learner import Learner
from selfplay.model.policy import DTYPES, described_in, load_model
from selfplay.partners import policy_pool
from selfplay.partners.checkpoints import Source, check_same_game, find_source
from selfplay.partners.ratings import rated
from selfplay.rollout.episode import Episode
from selfplay.rollout.players import FrozenPlayer, Player, PolicyPlayer
from selfplay.rollout.seating import SELF_PLAY, Partner, scripted_partner
from selfplay.rollout.text_players import EndpointPlayer, PersonPlayer

POLICY = PolicyPlayer.name


class Partners:
    """The partners of a run or an evaluation. Only a rank that plays has their engines.

    Raises:
        SettingsError: for a checkpoint or a key that is not there.
    """

    def __init__(
        self,
        shares: Sequence[tuple[Spec, float]],
        config: Config,
        *,
        rendering: Rendering,
        world: World,
    ) -> None:
        self._config, self._world, self._plays = config, world, world.replica.leads
        self._folder, self._rendering = Path(config.out), rendering
        self._frozen: dict[str, Frozen] = {}
        self._endpoints: dict[str, Endpoint] = {}
        self._partners: list[
            tuple[Partner | None, float]
        ] = []  # None: whichever past policy is drawn
        for spec, share in shares:
            partner = None if spec.kind == POOL else self._partner(spec)
            self._partners.append((partner, share))
        kinds = {spec.kind for spec, _ in shares}
        self._pool_share = POOL in kinds
        self._needs_router = bool(kinds & {POOL, CHECKPOINT, ENDPOINT})
        self._members: list[int] = []
        self._ratings: dict[str, float] = {}
        self._met: int | None = None  # the past policy whose weights the pool's engine holds

    # Who sits where

    def for_step(self, step: int) -> list[tuple[Partner, float]]:
        """Who may be met in this step, with their shares. One past policy a step is drawn from the
        pool and its weights loaded."""
        return [(partner or self._pool_partner(step), share) for partner, share in self._partners]

    def usual(self) -> Partner:
        """With whom held-out games are played: the policy itself, or in a game of unequal seats the
        first partner it trains with."""
        if kit_of(self._config.game).LEARNER_SEAT is None:
            return SELF_PLAY
        return self._partners[0][0] or SELF_PLAY

    def invite(self, spec: Spec) -> Partner:
        """One more who may be met, outside the training games; a frozen one is loaded here."""
        self._needs_router = self._needs_router or spec.kind in (CHECKPOINT, ENDPOINT)
        return self._partner(spec)

    def beside(self, engine: Engine | None) -> Engine | None:
        """The policy's engine with the partners' voices beside it; the engine itself where no
        partner needs one."""
        if engine is None or not self._needs_router:
            return engine
        return EngineRouter(engine, frozen=self._frozen, endpoints=self._endpoints)

    # What the games change

    def begin(
        self, state: Mapping[str, Any], learner: Learner, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Go on with what a checkpoint carried; at a run's start its first weights open the
        pool."""
        self._members = list(state.get("pool", []))
        self._ratings = dict(state.get("ratings", {}))
        if self._pool_share and not self._members:
            self._join(0, learner, tokenizer)

    def finish_step(
        self,
        step: int,
        episodes: Sequence[Episode],
        learner: Learner,
        tokenizer: PreTrainedTokenizerBase,
    ) -> dict[str, float]:
        """After `step` steps: rate who played with whom, let the policy join the pool when it is
        due. Returns the ratings and what endpoints cost; nothing where the policy plays by
        itself. Every rank calls."""
        if all(partner is SELF_PLAY for partner, _ in self._partners):
            return {}
        games = [(*_pair(episode), episode.outcome.score_norm) for episode in episodes]
        gathered = gather_objects((games, self._usage()), self._world)
        everyone = [game for part, _ in gathered for game in part]
        self._ratings = rated(self._ratings, everyone, step=self._config.policy_pool.rating_step)
        if self._pool_share and step % self._config.policy_pool.every == 0:
            self._join(step, learner, tokenizer)
        metrics = {f"rating/{name}": rating for name, rating in self._ratings.items()}
        for _, usage in gathered:
            for name, number in usage.items():
                metrics[name] = metrics.get(name, 0.0) + number
        return metrics

    def state(self) -> dict[str, Any]:
        """What a checkpoint must carry so that the run goes on as if it had not stopped."""
        return {"pool": self._members, "ratings": self._ratings}

    def close(self) -> None:
        for endpoint in self._endpoints.values():
            endpoint.close()

    # How each kind is made

    def _partner(self, spec: Spec) -> Partner:
        if spec.kind == SELF:
            return SELF_PLAY
        if spec.kind == CHECKPOINT:
            return self._checkpoint(spec)
        if spec.kind == ENDPOINT:
            return self._endpoint(spec)
        if spec.kind == PERSON:
            return Partner(spec.text, _sit_down, alone=True)
        return Partner(
            spec.text,
            lambda names, seat: scripted_partner(spec.argument, names, seat, self._config.game),
        )

    def _checkpoint(self, spec: Spec) -> Partner:
        weights = _find(spec).weights
        rendering = make_rendering(
            AutoTokenizer.from_pretrained(weights),
            template_kwargs=self._config.model.chat_template,
        )
        if self._plays and spec.text not in self._frozen:
            self._frozen[spec.text] = self._load(spec.text, weights, rendering)
        text = AutoConfig.from_pretrained(described_in(weights)).get_text_config()
        room = getattr(text, "max_position_embeddings", None)
        return Partner(spec.text, self._seat(spec.text, spec.text, rendering, room))

    def _endpoint(self, spec: Spec) -> Partner:
        settings = self._config.endpoint
        model, url = spec.address
        key = endpoint_key(settings)
        if self._plays:
            self._endpoints[spec.text] = Endpoint(model, url, settings=settings, key=key)

        def sit(names: tuple[object, ...], seat: int) -> Player:
            return EndpointPlayer(
                name=spec.text, seed_names=names, max_new_tokens=settings.max_new_tokens
            )

        return Partner(spec.text, sit)

    def _pool_partner(self, step: int) -> Partner:
        member = policy_pool.draw_member(
            self._members,
            self._ratings,
            names=(self._config.seed, "past self", step),
            settings=self._config.policy_pool,
        )
        folder = policy_pool.snapshot_folder(self._folder, member)
        if self._plays and POOL not in self._frozen:
            self._frozen[POOL] = self._load("the pool of past policies", folder, self._rendering)
        elif self._plays and member != self._met:
            engine = self._frozen[POOL].engine
            engine.update_weights(policy_pool.snapshot_weights(folder), member)
        self._met = member
        name = policy_pool.self_name(member)
        return Partner(name, self._seat(name, POOL, self._rendering, None))

    def _seat(
        self, name: str, speaker: str, rendering: Rendering, room: int | None
    ) -> Callable[[tuple[object, ...], int], Player]:
        """How a frozen policy sits down; `room` is the longest transcript it can read."""
        rollout = self._config.rollout

        def sit(names: tuple[object, ...], seat: int) -> Player:
            policy = PolicyPlayer(
                rendering,
                seed_names=names,
                max_new_tokens=rollout.max_new_tokens,
                max_game_tokens=min(rollout.max_game_tokens, room or rollout.max_game_tokens),
                speaker=speaker,
            )
            return FrozenPlayer(policy, name=name)

        return sit

    def _load(self, what: str, weights: Path, rendering: Rendering) -> Frozen:
        """A whole copy on this rank's device, in the dtype of computation, for as long as it
        runs."""
        device, dtype = self._world.device, DTYPES[self._config.model.dtype]
        model = load_model(str(weights), device=device, dtype=dtype).requires_grad_(False)
        num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        if self._world.rank == 0:
            mib = num_bytes / 2**20
            print(
                f"{what}: {mib:.3g} MiB of weights more on {device} as long as it plays, "
                f"from {weights}",
                flush=True,
            )
        engine = HFEngine(model, max_batch=self._config.engine.max_batch)
        return Frozen(engine, rendering.stop_ids)

    def _join(self, step: int, learner: Learner, tokenizer: PreTrainedTokenizerBase) -> None:
        """The policy of this step becomes a past policy, rated as the policy is now; who leaves the
        pool for it is rated no longer."""
        folder = policy_pool.snapshot_folder(self._folder, step)
        export_atomically(learner.model, tokenizer, folder, world=learner.world)
        left = set(self._members)
        self._members = policy_pool.joined(self._members, step, size=self._config.policy_pool.size)
        if POLICY in self._ratings:
            self._ratings[policy_pool.self_name(step)] = self._ratings[POLICY]
        for member in left.difference(self._members):
            self._ratings.pop(policy_pool.self_name(member), None)

    def _usage(self) -> dict[str, float]:
        """This rank's requests to endpoints since the last call, summed over them."""
        total: dict[str, float] = {}
        for endpoint in self._endpoints.values():
            usage = endpoint.take_usage()
            found = {
                "num_endpoint_requests": usage.num_requests,
                "num_endpoint_retries": usage.num_retries,
                "num_endpoint_prompt_tokens": usage.num_prompt_tokens,
                "num_endpoint_tokens": usage.num_new_tokens,
                "endpoint_cost": usage.cost(self._config.endpoint),
            }
            for name, number in found.items():
                total[name] = total.get(name, 0.0) + number
        return total


def check_partners(config: Config) -> None:
    """Raise SettingsError, before anything starts, for a checkpoint that is not there or of another
    game; the run's own warm start will be there."""
    own = Path(config.out) / "warm_start"
    for spec, _ in parse_shares(config.rollout.partners):
        if Path(spec.argument) != own:
            check_spec(spec, config)


def check_spec(spec: Spec, config: Config) -> None:
    """Raise SettingsError for a checkpoint that is not there or of another game than the run's."""
    if spec.kind == CHECKPOINT:
        try:
            check_same_game(_find(spec), config, what=f"partner {spec.text!r}", played=config.out)
        except ValueError as error:
            raise SettingsError(str(error)) from None


def _find(spec: Spec) -> Source:
    """Where a checkpoint's weights lie."""
    try:
        return find_source(Path(spec.argument), what=f"partner {spec.text!r}")
    except ValueError as error:
        raise SettingsError(str(error)) from None


def make_partners(
    config: Config, rendering: Rendering, world: World, *, cleanup: ExitStack
) -> Partners:
    """The partners that the settings name; `cleanup` will end what they started."""
    shares = parse_shares(config.rollout.partners)
    partners = Partners(shares, config, rendering=rendering, world=world)
    cleanup.callback(partners.close)
    return partners


def _sit_down(names: tuple[object, ...], seat: int) -> Player:
    return PersonPlayer(name=PERSON, lines_in=sys.stdin, lines_out=sys.stdout)


def _pair(episode: Episode) -> tuple[str, str]:
    one, other = episode.players
    return one, other
