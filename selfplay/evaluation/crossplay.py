"""Cross-play: every player with every other, in both seats, on the same instances and with the same
seeds.

Policies that trained apart understand each other only in the language they share. A language that a
pair made up for itself shows as self-play scores above cross-play scores. At most two models are in
memory at a time: the one whose row is played and one partner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from selfplay.chat.rendering import Rendering
from selfplay.colocation.start import load_engine
from selfplay.config import Config, GameConfig, RolloutConfig
from selfplay.distributed import World
from selfplay.engines.base import Engine
from selfplay.evaluation.crossplay_report import Matrix
from selfplay.evaluation.crossplay_sources import MatrixPlayer
from selfplay.evaluation.evaluate import Evaluation, EvaluationContext, evaluate, evaluate_scripted
from selfplay.partners.partners import Partners

Pair = tuple[str, str]
Cells = dict[Pair, Evaluation]


@dataclass(frozen=True, slots=True)
class MatrixPolicy:
    """What a policy of the matrix needs to play: settings that name its weights, and the rendering
    with its tokenizer and chat template."""

    config: Config
    rendering: Rendering


def play_matrix(
    players: Sequence[MatrixPlayer],
    rows: Sequence[str],
    *,
    instances: Sequence[Any],
    policies: Mapping[str, MatrixPolicy],
    game: GameConfig,
    rollout: RolloutConfig,
    temperature: float | None,
    world: World,
    facts: dict[str, Any],
) -> Matrix:
    """Play every player of `rows` with every player in both seats. Every rank must call.

    `policies` holds the players with weights by label; `game` and `rollout` are the settings of
    games between two scripted players.

    Raises:
        AllVoid: if all games of a pair are void.
    """
    cells: Cells = {}
    for number, one in enumerate(players):
        others = [p for p in players[number:] if one.label in rows or p.label in rows]
        if one.source is None:
            for other in others:
                cells |= _play_scripted(one, other, instances=instances, game=game, rollout=rollout)
            continue
        if not others:
            continue
        policy = policies[one.label]
        with ExitStack() as cleanup:
            engine = load_engine(policy.config, one.source.weights, world, cleanup=cleanup)
            for other in others:
                cells |= _play_policy(
                    one,
                    other,
                    engine=engine,
                    policy=policy,
                    instances=instances,
                    temperature=temperature,
                    world=world,
                )
                if world.rank == 0:
                    print(f"played: {one.label} with {other.label}", flush=True)
    columns = [*rows, *(player.label for player in players if player.label not in rows)]
    return Matrix(facts, tuple(rows), tuple(columns), cells)


def _play_policy(
    one: MatrixPlayer,
    other: MatrixPlayer,
    *,
    engine: Engine | None,
    policy: MatrixPolicy,
    instances: Sequence[Any],
    temperature: float | None,
    world: World,
) -> Cells:
    """The games of a policy with itself, or with another player in both seats. The other player's
    model is freed afterwards."""
    config, rendering = policy.config, policy.rendering
    if one is other:
        context = EvaluationContext.of(config, engine, rendering=rendering, world=world)
        return {(one.label, one.label): evaluate(instances, context, temperature=temperature)}
    partners = Partners([(other.spec, 1.0)], config, rendering=rendering, world=world)
    partner, router = partners.for_step(0)[0][0], partners.beside(engine)
    context = EvaluationContext.of(
        config, router, rendering=rendering, world=world, partner=partner
    )
    try:
        first, second = (
            evaluate(instances, context, temperature=temperature, seat=seat) for seat in (0, 1)
        )
    finally:
        partners.close()
    return {(one.label, other.label): first, (other.label, one.label): second}


def _play_scripted(
    one: MatrixPlayer,
    other: MatrixPlayer,
    *,
    instances: Sequence[Any],
    game: GameConfig,
    rollout: RolloutConfig,
) -> Cells:
    """The games of two scripted players in both seats."""
    return {
        (a.label, b.label): evaluate_scripted(
            instances, spec=a.spec.argument, other=b.spec.argument, game=game, rollout=rollout
        )
        for a, b in ((one, other), (other, one))
    }
