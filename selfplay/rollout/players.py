"""The players of a seat: the policy, a frozen policy, a scripted player, and a teacher whose moves
are imitated.

A player's `move` is a generator. A policy yields a `Request` and is sent a `Completion`; a scripted
player yields nothing. Sampled ids go into the transcript as they are: text is decoded from them for
the game and is never tokenized again.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

from dialop.game import Game, Prompt, Script
from selfplay.chat.rendering import Rendering
from selfplay.chat.transcript import Transcript
from selfplay.data.seeds import named_seed
from selfplay.engines.base import Completion, Request


@dataclass(frozen=True, slots=True)
class Move:
    """One try at a move: its text, whether it is complete (not cut off), how many tokens were
    sampled.

    `void` is the reason why a partner has no move (an endpoint that fails). The game is then void
    and is not scored.
    """

    text: str
    complete: bool
    num_tokens: int
    void: str | None = None


Moving = Generator[Request, Completion, Move | None]


class Player(Protocol):
    """Plays one seat of one game. `transcript` is None for a partner, whose tokens never train."""

    @property
    def name(self) -> str: ...

    @property
    def transcript(self) -> Transcript | None: ...

    def move(self, game: Game, seat: int, observation: str) -> Moving:
        """Try a move after reading `observation`; None when the seat has no tokens left."""
        ...

    def refused(self) -> None:
        """The last move was illegal."""
        ...

    def fork(self, *names: object) -> Player:
        """An independent copy; `names` are added to the names of its random draws."""
        ...


class PolicyPlayer:
    """The model being trained. It keeps the seat's exact tokens and requests each turn from the
    engine."""

    name = "policy"

    def __init__(
        self,
        rendering: Rendering,
        *,
        seed_names: tuple[object, ...],
        max_new_tokens: int,
        max_game_tokens: int,
        speaker: str = "",
    ) -> None:
        self.transcript = Transcript()
        self._speaker = speaker
        self._rendering = rendering
        self._seed_names = seed_names
        self._max_new_tokens, self._max_game_tokens = max_new_tokens, max_game_tokens

    def move(self, game: Game, seat: int, observation: str) -> Moving:
        _observe(self.transcript, self._rendering, game, seat, observation)
        room = min(self._max_new_tokens, self._max_game_tokens - len(self.transcript.ids))
        if room < 1:
            return None
        turn = len(self.transcript.spans)
        seed = named_seed(*self._seed_names, seat, turn)
        # The prompt is a copy: the transcript grows later, the request must not.
        completion = yield Request(
            prompt_ids=tuple(self.transcript.ids),
            max_new_tokens=room,
            seed=seed,
            speaker=self._speaker,
        )
        self.transcript.act(
            completion.ids,
            logprobs=completion.logprobs,
            version=completion.version,
            finish=completion.finish,
        )
        return Move(
            text=self._rendering.decode(completion.ids),
            complete=completion.finish == "stop",
            num_tokens=len(completion.ids),
        )

    def refused(self) -> None:
        """Nothing to do: a refused move stays in the transcript and trains, so that the policy
        learns to avoid errors."""

    def fork(self, *names: object) -> PolicyPlayer:
        twin = copy.copy(self)
        twin.transcript = self.transcript.fork()
        twin._seed_names = (*self._seed_names, *names)
        return twin


class FrozenPlayer:
    """A policy that does not train, served by its own engine. Its tokens are kept only to build its
    next prompt."""

    transcript: Transcript | None = None

    def __init__(self, policy: PolicyPlayer, *, name: str) -> None:
        self.name, self._policy = name, policy

    def move(self, game: Game, seat: int, observation: str) -> Moving:
        return (yield from self._policy.move(game, seat, observation))

    def refused(self) -> None:
        """Nothing to do: its next observation contains the error."""

    def fork(self, *names: object) -> FrozenPlayer:
        return FrozenPlayer(self._policy.fork(*names), name=self.name)


class ScriptedPartner:
    """A scripted player as a partner; its moves never train."""

    transcript: Transcript | None = None

    def __init__(self, script: Script, *, name: str) -> None:
        self.name, self._script = name, script

    def move(self, game: Game, seat: int, observation: str) -> Moving:
        return Move(text=self._script.act(game.view(seat)), complete=True, num_tokens=0)
        yield  # makes this a generator, though it never requests a completion

    def refused(self) -> None:
        """Nothing to do: the game's view lists refused moves."""

    def fork(self, *names: object) -> ScriptedPartner:
        seed = named_seed(self._script.seed, *names)
        return ScriptedPartner(self._script.reseeded(seed), name=self.name)


class Teacher:
    """A scripted player that writes its moves into a transcript as if a policy had sampled them."""

    def __init__(self, script: Script, rendering: Rendering, *, name: str) -> None:
        self.name, self.transcript = name, Transcript()
        self._script, self._rendering = script, rendering

    def move(self, game: Game, seat: int, observation: str) -> Moving:
        _observe(self.transcript, self._rendering, game, seat, observation)
        lesson = self._script.lesson(game.view(seat))
        ids = self._rendering.action_ids(lesson.text)
        self.transcript.act(
            ids,
            logprobs=[0.0] * len(ids),
            version=0,
            finish="stop",
            untrained=(
                self._rendering.token_ranges(lesson.text, lesson.detours) if lesson.detours else ()
            ),
        )
        return Move(text=lesson.text, complete=True, num_tokens=len(ids))
        yield  # makes this a generator, though it never requests a completion

    def refused(self) -> None:
        """Exclude the refused move from imitation; it stays as context for its correction."""
        self.transcript.mark_untrained(len(self.transcript.spans) - 1)

    def fork(self, *names: object) -> Teacher:
        twin = copy.copy(self)
        twin.transcript = self.transcript.fork()
        twin._script = self._script.reseeded(named_seed(self._script.seed, *names))
        return twin


def _observe(
    transcript: Transcript, rendering: Rendering, game: Game, seat: int, observation: str
) -> None:
    """Append what the seat reads before its next turn: the opening prompt, or what happened since
    its last turn."""
    if transcript.ids:
        last = transcript.spans[-1]
        closed = rendering.ends_turn(transcript.ids[last.start : last.end])
        transcript.observe(rendering.following(observation, closed=closed))
    else:
        transcript.observe(opening_ids(rendering, game.prompt(seat), observation))


def opening_ids(rendering: Rendering, prompt: Prompt, observation: str = "") -> list[int]:
    """The ids of a seat's first prompt of a game, demonstration games included."""
    (first, *later), moves = prompt.read(observation)
    ids = rendering.first(system=prompt.system, user=first)
    for move, user in zip(moves, later, strict=True):
        ids += rendering.action_ids(move) + rendering.following(user, closed=True)
    return ids
