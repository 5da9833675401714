"""The partners of a run by their names in the settings, and the router to their engines.

Names and the pool are the same on every rank.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerBase

from selfplay.chat.rendering import Rendering
from selfplay.config import Config
from selfplay.config.player_spec import (
    CHECKPOINT,
    ENDPOINT,
    POOL,
    SCRIPTED,
    SELF,
    Spec,
    parse_shares,
)
from selfplay.distributed import World, gather_objects, on_first_rank
from selfplay.engines.base import GameRunner
from selfplay.errors import SettingsError
from selfplay.learner.learner import Learner
from selfplay.learner.method import Ask
from selfplay.metrics.step import add_up
from selfplay.partners.endpoints import Endpoints
from selfplay.partners.frozen import FrozenPolicies
from selfplay.partners.opponents import Opponents, drawn
from selfplay.partners.pool import PolicyPool
from selfplay.partners.router import EngineRouter, Live
from selfplay.partners.updates import PartnerUpdates
from selfplay.policies.seats import for_policy
from selfplay.rollout.seat_rules import chosen_seats, partner_seats
from selfplay.rollout.seating import SELF_PLAY, Partner, scripted_partner


def shared_out(drawn: Sequence[list[tuple[Partner, float]]]) -> list[tuple[Partner, float]]:
    """The partners drawn for each policy with their shares of the step's instances: each policy
    that has partners gets an equal part of the instances."""
    having = [own for own in drawn if any(partner.make_player for partner, _ in own)]
    joined = [(partner, share / len(having)) for own in having for partner, share in own]
    return joined or [(SELF_PLAY, 1.0)]


class Partners:
    """The partners of a run or an evaluation. Only ranks that play games hold engines.

    `specs` are the partners that `opponents` may draw in training. With SGLang each checkpoint
    among them has its own engine, which takes half a minute to start and answers many games at
    once; one added later plays in transformers.

    Raises:
        SettingsError: for a missing checkpoint or API key.
    """

    def __init__(
        self,
        specs: Sequence[Spec],
        config: Config,
        *,
        rendering: Rendering,
        world: World,
        policy: str = "",
        seats: Sequence[int] = (),
    ) -> None:
        """`policy` is the name of the policy, if there are several, whose `seats` they play."""
        self._config, self._world = config, world
        self._policy, self._seats = policy, seats
        self._frozen = FrozenPolicies(config, rendering, world)
        self._endpoints = Endpoints(config.endpoint, plays=world.replica.leads)
        has_pool = POOL in {spec.kind for spec in specs}
        self._pool = PolicyPool(config, self._frozen, policy=policy) if has_pool else None
        self._partners = {
            spec.text: self._partner(spec, own_engine=True, seats=seats)
            for spec in specs
            if spec.kind != POOL
        }
        self.updates = PartnerUpdates(Path(config.out), self._frozen, world)
        self._digests: dict[str, str] = {}  # of the frozen policies, by name
        self._drawn: tuple[int, list[tuple[Partner, float]]] | None = None  # the last draw's step

    def for_step(self, step: int, opponents: Opponents) -> list[tuple[Partner, float]]:
        """The partners of this step with their shares, drawn once per step; loads the weights of
        the pool's members. Every rank must call."""
        if self._drawn is None or self._drawn[0] != step:
            members = self._pool.names if self._pool else {}
            shares = drawn(opponents, step, [*members], self._world)
            every = self._partners
            if self._pool:
                every = every | self._pool.load([name for name, _ in shares if name in members])
            own = [(for_policy(every[n], self._policy, self._seats), share) for n, share in shares]
            self._drawn = step, own
        return self._drawn[1]

    def make_ready(self, specs: Sequence[Spec]) -> None:
        """Let opponents draw these. Raises SettingsError for one that needs a model or an endpoint
        that the run has not loaded at its start."""
        for spec in specs:
            if spec.text in self._partners or (spec.kind == POOL and self._pool):
                continue
            if spec.kind not in (SELF, SCRIPTED):
                known = [*self._partners, *([POOL] if self._pool else [])]
                raise SettingsError(
                    "rollout.partners of a step must be self, scripted players, or partners that "
                    f"the run has loaded ({', '.join(known)}), got {spec.text!r}"
                )
            self._partners[spec.text] = self._partner(spec, own_engine=False)

    def named(self, name: str) -> Partner:
        """The partner of this spec."""
        return self._partners[name]

    def held_out_partner(self) -> Partner:
        """The partner in held-out games: the policy itself, or the first training partner if the
        policy does not play all seats."""
        if chosen_seats(self._config.game, self._config.rollout) is None:
            return SELF_PLAY
        first, _ = parse_shares(self._config.rollout.partners)[0]
        return self._partners.get(first.text, SELF_PLAY)

    def add(self, spec: Spec) -> Partner:
        """Add a partner for games outside training; a checkpoint is loaded here."""
        return self._partner(spec, own_engine=False)

    def reader(self, spec: Spec) -> Ask:
        """Answers chats outside games, with an endpoint or a checkpoint, which is loaded here.
        `take_usage` counts the usage."""
        return (self._endpoints if spec.kind == ENDPOINT else self._frozen).reader(spec)

    def routed(
        self, engine: GameRunner, *others: Partners, live: Mapping[str, Live] = MappingProxyType({})
    ) -> GameRunner:
        """A router over the policy's engine, the engines of these and other policies' partners, and
        the `live` ones of other policies; the policy's engine itself if nobody needs another."""
        every = (self, *others)
        if not live and not any(
            each._pool or each._frozen.engines or each._endpoints.clients for each in every
        ):
            return engine
        frozen = ChainMap(*(each._frozen.engines for each in every))
        endpoints = ChainMap(*(each._endpoints.clients for each in every))
        return EngineRouter(engine, frozen=frozen, endpoints=endpoints, live=live)

    def restore(
        self, state: Mapping[str, Any], learner: Learner, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Restore `state()` of a checkpoint, or begin with {}. Rank 0 prints which frozen policies
        have other weights than there. Every rank must call."""
        self.updates.restore(state.get("updated", {}))
        # Of the weights at the start: their files may change or go while the run plays with them.
        self._digests = self._digests or on_first_rank(self._frozen.digests, self._world)
        for name, digest in state.get("weights", {}).items() if self._world.rank == 0 else ():
            if self._digests.get(name, digest) != digest and name not in self.updates.steps:
                print(f"{self._config.out} continues with a changed {name}", flush=True)
        if self._pool:
            self._pool.restore(state.get("pool", []), learner, tokenizer)

    def add_to_pool(self, step: int, learner: Learner, tokenizer: PreTrainedTokenizerBase) -> None:
        """Add the policy after `step` steps to the pool if it is due. Every rank must call."""
        if self._pool:
            self._pool.add(step, learner, tokenizer)

    def take_usage(self) -> dict[str, float]:
        """All ranks' endpoint usage since the last call, as metrics. Every rank must call."""
        own = add_up(client.take_usage() for client in self._endpoints.clients.values())
        return add_up(gather_objects(own, self._world))

    def state(self) -> dict[str, Any]:
        """The partners' part of the trainer state, as plain values for `restore`."""
        pool = {"pool": self._pool.members if self._pool else []}
        more = {"updated": dict(self.updates.steps), "weights": self._digests}
        return pool | {name: of for name, of in more.items() if of}

    def close(self) -> None:
        self._endpoints.close()
        self._frozen.close()

    def _partner(self, spec: Spec, *, own_engine: bool, seats: Sequence[int] = ()) -> Partner:
        if spec.kind == SELF:
            return SELF_PLAY
        if spec.kind == CHECKPOINT:
            seats = seats or partner_seats(self._config.game, self._config.rollout)
            return self._frozen.checkpoint(spec, own_engine=own_engine, seats=seats)
        if spec.kind == ENDPOINT:
            return self._endpoints.partner(spec)
        return Partner(
            spec.text,
            lambda names, seat: scripted_partner(spec.argument, names, seat, self._config.game),
        )
