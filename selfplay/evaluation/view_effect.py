"""The view effect: a seat's score minus its score in the same games if it reads another private
view. Near 0 the policy plays as if it could not see what only its seat sees.

A control plays the same instance with the same named seeds. In each game one seat of the policy,
the seats in turn, reads what it would read after the same moves in another instance: one that the
game's `vary` makes, which differs only in what this seat sees. Without `vary` it reads the prompt
of the next instance. The game itself goes on with its own instance, for all that other seats read,
for what is legal, and for the score.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from dialop.game import Game, Instance, Prompt, Step
from dialop.kit import Kit
from selfplay.config import GameConfig
from selfplay.data.seeds import named_seed
from selfplay.distributed import World, gather_objects
from selfplay.evaluation.rows import ViewEffect
from selfplay.evaluation.tables import paired_interval
from selfplay.evaluation.talk_effect import policy_seats
from selfplay.rollout.episode import Episode, GameSetup

_ENOUGH = 8  # games without another view, after which no more are looked at


def view_controls(
    setups: Mapping[int, GameSetup], instances: Sequence[Instance], *, game: GameConfig
) -> dict[int, tuple[int, GameSetup]]:
    """The controls of these games, by their index in `instances`: the seat of the policy that reads
    another private view, and the game in which it does.

    A game without another view has none, and after _ENOUGH such games no more are looked at. The
    controls are not played: their draws are those of the games, so they may play beside them.
    """
    controls: dict[int, tuple[int, GameSetup]] = {}
    for num, (index, setup) in enumerate(setups.items()):
        if num == _ENOUGH and not controls:  # the game has no private views
            break
        twins = dict(other_views(game, setup.game, instances, index, policy_seats(setup)))
        if twins:
            seat = [*twins][index // len(setup.players) % len(twins)]
            seen = SeenOtherwise(setup.game, seat, twins[seat], follows=game.kit.has("vary"))
            controls[index] = seat, replace(setup, game=cast(Game, seen))
    return controls


def view_effect(
    games: Mapping[int, Episode], controls: Mapping[int, tuple[int, Episode]], world: World
) -> ViewEffect | None:
    """The view effect over all ranks' games; None if no seat of the policy has a private view.
    `games` are this rank's, by index, and `controls` those of `view_controls`, played. A pair of
    which one game was aborted is left out. Every rank must call."""
    own = {
        index: _score(games[index], seat) - _score(other, seat)
        for index, (seat, other) in controls.items()
        if index in games
    }
    every = gather_objects(own, world)
    merged = {index: difference for of_rank in every for index, difference in of_rank.items()}
    if not merged:
        return None
    return ViewEffect(paired_interval([merged[index] for index in sorted(merged)]), len(merged))


def _score(episode: Episode, seat: int) -> float:
    return episode.outcome.score_of([seat])


def other_views(
    game: GameConfig, plain: Game, instances: Sequence[Any], number: int, seats: Sequence[int]
) -> Iterator[tuple[int, Game]]:
    """Those of the seats that see something of their own in `plain`, the new game of this instance,
    and the new game of another one in which they see something else (`other_instance`)."""
    for seat in seats:
        other = other_instance(game.kit, instances, number, seat)
        if other is not None:
            twin = game.kit.new_game(other, game.options)
            if game.kit.has("vary") or twin.prompt(seat) != plain.prompt(seat):
                yield seat, twin


def other_instance(kit: Kit, instances: Sequence[Any], number: int, seat: int) -> Any:
    """An instance in which the seat sees something else: by the game's `vary`, else the next of
    `instances`. None if there is none."""
    instance = instances[number]
    if kit.has("vary"):
        seed = named_seed("another view", instance.key, seat) % 1000  # a game may show it
        return kit.vary(instance, seat, seed=seed)
    return instances[(number + 1) % len(instances)] if len(instances) > 1 else None


class SeenOtherwise:
    """A game in which one seat reads what the `twin` shows it: its prompt and, with `follows`, the
    observations after the same moves, until the twin refuses one. All else is the game's."""

    def __init__(self, game: Game, seat: int, twin: Game, *, follows: bool) -> None:
        self._game, self._seat, self._twin, self._follows = game, seat, twin, follows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._game, name)

    def clone(self) -> SeenOtherwise:
        game, twin = self._game.clone(), self._twin.clone()
        return SeenOtherwise(game, self._seat, twin, follows=self._follows)

    def prompt(self, seat: int) -> Prompt:
        return (self._twin if seat == self._seat else self._game).prompt(seat)

    def step(self, seat: int, text: str) -> Step:
        step = self._game.step(seat, text)
        if step.error is not None or not self._follows:
            return step
        other = self._twin.step(seat, text)
        self._follows = other.error is None
        if not self._follows:
            return step
        seen = list(step.observations)
        seen[self._seat] = other.observations[self._seat]
        return replace(step, observations=tuple(seen))
