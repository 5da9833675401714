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
from selfplay.evaluation.talk_effect import Play
from selfplay.rollout.episode import Episode, GameSetup

_ENOUGH = 8  # games without another view, after which no more are looked at


def view_effect(
    games: Mapping[int, Episode],
    instances: Sequence[Instance],
    setups: Sequence[GameSetup],
    play: Play,
    *,
    game: GameConfig,
    world: World,
) -> ViewEffect | None:
    """The view effect over all ranks' games; None if no seat of the policy has a private view.
    `games` are this rank's, by their index in `instances` and `setups`; a game without another view
    is left out, as is one whose control was aborted. Every rank must call."""
    seats: dict[int, int] = {}
    controls: dict[int, GameSetup] = {}
    for num, (index, episode) in enumerate(games.items()):
        if num == _ENOUGH and not controls:  # the game has no private views
            break
        plain, own_seats = setups[index].game, episode.policy_seats
        twins = dict(other_views(game, plain, instances, index, own_seats))
        if twins:
            seat = seats[index] = [*twins][index // len(episode.players) % len(twins)]
            seen = SeenOtherwise(plain, seat, twins[seat], follows=game.kit.has("vary"))
            controls[index] = replace(setups[index], game=cast(Game, seen))
    own = {
        index: _score(games[index], seats[index]) - _score(other, seats[index])
        for index, other in play(controls).items()
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
