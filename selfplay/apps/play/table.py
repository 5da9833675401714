"""The table between a person and a running game: what the person sees, and the moves they make.

The game runs in its own thread and waits in `ask`; the page reads `state` and calls `give`. Until
the game is over the person sees only their own prompt, board and the talk of their rooms.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import asdict
from typing import Any

from dialop.forms import Form
from dialop.game import Game
from dialop.shown import printable
from selfplay.apps.play.games import Session, called_by
from selfplay.apps.play.talk import own_move, spoken, tags_of
from selfplay.apps.report.games import seat_names
from selfplay.engines.base import Generate
from selfplay.rollout.episode import Position
from selfplay.rollout.players import Move, PartnerPlayer

IDLE, YOURS, THEIRS, OVER = "idle", "yours", "theirs", "over"
TAKEN = "taken"  # the phase of a running game for any other visitor


class NotNow(ValueError):
    """A request that does not fit the game's phase, such as a move during another seat's turn."""

    status = 409  # of HTTP


class Table:
    """One person's table. All methods may be called from any thread."""

    def __init__(self, session: Session) -> None:
        self._session, kit = session, session.game.kit
        self._suggestion = ""
        self._lock = threading.Lock()
        self._moves: queue.Queue[str | None] = queue.Queue()
        self._starts: queue.Queue[bool] = queue.Queue()
        self._phase, self._number, self._version = IDLE, 0, 0
        self._kit, self._names = kit, seat_names(kit.ROLES)
        self._seat = 0
        self._position: Position | None = None
        self._left: list[str] = []
        self._prompt: dict[str, str] = {}
        self._rooms: list[str] = []
        self._board: dict[str, Any] = {}
        self._forms: list[Form] = []
        self._talk: list[dict[str, Any]] = []
        self._given: str | None = None
        self._refused = False
        self._num_moves = 0
        self._result: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """The contents of the page as plain values; `version` grows with every change."""
        with self._lock:
            sent = [] if self._given is None else [self._sent(self._given)]
            return {
                "version": self._version,
                "phase": self._phase,
                "game": self._number,
                "seat": self._seat,
                "names": self._names,
                "called": called_by(self._kit.ROLES, self._seat),
                "left": self._left,
                "rooms": self._rooms,
                "prompt": self._prompt,
                "board": self._board or None,
                "forms": [asdict(form) for form in self._forms] if self._phase == YOURS else [],
                "suggestion": self._suggestion if self._phase == YOURS else "",
                "talk": [*self._talk, *sent],
                "result": self._result,
            }

    # --- the page's side

    def start(self) -> None:
        """Request the next game. Raises NotNow during a game."""
        with self._lock:
            if self._phase not in (IDLE, OVER):
                raise NotNow("a game is being played")
            self._set(THEIRS)
        self._starts.put(True)

    def give(self, text: str) -> None:
        """Make a move. Raises NotNow unless it is the person's turn."""
        with self._lock:
            if self._phase != YOURS:
                raise NotNow("it is not your move")
            self._given = text
            self._set(THEIRS)
        self._moves.put(text)

    def taken(self, text: str) -> tuple[str, bool]:
        """As `Session.taken`, for a move that is not sent yet. Raises NotNow unless it is the
        person's turn."""
        with self._lock:
            if self._phase != YOURS or self._position is None:
                raise NotNow("it is not your move")
            return self._session.taken(self._position, text)

    def leave(self) -> None:
        """Give up the game. Raises NotNow unless it is the person's turn."""
        with self._lock:
            if self._phase != YOURS:
                raise NotNow("a game can be left only at your move")
            self._set(THEIRS)
        self._moves.put(None)

    def close(self) -> None:
        """End the game's thread when it next waits for the person."""
        self._starts.put(False)
        self._moves.put(None)

    # --- the game's side

    def wait_for_start(self) -> bool:
        """Wait until the person requests a game; False when the table is closed."""
        return self._starts.get()

    def begin(self, game: Game, seat: int, rules: str) -> None:
        """Show the seat's first view of a new game, and its rules."""
        prompt = game.prompt(seat)
        with self._lock:
            self._number += 1
            self._seat, self._given, self._refused, self._num_moves = seat, None, False, 0
            self._talk, self._result, self._left = [], None, []
            self._prompt = {"system": printable(rules), "user": printable(prompt.user)}
            self._see(game, "")
            self._set(THEIRS)

    def follow(self, position: Position) -> None:
        """Before each turn, show what is left of the game, and that another seat's move was
        invalid; its words are shown at the end."""
        left = self._session.left(position, self._seat)
        last = position.turns[-1] if position.turns else None
        with self._lock:
            self._position, self._left = position, left
            if last is not None and last.error is not None and last.seat != self._seat:
                self._see(position.setup.game, "")
                hidden = "It made an invalid move, which you see at the end. It tries again."
                self._talk.append({"seat": last.seat, "kind": "", "text": "", "error": hidden})
            self._set(self._phase)

    def ask(self, game: Game, seat: int, observation: str) -> str | None:
        """Show the game as the seat sees it and wait for the person's move; None if they leave."""
        suggestion = printable(self._session.suggested(game, seat))
        with self._lock:
            self._see(game, observation)
            self._suggestion = suggestion
            self._set(YOURS)
        return self._moves.get()

    def refuse(self) -> None:
        """Note that the person's move was invalid; the next `ask` has the reason."""
        with self._lock:
            self._refused = True

    def finish(self, result: dict[str, Any]) -> None:
        """Show how the game ended, with everything that was hidden."""
        with self._lock:
            self._result = result
            self._set(OVER)

    def _set(self, phase: str) -> None:
        self._phase = phase
        self._version += 1

    def _sent(self, text: str) -> dict[str, Any]:
        """The person's attempted move as an entry of the talk."""
        return {"seat": self._seat, **own_move(text, rooms=self._rooms, tags=tags_of(self._forms))}

    def _see(self, game: Game, observation: str) -> None:
        """Update what the seat knows. The talk has the moves so far and the person's own invalid
        ones, or the texts that the seat reads and writes if the kit lists no moves."""
        own = [] if self._given is None else [self._sent(self._given)]
        kit, seat = self._kit, self._seat
        to_move = game.seat_to_move == seat
        self._rooms, self._board = kit.rooms(game, seat), kit.board(game, seat)
        self._forms = kit.forms(game, seat) if to_move else []
        if own and self._refused:
            own[0]["error"] = printable(observation)
            observation = ""
        moves = kit.talk(game, seat)
        if moves is not None:
            said = [
                {"seat": mover, "kind": kind, "text": printable(text)}
                for mover, kind, text in moves[self._num_moves :]
            ]
            self._talk += [*(own if self._refused else []), *said]
            self._num_moves = len(moves)
        else:
            said = spoken(observation, self._names, rooms=self._rooms)
            if own and said and "seat" not in said[0]:
                own[0]["note"] = said.pop(0)["note"]  # a tool's answer, or a move's effect
            self._talk += [*own, *(entry for entry in said if entry.get("note") or entry["text"])]
        self._given, self._refused = None, False


class SeatedPerson(PartnerPlayer):
    """A player whose moves come from a table."""

    name = "person"

    def __init__(self, table: Table) -> None:
        self._table = table

    async def move(self, game: Game, seat: int, observation: str, generate: Generate) -> Move:
        text = self._table.ask(game, seat, observation)
        if text is None:
            return Move(text="", complete=False, num_tokens=0, void="the person left")
        return Move(text=text, complete=True, num_tokens=0)

    def refused(self) -> None:
        """The next `ask` shows the error."""
        self._table.refuse()

    def fork(self, *names: object) -> SeatedPerson:
        """The same person at the same table."""
        return self
