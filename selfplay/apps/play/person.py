"""A person at the terminal as a player: none of their text trains."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TextIO

from dialop.game import Game
from dialop.shown import printable
from selfplay.engines.base import Generate
from selfplay.rollout.players import Move, PartnerPlayer

_WELCOME = """\
=== a new game{called} ===
A move is one line that starts with its [tag].
End the input to leave."""


class PersonPlayer(PartnerPlayer):
    """A person at a terminal, who reads the seat's texts and types moves. `called` names the seat,
    "" if it needs no name. `advice("")` is shown before each move; `advice(move)` warns about a
    move, which is then sent only if it is typed again.

    A line is a move; `[propose]`, and a line with only `[message]`, continue up to a blank line.
    When the input ends, this game and all later ones are aborted.
    """

    def __init__(
        self,
        *,
        name: str,
        called: str,
        lines_in: TextIO,
        lines_out: TextIO,
        advice: Callable[[str], str] = lambda move: "",
    ) -> None:
        self.name, self._called, self._in, self._out = name, called, lines_in, lines_out
        self._opened, self._advice = False, advice

    async def move(self, game: Game, seat: int, observation: str, generate: Generate) -> Move:
        texts = [observation]
        if not self._opened:
            prompt, self._opened = game.prompt(seat), True
            welcome = _WELCOME.format(called=self._called and f"; you are {self._called}")
            texts = [welcome, prompt.system, prompt.user, observation]
        texts.append(self._advice(""))
        self._print("\n\n".join(text for text in texts if text))
        text, before = self._read(), None
        while text is not None and text != before and (warning := self._advice(text)):
            self._print(f"{warning} Write another move, or this one again to send it.")
            text, before = self._read(), text
        if text is None:
            return Move(text="", complete=False, num_tokens=0, void="the person left")
        return Move(text=text, complete=True, num_tokens=0)

    def fork(self, *names: object) -> PersonPlayer:
        """The same person also plays the forked game."""
        return copy.copy(self)

    def _read(self) -> str | None:
        """One move; None at the end of the input."""
        self._print("> ", end="")
        lines: list[str] = []
        while (line := self._in.readline()) and (line.strip() or not lines):
            if not line.strip():
                continue
            lines.append(line.rstrip("\r\n"))
            first = lines[0].strip().lower()
            if not first.startswith("[propose") and first != "[message]":
                break
            if len(lines) == 1:
                what = "message" if first == "[message]" else "proposal"
                self._print(f"(continue; a blank line ends the {what})")
        return "\n".join(lines) or None

    def _print(self, text: str, *, end: str = "\n") -> None:
        print(printable(text), end=end, file=self._out, flush=True)
