"""Play many games at once with one engine: each game is a coroutine that awaits its turns."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from selfplay.engines.base import Completion, Engine, Generate, Request, Sampling, Task
from selfplay.errors import EngineFault
from selfplay.rollout.branches import play_branching
from selfplay.rollout.episode import (
    VOID,
    Episode,
    GameSetup,
    Limits,
    Playing,
    Position,
    Spawn,
    named,
    play,
)


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """Tokens of one rollout and the seconds of its games. `void` has the indices of the game
    setups whose game ended void."""

    num_prompt_tokens: int
    num_generated_tokens: int
    engine_s: float
    void: tuple[int, ...] = ()

    def __add__(self, other: RolloutStats) -> RolloutStats:
        """The statistics of two rollouts, one after the other."""
        return RolloutStats(
            self.num_prompt_tokens + other.num_prompt_tokens,
            self.num_generated_tokens + other.num_generated_tokens,
            self.engine_s + other.engine_s,
            self.void + other.void,
        )


@dataclass(slots=True)
class FinishedGames:
    """The games of a rollout that have ended, by their index in `setups`, and the engine's seconds.

    After an EngineFault, call `play_games` again with the same record. It plays only the unfinished
    games, from their start.
    """

    games: dict[int, _FinishedGame] = field(default_factory=dict)
    engine_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _FinishedGame:
    """A game with its continuations, and the tokens of all of them."""

    episode: Episode
    num_prompt_tokens: int
    num_generated_tokens: int


def play_games(
    setups: Sequence[GameSetup],
    engine: Engine | None,
    *,
    sampling: Sampling,
    limits: Limits,
    on_end: Callable[[], object] | None = None,
    version: int | None = None,
    finished: FinishedGames | None = None,
) -> tuple[list[Episode], RolloutStats]:
    """Play all games to their end; returns the episodes in the order of `setups`.

    Void games (a partner gave no answer) are left out, so that they are never scored; the
    statistics list them. `on_end` is called each time a game ends. `version` is the step whose
    weights the policy's completions must come from; None skips this check. Games in `finished` are
    not played again; each game that ends is added to it.

    A rank that shares another rank's engine passes None for `engine` and no setups. Raises
    ValueError if it has setups, EngineFault if the policy's engine fails or gives an invalid
    completion (`_check_completion`), and RuntimeError for such a completion of a partner's engine.
    """
    if engine is None:
        if setups:
            raise ValueError(f"a rank without an engine cannot play games, got {len(setups)}")
        return [], RolloutStats(0, 0, 0.0)
    finished = FinishedGames() if finished is None else finished
    rollout = _Rollout(finished, version, on_end)
    games = {
        index: named(setup, _playing(setup.fresh(), limits))
        for index, setup in enumerate(setups)
        if index not in finished.games
    }
    if games:
        with engine.rollout():
            rollout.play(games, engine, sampling)
    played = [finished.games[index] for index in range(len(setups))]
    episodes = [game.episode for game in played if game.episode.ended != VOID]
    return episodes, RolloutStats(
        num_prompt_tokens=sum(game.num_prompt_tokens for game in played),
        num_generated_tokens=sum(game.num_generated_tokens for game in played),
        engine_s=finished.engine_s,
        void=tuple(index for index, game in enumerate(played) if game.episode.ended == VOID),
    )


def _playing(setup: GameSetup, limits: Limits) -> Playing:
    """One game. Its first prompt is rendered when the game starts, so the engine can generate for
    the first games while later prompts are rendered."""
    position, branching = Position(setup, limits), setup.branching
    return (yield from play_branching(position, branching) if branching else play(position))


def _check_completion(request: Request, completion: Completion, *, version: int | None) -> None:
    """Refuse a completion that no correct engine returns: no ids or too many, a different number of
    log-probs, a log-prob that is not finite or is above 0 by more than rounding, or weights of
    another version.

    Raises EngineFault if it is the policy's, RuntimeError if it is a partner's. Completions of text
    requests have no ids to check.
    """
    if request.messages:
        return
    num, problem = len(completion.ids), ""
    if not 1 <= num <= request.max_new_tokens:
        problem = f"must have 1 to {request.max_new_tokens} ids, has {num}"
    elif len(completion.logprobs) != num:
        problem = f"must have one log-prob per id, has {len(completion.logprobs)} for {num} ids"
    elif invalid := [x for x in completion.logprobs if not -math.inf < x <= 1e-3]:
        problem = f"must have finite log-probs of at most 0, has {invalid[0]}"
    elif version is not None and not request.model and completion.version != version:
        problem = f"must use the weights of step {version}, uses those of {completion.version}"
    if problem:
        error = RuntimeError if request.model else EngineFault
        raise error(f"a completion of the engine of {request.model or 'the policy'} {problem}")


class _Rollout:
    """Plays games, checks completions, counts their tokens by game and moves games that end to
    `finished`."""

    def __init__(
        self, finished: FinishedGames, version: int | None, on_end: Callable[[], object] | None
    ) -> None:
        self.finished, self._version, self._on_end = finished, version, on_end
        self._tokens: dict[int, tuple[int, int]] = {}

    def play(self, games: Mapping[int, Playing], engine: Engine, sampling: Sampling) -> None:
        """Play these games to their end, on the engine's event loop."""
        began_s = time.perf_counter()
        try:
            engine.stream([self._task(index, game) for index, game in games.items()], sampling)
        finally:
            self.finished.engine_s += time.perf_counter() - began_s

    def _task(self, index: int, game: Playing, *, spawned: bool = False) -> Task:
        """The coroutine of a game, which ends when the games that it spawned have ended too."""

        async def run(generate: Generate) -> None:
            try:
                async with asyncio.TaskGroup() as continuations:
                    episode = await self._play_one(index, game, generate, continuations)
            except BaseExceptionGroup as errors:  # of this game or of one that it spawned
                raise errors.exceptions[0] from None
            if not spawned:
                self._end(index, episode)

        return run

    async def _play_one(
        self, index: int, game: Playing, generate: Generate, continuations: asyncio.TaskGroup
    ) -> Episode:
        """Play a game to its end. It continues as soon as its own completion arrives."""
        try:
            step = next(game)
            while True:
                if isinstance(step, Spawn):
                    task = self._task(index, step.playing, spawned=True)
                    continuations.create_task(task(generate))
                    step = next(game)
                else:
                    completion = await generate(step)
                    self._take(index, step, completion)
                    step = game.send(completion)
        except StopIteration as stop:
            return stop.value

    def _take(self, index: int, request: Request, completion: Completion) -> None:
        """Check a completion and count its tokens for the game at `index`."""
        _check_completion(request, completion, version=self._version)
        prompt, generated = self._tokens.get(index, (0, 0))
        self._tokens[index] = prompt + len(request.prompt_ids), generated + len(completion.ids)

    def _end(self, index: int, episode: Episode) -> None:
        """The game at `index` and all its continuations have ended."""
        self.finished.games[index] = _FinishedGame(episode, *self._tokens.pop(index, (0, 0)))
        if self._on_end is not None:
            self._on_end()


def play_scripted(setups: Sequence[GameSetup], *, limits: Limits) -> list[Episode]:
    """Play games without an engine (teachers, scripted baselines).

    Raises ValueError if a player requests a completion.
    """
    episodes = []
    for setup in setups:
        game = named(setup, play(Position(setup, limits)))
        try:
            next(game)
        except StopIteration as stop:
            episodes.append(stop.value)
        else:
            raise ValueError(
                f"a seat of instance {setup.instance} asked for an engine in a scripted game"
            )
    return episodes


def first_turns(episodes: Sequence[Episode], num: int) -> list[tuple[list[int], list[int]]]:
    """The first turns of at most `num` policy seats, drawn from the full rollout.

    Each is (ids up to the end of the turn, mask that is 1 where the policy sampled the id). First
    turns have the shortest contexts.
    """
    transcripts = [t for e in episodes for t in e.transcripts if t is not None and t.spans]
    turns = []
    for index in Random(0).sample(range(len(transcripts)), min(num, len(transcripts))):
        transcript = transcripts[index]
        span = transcript.spans[0]
        mask = [0] * span.start + [1] * (span.end - span.start)
        turns.append((transcript.ids[: span.end], mask))
    return turns
