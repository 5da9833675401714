"""The engine's interface: prompt ids in, sampled ids out; weights in, compared bit for bit.

`engines.kinds` finds the class by `engine.kind`; no other room depends on which one it is.
`weight_sync.supervised.Supervised` wraps the engine and handles its failures.

`GameRunner.run_games` plays games: one coroutine per game, which awaits its completions. The SGLang
engine answers each request as soon as it is done. The hf engine waits until every game has a
request, and answers them as one batch (`waves`).
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:  # a game runner needs no torch
    from pathlib import Path

    import torch
    from transformers import PreTrainedModel

    from selfplay.config import Config, EngineConfig
    from selfplay.distributed import World
    from selfplay.engines.sglang.choose import Load
    from selfplay.engines.weights import Compared, Weights


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message, for a model that takes text; `role` as in chat templates."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Request:
    """One turn to generate: exact prompt ids, maximum number of new tokens, sampling seed.

    `model` names the model that generates; "" is the policy, or of several the one whose engine
    runs the games. A model that takes text reads `messages` instead of prompt ids.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    seed: int
    model: str = ""
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A sampled turn: new ids, one log-prob per id, why it ended, the step of the last push.

    `version` is the trainer's own count of that step, not read from the engine's weights.

    The ids include the matched stop token. Log-probs are in nats, from the full softmax after the
    temperature. `finish` is "stop" or "length". A model that takes text returns `text` and no
    ids; without an answer `finish` is "void", and `text` holds the reason.
    """

    ids: list[int]
    logprobs: list[float]
    finish: str
    version: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings of a rollout: temperature and the ids that end a turn.

    Temperature 0 is greedy, with log-probs at temperature 1.
    """

    temperature: float
    stop_ids: tuple[int, ...]


# Sends one request and waits for its completion.
Generate = Callable[[Request], Coroutine[Any, Any, Completion]]

# One game: a coroutine function that gets its completions from `Generate`.
GameCoroutine = Callable[[Generate], Coroutine[Any, Any, Any]]


async def one_turn(request: Request, generate: Generate) -> Completion:
    """A game that consists of one request."""
    return await generate(request)


async def run_all(coroutines: Iterable[Awaitable[Any]]) -> list[Any]:
    """Run coroutines, or tasks that already run, concurrently; results in order.

    The first exception cancels the others, and propagates once they have ended.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class GameRunner(Protocol):
    """Plays games: the part of an engine that a rollout needs."""

    @abstractmethod
    def run_games(
        self, games: Iterable[GameCoroutine], sampling: Sampling, partners: Generate | None = None
    ) -> list[Any]:
        """Run one coroutine per game, which receives `generate(request)`; results in order.

        `partners` answers requests that name another model. The first exception ends all games,
        then propagates.
        """
        ...

    def generate_batch(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Answer all requests, in order. Raises as `run_games` does."""
        return self.run_games([partial(one_turn, request) for request in requests], sampling)

    def rollout(self) -> AbstractContextManager[None]:
        """A context in which requests may reuse the work of earlier ones; none is by default."""
        return nullcontext()


class Engine(GameRunner):
    """Generates turns with weights that the trainer replaces. Sizes are in tokens, times in
    seconds. Each rank has one. A rank that shares another rank's engine has a part of it, which
    plays no games but takes part in `load`, `compare` and `wake`.

    A subclass defines `dtype`, `start`, `run_games`, `load` and `compare`, and overrides any other
    default that differs. Facts that are needed before an engine exists (`in_trainer`,
    `starts_empty`, `shares`, `needs_merged`, `num_weights`) are on the class, so importing the
    class must not import its libraries.

    `weight_sync.supervised` calls in this order: `start`, `sleep`; then in each step `wake` for
    weights, `load`, `compare`, `wake` for the cache, `run_games`, `score`, `sleep`. After an
    EngineFault it calls `restart` and then all of these again. Any other error is a bug and ends
    the run.
    """

    in_trainer: ClassVar[bool] = False  # it runs in the trainer's process; its model never sleeps
    score_temperature: ClassVar[float | None] = None  # the only one of `score`; None: any
    starts_empty: ClassVar[bool] = False  # a warm start runs beside it (warm_start/beside.py)
    scores: bool = False  # whether its log-probs can differ from the trainer's with equal weights
    version: int = 0  # of the last `load`
    dtype: torch.dtype  # of the weights that it takes
    num_copies: int = 1  # copies of the weights that `compare` counts on this rank

    @classmethod
    def shares(cls, world: World) -> bool:
        """Whether it generates with the learner's own parameters (`around`) instead of a copy."""
        return False

    @classmethod
    def check(cls, engine: EngineConfig, *, here: bool) -> None:
        """Raise SettingsError for unsupported settings and, if the run is to be `here`, for
        anything that this machine lacks."""

    @classmethod
    def why_not(cls, model: PreTrainedModel) -> str | None:
        """Why it cannot take this model's weights, None if it can; the model may be on meta."""
        return None

    @classmethod
    def needs_merged(cls, engine: EngineConfig) -> bool:
        """Whether `start` needs a folder without adapters."""
        return True

    @classmethod
    def num_weights(cls, folder: Path) -> int:
        """The model size by which its `auto` settings are chosen; 0 if it has none."""
        return 0

    @classmethod
    def choose(cls, engine: EngineConfig, load: Load) -> EngineConfig:
        """The settings with each `auto` replaced by a value."""
        return engine

    @classmethod
    def parted(cls, engines: Sequence[EngineConfig]) -> list[EngineConfig]:
        """The chosen settings of several policies' engines that share each rank's GPU and start one
        after the other, while none sleeps. Raises SettingsError if one gets too little."""
        return [*engines]

    @classmethod
    def start(
        cls, config: Config, weights: Path, world: World, *, load_format: str = "auto"
    ) -> Engine:
        """An engine with the weights of this folder; every rank calls. With `load_format` "dummy"
        the folder needs only a config, and the first `load` brings the weights. Raises EngineLost
        if the engine does not start."""
        raise NotImplementedError

    @classmethod
    def around(cls, model: PreTrainedModel, engine: EngineConfig, policy: str = "") -> Engine:
        """Instead of `start`: an engine that `shares` the parameters of this model, with the
        adapters of `policy`."""
        raise NotImplementedError

    @classmethod
    def start_partner(cls, config: Config, weights: Path, world: World) -> Engine | None:
        """Another engine for a frozen partner, always awake; None on a rank that shares another's.
        Raises as `start`, and SettingsError if too little memory is free."""
        return cls.start(config, weights, world)

    def answering(self, sampling: Sampling) -> Callable[[], AbstractContextManager[Generate]]:
        """Answers in games that another engine of its kind runs, once for each of its `run_games`.

        Each call of the result, on the other engine's event loop, opens the requests of one game
        until its end. By default they are answered in waves of `generate_batch`, which runs in a
        thread unless the engine is in the trainer's process. Raises as `run_games` does."""
        from selfplay.engines.waves import WaveScheduler

        answer = partial(self.generate_batch, sampling=sampling)
        waves = WaveScheduler(answer, in_thread=not self.in_trainer)
        return lambda: nullcontext(waves.generate)

    @abstractmethod
    def load(self, weights: Weights, version: int) -> None:
        """Replace all weights with these. Raises EngineFault, on every rank that shares the engine,
        possibly before every bucket is taken."""

    @abstractmethod
    def compare(self, weights: Weights) -> Compared:
        """Compare these with the engine's own, bit for bit, without writing; returns this rank's
        counts. Equal weights never differ: both sides come from the same cast of the same numbers.
        Raises as `load` does."""

    @property
    def num_weight_bytes(self) -> int:
        """The size in bytes of one copy of the weights; 0 if another rank's engine holds them."""
        return 0

    def score(
        self, texts: Sequence[Sequence[int]], *, temperature: float = 1.0
    ) -> Callable[[], list[list[float]]]:
        """Request the log-prob of each token of these texts given the tokens before it, in nats,
        and return at once. The returned function waits for the answers, each one entry shorter than
        its text. `temperature` is `score_temperature` if there is only one.
        """
        raise NotImplementedError(f"{type(self).__name__} does not score")

    def sleep(self) -> None:
        """Free the memory of weights and cache while the trainer works, where possible."""

    def wake(self, what: str) -> None:
        """Allocate memory again: "weights" before a push, then "kv_cache" before generating. Until
        the first call the trainer may use the memory that `sleep` freed."""

    def restart(self) -> None:
        """End the engine and start it again. Until the next `load` it has no weights, or its first.

        Raises EngineFault if it does not start; it then stays lost, and the next call counts as its
        next failure. An engine in the trainer's process has nothing to restart.
        """

    @property
    def lost(self) -> bool:
        """Whether the engine no longer answers and needs a restart."""
        return False

    def close(self) -> None:
        """End the engine and everything that it started."""
