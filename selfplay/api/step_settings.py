"""Settings of a single step: numbers of the update, the partners, and which instances are drawn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from numbers import Real
from pathlib import Path
from typing import Any

from dialop.kit import Kit
from dialop.specs import closest
from selfplay.config import Config
from selfplay.config.features import section_class
from selfplay.config.load import load, override_words
from selfplay.config.player_spec import parse_shares
from selfplay.data.stream import TrainStream, made_instances
from selfplay.errors import SettingsError
from selfplay.preflight.seats import check_players
from selfplay.step.run import Policy, Run

PARTNERS, OPTIONS = "rollout.partners", "game.options"
# The settings that each step reads; `start` has built the run's parts from the others.
OF_A_STEP = (
    *("rollout.temperature", "optim.lr", "algorithm.kl", "algorithm.entropy", "algorithm.options"),
    *("algorithm.clip_low", "algorithm.clip_high", "algorithm.dual_clip"),
    *("reward.token_cost", "reward.message_cost", "reward.error_penalty", "reward.options"),
    *(PARTNERS, OPTIONS),
)
_WATCHED = 4, 40  # scripted games in which a game's options are watched, and moves of each


@contextmanager
def step_parts(run: Run, folder: Path, overrides: Mapping[str, Any], step: int) -> Iterator[Run]:
    """The run's parts with these settings replaced, inside, where opponents draw by them too.

    Raises SettingsError for settings that a step cannot change.
    """
    words, valid = override_words(overrides), _keys(run.config.policies)
    for key in overrides:
        if not any(key == name or key.startswith(f"{name}.") for name in valid):
            known = ", ".join(name for name in valid if not name.startswith("policies."))
            if run.config.policies:
                known += ", policies.NAME.partners, .optim.lr and the same of .algorithm"
            same = [name for name in valid if name.rpartition(".")[2] == key.rpartition(".")[2]]
            near = closest(key, same or valid) or next(iter(same), "")
            raise SettingsError(
                f"a step's overrides must be among {known}, got {key}"
                f"{near and f'; nearest is {near}'}"
            )
    given = load(Config, folder / "config.yaml", words)
    stream = _stream(run, given, step)
    check_players(given)
    policies = []
    for each in run.policies:
        with section_class("policies").naming(given, each.name):
            policies.append(_changed(each, given.of_policy(each.name)))
    config = policies[0].config
    if given.policies:
        config = replace(run.config, rollout=given.rollout, reward=given.reward)
    named = dict(word.split("=", 1) for word in words)
    changed = replace(
        run,
        config=config,
        policies=policies,
        stream=stream,
        changed=dict(_numbers(overrides)),
        overrides=named,
    )
    try:
        for each in changed.policies:
            each.opponents.config = each.config
        yield changed
    finally:
        for each in run.policies:
            each.opponents.config = each.config


def _keys(policies: Iterable[str]) -> list[str]:
    """The keys that a step of a run with these policies may change.

    A key of one of several policies is its partners, which the run does not have, or a number of
    its update over the run's, as in the settings of a whole run.
    """
    if not (names := [*policies]):
        return [*OF_A_STEP]
    of_run = [key for key in OF_A_STEP if key != PARTNERS]
    own = ["partners", *(key for key in of_run if key.startswith(("optim.", "algorithm.")))]
    return of_run + [f"policies.{name}.{key}" for name in names for key in own]


def _numbers(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of settings by their dotted keys."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, Real):
            yield f"{prefix}{name}", float(value)


def _changed(policy: Policy, given: Config) -> Policy:
    """The policy with the values of a step. Raises SettingsError for a KL without a reference, and
    for a partner that the run has not loaded."""
    if given.algorithm.kl and not policy.config.algorithm.kl:
        raise SettingsError(
            "algorithm.kl must be above 0 at the run's start to load a reference, got "
            f"{policy.config.algorithm.kl:g} there and {given.algorithm.kl:g} in a step"
        )
    policy.partners.make_ready([spec for spec, _ in parse_shares(given.rollout.partners)])
    changeable = ("rollout", "algorithm", "reward", "optim")
    values = {name: getattr(given, name) for name in changeable}
    return replace(policy, config=replace(policy.config, **values))


def _stream(run: Run, given: Config, step: int) -> TrainStream:
    """The instances of a step with these options of the game, in which the run's own are played.

    Raises SettingsError for an option that play reads, and for instances of a file.
    """
    own, kit = run.config.game, run.config.game.kit
    changed = {
        each.name: getattr(given.game.options, each.name)
        for each in fields(own.options)
        if getattr(given.game.options, each.name) != getattr(own.options, each.name)
    }
    if not changed:
        return run.stream
    if run.config.data.train_file:
        raise SettingsError(
            f"{OPTIONS} must be the run's in a step with the instances of a file, "
            f"{run.config.data.train_file}, got {', '.join(changed)}"
        )
    numbers = range(min(_WATCHED[0], run.config.rollout.instances))
    instances = made_instances(run.config, step, numbers)
    read = read_in_play(kit, own.options, instances)
    if wrong := next((name for name in changed if name in read), None):
        able = [each.name for each in fields(own.options) if each.name not in read]
        raise SettingsError(
            f"{OPTIONS}.{wrong} must be the run's in a step, because it changes games and not only "
            f"which are drawn, got {changed[wrong]!r}; a step may change "
            f"{', '.join(able) or 'none of the options'}"
        )
    data = replace(run.config.data, processes=1)  # workers would be started for one step
    return TrainStream(replace(run.config, game=given.game, data=data))


def read_in_play(kit: Kit, options: Any, instances: Sequence[Any]) -> set[str]:
    """The names of the options that a game reads when it is made, shown and played by scripted
    players, if it has any."""
    names, read = {each.name for each in fields(options)}, set[str]()

    def get(self: Any, name: str) -> Any:
        if name in names:
            read.add(name)
        return object.__getattribute__(self, name)

    watched: Any = object.__new__(type("Watched", (type(options),), {"__getattribute__": get}))
    for name in names:
        object.__setattr__(watched, name, getattr(options, name))
    for number, instance in enumerate(instances):
        game = kit.new_game(instance, watched)
        for seat in range(game.num_seats):
            game.prompt(seat), game.view(seat)
        game.legal_moves(), game.outcome()
        for spec in kit.BASELINES[:1]:
            scripts = [kit.make_script(each, seed=number) for each in kit.seated(spec)]
            for _ in range(_WATCHED[1]):
                if (seat_to_move := game.seat_to_move) is not None:
                    game.step(seat_to_move, scripts[seat_to_move].act(game.view(seat_to_move)))
        game.measures(range(game.num_seats)), game.outcome()
    return read
