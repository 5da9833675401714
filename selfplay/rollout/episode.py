"""One game: its records, and its play turn by turn. `branches` plays its branch points."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from dialop.game import (
    Game,
    GameError,
    Outcome,
    Prompt,
    wrong_measures,
    wrong_outcome,
    wrong_step,
)
from dialop.rows import MAX_TEXT
from dialop.shown import error_line, is_own, line_of
from dialop.tags import MAX_MOVE, after_thought, in_thought, split_message
from selfplay.chat.transcript import Transcript
from selfplay.config import RolloutConfig
from selfplay.config.player_spec import SELF
from selfplay.engines.base import Generate
from selfplay.errors import OwnFault
from selfplay.rollout.players import Move, Player

VOID = "void"  # `ended` of a game in which a partner gave no answer; it is not scored


@dataclass(frozen=True, slots=True)
class GameSetup:
    """A game that is ready to be played.

    `instance` is the key of its instance, `index` its number among the instance's games, `partner`
    the name of the policy's partner.
    """

    game: Game
    players: tuple[Player, ...]
    instance: str
    index: int
    partner: str = SELF

    def copy(self, *names: object) -> GameSetup:
        """An independent copy, so that the game can be played again; `names` are added to the names
        of its random draws."""
        players = tuple(player.fork(*names) for player in self.players)
        game = self.game.clone()
        if game is self.game or not isinstance(game, type(self.game)):
            check_game(self.game, "clone", f"must give a copy, got {game!r}", self.instance)
        return replace(self, game=game, players=players)


@dataclass(frozen=True, slots=True)
class Limits:
    """How many legal moves a game may have over all seats, and how many invalid moves in a row it
    survives. A move that keeps the turn, such as a tool call, counts as a legal move."""

    max_turns: int
    max_retries: int


def limits_of(rollout: RolloutConfig) -> Limits:
    return Limits(max_turns=rollout.max_turns, max_retries=rollout.max_retries)


@dataclass(frozen=True, slots=True)
class Turn:
    """One try at a move: the seat, its text, the legal action or the error of an invalid move, each
    seat's observation and each seat's reward for it (empty: none). A turn with neither action nor
    error was cut off by the seat's token limit for the game."""

    seat: int
    text: str
    action: str | None
    error: str | None
    error_kind: str | None
    observations: tuple[str, ...]
    num_tokens: int
    rewards: tuple[float, ...] = ()


# Each seat's reward at the end, and for each turn (() if the turn has none).
Paid = tuple[tuple[float, ...], tuple[tuple[float, ...], ...]]


@dataclass(frozen=True, slots=True)
class Episode:
    """One played game. `ended` is "finished" (a regular end), the limit that ended it ("turns",
    "retries", "tokens") or "void" (aborted).

    Transcripts are None for partners; `partner` names the policy's partner. `counted` are the seats
    whose score and moves count, set by `counting`; if empty, the policy's seats or, if it has none,
    all. `measures` are the game's own counts of their moves. `judge` is a judge's answer. `paid` is
    the result of `reward.function`, which trains; None if it was not called, which means the game's
    own rewards. `game` is the final game state; None if only its texts are known.
    """

    instance: str
    index: int
    players: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    turns: tuple[Turn, ...]
    transcripts: tuple[Transcript | None, ...]
    outcome: Outcome
    ended: str
    branches: tuple[BranchPoint, ...] = ()
    measures: dict[str, float] = field(default_factory=dict)
    judge: str = ""
    counted: tuple[int, ...] = ()
    paid: Paid | None = None
    partner: str = SELF
    game: Game | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        seats = self.outcome.seat_scores
        scores = ", ".join(f"{score:.3f}" for score in seats or (self.outcome.score_norm,))
        return (
            f"Episode {self.index} of instance {self.instance}: {self.ended}, "
            f"{len(self.turns)} turns, score{'s' if seats else ''} {scores}"
        )

    @property
    def own_rewards(self) -> Paid:
        """The rewards that the game itself gives."""
        return self.outcome.rewards, tuple(turn.rewards for turn in self.turns)

    @property
    def policy_seats(self) -> list[int]:
        """The seats of the policy in training."""
        return [seat for seat, t in enumerate(self.transcripts) if t is not None]

    @property
    def counted_seats(self) -> list[int]:
        """The seats whose score and moves count."""
        return [*self.counted] or self.policy_seats or [*range(len(self.players))]

    def counting(self, seats: Iterable[int]) -> Episode:
        """The same game, with the score and the measures of these seats."""
        assert self.game is not None
        seats = tuple(sorted(seats))
        return replace(self, counted=seats, measures=measures_of(self.game, seats, self.instance))

    @property
    def score(self) -> float:
        """The normalized score of the seats that count."""
        return self.outcome.score_of(self.counted_seats)

    def changed_branches(
        self, change: Callable[[Episode], Episode | None]
    ) -> tuple[BranchPoint, ...]:
        """The branch points with `change` applied to each continuation; None removes it."""
        points = []
        for point in self.branches:
            games = {key: change(game) for key, game in point.continuations.items()}
            kept = {key: game for key, game in games.items() if game is not None}
            points.append(replace(point, continuations=kept))
        return tuple(points)

    def messages(self, seats: Collection[int]) -> list[str]:
        """The texts of the messages these seats sent, without the tag and any private reasoning
        before it."""
        sent = [t.text for t in self.turns if t.action == "message" and t.seat in seats]
        return [split_message(text)[1] for text in sent]

    def num_errors(self, seat: int) -> int:
        return sum(turn.error is not None for turn in self.turns if turn.seat == seat)


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """Sibling turns sampled from one state. `turn` is the number of turns before it.

    `continuations[sibling, number]` is the full episode of a continuation. Sibling 0 is the played
    game's own turn, so (0, 0) would be the played game and is left out. The dict fills as games
    end.
    """

    turn: int
    seat: int
    continuations: dict[tuple[int, int], Episode] = field(default_factory=dict)


class Position:
    """A running game: its turns, each seat's unread observations, and why it ended.

    `num_legal` counts its legal moves, `num_refused` the invalid moves since the last legal one.
    `ended` is None while the game runs. `fork` copies the game and its transcripts at this turn, so
    nothing is rendered or sampled twice.
    """

    __slots__ = (
        "_limits",
        "_prompts",
        "ended",
        "num_legal",
        "num_refused",
        "setup",
        "turns",
        "unread",
    )

    def __init__(self, setup: GameSetup, limits: Limits) -> None:
        game = setup.game
        self.setup, self._limits = setup, limits
        self.turns: list[Turn] = []
        self.ended: str | None = None
        self._prompts = tuple(game.prompt(seat) for seat in range(game.num_seats))
        for each in self._prompts:
            if not isinstance(each, Prompt):
                check_game(game, "prompt", f"must give a Prompt, got {each!r}", setup.instance)
        self.unread = [""] * game.num_seats
        self.num_legal, self.num_refused = 0, 0
        self._close()

    async def turn(self, generate: Generate) -> None:
        """One try at a move. `generate` answers the requests of a player that is a model.

        A move cut off by its token limit, or inside a thought, is refused and never reaches the
        game; a partner's thoughts are removed before the game reads its move. A move cut off by the
        seat's token limit for the game is not refused, because the seat has no tokens left for a
        shorter one: it ends the game. An exception gets a note that names the game. Raises
        GameError for a text that is too long for any tokenizer.
        """
        setup, game = self.setup, self.setup.game
        seat = game.seat_to_move
        assert self.ended is None and seat is not None
        prompt = self._prompts[seat]
        num = len(prompt.system) + len(prompt.user) + len(self.unread[seat])
        if num > MAX_TEXT:
            raise GameError(
                f"{type(game).__name__}: the text for seat {seat} must have at most {MAX_TEXT} "
                f"characters, got {num} (instance {setup.instance})"
            )
        try:
            transcript = setup.players[seat].transcript
            number = 0 if transcript is None else len(transcript.spans)
            move = await setup.players[seat].move(game, seat, self.unread[seat], generate)
            if not isinstance(move, Move | None):
                raise OwnFault(f"rollout.player: move must give a Move or None, got {move!r}")
            sampled = 0 if transcript is None else transcript.join(number)
            if sampled:  # without a move: a thought took all tokens
                move = move or Move("", complete=False, num_tokens=0, used_up=True)
                move = replace(move, num_tokens=sampled)
            if move is None or move.void is not None:
                self.ended = "tokens" if move is None else VOID
            elif move.used_up:
                unread = ("",) * game.num_seats
                self.turns.append(Turn(seat, move.text, None, None, None, unread, move.num_tokens))
                self.ended = "tokens"
            else:
                partner = transcript is None
                self._take(_try_move(game, seat, move, setup.instance, partner=partner))
        except (Exception, SystemExit) as error:
            error.add_note(f"in instance {setup.instance}, episode {setup.index}, seat {seat}")
            if isinstance(error, SystemExit) and is_own(error):
                raise GameError(error_line(error)) from error
            raise

    def fork(self, *names: object) -> Position:
        """An independent copy of the game; `names` are added to the names of its random draws."""
        twin = copy.copy(self)
        twin.setup = self.setup.copy(*names)
        twin.turns, twin.unread = list(self.turns), list(self.unread)
        return twin

    def episode(self) -> Episode:
        """The record of the game so far. Raises GameError for an outcome or measures that cannot
        enter a mean or an interval."""
        setup, game = self.setup, self.setup.game
        outcome = checked_outcome(game, setup.instance, self.turns, self.ended)
        transcripts = tuple(p.transcript for p in setup.players)
        policy = [seat for seat, t in enumerate(transcripts) if t is not None]
        measures = measures_of(game, policy or range(game.num_seats), setup.instance)
        return Episode(
            instance=setup.instance,
            index=setup.index,
            players=tuple(p.name for p in setup.players),
            prompts=self._prompts,
            turns=tuple(self.turns),
            transcripts=transcripts,
            outcome=outcome,
            ended=self.ended or "",
            measures=measures,
            partner=setup.partner,
            game=game,
        )

    def _take(self, turn: Turn) -> None:
        """Add a turn: its seat reads its error next, and each seat its observation."""
        self.turns.append(turn)
        self.unread[turn.seat] = turn.error or ""
        for seat, text in enumerate(turn.observations):
            self.unread[seat] = "\n".join(line for line in (self.unread[seat], text) if line)
        if turn.error is None:
            self.num_legal, self.num_refused = self.num_legal + 1, 0
        else:
            self.num_refused += 1
            self.setup.players[turn.seat].refused()
        self._close()

    def _close(self) -> None:
        if self.setup.game.seat_to_move is None:
            self.ended = "finished"
        elif self.num_legal >= self._limits.max_turns:
            self.ended = "turns"
        elif self.num_refused > self._limits.max_retries:
            self.ended = "retries"


async def play_turns(position: Position, generate: Generate) -> Episode:
    """Play turn by turn to the end, each seat by its player."""
    while position.ended is None:
        await position.turn(generate)
    return position.episode()


def check_game(game: Game, method: str, problem: str, instance: str) -> None:
    """Raise GameError with the file and line of the game's method if `problem` is not empty."""
    if problem:
        where = f"(instance {instance}){line_of(getattr(game, method))}"
        raise GameError(f"{type(game).__name__}.{method}() {problem} {where}")


def checked_outcome(game: Game, instance: str, turns: Sequence[Turn], ended: str | None) -> Outcome:
    """The outcome of a game after these turns: a forfeit's if a limit ended it and its last turn
    was not a legal move. Raises GameError for one that cannot enter a mean or an interval."""
    forfeited = ended in ("retries", "tokens") and turns and turns[-1].action is None
    outcome = game.outcome_of_forfeit(turns[-1].seat) if forfeited else game.outcome()
    method = "outcome_of_forfeit" if forfeited else "outcome"
    check_game(game, method, wrong_outcome(game, outcome), instance)
    return outcome


def measures_of(game: Game, seats: Collection[int], instance: str) -> dict[str, float]:
    """The game's own counts for these seats. Raises GameError for one that cannot enter a mean."""
    measures = game.measures(seats)
    check_game(game, "measures", wrong_measures(measures), instance)
    return measures


def _try_move(game: Game, seat: int, move: Move, instance: str, *, partner: bool) -> Turn:
    """Apply one try at a move to the game. A `partner`'s move is cut at `MAX_MOVE` characters."""
    said = after_thought(move.text) if partner else move.text
    too_long = partner and len(said) > MAX_MOVE
    if too_long:
        move = replace(move, text=said[:MAX_MOVE])
    if too_long or not move.complete or in_thought(move.text):
        error = "Error: your move was cut off; be shorter."
        no_text = ("",) * game.num_seats
        return Turn(seat, move.text, None, error, "cut_off", no_text, move.num_tokens)
    step = game.step(seat, said)
    check_game(game, "step", wrong_step(game, step), instance)
    return Turn(
        seat,
        move.text,
        step.action,
        step.error,
        step.error_kind,
        step.observations,
        move.num_tokens,
        step.rewards,
    )
