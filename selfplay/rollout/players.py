"""The players of a seat: the policy, a frozen policy, a scripted player, and a teacher whose moves
are imitated.

A policy awaits its turns from an engine; a scripted player awaits nothing. Sampled ids enter the
transcript unchanged: text is decoded from them for the game and is never tokenized again.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Protocol

from dialop.game import Game, Prompt, Script
from selfplay.chat.rendering import Rendering
from selfplay.chat.transcript import Transcript
from selfplay.data.seeds import named_seed
from selfplay.engines.base import Generate, Request


@dataclass(frozen=True, slots=True)
class Move:
    """One try at a move: its text, whether it is complete (not cut off), how many tokens were
    sampled.

    `void` is the reason why a partner has no move (a failed endpoint); the game is then aborted and
    not scored. `used_up` means that the seat's last tokens ended before the move did.
    """

    text: str
    complete: bool
    num_tokens: int
    void: str | None = None
    used_up: bool = False


class Player(Protocol):
    """Plays one seat of one game. `transcript` is None for a partner, whose tokens never train."""

    @property
    def name(self) -> str: ...

    @property
    def transcript(self) -> Transcript | None: ...

    async def move(
        self, game: Game, seat: int, observation: str, generate: Generate
    ) -> Move | None:
        """Try a move after reading `observation`; None if the seat has no tokens left.
        `generate` answers the requests of a model."""
        ...

    def refused(self) -> None:
        """The last move was illegal."""
        ...

    def fork(self, *names: object) -> Player:
        """An independent copy; `names` are added to the names of its random draws. Without names
        its draws equal the original's."""
        ...


class _SeatText:
    """What a seat has read and said, as exact tokens; `answers` are its own turns as texts.

    If the chat template rewrites old turns, each turn is a separate sequence of the transcript,
    with the template's rendering of the conversation so far as its prompt. So is a turn after one
    that did not end with the template's end-of-turn token.
    """

    def __init__(self, rendering: Rendering) -> None:
        self.transcript, self._rendering = Transcript(), rendering
        self._system, self._users, self.answers = "", list[str](), list[str]()

    def read(self, game: Game, seat: int, observation: str) -> None:
        """Append what the seat reads before its next turn: the opening prompt, or the events since
        its last turn."""
        transcript, rendering = self.transcript, self._rendering
        if not transcript.ids:
            prompt = game.prompt(seat)
            self._system = prompt.system
            self._users, self.answers = prompt.read(observation)
            transcript.observe(opening_ids(rendering, prompt, observation))
        elif rendering.rewritten:
            self._users.append(observation)
            transcript.begin()
            transcript.observe(rendering.conversation(self._system, self._users, self.answers))
        else:
            context = transcript.context()
            kept, ids = rendering.continued(context, observation)
            if kept < len(context):
                transcript.begin()
                transcript.observe(context[:kept])
            transcript.observe(ids)

    def fork(self) -> _SeatText:
        """An independent copy."""
        twin = copy.copy(self)
        twin.transcript = self.transcript.fork()
        twin._users, twin.answers = list(self._users), list(self.answers)
        return twin


def opening_ids(rendering: Rendering, prompt: Prompt, observation: str = "") -> list[int]:
    """The ids of a seat's first prompt of a game, including demonstration games."""
    return rendering.conversation(prompt.system, *prompt.read(observation))


class PolicyPlayer:
    """The policy in training. It keeps the seat's exact tokens and requests each turn from the
    engine."""

    name = "policy"

    def __init__(
        self,
        rendering: Rendering,
        *,
        seed_names: tuple[object, ...],
        max_new_tokens: int,
        max_game_tokens: int,
        model: str = "",
    ) -> None:
        self._text = _SeatText(rendering)
        self.transcript = self._text.transcript
        self._model = model
        self._rendering = rendering
        self._seed_names, self._num_requests = seed_names, 0
        self._max_new_tokens, self.max_game_tokens = max_new_tokens, max_game_tokens

    async def move(
        self, game: Game, seat: int, observation: str, generate: Generate
    ) -> Move | None:
        self._text.read(game, seat, observation)
        prompt_ids = tuple(self.transcript.context())
        room = min(self._max_new_tokens, self.max_game_tokens - len(prompt_ids))
        if room < 1:
            return None
        seed = named_seed(*self._seed_names, seat, self._num_requests)
        self._num_requests += 1
        # The prompt is a copy: the transcript grows later, the request must not change.
        completion = await generate(
            Request(prompt_ids=prompt_ids, max_new_tokens=room, seed=seed, model=self._model)
        )
        self.transcript.act(completion.ids, logprobs=completion.logprobs)
        text = self._rendering.decode(completion.ids)
        self._text.answers.append(text)
        complete = completion.finish == "stop"
        return Move(
            text=text,
            complete=complete,
            num_tokens=len(completion.ids),
            used_up=not complete and room < self._max_new_tokens,
        )

    def refused(self) -> None:
        """Do nothing: invalid moves stay in the loss, so that the policy learns to avoid them."""

    def fork(self, *names: object) -> PolicyPlayer:
        twin = copy.copy(self)
        twin._text = self._text.fork()
        twin.transcript = twin._text.transcript
        twin._seed_names = (*self._seed_names, *names)
        return twin


class PartnerPlayer:
    """Base of the players whose tokens never train."""

    name: str
    transcript: Transcript | None = None

    def refused(self) -> None:
        """Do nothing: the next observation contains the error."""


class FrozenPlayer(PartnerPlayer):
    """A policy that does not train, served by its own engine. Its tokens are kept only to build its
    next prompt."""

    def __init__(self, policy: PolicyPlayer, *, name: str) -> None:
        self.name, self.policy = name, policy

    async def move(
        self, game: Game, seat: int, observation: str, generate: Generate
    ) -> Move | None:
        return await self.policy.move(game, seat, observation, generate)

    def fork(self, *names: object) -> FrozenPlayer:
        return FrozenPlayer(self.policy.fork(*names), name=self.name)


class ScriptedPartner(PartnerPlayer):
    """A scripted player as a partner; its moves never train."""

    def __init__(self, script: Script, *, name: str) -> None:
        self.name, self._script = name, script

    async def move(
        self, game: Game, seat: int, observation: str, generate: Generate
    ) -> Move | None:
        return Move(text=self._script.act(game.view(seat)), complete=True, num_tokens=0)

    def fork(self, *names: object) -> ScriptedPartner:
        return ScriptedPartner(_reseeded(self._script, names), name=self.name)


class Teacher:
    """A scripted player that writes its moves into a transcript as if a policy had sampled them."""

    def __init__(self, script: Script, rendering: Rendering, *, name: str) -> None:
        self._text = _SeatText(rendering)
        self.name, self.transcript = name, self._text.transcript
        self._script, self._rendering = script, rendering

    async def move(
        self, game: Game, seat: int, observation: str, generate: Generate
    ) -> Move | None:
        self._text.read(game, seat, observation)
        lesson = self._script.lesson(game.view(seat))
        ids = self._rendering.action_ids(lesson.text)
        self.transcript.act(
            ids,
            logprobs=[0.0] * len(ids),
            untrained=(
                self._rendering.token_ranges(lesson.text, lesson.detours) if lesson.detours else ()
            ),
        )
        self._text.answers.append(lesson.text)
        return Move(text=lesson.text, complete=True, num_tokens=len(ids))

    def refused(self) -> None:
        """Exclude the invalid move from imitation; it stays as context for its correction."""
        self.transcript.mark_untrained(len(self.transcript.spans) - 1)

    def fork(self, *names: object) -> Teacher:
        twin = copy.copy(self)
        twin._text = self._text.fork()
        twin.transcript = twin._text.transcript
        twin._script = _reseeded(self._script, names)
        return twin


def _reseeded(script: Script, names: tuple[object, ...]) -> Script:
    """The script with its own seed for these names; unchanged without names."""
    return script.reseeded(named_seed(script.seed, *names)) if names else script
