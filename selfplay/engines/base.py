"""The engine's interface: prompt ids in, sampled ids out; weights in, compared bit for bit.

`engines.kinds` starts the engine that `engine.kind` names; nothing outside this room asks which
one it is. `weight_sync.supervised.Supervised` wraps it and alone knows of failures.

`GameRunner.run_games` plays games: one coroutine for each game, which awaits its completions. The
SGLang engine answers each request as soon as it is done. The hf engine answers when all games wait,
as one batch (`waves`).
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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
    """One turn to generate: exact prompt ids, limit of new tokens, seed of the sampling.

    `model` names the model that generates; "" is the policy. A model that takes text reads
    `messages` instead of prompt ids.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    seed: int
    model: str = ""
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A sampled turn: new ids, one log-prob for each, why it ended, the step of the last push.

    `version` is that step by the trainer's own count; it is not read from the engine's weights.

    The ids include the matched stop token. Log-probs are in nats, of the full softmax after the
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
    """How every request of a rollout is sampled: temperature and the ids that end a turn.

    Temperature 0 is greedy, with log-probs at temperature 1.
    """

    temperature: float
    stop_ids: tuple[int, ...]


# Sends one request and waits for its completion.
Generate = Callable[[Request], Coroutine[Any, Any, Completion]]

# One game: a coroutine that gets its completions by `Generate`.
GameCoroutine = Callable[[Generate], Coroutine[Any, Any, Any]]


async def one_turn(request: Request, generate: Generate) -> Completion:
    """A game of one request."""
    return await generate(request)


async def run_all(coroutines: Iterable[Awaitable[Any]]) -> list[Any]:
    """Run coroutines, or tasks that run already, concurrently; results in order.

    The first exception cancels the others, and propagates when they have ended.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class GameRunner(Protocol):
    """Plays games: what a rollout needs."""

    @abstractmethod
    def run_games(
        self, games: Iterable[GameCoroutine], sampling: Sampling, partners: Generate | None = None
    ) -> list[Any]:
        """Run one coroutine for each game, passing it `generate(request)`; results in order.

        `partners` answers the requests that name another model. The first exception ends all games,
        then propagates.
        """
        ...

    def rollout(self) -> AbstractContextManager[None]:
        """Inside it requests may use what earlier ones computed; nothing of that outlives it."""
        ...


class Engine(GameRunner):
    """Generates turns, with weights that a trainer replaces. All sizes in tokens, all times in
    seconds. Each rank has one; a rank that shares another rank's has a part of it, which plays no
    games and takes part in `load`, `compare` and `wake`.

    A subclass has `dtype`, `start`, `run_games`, `generate_batch`, `load` and `compare`, and states
    what else differs from the defaults here. The class says what must be known before there is an
    engine (`in_trainer`, `shares`, `needs_merged`, `num_weights`), so that to import it must need
    none of its libraries.

    `weight_sync.supervised` calls in this order: `start`, `sleep`; then in each step `wake` for
    weights, `load`, `compare`, `wake` for the cache, `run_games`, `score`, `sleep`. A method that
    raises EngineFault is followed by `restart` and all of these again. Any other error is a bug and
    ends the run.
    """

    in_trainer: ClassVar[bool] = (
        False  # it computes in the trainer's process, its model never sleeps
    )
    scores: bool = False  # whether its log-probs can differ from the trainer's with equal weights
    version: int = 0  # of the last `load`
    dtype: torch.dtype  # of the weights that it takes
    num_copies: int = 1  # of the weights that `compare` counts here

    @classmethod
    def shares(cls, world: World) -> bool:
        """Whether it generates with the learner's own parameters (`around`), not with a copy."""
        return False

    @classmethod
    def check(cls, engine: EngineConfig, *, here: bool) -> None:
        """Raise SettingsError for settings that it cannot have and, if the run is to be `here`, for
        what this machine lacks."""

    @classmethod
    def why_not(cls, model: PreTrainedModel) -> str | None:
        """Why it cannot take the weights of this model, which may be on the meta device."""
        return None

    @classmethod
    def needs_merged(cls, engine: EngineConfig) -> bool:
        """Whether `start` needs a folder without adapters."""
        return True

    @classmethod
    def num_weights(cls, folder: Path) -> int:
        """The weights by whose number its `auto` settings are chosen; 0 where none are."""
        return 0

    @classmethod
    def choose(cls, engine: EngineConfig, load: Load) -> EngineConfig:
        """The settings with a value for each that is `auto`."""
        return engine

    @classmethod
    def start(
        cls, config: Config, weights: Path, world: World, *, load_format: str = "auto"
    ) -> Engine:
        """An engine with the weights of this folder; every rank calls. With `load_format` "dummy"
        the first `load` replaces its weights, and the folder needs only a config. Raises EngineLost
        if it does not start."""
        raise NotImplementedError

    @classmethod
    def around(cls, model: PreTrainedModel, engine: EngineConfig) -> Engine:
        """In place of `start`: an engine that `shares` the parameters of this model."""
        raise NotImplementedError

    @classmethod
    def start_partner(cls, config: Config, weights: Path, world: World) -> Engine | None:
        """One more for a frozen partner, which stays awake; None on a rank that shares another's.
        Raises as `start`, and SettingsError if too little memory is free."""
        return cls.start(config, weights, world)

    @abstractmethod
    def generate_batch(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Answer all requests, in order."""

    @abstractmethod
    def load(self, weights: Weights, version: int) -> None:
        """Replace all weights by these. Raises EngineFault, on every rank that shares the engine,
        and may then leave buckets untaken."""

    @abstractmethod
    def compare(self, weights: Weights) -> Compared:
        """Compare these with the engine's own, bit for bit; nothing is written. This rank's counts.
        Equal weights never differ: both sides come from the same cast of the same numbers. Raises
        as `load` does."""

    @property
    def num_weight_bytes(self) -> int:
        """The bytes of one copy of the weights here; 0 if another rank's engine has them."""
        return 0

    def rollout(self) -> AbstractContextManager[None]:
        """As `GameRunner.rollout`: by default nothing of a rollout is kept."""
        return nullcontext()

    def score(self, texts: Sequence[Sequence[int]]) -> Callable[[], list[list[float]]]:
        """Request the log-prob of each token of these texts given the tokens before it, and return
        at once. The returned function waits for the answers, each one entry shorter than its text.
        """
        raise NotImplementedError(f"{type(self).__name__} does not score")

    def sleep(self) -> None:
        """Free the memory of weights and cache while the trainer works, where possible."""

    def wake(self, what: str) -> None:
        """Allocate memory again: "weights" before a push, then "kv_cache" before generating. Until
        the first the trainer may use what `sleep` freed."""

    def restart(self) -> None:
        """End the engine and start it again. Until the next `load` it has no weights or its first.

        Raises EngineFault if it does not start; the engine then stays lost, and the next call is
        its next failure. An engine in the trainer's process has nothing to restart.
        """

    @property
    def lost(self) -> bool:
        """Whether the engine answers no more, unless it is restarted."""
        return False

    def close(self) -> None:
        """End the engine and everything it started."""
