"""Play many games at once with one engine.

There are two drivers. The wave driver sends the prompts of all waiting games as one batch. The
streaming driver sends each prompt as soon as its game needs it, so a long message delays only its
own game.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random

from selfplay.engines.base import Completion, Engine, Request, Sampling
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
    """Counts and times of one rollout.

    `engine_s` is the time in the engine, `games_s` the rest. `void` has the indices of the game
    setups whose game ended void; no other field counts these games.
    """

    num_games: int
    num_turns: int
    num_errors: int
    num_prompt_tokens: int
    num_generated_tokens: int
    engine_s: float
    games_s: float
    void: tuple[int, ...] = ()


def play_games(
    setups: Sequence[GameSetup],
    engine: Engine | None,
    *,
    sampling: Sampling,
    limits: Limits,
    ended: Callable[[], object] | None = None,
    version: int | None = None,
) -> tuple[list[Episode], RolloutStats]:
    """Play all games to their end; returns the episodes in the order of `setups`.

    Void games (a partner gave no answer) are left out, so that nothing can score them; the
    statistics list them. `ended` is called each time a game ends. `version` is the step whose
    weights the policy's completions must come from; None skips this check.

    A rank that shares another rank's engine passes None for `engine` and no setups. Raises
    ValueError if it has setups, and RuntimeError for an invalid completion (`_check_completion`).
    """
    if engine is None:
        if setups:
            raise ValueError(f"a rank without an engine cannot play games, got {len(setups)}")
        return [], RolloutStats(0, 0, 0, 0, 0, 0.0, 0.0)
    started = time.perf_counter()
    games = [_run_game(setup, limits, ended) for setup in setups]
    tally = _Tally(version)
    drive = _drive_stream if engine.streaming else _drive_waves
    played = drive(games, engine, sampling, tally)
    episodes = [episode for episode in played if episode.ended != VOID]
    turns = [turn for episode in episodes for turn in episode.turns]
    return episodes, RolloutStats(
        num_games=len(episodes),
        num_turns=len(turns),
        num_errors=sum(turn.error is not None for turn in turns),
        num_prompt_tokens=tally.num_prompt_tokens,
        num_generated_tokens=tally.num_generated_tokens,
        engine_s=tally.engine_s,
        games_s=time.perf_counter() - started - tally.engine_s,
        void=tuple(index for index, episode in enumerate(played) if episode.ended == VOID),
    )


def _run_game(setup: GameSetup, limits: Limits, ended: Callable[[], object] | None) -> Playing:
    """One game. Its first prompt is rendered when the game starts, so the engine already works on
    the first games while later ones still render."""
    position, branching = Position(setup, limits), setup.branching
    playing = play_branching(position, branching) if branching else play(position)
    episode = yield from named(setup, playing)
    if ended is not None:
        ended()
    return episode


def _check_completion(request: Request, completion: Completion, *, version: int | None) -> None:
    """Raise RuntimeError for a completion that no correct engine returns: no ids or too many, a
    different number of log-probs, a log-prob that is not finite or is above 0 by more than
    rounding, or weights of another version.

    Completions of text requests have no ids to check.
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
    elif version is not None and not request.speaker and completion.version != version:
        problem = f"must use the weights of step {version}, uses those of {completion.version}"
    if problem:
        raise RuntimeError(
            f"a completion of the engine of {request.speaker or 'the policy'} {problem}"
        )


@dataclass(slots=True)
class _Tally:
    """Counts kept while games run. With a streaming engine `engine_s` is the full time of its
    loop."""

    version: int | None = None
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    engine_s: float = 0.0

    def count(self, request: Request, completion: Completion) -> None:
        """Check a completion and count its tokens."""
        _check_completion(request, completion, version=self.version)
        self.num_prompt_tokens += len(request.prompt_ids)
        self.num_generated_tokens += len(completion.ids)


def _drive_waves(
    games: Sequence[Playing], engine: Engine, sampling: Sampling, tally: _Tally
) -> list[Episode]:
    """Send the requests of all waiting games as one batch, wave after wave, until all games end.

    Spawned games join the next wave.
    """
    episodes: dict[int, Episode] = {}
    waiting: list[tuple[int, Request]] = []
    running = list(games)

    def resume(index: int, completion: Completion | None) -> None:
        """Run a game up to its next request or its end; start the games that it spawns."""
        game = running[index]
        try:
            step = game.send(completion)  # type: ignore[arg-type]
            while isinstance(step, Spawn):
                running.append(step.playing)
                resume(len(running) - 1, None)
                step = next(game)
            waiting.append((index, step))
        except StopIteration as stop:
            episodes[index] = stop.value

    for index in range(len(games)):
        resume(index, None)
    while waiting:
        wave, waiting = waiting, []
        started = time.perf_counter()
        completions = engine.generate([request for _, request in wave], sampling)
        tally.engine_s += time.perf_counter() - started
        for (index, request), completion in zip(wave, completions, strict=True):
            tally.count(request, completion)
            resume(index, completion)
    return [episodes[index] for index in range(len(games))]


def _drive_stream(
    games: Sequence[Playing], engine: Engine, sampling: Sampling, tally: _Tally
) -> list[Episode]:
    """Each game continues as soon as its own completion arrives. A game that spawned others waits
    for them at its end."""
    Ask = Callable[[Request], Awaitable[Completion]]

    def task(game: Playing) -> Callable[[Ask], Awaitable[Episode]]:
        async def run(ask: Ask) -> Episode:
            spawned: list[asyncio.Future[Episode]] = []
            try:
                step = next(game)
                while True:
                    if isinstance(step, Spawn):
                        spawned.append(asyncio.ensure_future(task(step.playing)(ask)))
                        step = next(game)
                    else:
                        completion = await ask(step)
                        tally.count(step, completion)
                        step = game.send(completion)
            except StopIteration as stop:
                episode: Episode = stop.value
                await asyncio.gather(*spawned)
                return episode
            finally:
                for future in spawned:
                    future.cancel()

        return run

    started = time.perf_counter()
    episodes: list[Episode] = engine.stream([task(game) for game in games], sampling)
    tally.engine_s += time.perf_counter() - started
    return episodes


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
