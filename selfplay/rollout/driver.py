"""Play many games at once with one engine: each game is a coroutine that awaits its turns."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from random import Random

from selfplay.engines.base import Completion, GameRunner, Generate, Request, Sampling
from selfplay.errors import EngineFault
from selfplay.rollout.episode import VOID, Episode, GameSetup, Limits, Position, play_turns
from selfplay.rollout.play import Play

# The step of the last push of each policy in training, by its requests' model; None allows any.
Versions = Mapping[str, int | None]
ANY_VERSION: Versions = {"": None}


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """Tokens of one rollout, the seconds of its games, and how many of them were aborted."""

    num_prompt_tokens: int
    num_generated_tokens: int
    engine_s: float
    num_void: int = 0

    def __add__(self, other: RolloutStats) -> RolloutStats:
        """The statistics of two consecutive rollouts."""
        return RolloutStats(*map(operator.add, astuple(self), astuple(other)))


@dataclass(slots=True)
class FinishedGames:
    """The finished games of a rollout with their token counts, by their index in `setups`, and the
    engine's seconds.

    After a failure a supervised engine runs all games again: finished ones return at once, the
    others restart.
    """

    games: dict[int, tuple[Episode, _Counting]] = field(default_factory=dict)
    engine_s: float = 0.0

    @property
    def episodes(self) -> dict[int, Episode]:
        """The games by their index, in order, without aborted ones."""
        games = sorted((index, episode) for index, (episode, _) in self.games.items())
        return {index: episode for index, episode in games if episode.ended != VOID}

    def result(self) -> tuple[list[Episode], RolloutStats]:
        """The episodes in order, without aborted ones, and the statistics of all games."""
        episodes, counted = [*self.episodes.values()], [tokens for _, tokens in self.games.values()]
        return episodes, RolloutStats(
            num_prompt_tokens=sum(tokens.num_prompt_tokens for tokens in counted),
            num_generated_tokens=sum(tokens.num_generated_tokens for tokens in counted),
            engine_s=self.engine_s,
            num_void=len(counted) - len(episodes),
        )


@dataclass(frozen=True, slots=True)
class Rollout:
    """This rank's games of a step, their statistics, and the names of the policies that train on
    them ("" alone: the run has one)."""

    episodes: list[Episode]
    stats: RolloutStats
    trained: Sequence[str] = ("",)

    def __add__(self, other: Rollout) -> Rollout:
        episodes = self.episodes + other.episodes
        return replace(self, episodes=episodes, stats=self.stats + other.stats)


def play_games(
    setups: Sequence[GameSetup],
    runner: GameRunner,
    *,
    sampling: Sampling,
    limits: Limits,
    play: Play = play_turns,
    on_end: Callable[[], object] | None = None,
    versions: Versions = ANY_VERSION,
    finished: FinishedGames | None = None,
) -> tuple[list[Episode], RolloutStats]:
    """Play all games to their end with `play`; returns the episodes in the order of `setups`.

    Aborted games (a partner gave no answer) are left out, so that they are never scored; the
    statistics count them. `on_end` is called each time a game ends. `versions` are the steps of the
    pushes that must be stamped on the policies' completions. Each game that ends is added to
    `finished`; games already in it are not played.

    Every rank must call if `runner` is supervised; one that shares another rank's engine has no
    setups. Raises what `runner` raises; inside a game EngineFault for an invalid completion from
    the policy's engine (`_check_completion`), RuntimeError for one from a partner's engine.
    """
    finished = FinishedGames() if finished is None else finished

    async def play_game(index: int, generate: Generate) -> None:
        if index in finished.games:  # it ended before the engine failed
            return
        setup, counting = setups[index].copy(), _Counting(generate, versions)
        episode = await play(Position(setup, limits), counting.generate)
        finished.games[index] = episode, counting
        if on_end is not None:
            on_end()

    start_s = time.perf_counter()
    try:
        with runner.rollout():
            runner.run_games([partial(play_game, index) for index in range(len(setups))], sampling)
    finally:
        finished.engine_s += time.perf_counter() - start_s
    return finished.result()


class _Counting:
    """Checks a game's completions and counts its tokens, including those of its branches."""

    def __init__(self, generate: Generate, versions: Versions) -> None:
        self._generate, self._versions = generate, versions
        self.num_prompt_tokens = self.num_generated_tokens = 0

    async def generate(self, request: Request) -> Completion:
        try:
            completion = await self._generate(request)
            _check_completion(request, completion, self._versions)
        except EngineFault as fault:
            fault.model = request.model
            raise
        self.num_prompt_tokens += len(request.prompt_ids)
        self.num_generated_tokens += len(completion.ids)
        return completion


def _check_completion(request: Request, completion: Completion, versions: Versions) -> None:
    """Refuse a completion that no correct engine returns: no ids or too many, a different number of
    log-probs, a log-prob that is not finite or exceeds 0 by more than rounding, or the trainer's
    stamp of another push (`Completion.version`).

    Raises EngineFault for a policy in `versions`, RuntimeError for a partner. Completions of text
    requests have no ids to check.
    """
    if request.messages:
        return
    num, problem, version = len(completion.ids), "", versions.get(request.model)
    if not 1 <= num <= request.max_new_tokens:
        problem = f"must have 1 to {request.max_new_tokens} ids, has {num}"
    elif len(completion.logprobs) != num:
        problem = f"must have one log-prob per id, has {len(completion.logprobs)} for {num} ids"
    elif invalid := [x for x in completion.logprobs if not -math.inf < x <= 1e-3]:
        problem = f"must have finite log-probs of at most 0, has {invalid[0]}"
    elif version is not None and completion.version != version:
        problem = f"must use the weights of step {version}, uses those of {completion.version}"
    if problem:
        error = EngineFault if request.model in versions else RuntimeError
        raise error(f"a completion of the engine of {request.model or 'the policy'} {problem}")


def play_scripted(setups: Sequence[GameSetup], *, limits: Limits) -> list[Episode]:
    """Play games without an engine (teachers, scripted baselines).

    Raises ValueError if a player requests a completion.
    """

    async def no_engine(request: Request) -> Completion:
        raise ValueError("a player requested a completion in a scripted game")

    episodes = []
    for setup in setups:
        try:
            play_turns(Position(setup, limits), no_engine).send(None)  # it awaits nothing
        except StopIteration as ended:
            episodes.append(ended.value)
    return episodes


def first_turns(
    episodes: Sequence[Episode], num: int, *, seed: int, policy: str = ""
) -> list[tuple[list[int], list[int]]]:
    """The first turns of at most `num` seats of the policy, drawn by `seed` from the full rollout.

    Each is (ids up to the end of the turn, mask, 1 where the policy sampled the id). First turns
    have the shortest contexts.
    """
    every = (t for e in episodes for t in e.transcripts if t is not None and t.policy == policy)
    transcripts = [transcript for transcript in every if transcript.spans]
    turns = []
    for index in Random(seed).sample(range(len(transcripts)), min(num, len(transcripts))):
        transcript = transcripts[index]
        end = min([transcript.spans[0].end, *transcript.starts[:1]])
        turns.append((transcript.ids[:end], transcript.mask[:end]))
    return turns
