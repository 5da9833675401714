"""Play many games at once: two drivers feed the prompts of all games to an engine.

A wave engine gets every waiting prompt at once; a streaming engine gets each prompt the moment its
game asks for it, so a long message delays only its own game. Speaks of seats, turns and episodes;
knows no torch and no rewards.
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
    """What a rollout did and how long the engine and everything beside it took.

    `void` holds the places of tables whose game ended void; they are in no other number of games.
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
    tables: Sequence[GameSetup],
    engine: Engine | None,
    *,
    sampling: Sampling,
    limits: Limits,
    ended: Callable[[], object] | None = None,
    version: int | None = None,
) -> tuple[list[Episode], RolloutStats]:
    """Play all tables to their end with one engine; episodes in the order of the tables.

    `version`, where given, is the step whose weights must speak for the policy. Raises RuntimeError
    for an answer that is none, see `check_completion`.

    `ended`, where given, is called each time a game ends.

    Void games (a partner gave no answer) are left out, so that nothing can score them; the
    statistics say which they were. A rank that shares another's engine has none, and no tables.
    """
    if engine is None:
        if tables:
            raise ValueError(f"a rank without an engine can play no tables, got {len(tables)}")
        return [], RolloutStats(0, 0, 0, 0, 0, 0.0, 0.0)
    started = time.perf_counter()
    plays = [_playing(table, limits, ended) for table in tables]
    tally = _Tally(version)
    drive = _drive_stream if engine.streaming else _drive_waves
    played = drive(plays, engine, sampling, tally)
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
        void=tuple(place for place, episode in enumerate(played) if episode.ended == VOID),
    )


def _playing(table: GameSetup, limits: Limits, ended: Callable[[], object] | None) -> Playing:
    """A table's game, set up when it is its turn: the engine works on the first while later ones
    still render."""
    position, branching = Position(table, limits), table.branching
    playing = play_branching(position, branching) if branching else play(position)
    episode = yield from named(table, playing)
    if ended is not None:
        ended()
    return episode


def check_completion(request: Request, completion: Completion, *, version: int | None) -> None:
    """Refuse, with RuntimeError, what no sound engine says: no ids or too many, another number of
    log-probs, one that is above 0 by more than rounding or not finite, weights of another version.

    An answer in text (a void one, too) has no ids to check.
    """
    if request.messages:
        return
    num, wrong = len(completion.ids), ""
    if not 1 <= num <= request.max_new_tokens:
        wrong = f"must have 1 to {request.max_new_tokens} ids, has {num}"
    elif len(completion.logprobs) != num:
        wrong = f"must have one log-prob an id, has {len(completion.logprobs)} for {num} ids"
    elif bad := [x for x in completion.logprobs if not -math.inf < x <= 1e-3]:
        wrong = f"must have finite log-probs of at most 0, has {bad[0]}"
    elif version is not None and not request.speaker and completion.version != version:
        wrong = f"must be spoken with the weights of step {version}, is with {completion.version}'s"
    if wrong:
        who = request.speaker or "the policy"
        raise RuntimeError(f"a completion of {who}'s engine {wrong}")


@dataclass(slots=True)
class _Tally:
    """Counts kept while games run. With a streaming engine `engine_s` is its loop's whole time."""

    version: int | None = None
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    engine_s: float = 0.0

    def count(self, request: Request, completion: Completion) -> None:
        """Count an answer, which `check_completion` lets pass."""
        check_completion(request, completion, version=self.version)
        self.num_prompt_tokens += len(request.prompt_ids)
        self.num_generated_tokens += len(completion.ids)


def _drive_waves(
    plays: Sequence[Playing], engine: Engine, sampling: Sampling, tally: _Tally
) -> list[Episode]:
    """All waiting games get their completions together, wave after wave, until all have ended.

    What a game has played beside it joins the same waves.
    """
    episodes: dict[int, Episode] = {}
    waiting: list[tuple[int, Request]] = []
    under_way = list(plays)

    def go_on(place: int, completion: Completion | None) -> None:
        playing = under_way[place]
        try:
            asked = playing.send(completion)  # type: ignore[arg-type]
            while isinstance(asked, Spawn):
                under_way.append(asked.playing)
                go_on(len(under_way) - 1, None)
                asked = next(playing)
            waiting.append((place, asked))
        except StopIteration as ended:
            episodes[place] = ended.value

    for place in range(len(plays)):
        go_on(place, None)
    while waiting:
        wave, waiting = waiting, []
        started = time.perf_counter()
        completions = engine.generate([request for _, request in wave], sampling)
        tally.engine_s += time.perf_counter() - started
        for (place, request), completion in zip(wave, completions, strict=True):
            tally.count(request, completion)
            go_on(place, completion)
    return [episodes[place] for place in range(len(plays))]


def _drive_stream(
    plays: Sequence[Playing], engine: Engine, sampling: Sampling, tally: _Tally
) -> list[Episode]:
    """Each game goes on as soon as its own turn is done; it ends with those played beside it."""
    Ask = Callable[[Request], Awaitable[Completion]]

    def task(playing: Playing) -> Callable[[Ask], Awaitable[Episode]]:
        async def go_on(ask: Ask) -> Episode:
            beside: list[asyncio.Future[Episode]] = []
            try:
                asked = next(playing)
                while True:
                    if isinstance(asked, Spawn):
                        beside.append(asyncio.ensure_future(task(asked.playing)(ask)))
                        asked = next(playing)
                    else:
                        completion = await ask(asked)
                        tally.count(asked, completion)
                        asked = playing.send(completion)
            except StopIteration as ended:
                episode: Episode = ended.value
                await asyncio.gather(*beside)
                return episode
            finally:
                for game in beside:
                    game.cancel()

        return go_on

    started = time.perf_counter()
    episodes: list[Episode] = engine.stream([task(playing) for playing in plays], sampling)
    tally.engine_s += time.perf_counter() - started
    return episodes


def play_scripted(tables: Sequence[GameSetup], *, limits: Limits) -> list[Episode]:
    """Play tables at which nobody asks an engine (teachers, scripted baselines)."""
    episodes = []
    for table in tables:
        playing = named(table, play(Position(table, limits)))
        try:
            next(playing)
        except StopIteration as ended:
            episodes.append(ended.value)
        else:
            raise ValueError(
                f"a seat of instance {table.instance} asked for an engine in a scripted game"
            )
    return episodes


def first_turns(episodes: Sequence[Episode], num: int) -> list[tuple[list[int], list[int]]]:
    """What at most `num` policy seats read and then said in their first turn, from all over the
    rollout: the ids, and a 1 for each that the policy sampled. The first turns have the shortest
    contexts."""
    transcripts = [t for e in episodes for t in e.transcripts if t is not None and t.spans]
    found = []
    for place in Random(0).sample(range(len(transcripts)), min(num, len(transcripts))):
        transcript = transcripts[place]
        first = transcript.spans[0]
        said = [0] * first.start + [1] * (first.end - first.start)
        found.append((transcript.ids[: first.end], said))
    return found
