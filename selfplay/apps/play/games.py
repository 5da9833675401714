"""Games between a person and a partner: who sits where, how a game ends, how it is saved.

A finished game is one JSON line: a record in the game's published format if it has one, else a
record of games.jsonl.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
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
    left_text,
    taken_by,
    taken_text,
    the,
)
from selfplay.apps.report.games import Texts, drawn_game, seat_names
from selfplay.chat.rendering import Rendering
from selfplay.config import GameConfig, RolloutConfig
from selfplay.config.player_spec import ENDPOINT, SELF, Spec
from selfplay.engines.base import GameCoroutine, GameRunner, Generate, Sampling
from selfplay.engines.waves import WaveScheduler
from selfplay.metrics.records import game_record
from selfplay.metrics.step import seat_rewards
from selfplay.rollout.episode import VOID, Episode, GameSetup, Position, limits_of
from selfplay.rollout.players import Player
from selfplay.rollout.seat_rules import able_seats
from selfplay.rollout.seating import (
    Cast,
    MakePlayer,
    Partner,
    Seated,
    pieces_of,
    policy_player,
    scripted_partner,
    seat_in_turn,
    seat_players,
    whole_cast,
)

# The reason shown for each limit that can end a game.
_LIMITS = {
    "turns": "the moves ran out (rollout.max_turns)",
    "retries": "too many invalid moves in a row (rollout.max_retries)",
    "tokens": "{} had no tokens left; what it reads counts too (rollout.max_game_tokens)",
}
Follow = Callable[[Position], object]


@dataclass(frozen=True, slots=True)
class Opponent:
    """The player of the other seats: a partner's, from `make_player`; without one the policy plays
    the seats that it can have, and a scripted player the rest. `engine` is None for a scripted
    partner. `cast` has the policy of each seat if they are several, and `names` their names for the
    person. `from_nothing` says that its weights began at random."""

    name: str
    engine: GameRunner | None
    rendering: Rendering | None
    make_player: MakePlayer | None = None
    from_nothing: bool = False
    cast: Cast = ()
    names: Sequence[str] = ()


class PartnersAlone(GameRunner):
    """Runs games in which only partners ask models: the `policy` of an `EngineRouter` that plays in
    none of them, so that its weights need not be loaded."""

    def run_games(
        self, games: Iterable[GameCoroutine], sampling: Sampling, partners: Generate | None = None
    ) -> list[Any]:
        return WaveScheduler(lambda _: [], partners=partners).run_games(games)


def seats_for_a_person(game: GameConfig, rollout: RolloutConfig, spec: Spec) -> list[int]:
    """The seats that leave the opponent `spec` a seat to play."""
    seats = range(len(game.kit.ROLES))
    theirs = able_seats(game, rollout) if spec.kind == SELF else seats
    return [s for s in seats if any(other != s for other in theirs)]


def seats_beside(own: Sequence[int], game: GameConfig) -> list[int]:
    """The seats that others play while a person takes the seats `own` in turn: all, or those but
    the person's only one."""
    return [seat for seat in range(len(game.kit.ROLES)) if {*own} - {seat}]


@dataclass(frozen=True, slots=True)
class Session:
    """The games of one start of the program: the instances in turn, the person in `seats` by
    `seat_in_turn`. `seed` is the run's."""

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
        partner gave no answer. `begin` gets, before the first move, the game, the person's seat and
        its rules in words, which a person needs in the brief style too. `follow` gets the running
        game before each turn. A second game on an instance has different draws.
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
        """Play game `number` between the policy and the opponent, which swap seats from game to
        game; None if it ended without a result. The opponent needs the policy's engine."""
        instance, opponent = self.instances[number % len(self.instances)], self.opponent
        assert opponent.rendering is not None
        players = seat_players(
            (self.seed, "watched", instance.key, number),
            Partner(opponent.name, opponent.make_player),
            index=seat_in_turn(number, len(self.game.kit.ROLES)),
            game=self.game,
            rollout=self.rollout,
            cast=self._cast(opponent.rendering),
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

    def seating(self, number: int) -> str:
        """Who plays each seat of game `number`, for the person."""
        opponent, roles = self.opponent, self.game.kit.ROLES
        players = self._setup(number, Says("")).players
        policies = opponent.names or [opponent.name] * len(roles)
        own, said = self.seat_of(number), []
        for seat, (role, player) in enumerate(zip(roles, players, strict=True)):
            name = policies[seat] if player.transcript is not None else player.name
            said.append(f"seat {seat} ({role}): {'you' if seat == own else name}")
        return "; ".join(said)

    def limits(self, number: int = 0) -> str:
        """The limits that can end game `number` early."""
        position = Position(self._setup(number, Says("")), limits_of(self.rollout))
        return "; ".join(self.left(position, self.seat_of(number)))

    def left(self, position: Position, seat: int) -> list[str]:
        """The moves, tries and tokens left before a limit ends a running game, in lines for the
        person in `seat`."""
        kit, game = self.game.kit, position.setup.game
        forms = kit.forms(game, seat) if game.seat_to_move == seat else ()
        may_propose = any("[propose]" in form.before for form in forms)
        left = left_of(position, self.rollout)
        return left_text(left, called_by(kit.ROLES, seat), may_propose=may_propose)

    def taken(self, position: Position, text: str) -> tuple[str, bool]:
        """How much of the tokens left the person's move takes, "" for nothing, and whether it
        ends the game because none are left."""
        called = called_by(self.game.kit.ROLES, position.setup.game.seat_to_move)
        return taken_text(left_of(position, self.rollout), taken_by(position, text), called)

    def introduction(self) -> dict[str, str]:
        """The texts before the first game: its title, its rules and what the opponent
        understands."""
        instance, seat = self.instances[0], self.seats[0]
        game = self.game.kit.new_game(instance, self.game.options)
        if self.opponent.rendering is None:
            understands = "It is a script and understands what scripts write."
        elif self.opponent.name.startswith(f"{ENDPOINT}:"):
            understands = "It is a chat model and reads sentences."
        elif switch(self.game.options, "brief"):
            understands = "It knows the short style of scripts, but no sentences."
        elif self.opponent.from_nothing:
            understands = "It began with random weights and knows only the words of its games."
        else:
            understands = "It reads the rules in words, and sentences."
        return {
            "title": self.game.kit.TITLE,
            "rules": printable(self._rules(game, instance, seat)),
            "understands": understands,
        }

    def _rules(self, game: Game, instance: Instance, seat: int) -> str:
        """A seat's rules, in words even if the players read them in the brief style."""
        options = self.game.options
        if switch(options, "brief"):
            game = self.game.kit.new_game(instance, replace(options, brief=False))
        return game.prompt(seat).system

    def suggested(self, game: Game, seat: int) -> str:
        """The move that a scripted player would make in the seat to move; "" if the game has no
        script for it."""
        kit = self.game.kit
        for spec in kit.BASELINES[:1]:
            with suppress(ValueError):  # a script may not handle a state that people have reached
                script = kit.make_script(kit.seated(spec)[seat], seed=self.seed)
                return script.act(game.view(seat))
        return ""

    def _other(self, names: tuple[object, ...], seat: int) -> Player:
        kit, opponent = self.game.kit, self.opponent
        if opponent.make_player is not None:
            return opponent.make_player(names, seat)
        if opponent.rendering is None or seat not in able_seats(self.game, self.rollout):
            return scripted_partner(kit.BASELINES[0], names, seat, self.game)
        return policy_player(names, self.rollout, self._cast(opponent.rendering)[seat])

    def _cast(self, rendering: Rendering) -> Cast:
        """The policy of each seat; `rendering` is that of the only one."""
        return self.opponent.cast or whole_cast(rendering, self.game)


def called_by(roles: Sequence[str], own: int | None) -> list[str]:
    """The name of each seat for the person in seat `own`: "you", "your partner" if both roles are
    equal, else the role; with `own` None all seats have their roles' names."""
    names = seat_names(roles)
    if own is not None and len(roles) == 2 and roles[0] == roles[1]:
        names[1 - own] = "your partner"
    if own is not None:
        names[own] = "you"
    return names


def result_of(episode: Episode, session: Session) -> dict[str, Any]:
    """A finished game with everything that was hidden, for the page's viewer, and the `limit` that
    ended it, "" for none."""
    opponent, kit = session.opponent, session.game.kit
    rendering, pieces = opponent.rendering, None
    if rendering is not None:
        pieces = pieces_of(opponent.cast or [Seated("", rendering)])
    texts = Texts()
    record = game_record(episode, step=0, pieces=pieces)
    game = drawn_game(record, "played", 0, texts, kit=kit)
    limit = _limit(episode, called_by(kit.ROLES, session.seat_of(episode.index)))
    return {"game": game, "texts": texts.all, "limit": limit}


def keep_game(episode: Episode, kit: Kit, path: Path) -> None:
    """Append the game on a line of its own to a .jsonl file, which is created if needed."""
    record = None if episode.game is None else kit.record(episode.game)
    if record is None:
        record = game_record(episode, step=0)
    else:
        record["players"] = list(episode.players)
    path.parent.mkdir(parents=True, exist_ok=True)
    cut = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")  # by a person or a kill
    with path.open("a", encoding="utf-8") as file:
        # JSON escapes keep it on one line, whatever a message contains.
        file.write("\n" * cut + json.dumps(record) + "\n")


def talk_text(episode: Episode, kit: Kit, *, own: int | None = None) -> str:
    """All turns of a finished game, for a terminal; with the seat `own` of a person only the
    invalid moves, which no other seat has read."""
    names, lines = called_by(kit.ROLES, own), []
    for turn in episode.turns:
        player = "" if own is not None else f" ({episode.players[turn.seat]})"
        if own is None or turn.action is None:
            lines.append(f"{names[turn.seat]}{player}: {printable(turn.text)}")
            lines += [f"  invalid: {printable(turn.error)}"] if turn.error else []
            lines += ["  cut off: no tokens left"] if not (turn.error or turn.action) else []
    return "\n".join(lines)


def ending_text(episode: Episode, kit: Kit, *, own: int | None = None) -> str:
    """How a game ended, for a terminal, and what was hidden from the seat `own` (None: from each):
    invalid moves, the table of the game's picture, or what only the other seats read."""
    outcome, names = episode.outcome, called_by(kit.ROLES, own)
    own_scores = ", ".join(f"{n} {s:.3f}" for n, s in zip(names, outcome.seat_scores, strict=False))
    score = f"scores {own_scores}" if own_scores else f"{outcome.score_norm:.3f} of the best"
    ended = "agreed" if outcome.agreed else "no agreement"
    paid = zip(names, seat_rewards(episode), strict=True)
    by_role = ", ".join(f"{name} {reward:.3g}" for name, reward in paid)
    lines = [f"The game is over: {ended}, {score}; rewards {by_role}."]
    if episode.ended in _LIMITS:
        lines.append(f"A limit ended it: {_limit(episode, names)}.")
    if own is not None and (invalid := talk_text(episode, kit, own=own)):
        lines += ["", "Invalid moves:", invalid]
    game = drawn_game(game_record(episode, step=0), "", 0, Texts(), kit=kit)
    if "board" in game:
        return "\n".join([*lines, "", *_table_lines(game)])
    for seat, prompt in enumerate(episode.prompts):
        if seat != own:
            lines += ["", f"Only {names[seat]} read:", printable(prompt.user)]
    return "\n".join(lines)


def _limit(episode: Episode, names: Sequence[str]) -> str:
    """The limit that ended a game, "" for none; the seat to move is the one that reached it."""
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
