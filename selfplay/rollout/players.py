"""Who sits in a seat: the policy, a frozen one, a scripted player, or a teacher whose words are
imitated.

A player's `move` is a generator: a policy yields a `Request` and is sent a `Completion`, a
scripted player yields nothing. Text is decoded on the side and never flows back into a transcript.
No torch here.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

from dialop.game import Game, Script
from selfplay.chat.rendering import Rendering
from selfplay.chat.transcript import Transcript
from selfplay.data.seeds import named_seed
from selfplay.engines.base import Completion, Request


@dataclass(frozen=True, slots=True)
class Move:
    """One try at a move: its text, whether it ended by itself, how many tokens were sampled.

    `void` says why there is none and never will be (a dead endpoint): the game then counts for
    nothing.
    """

    text: str
    complete: bool
    num_tokens: int
    void: str | None = None


Moving = Generator[Request, Completion, Move | None]


class Player(Protocol):
    """A seat's occupant. `transcript` is None for a partner whose tokens never train."""

    @property
    def name(self) -> str: ...

    @property
    def transcript(self) -> Transcript | None: ...

    def move(self, game: Game, seat: int, observation: str) -> Moving:
        """Try a move after reading `observation`; None when the seat is out of tokens."""
        ...

    def refused(self) -> None:
        """The last move was illegal."""
        ...

    def fork(self, *names: object) -> Player:
        """An independent copy from here on, whose draws bear these names as well."""
        ...


class PolicyPlayer:
    """The model being trained: keeps the seat's exact tokens and asks the engine for each turn."""

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
        read(self.transcript, self._rendering, game, seat, observation)
        room = min(self._max_new_tokens, self._max_game_tokens - len(self.transcript.ids))
        if room < 1:
            return None
        turn = len(self.transcript.spans)
        seed = named_seed(*self._seed_names, seat, turn)
        # The prompt is copied: the transcript grows while other games still wait for the same
        # engine call.
        said = yield Request(
            prompt_ids=tuple(self.transcript.ids),
            max_new_tokens=room,
            seed=seed,
            speaker=self._speaker,
        )
        self.transcript.act(
            said.ids, logprobs=said.logprobs, version=said.version, finish=said.finish
        )
        complete = said.finish == "stop"
        return Move(
            text=self._rendering.decode(said.ids), complete=complete, num_tokens=len(said.ids)
        )

    def refused(self) -> None:
        """A refused move stays in the transcript and trains: avoiding errors is learnt, too."""

    def fork(self, *names: object) -> PolicyPlayer:
        twin = copy.copy(self)
        twin.transcript = self.transcript.fork()
        twin._seed_names = (*self._seed_names, *names)
        return twin


class FrozenPlayer:
    """A policy that does not train, behind an engine of its own: what it keeps of its tokens is for
    its next prompt alone."""

    transcript: Transcript | None = None

    def __init__(self, policy: PolicyPlayer, *, name: str) -> None:
        self.name, self._policy = name, policy

    def move(self, game: Game, seat: int, observation: str) -> Moving:
        return (yield from self._policy.move(game, seat, observation))

    def refused(self) -> None:
        """It reads of its slip in its next observation."""

    def fork(self, *names: object) -> FrozenPlayer:
        return FrozenPlayer(self._policy.fork(*names), name=self.name)


class ScriptedPartner:
    """A scripted player as a partner; nothing of it trains."""

    transcript: Transcript | None = None

    def __init__(self, script: Script, *, name: str) -> None:
        self.name, self._script = name, script

    def move(self, game: Game, seat: int, observation: str) -> Moving:
        return Move(text=self._script.act(game.view(seat)), complete=True, num_tokens=0)
        yield  # a generator that never asks the engine

    def refused(self) -> None:
        """Scripted players see their refused moves in the view."""

    def fork(self, *names: object) -> ScriptedPartner:
        seed = named_seed(self._script.seed, *names)
        return ScriptedPartner(self._script.reseeded(seed), name=self.name)


class Teacher:
    """A scripted player whose moves become the transcript a policy would have sampled here."""

    def __init__(self, script: Script, rendering: Rendering, *, name: str) -> None:
        self.name, self.transcript = name, Transcript()
        self._script, self._rendering = script, rendering

    def move(self, game: Game, seat: int, observation: str) -> Moving:
        read(self.transcript, self._rendering, game, seat, observation)
        lesson = self._script.lesson(game.view(seat))
        text, detours = lesson.text, lesson.detours
        ids = self._rendering.action_ids(text)
        self.transcript.act(
            ids,
            logprobs=[0.0] * len(ids),
            version=0,
            finish="stop",
            untrained=self._rendering.token_ranges(text, detours) if detours else (),
        )
        return Move(text=text, complete=True, num_tokens=len(ids))
        yield  # a generator that never asks the engine

    def refused(self) -> None:
        """A slip is context for its repair, never something to imitate."""
        self.transcript.mark_untrained(len(self.transcript.spans) - 1)

    def fork(self, *names: object) -> Teacher:
        twin = copy.copy(self)
        twin.transcript = self.transcript.fork()
        twin._script = self._script.reseeded(named_seed(self._script.seed, *names))
        return twin


def read(
    transcript: Transcript, rendering: Rendering, game: Game, seat: int, observation: str
) -> None:
    """Bring a seat's transcript up to its next turn: the opening prompt, or what was said since."""
    if transcript.ids:
        last = transcript.spans[-1]
        closed = rendering.ends_turn(transcript.ids[last.start : last.end])
        transcript.observe(rendering.following(observation, closed=closed))
    else:
        prompt = game.prompt(seat)
        user = "\n".join(text for text in (prompt.user, observation) if text)
        transcript.observe(rendering.first(system=prompt.system, user=user))
