"""The observers of a run, in order; each reads each finished step.

Custom ones may end the run and return numbers; built-in ones only read. Each is called in a
separate block (`Ending.after_weights_changed`), so that one that ends the run does not keep the
step from the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from selfplay.config import Config
from selfplay.config.load import typed_options
from selfplay.config.plugins import PLUGINS, function_of, named, own_call, plain_state
from selfplay.distributed import World, broadcast_object, gather_objects, raise_on_all_ranks
from selfplay.errors import OwnFault, SettingsError
from selfplay.metrics.observer import Observer, Step
from selfplay.metrics.records import OBSERVED, Pieces, group_records
from selfplay.metrics.step_log import Journal


class Groups(Observer):
    """Writes the games of all ranks to groups.jsonl, in step 1 and every `log_groups_every` steps
    from there."""

    def __init__(self, config: Config, world: World, journal: Journal, pieces: Pieces) -> None:
        """`pieces` renders the policy's tokens."""
        super().__init__(config, world)
        self._journal, self._pieces = journal, pieces

    def on_step(self, step: Step) -> None:
        """Every rank sends its games to rank 0."""
        every = self.config.log_groups_every
        if not every or (step.number - 1) % every:
            return
        own = group_records(
            step.episodes, step.stats, step.advantages, step=step.number, pieces=self._pieces
        )
        every_rank = gather_objects(own, self.world)
        self._journal.groups([record for records in every_rank for record in records])


class _Own(Observer):
    """A custom observer, or a built-in one that measures: an error in it ends the run with one
    line, on every rank."""

    def __init__(self, name: str, options: Mapping[str, Any], config: Config, world: World) -> None:
        """`name` and `options` are an entry of `observers`. Raises OwnFault for options that the
        class does not declare."""
        kind = function_of("observers", name)
        self._name, self.world = name, world
        self.key = f"observer {name.rpartition(':')[2]}"
        with own_call("observers", name):
            self._observer: Observer = kind(config, world, own_options(kind, options))

    def on_step(self, step: Step) -> None:
        """Add rank 0's numbers to the line, on every rank.

        Monitors decide on every rank, so all must read the same line: the numbers of other ranks
        are dropped.
        """
        with raise_on_all_ranks(self.world), own_call("observers", self._name):
            given = checked_numbers(self._observer.on_step(step))
        step.metrics.update(broadcast_object(given, self.world))

    def state(self) -> dict[str, Any]:
        """The result of its `state`. Raises OwnFault for one that JSON cannot hold."""
        return dict(plain_state("observers", self._name, self._observer.state))

    def restore(self, state: Mapping[str, Any]) -> None:
        """Starts from {} if the run started without it."""
        with own_call("observers", self._name):
            self._observer.restore(state)

    def close(self) -> None:
        """An error here fails the run, although all steps are done."""
        with own_call("observers", self._name):
            self._observer.close()


def own_options(kind: Any, given: Mapping[str, Any]) -> Any:
    """The options of a custom class, None if it declares none. Raises OwnFault for others."""
    if kind.Options is None and given:
        raise OwnFault(f"it must have no options, because it declares no Options, got {given}")
    try:
        return kind.Options and typed_options(kind.Options, given, what="options")
    except ValueError as error:
        raise OwnFault(str(error)) from None


def checked_numbers(given: Any) -> dict[str, float]:
    """The numbers returned by `on_step` under their names in metrics.jsonl: the prefix `OBSERVED`
    keeps the trainer's names free. Numbers may be of any real type, such as numpy's, and NaN, which
    the file holds as null. None stands for no numbers.

    Raises OwnFault for anything else.
    """
    if not isinstance(given, Mapping | None) or not all(
        isinstance(name, str) and isinstance(number, Real) for name, number in (given or {}).items()
    ):
        raise OwnFault(f"on_step must return numbers by name, or None, got {given!r}")
    return {f"{OBSERVED}{name}": float(number) for name, number in (given or {}).items()}


def check_observers(config: Config, *, here: bool) -> None:
    """Ask each observer of the settings whether it is `ready`.

    Raises SettingsError for options that it does not declare, or that do not fit other settings.
    """
    for name, options in map(named, config.observers):
        try:
            with own_call("observers", name):
                kind: Any = function_of("observers", name)
                kind.ready(config, own_options(kind, options), here=here)
        except OwnFault as fault:
            raise SettingsError(str(fault)) from fault


def make_observers(config: Config, world: World, *records: Observer) -> list[Observer]:
    """A run's observers: first the custom ones, so that all others read their numbers; then
    `records`, which every run has; then the built-in ones of `observers`, which read the records'
    files."""
    own: list[Observer] = []
    built_in: list[Observer] = []
    for name, options in map(named, config.observers):
        kind: Any = function_of("observers", name)
        if name in PLUGINS["observers"].built_in and not kind.measures:
            built_in.append(kind(config, world))
        else:
            own.append(_Own(name, options, config, world))
    return [*own, *records, *built_in]
