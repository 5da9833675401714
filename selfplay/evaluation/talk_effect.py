"""The talk effect: a score minus the score of the same games with other messages. It adds up the
gain from right messages and the harm of wrong ones, so it is not the gain of talk over silence.

A control plays the same instances with the same named seeds. Only one thing differs: instead of
each message that a seat of the policy reads, it reads a message of another game, sent by the same
seat and the same player (policy or partner), as close as possible to the same turn and of a similar
length; or an empty one. The game itself continues with the message that was sent, so its own texts,
proposals, answers, tools and everything that partners and the speaker read are unchanged. A game in
which the policy heard no message counts as a difference of 0 and is not played again.

This works for every game where a move that only speaks has the kind (`Step.action`) "message" and
its readers read it in `Step.observations`. A message that the game would refuse from this speaker
at this turn, or would show to other readers, is not substituted.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, cast

from dialop.game import Game, Step
from dialop.tags import split_message
from selfplay.data.seeds import named_seed
from selfplay.distributed import World, gather_objects
from selfplay.evaluation.rows import TalkEffect
from selfplay.evaluation.tables import paired_interval
from selfplay.rollout.episode import Episode, GameSetup, Turn

MESSAGE = "message"
NOTHING = "qzxqzx"  # stands for an empty message, which games refuse; removed before it is read
_UNREAD = re.compile(rf"[ \t]*{NOTHING}", re.IGNORECASE)  # with the spaces before it


@dataclass(frozen=True, slots=True)
class Said:
    """A message as its speaker sent it. `turn` counts the legal moves before it. `by_policy` is
    False for a partner's."""

    instance: str
    seat: int
    readers: tuple[int, ...]
    turn: int
    text: str
    by_policy: bool = True


Change = Callable[[Said], str | None]  # the message heard instead; None leaves it unchanged
Play = Callable[[Mapping[Any, GameSetup]], Mapping[Any, Episode]]


def talk_effect(
    games: Mapping[int, Episode], setups: Sequence[GameSetup], play: Play, world: World
) -> TalkEffect | None:
    """The talk effect over all ranks' games; None if the policy heard no message that could be
    changed. `games` are this rank's, by their index in `setups`. Every rank must call."""
    said = {index: messages_of(episode) for index, episode in games.items()}
    bank = MessageBank(chain.from_iterable(gather_objects(list(chain(*said.values())), world)))
    heard = {
        index: setups[index]
        for index, episode in games.items()
        if any(set(episode.policy_seats) & set(message.readers) for message in said[index])
    }
    if not sum(gather_objects(len(heard), world)):
        return None
    # Both controls at once: the last games of each leave an engine almost idle.
    controls = play(
        {
            (control, index): changed(setup, change)
            for control, change in enumerate((bank.other, blank))
            for index, setup in heard.items()
        }
    )
    played = [{i: e for (of, i), e in controls.items() if of == control} for control in (0, 1)]
    effect, blanked = (_differences(games, heard, each, world) for each in played)
    if effect is None:
        return None
    scores, agreements = zip(*effect, strict=True)
    return TalkEffect(
        paired_interval(scores),
        paired_interval(agreements),
        paired_interval([score for score, _ in blanked]) if blanked else None,
        len(effect),
    )


def _differences(
    games: Mapping[int, Episode],
    heard: Collection[int],
    controls: Mapping[int, Episode],
    world: World,
) -> list[tuple[float, float]] | None:
    """Score and agreement of each game of all ranks minus the control's; None if no message was
    changed. A game that was `heard` and whose control was aborted is left out."""
    own = {
        index: (
            episode.score - other.score,
            float(episode.outcome.agreed) - float(other.outcome.agreed),
        )
        for index, episode in games.items()
        if (other := controls.get(index) if index in heard else episode) is not None
    }
    num_changed = sum(cast(Any, control.game).num_changed for control in controls.values())
    every = gather_objects((own, num_changed), world)
    if not sum(num for _, num in every):
        return None
    merged = {index: value for differences, _ in every for index, value in differences.items()}
    return [merged[index] for index in sorted(merged)]


def changed(setup: GameSetup, change: Change) -> GameSetup:
    """The same game, but the policy's seats hear other messages."""
    game = HeardOtherwise(setup.game, setup.instance, policy_seats(setup), change)
    return replace(setup, game=cast(Game, game))


def policy_seats(setup: GameSetup) -> list[int]:
    """The seats of the policy in a game that is still to be played."""
    return [seat for seat, player in enumerate(setup.players) if player.transcript is not None]


class HeardOtherwise:
    """A game whose seats `policy` read other messages than the ones sent. Everything else is
    delegated to the game. `num_changed` counts the messages changed so far."""

    def __init__(self, game: Game, instance: str, policy: Collection[int], change: Change) -> None:
        self._game, self._instance, self._policy = game, instance, frozenset(policy)
        self._change, self._num_legal, self.num_changed = change, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._game, name)

    def clone(self) -> HeardOtherwise:
        twin = HeardOtherwise(self._game.clone(), self._instance, self._policy, self._change)
        twin._num_legal, twin.num_changed = self._num_legal, self.num_changed
        return twin

    def step(self, seat: int, text: str) -> Step:
        before, step = self._game.clone(), self._game.step(seat, text)
        if step.action is None:
            return step
        readers = readers_of(step)
        said = Said(
            self._instance, seat, readers, self._num_legal, text, by_policy=seat in self._policy
        )
        self._num_legal += 1
        if step.action != MESSAGE or not self._policy & set(readers):
            return step
        other = self._change(said)
        if other is None:
            return step
        heard = before.step(seat, other)
        if heard.action != MESSAGE or readers_of(heard) != readers:
            return step
        self.num_changed += 1
        pairs = enumerate(zip(step.observations, heard.observations, strict=True))
        changed = self._policy & set(readers)
        heard_by = (_UNREAD.sub("", t) if each in changed else own for each, (own, t) in pairs)
        return replace(step, observations=tuple(heard_by))


def readers_of(move: Step | Turn) -> tuple[int, ...]:
    """The seats other than the mover that read something of a move."""
    return tuple(s for s, text in enumerate(move.observations) if text and s != move.seat)


def messages_of(episode: Episode) -> list[Said]:
    """The messages of a game."""
    legal = [turn for turn in episode.turns if turn.action is not None]
    return [
        Said(
            episode.instance,
            turn.seat,
            readers_of(turn),
            number,
            turn.text,
            by_policy=turn.seat in episode.policy_seats,
        )
        for number, turn in enumerate(legal)
        if turn.action == MESSAGE
    ]


class MessageBank:
    """The messages of many games, from which a game is given messages of others."""

    def __init__(self, said: Iterable[Said]) -> None:
        self._said: dict[tuple[Any, ...], list[tuple[Said, int]]] = defaultdict(list)
        for message in said:
            key = message.seat, message.readers, message.by_policy
            self._said[key].append((message, length_class(message)))

    def other(self, said: Said) -> str | None:
        """A message of another instance from the same seat to the same readers: from the closest
        turn, then the closest length class, then drawn by a named seed. None if there is none.

        The classes are 1, 2 to 3, 4 to 7, … words. Equal lengths would often mean equal texts,
        because the length of a short message gives away much of its content.
        """
        own_class = length_class(said)
        others = [
            (abs(other.turn - said.turn), abs(other_class - own_class), other.text)
            for other, other_class in self._said[said.seat, said.readers, said.by_policy]
            if other.instance != said.instance
        ]
        if not others:
            return None
        closest = min(distance for *distance, _ in others)
        able = [text for *distance, text in others if distance == closest]
        seed = named_seed("another game's message", said.instance, said.seat, said.turn)
        return able[seed % len(able)]


def blank(said: Said) -> str:
    """The message with NOTHING as its words, which its readers read as empty."""
    return f"{split_message(said.text)[0]}{NOTHING}"


def length_class(said: Said) -> int:
    """The number of bits of a message's word count."""
    return len(split_message(said.text)[1].split()).bit_length()
