"""Cross-play: who understands whom. Every player with every other, in both seats, on the same
instances and with the same draws.

Policies that trained apart understand each other only where they speak the language that they
share; what a pair made up for itself shows as self-play above cross-play. At most two models are in
memory at a time: the one whose row is played and one partner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from selfplay.chat.rendering import Rendering
from selfplay.colocation.start import load_engine
from selfplay.config import Config
from selfplay.distributed import World
from selfplay.engines.base import Engine
from selfplay.evaluation.crossplay_report import Matrix
from selfplay.evaluation.crossplay_sources import MatrixPlayer
from selfplay.evaluation.evaluate import Evaluation, EvaluationContext, evaluate, evaluate_scripted
from selfplay.partners.partners import Partners

Pair = tuple[str, str]
Cells = dict[Pair, Evaluation]


@dataclass(frozen=True, slots=True)
class Voice:
    """How a policy of the matrix speaks: the settings with its weights, its tokenizer and
    template."""

    config: Config
    rendering: Rendering


def play_matrix(
    players: Sequence[MatrixPlayer],
    rows: Sequence[str],
    *,
    instances: Sequence[Any],
    voices: Mapping[str, Voice],
    config: Config,
    temperature: float | None,
    world: World,
    facts: dict[str, Any],
) -> Matrix:
    """Play every player of `rows` with every player in both seats. Every rank calls.

    `voices` holds one for each player with weights, by label; `config` says which game is played.

    Raises:
        AllVoid: where none of a pair's games came to an end.
    """
    cells: Cells = {}
    for number, one in enumerate(players):
        others = [p for p in players[number:] if one.label in rows or p.label in rows]
        if one.source is None:
            for other in others:
                cells |= _scripts(one, other, instances=instances, config=config)
            continue
        if not others:
            continue
        voice = voices[one.label]
        with ExitStack() as cleanup:
            engine = load_engine(voice.config, one.source.weights, world, cleanup=cleanup)
            for other in others:
                cells |= _beside(
                    one,
                    other,
                    engine=engine,
                    voice=voice,
                    instances=instances,
                    temperature=temperature,
                    world=world,
                )
                if world.rank == 0:
                    print(f"played: {one.label} with {other.label}", flush=True)
    by_label = [player.label for player in players]
    columns = [*rows, *(label for label in by_label if label not in rows)]
    return Matrix(facts, tuple(rows), tuple(columns), cells)


def _beside(
    one: MatrixPlayer,
    other: MatrixPlayer,
    *,
    engine: Engine | None,
    voice: Voice,
    instances: Sequence[Any],
    temperature: float | None,
    world: World,
) -> Cells:
    """The games of a policy with itself, or with another in both seats; the other's model goes
    when they are played."""
    if one is other:
        context = EvaluationContext.of(voice.config, engine, rendering=voice.rendering, world=world)
        return {(one.label, one.label): evaluate(instances, context, temperature=temperature)}
    partners = Partners([(other.spec, 1.0)], voice.config, rendering=voice.rendering, world=world)
    partner, router = partners.for_step(0)[0][0], partners.beside(engine)
    context = EvaluationContext.of(
        voice.config, router, rendering=voice.rendering, world=world, partner=partner
    )
    try:
        first, second = (
            evaluate(instances, context, temperature=temperature, seat=seat) for seat in (0, 1)
        )
    finally:
        partners.close()
    return {(one.label, other.label): first, (other.label, one.label): second}


def _scripts(
    one: MatrixPlayer, other: MatrixPlayer, *, instances: Sequence[Any], config: Config
) -> Cells:
    """The games of two scripted players in both seats."""
    return {
        (a.label, b.label): evaluate_scripted(
            instances,
            spec=a.spec.argument,
            other=b.spec.argument,
            game=config.game,
            rollout=config.rollout,
        )
        for a, b in ((one, other), (other, one))
    }
