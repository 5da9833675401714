"""Plays the matches of an evaluation: every player with every other, in both seats, on the same
instances and with the same seeds. A single policy is a matrix of one row.

Policies that trained separately understand each other only if they share a language. A private
language shows as self-play scores above cross-play scores. At most two models are in
memory at a time: the one whose matches are played and one partner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from selfplay.chat.rendering import Rendering
from selfplay.config import Config, GameConfig, RolloutConfig
from selfplay.distributed import World
from selfplay.evaluation.evaluate import Evaluation, EvaluationContext, evaluate, evaluate_scripted
from selfplay.evaluation.plan import ITSELF, EvalPlan, Match
from selfplay.partners.partners import Partners
from selfplay.weight_sync.start import load_engine
from selfplay.weight_sync.supervisor import EngineSupervisor


@dataclass(frozen=True, slots=True)
class MatrixPolicy:
    """What a policy of the matrix needs to play: settings that name its weights, and the rendering
    with its tokenizer and chat template."""

    config: Config
    rendering: Rendering


def play_matches(
    plan: EvalPlan,
    *,
    instances: Sequence[Any],
    policies: Mapping[str, MatrixPolicy],
    world: World,
) -> dict[str, Evaluation]:
    """Play every match; the result has the matches' names. Every rank must call.

    `policies` holds the players with weights by label.

    Raises:
        AllVoid: if all games of a match are void.
        RunEnds: if an engine fails three times in a row.
        SettingsError: for a partner whose weights or API key cannot be used.
    """
    rows: dict[str, Evaluation] = {}
    for one, own in groupby(plan.matches, key=lambda match: match.one):
        if one.source is None:
            rows |= {
                match.name: _scripted(match, plan.config.game, plan.config.rollout, instances)
                for match in own
            }
            continue
        config, rendering = policies[one.label].config, policies[one.label].rendering
        with ExitStack() as cleanup:
            engine = load_engine(config, one.source.weights, world, cleanup=cleanup)
            for other, matches in groupby(own, key=lambda match: match.other):
                spec = ITSELF if other == one else other.spec
                # The partner's model is freed before the next one is loaded.
                with closing(
                    Partners([(spec, 1.0)], config, rendering=rendering, world=world)
                ) as partners:
                    context = EvaluationContext(
                        config,
                        EngineSupervisor(engine, world, router=partners.routed(engine)),
                        rendering,
                        world,
                        partners.for_step(0)[0][0],
                    )
                    for match in matches:
                        rows[match.name] = evaluate(
                            instances, context, temperature=match.temperature, seat=match.seat
                        )
                        if world.rank == 0:
                            print(f"played: {match.name}", flush=True)
    return rows


def _scripted(
    match: Match, game: GameConfig, rollout: RolloutConfig, instances: Sequence[Any]
) -> Evaluation:
    specs = (match.one.spec.argument, match.other.spec.argument)
    first, second = specs[::-1] if match.seat == 1 else specs
    return evaluate_scripted(instances, spec=first, other=second, game=game, rollout=rollout)
