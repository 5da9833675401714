"""The scripted players that teach, and their checks before a run."""

from __future__ import annotations

from collections.abc import Sequence

from selfplay.config import Config, GameConfig
from selfplay.config.player_spec import weighted
from selfplay.errors import SettingsError
from selfplay.warm_start.options import WarmStartConfig


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
