"""The scripted players that teach, and their checks before a run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from dialop.game import Script
from dialop.turns import FunctionScript
from selfplay.config import Config, GameConfig
from selfplay.config.player_spec import weighted
from selfplay.errors import SettingsError
from selfplay.evaluation.view_effect import other_views
from selfplay.warm_start.options import WarmStartConfig

_LONGEST = 40  # moves of a game in which a teacher is watched


def check_teachers(config: Config) -> None:
    """Raise SettingsError for a teacher that does not exist or cannot teach."""
    warm: WarmStartConfig = config.warm_start
    if warm.num_games or "auxiliary_imitation" in config.methods:
        teacher_mixture(warm.teachers, config.game)
    elif config.model.scratch:
        tokenizer_scripts(config)
    if warm.first_games:
        teacher_mixture(warm.first_teachers, config.game, key="warm_start.first_teachers")


def tokenizer_scripts(config: Config) -> list[str]:
    """The scripted players whose games train a scratch model's tokenizer: the teachers, or all of
    the game's scripts, if any, for a run without teachers and scripted games to imitate."""
    warm, names = config.warm_start, config.game.kit.SCRIPT_NAMES
    unused = not (warm.num_games or "auxiliary_imitation" in config.methods)
    if unused and warm.teachers == WarmStartConfig().teachers and not {*warm.teachers} & {*names}:
        return list(names)
    return teacher_mixture(warm.teachers, config.game)[0]


def teacher_mixture(
    teachers: Sequence[str], game: GameConfig, *, key: str = "warm_start.teachers"
) -> tuple[list[str], list[float]]:
    """Specs and weights of "spec*weight" teachers; the weight defaults to 1.

    Raises SettingsError, which names `key`, for a teacher that does not exist or cannot teach.
    """
    kit = game.kit
    specs, weights = [], []
    for entry in teachers:
        try:
            spec, weight = weighted(entry, what="weight", example="solo*0.5")
            kit.make_script(spec, seed=0)
        except ValueError as error:
            raise SettingsError(f"{key}: {error}") from None
        specs.append(spec)
        weights.append(weight)
    if sum(weights) <= 0:
        raise SettingsError(f"{key} needs a positive weight, got {list(teachers)}")
    if not any(kit.seated(spec)[seat] == spec for spec in specs for seat in kit.POLICY_SEATS):
        seats = ", ".join(map(str, kit.POLICY_SEATS))
        raise SettingsError(
            f"{key} must be able to play the policy's seat {seats}, got {list(teachers)}"
        )
    return specs, weights


def blind_teachers(config: Config, *, num: int = 8) -> list[str]:
    """The teachers that do not look at what only their seat sees, if no other teacher does; else
    none.

    In scripted games of `num` instances each teacher is asked for each of its moves a second time,
    with the same random draws, as if its seat saw another instance (`other_views`).
    """
    warm, game = config.warm_start, config.game
    if not warm.num_games:
        return []
    specs = list(dict.fromkeys(teacher_mixture(warm.teachers, game)[0]))
    instances = game.kit.generate(game.kit.easy(game.options), seed=0, num=num)
    uses = {spec: {_uses_view(spec, game, instances, n) for n in range(num)} for spec in specs}
    return [
        spec for spec in specs if False in uses[spec] and True not in set().union(*uses.values())
    ]


def _uses_view(spec: str, game: GameConfig, instances: Sequence[Any], number: int) -> bool | None:
    """Whether a move of the teacher differs in this instance; None if its seats see nothing of
    their own, or it makes no move there."""
    kit = game.kit
    own, specs = kit.new_game(instances[number], game.options), kit.seated(spec)
    scripts = [kit.make_script(each, seed=number) for each in specs]
    seats = [seat for seat in kit.POLICY_SEATS if specs[seat] == spec]
    twins = dict(other_views(game, own, instances, number, seats))
    asked = None
    for turn in range(_LONGEST):
        mover = own.seat_to_move
        if mover is None or not twins:
            break
        draws = f"{number} {turn}"
        text = _move(scripts[mover], own.view(mover), draws)
        if mover in twins:
            if _move(scripts[mover], twins[mover].view(mover), draws) != text:
                return True
            asked = False
        if own.step(mover, text).error is not None:
            break
        twins = {each: twin for each, twin in twins.items() if twin.step(mover, text).error is None}
    return asked


def _move(script: Script, view: Any, draws: str) -> str:
    """The script's move, with draws that depend on the game and the turn, not on the view."""
    if isinstance(script, FunctionScript):
        return script.move(view, random.Random(draws))
    return script.act(view)
