"""Partners who are asked in text or in person: a chat endpoint, somebody at the terminal.

Neither leaves a transcript. What they read is what any seat reads; their words become moves as they
are. No torch here.
"""

from __future__ import annotations

import copy
from typing import TextIO

from dialop.game import Game
from dialop.shown import printable
from selfplay.chat.transcript import Transcript
from selfplay.data.seeds import named_seed
from selfplay.engines.base import Message, Request
from selfplay.rollout.players import Move, Moving

_WELCOME = """\
=== a new game; you are seat {seat} ===
A move is one line that starts with its [tag]. After [propose] go on, and end with a blank line.
End the input to leave."""


class EndpointPlayer:
    """A chat model: the game's texts are its system and user messages, its own moves its answers.

    A game whose endpoint gives no answer is void.
    """

    transcript: Transcript | None = None

    def __init__(self, *, name: str, seed_names: tuple[object, ...], max_new_tokens: int) -> None:
        self.name, self._seed_names, self._max_new_tokens = name, seed_names, max_new_tokens
        self._messages: tuple[Message, ...] = ()

    def move(self, game: Game, seat: int, observation: str) -> Moving:
        told = observation
        if not self._messages:
            prompt = game.prompt(seat)
            told = "\n".join(text for text in (prompt.user, observation) if text)
            if prompt.system:
                self._messages = (Message("system", prompt.system),)
        self._messages = (*self._messages, Message("user", told))
        said = yield Request(
            prompt_ids=(),
            max_new_tokens=self._max_new_tokens,
            seed=named_seed(*self._seed_names, seat, len(self._messages)),
            speaker=self.name,
            messages=self._messages,
        )
        if said.finish == "void":
            return Move(text="", complete=False, num_tokens=0, void=said.text)
        self._messages = (*self._messages, Message("assistant", said.text))
        return Move(text=said.text, complete=said.finish == "stop", num_tokens=0)

    def refused(self) -> None:
        """It reads of its slip in its next message."""

    def fork(self, *names: object) -> EndpointPlayer:
        twin = copy.copy(self)
        twin._seed_names = (*self._seed_names, *names)
        return twin


class PersonPlayer:
    """Somebody at a terminal: reads the seat's texts, types moves.

    A line is a move, `[propose]` goes on until a blank line. Who ends the input leaves: that game
    and all that follow are void.
    """

    transcript: Transcript | None = None

    def __init__(self, *, name: str, lines_in: TextIO, lines_out: TextIO) -> None:
        self.name, self._in, self._out = name, lines_in, lines_out
        self._opened = False

    def move(self, game: Game, seat: int, observation: str) -> Moving:
        told = [observation]
        if not self._opened:
            prompt, self._opened = game.prompt(seat), True
            told = [_WELCOME.format(seat=seat), prompt.system, prompt.user, observation]
        self._say("\n\n".join(text for text in told if text))
        text = self._read()
        if text is None:
            return Move(text="", complete=False, num_tokens=0, void="the person left")
        return Move(text=text, complete=True, num_tokens=0)
        yield  # a generator that never asks an engine

    def refused(self) -> None:
        """The game's own words about the slip are read before the next try."""

    def fork(self, *names: object) -> PersonPlayer:
        """A person cannot be copied, but may be asked again."""
        return copy.copy(self)

    def _read(self) -> str | None:
        """One move, None at the end of the input."""
        self._say("> ", end="")
        lines: list[str] = []
        while True:
            line = self._in.readline()
            if not line:
                return "\n".join(lines) or None
            line = line.rstrip("\r\n")
            if not line.strip():
                if lines:
                    return "\n".join(lines)
                continue
            lines.append(line)
            if not lines[0].lstrip().lower().startswith("[propose"):
                return line

    def _say(self, text: str, *, end: str = "\n") -> None:
        print(printable(text), end=end, file=self._out, flush=True)
