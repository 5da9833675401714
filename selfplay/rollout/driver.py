"""Play many games at once with one engine.

There are two drivers. The wave driver sends the prompts of all waiting games as one batch. The
streaming driver sends each prompt as soon as its game needs it, so a long message delays only its
own game.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

from selfplay.engines.base import Completion, Engine, Request, Sampling, check_count
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
    """Tokens of one rollout and the seconds in the engine. `void` has the indices of the game
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
    """The games of a rollout that have ended, by their place in `setups`, and the engine's seconds.

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
    unfinished = {
        place: setup.fresh() for place, setup in enumerate(setups) if place not in finished.games
    }
    games = {place: named(setup, _playing(setup, limits)) for place, setup in unfinished.items()}
    drive = _drive_stream if engine.streaming else _drive_waves
    if games:
        with engine.rollout():
            drive(games, engine, sampling, rollout)
    played = [finished.games[place] for place in range(len(setups))]
    episodes = [game.episode for game in played if game.episode.ended != VOID]
    return episodes, RolloutStats(
        num_prompt_tokens=sum(game.num_prompt_tokens for game in played),
        num_generated_tokens=sum(game.num_generated_tokens for game in played),
        engine_s=finished.engine_s,
        void=tuple(place for place, game in enumerate(played) if game.episode.ended == VOID),
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
    """Checks completions, counts their tokens by game and moves games that end to `finished`. With
    a streaming engine `engine_s` is the full time of its loop."""

    def __init__(
        self, finished: FinishedGames, version: int | None, on_end: Callable[[], object] | None
    ) -> None:
        self.finished, self._version, self._on_end = finished, version, on_end
        self._tokens: dict[int, tuple[int, int]] = {}

    def take(self, place: int, request: Request, completion: Completion) -> None:
        """Check a completion and count its tokens for the game at `place`."""
        _check_completion(request, completion, version=self._version)
        prompt, generated = self._tokens.get(place, (0, 0))
        self._tokens[place] = prompt + len(request.prompt_ids), generated + len(completion.ids)

    def end(self, place: int, episode: Episode) -> None:
        """The game at `place` and all its continuations have ended."""
        self.finished.games[place] = _FinishedGame(episode, *self._tokens.pop(place, (0, 0)))
        if self._on_end is not None:
            self._on_end()

    @contextmanager
    def in_engine(self) -> Iterator[None]:
        """Count the time inside this block as the engine's."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.finished.engine_s += time.perf_counter() - started


def _drive_waves(
    games: Mapping[int, Playing], engine: Engine, sampling: Sampling, rollout: _Rollout
) -> None:
    """Send the requests of all waiting games as one batch, wave after wave, until all games end.

    Spawned games join the next wave.
    """
    waiting: list[tuple[int, Playing, Request]] = []
    num_running = dict.fromkeys(games, 0)  # of a game and its continuations
    episodes: dict[int, Episode] = {}

    def resume(place: int, game: Playing, completion: Completion | None) -> None:
        """Run a game up to its next request or its end; start the games that it spawns."""
        num_running[place] += completion is None
        try:
            step = game.send(completion)  # type: ignore[arg-type]
            while isinstance(step, Spawn):
                resume(place, step.playing, None)
                step = next(game)
            waiting.append((place, game, step))
        except StopIteration as stop:
            if game is games[place]:
                episodes[place] = stop.value
            num_running[place] -= 1
            if not num_running[place]:
                rollout.end(place, episodes.pop(place))

    for place, game in games.items():
        resume(place, game, None)
    while waiting:
        wave, waiting = waiting, []
        with rollout.in_engine():
            completions = engine.generate([request for _, _, request in wave], sampling)
        check_count(completions, len(wave))
        for (place, game, request), completion in zip(wave, completions, strict=True):
            rollout.take(place, request, completion)
            resume(place, game, completion)


def _drive_stream(
    games: Mapping[int, Playing], engine: Engine, sampling: Sampling, rollout: _Rollout
) -> None:
    """Each game continues as soon as its own completion arrives. A game that spawned others waits
    for them at its end."""
    Ask = Callable[[Request], Awaitable[Completion]]

    def task(place: int, game: Playing) -> Callable[[Ask], Awaitable[None]]:
        async def run(ask: Ask) -> None:
            spawned: list[asyncio.Future[None]] = []
            try:
                step = next(game)
                while True:
                    if isinstance(step, Spawn):
                        spawned.append(asyncio.ensure_future(task(place, step.playing)(ask)))
                        step = next(game)
                    else:
                        completion = await ask(step)
                        rollout.take(place, step, completion)
                        step = game.send(completion)
            except StopIteration as stop:
                await asyncio.gather(*spawned)
                if game is games[place]:
                    rollout.end(place, stop.value)
            finally:
                for future in spawned:
                    future.cancel()

        return run

    with rollout.in_engine():
        engine.stream([task(place, game) for place, game in games.items()], sampling)


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
