"""Games between a person and a partner: who sits where, how a game ends, how it is kept.

A finished game is one JSON line: a record of the published form where the game has one, else what
games.jsonl holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dialop.game import Game, Instance
from dialop.kit import Kit, switch
from dialop.shown import printable
from selfplay.apps.play.limits import (
    Says,
    ask_no_model,
    left_of,
    left_told,
    taken_by,
    taken_told,
    the,
)
from selfplay.apps.report.games import Texts, drawn_game, seat_names
from selfplay.chat.rendering import Rendering
from selfplay.config import GameConfig, RolloutConfig
from selfplay.config.player_spec import ENDPOINT
from selfplay.engines.base import GameRunner, Generate, Sampling
from selfplay.metrics.records import game_record
from selfplay.metrics.step import seat_rewards
from selfplay.rollout.episode import VOID, Episode, GameSetup, Position, limits_of
from selfplay.rollout.players import Player
from selfplay.rollout.seat_rules import able_seats
from selfplay.rollout.seating import (
    MakePlayer,
    Partner,
    policy_player,
    scripted_partner,
    seat_in_turn,
    seat_players,
)

# What a limit that ended a game says of it.
_LIMITS = {
    "turns": "the moves ran out (rollout.max_turns)",
    "retries": "too many tries in a row were refused (rollout.max_retries)",
    "tokens": "{} had no tokens left; what it reads counts too (rollout.max_game_tokens)",
}
Follow = Callable[[Position], object]


@dataclass(frozen=True, slots=True)
class Opponent:
    """Who plays the other seats. Without `make_player`, which makes a partner's player, the policy
    plays those that it can have, and a scripted player the rest. `engine` is None for a scripted
    partner. `from_nothing` says that its weights began at random."""

    name: str
    engine: GameRunner | None
    rendering: Rendering | None
    make_player: MakePlayer | None = None
    from_nothing: bool = False


def seats_for_a_person(game: GameConfig, rollout: RolloutConfig, opponent: Opponent) -> list[int]:
    """The seats that leave the opponent one to play."""
    seats = range(len(game.kit.ROLES))
    theirs = able_seats(game, rollout) if opponent.make_player is None else seats
    return [s for s in seats if any(other != s for other in theirs)]


@dataclass(frozen=True, slots=True)
class Session:
    """The games of one start of the program: the instances in turn, the person in `seats` as
    `seat_in_turn` says. `seed` is the run's."""

    instances: Sequence[Instance]
    opponent: Opponent
    seats: Sequence[int]
    game: GameConfig
    rollout: RolloutConfig
    seed: int

    def seat_of(self, number: int) -> int:
        """The person's seat in game `number`."""
        return self.seats[seat_in_turn(number, len(self.seats))]

    def play(
        self,
        number: int,
        person: Player,
        begin: Callable[[Game, int, str], None],
        follow: Follow = lambda _: None,
    ) -> Episode | None:
        """Play game `number`; None if it ended without a result, because the person left or the
        partner gave no answer. `begin` is told, before the first move, the game, the person's seat
        and its rules in words, which a person needs in the brief style too. `follow` gets the
        running game before each try at a move. A second game on an instance has other draws.
        """
        setup = self._setup(number, person)
        own, instance = self.seat_of(number), self.instances[number % len(self.instances)]
        begin(setup.game, own, self._rules(setup.game, instance, own))
        return self._played(setup, follow)

    def _setup(self, number: int, person: Player) -> GameSetup:
        instance = self.instances[number % len(self.instances)]
        own, kit = self.seat_of(number), self.game.kit
        game = kit.new_game(instance, self.game.options)
        names = (self.seed, "with a person", instance.key, number)
        players = tuple(
            person if seat == own else self._other(names, seat) for seat in range(len(kit.ROLES))
        )
        return GameSetup(game=game, players=players, instance=instance.key, index=number)

    def watch(self, number: int) -> Episode | None:
        """Play game `number` between the policy and the opponent, who change seats from game to
        game; None if it ended without a result. The opponent needs the policy's engine."""
        instance, opponent = self.instances[number % len(self.instances)], self.opponent
        assert opponent.rendering is not None
        players = seat_players(
            (self.seed, "watched", instance.key, number),
            Partner(opponent.name, opponent.make_player),
            index=seat_in_turn(number, len(self.game.kit.ROLES)),
            game=self.game,
            rollout=self.rollout,
            rendering=opponent.rendering,
        )
        game = self.game.kit.new_game(instance, self.game.options)
        return self._played(GameSetup(game, players, instance.key, number), lambda _: None)

    def _played(self, setup: GameSetup, follow: Follow) -> Episode | None:
        opponent, position = self.opponent, Position(setup, limits_of(self.rollout))

        async def to_its_end(generate: Generate) -> None:
            while position.ended is None:
                follow(position)
                await position.turn(generate)

        if opponent.engine is None or opponent.rendering is None:
            with suppress(StopIteration):
                to_its_end(ask_no_model).send(None)  # it awaits nothing, so it ends at once
        else:
            stop_ids = opponent.rendering.stop_ids
            sampling = Sampling(temperature=self.rollout.temperature, stop_ids=stop_ids)
            with opponent.engine.rollout():
                opponent.engine.run_games([to_its_end], sampling)
        return None if position.ended == VOID else position.episode()

    def limits(self, number: int = 0) -> str:
        """What can end game `number` early."""
        position = Position(self._setup(number, Says("")), limits_of(self.rollout))
        return "; ".join(self.left(position, self.seat_of(number)))

    def left(self, position: Position, seat: int) -> list[str]:
        """What is left of a running game before a limit ends it, in lines for the person in
        `seat`."""
        kit, game = self.game.kit, position.setup.game
        forms = kit.forms(game, seat) if game.seat_to_move == seat else ()
        may_propose = any("[propose]" in form.before for form in forms)
        left = left_of(position, self.rollout)
        return left_told(left, called_by(kit.ROLES, seat), may_propose=may_propose)

    def taken(self, position: Position, text: str) -> tuple[str, bool]:
        """What the person's move takes of the tokens that are left, "" for nothing, and whether it
        ends the game for want of them."""
        called = called_by(self.game.kit.ROLES, position.setup.game.seat_to_move)
        return taken_told(left_of(position, self.rollout), taken_by(position, text), called)

    def introduction(self) -> dict[str, str]:
        """What a person reads before the first game: its title, what it is about and what the
        opponent understands."""
        instance, seat = self.instances[0], self.seats[0]
        game = self.game.kit.new_game(instance, self.game.options)
        if self.opponent.rendering is None:
            understands = "It is a script and understands what scripts write."
        elif self.opponent.name.startswith(f"{ENDPOINT}:"):
            understands = "It is a chat model and reads sentences."
        elif switch(self.game.options, "brief"):
            understands = "It knows the short style that scripts write, and no sentences."
        elif self.opponent.from_nothing:
            understands = "It began with random weights and knows no words but those of its games."
        else:
            understands = "It reads the rules in words, and sentences."
        return {
            "title": self.game.kit.TITLE,
            "rules": printable(self._rules(game, instance, seat)),
            "understands": understands,
        }

    def _rules(self, game: Game, instance: Instance, seat: int) -> str:
        """A seat's rules, in words also where the players read them in the brief style."""
        options = self.game.options
        if switch(options, "brief"):
            game = self.game.kit.new_game(instance, replace(options, brief=False))
        return game.prompt(seat).system

    def suggested(self, game: Game, seat: int) -> str:
        """The move that a scripted player would make in a seat whose move it is; "" where the game
        has no script for it."""
        kit = self.game.kit
        for spec in kit.BASELINES[:1]:
            with suppress(ValueError):  # a script need not know what to do where people led a game
                script = kit.make_script(kit.seated(spec)[seat], seed=self.seed)
                return script.act(game.view(seat))
        return ""

    def _other(self, names: tuple[object, ...], seat: int) -> Player:
        kit, opponent = self.game.kit, self.opponent
        if opponent.make_player is not None:
            return opponent.make_player(names, seat)
        if opponent.rendering is None or seat not in able_seats(self.game, self.rollout):
            return scripted_partner(kit.BASELINES[0], names, seat, self.game)
        return policy_player(names, self.rollout, opponent.rendering)


def called_by(roles: Sequence[str], own: int | None) -> list[str]:
    """What the person in seat `own` calls each seat: "you", "your partner" where both roles are
    equal, else the role; `own` None names all seats by their roles."""
    names = seat_names(roles)
    if own is not None and len(roles) == 2 and roles[0] == roles[1]:
        names[1 - own] = "your partner"
    if own is not None:
        names[own] = "you"
    return names


def result_of(episode: Episode, session: Session) -> dict[str, Any]:
    """A finished game with everything that was hidden, as the page's viewer reads it, and `limit`,
    which ended it; "" for none."""
    rendering, kit = session.opponent.rendering, session.game.kit
    pieces = None if rendering is None else rendering.pieces
    texts = Texts()
    record = game_record(episode, step=0, pieces=pieces)
    game = drawn_game(record, "played", 0, texts, kit=kit)
    limit = _limit(episode, called_by(kit.ROLES, session.seat_of(episode.index)))
    return {"game": game, "texts": texts.all, "limit": limit}


def keep_game(episode: Episode, kit: Kit, path: Path) -> None:
    """Append the game to a .jsonl file, which is made if needed."""
    record = None if episode.game is None else kit.record(episode.game)
    if record is None:
        record = game_record(episode, step=0)
    else:
        record["players"] = list(episode.players)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        # JSON escapes keep the line whole, whatever a message holds.
        file.write(json.dumps(record) + "\n")


def talk_text(episode: Episode, kit: Kit, *, own: int | None = None) -> str:
    """All tries at a move in a finished game, for a terminal; with the seat `own` of a person, the
    refused ones alone, which no other seat has read."""
    names, lines = called_by(kit.ROLES, own), []
    for turn in episode.turns:
        player = "" if own is not None else f" ({episode.players[turn.seat]})"
        if own is None or turn.action is None:
            lines.append(f"{names[turn.seat]}{player}: {printable(turn.text)}")
            lines += [f"  refused: {printable(turn.error)}"] if turn.error else []
            lines += ["  cut off: no tokens left"] if not (turn.error or turn.action) else []
    return "\n".join(lines)


def ending_text(episode: Episode, kit: Kit, *, own: int | None = None) -> str:
    """How a game ended, for a terminal, and what was hidden from the seat `own` (None: from each):
    refused tries, the table of the game's picture, or what the other seats alone read."""
    outcome, names = episode.outcome, called_by(kit.ROLES, own)
    own_scores = ", ".join(f"{n} {s:.3f}" for n, s in zip(names, outcome.seat_scores, strict=False))
    score = f"scores {own_scores}" if own_scores else f"{outcome.score_norm:.3f} of the best"
    ended = "agreed" if outcome.agreed else "no agreement"
    paid = zip(names, seat_rewards(episode), strict=True)
    by_role = ", ".join(f"{name} {reward:.3g}" for name, reward in paid)
    lines = [f"The game is over: {ended}, {score}; rewards {by_role}."]
    if episode.ended in _LIMITS:
        lines.append(f"A limit ended it: {_limit(episode, names)}.")
    if own is not None and (refused := talk_text(episode, kit, own=own)):
        lines += ["", "Tries that were no moves:", refused]
    game = drawn_game(game_record(episode, step=0), "", 0, Texts(), kit=kit)
    if "board" in game:
        return "\n".join([*lines, "", *_table_lines(game)])
    for seat, prompt in enumerate(episode.prompts):
        if seat != own:
            lines += ["", f"What {names[seat]} alone read:", printable(prompt.user)]
    return "\n".join(lines)


def _limit(episode: Episode, names: Sequence[str]) -> str:
    """The limit that ended a game, "" for none; the seat to move is the one that met it."""
    seat = None if episode.game is None else episode.game.seat_to_move
    return _LIMITS.get(episode.ended, "").format("a seat" if seat is None else the(names[seat]))


def _table_lines(game: dict[str, Any]) -> Sequence[str]:
    board = game["board"]
    proposals = [turn["proposal"] for turn in game["turns"] if "proposal" in turn]
    last = proposals[-1] if proposals else {}
    chosen = {(row, column) for row, column, _ in last.get("cells", ())}
    best = {tuple(cell) for cell in last.get("best", board.get("best", ()))}
    width = max(len(name) for name in board["columns"]) + 3
    first = max(len(name) for name in board["rows"]) + 1
    legend = ["[ ] the last proposal"] * bool(chosen) + ["* a best one"] * bool(best)
    title = board.get("title", "The table")
    lines = [f"{title} ({', '.join(legend)}):" if legend else f"{title}:"]
    lines.append(" " * first + "".join(f"{name:>{width}}" for name in board["columns"]))
    for r, name in enumerate(board["rows"]):
        cells = []
        for c, value in enumerate(board["cells"][r]):
            shown = f"[{value}]" if (r, c) in chosen else f"{'·' if value is None else value} "
            cells.append(f"{shown + ('*' if (r, c) in best else ' '):>{width}}")
        lines.append(f"{name:{first}}" + "".join(cells))
    notes = [board.get("note", ""), f"last proposal {last['label']}" if "label" in last else ""]
    lines += [f"{'; '.join(filter(None, notes))}."] if any(notes) else []
    return [line.rstrip() for line in lines]
