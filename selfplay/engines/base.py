"""What an engine is: prompt ids in, sampled ids out. Knows no games, no rewards, no text.

Two drivers meet two kinds of engine: a wave engine (`generate`) answers all waiting prompts at
once; a streaming engine (`stream`) answers each as soon as it is done, on its own event loop.
`Engine.streaming` says which one it is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat for a speaker that is asked in text; `role` as chat templates say."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Request:
    """One turn to generate: the exact prompt ids, how many more at most, the seed of its draws.

    `speaker` names who is to speak, "" the policy. A speaker that is asked in text reads `messages`
    in place of prompt ids.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    seed: int
    speaker: str = ""
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """What was sampled: new ids, one log-prob a token, why it ended, whose weights.

    The ids include the matched stop token. Log-probs are those of the full softmax after the
    temperature. `finish` is "stop" or "length"; a speaker that is asked in text answers in `text`
    without ids, and with "void" where it gave no answer, `text` then saying why.
    """

    ids: list[int]
    logprobs: list[float]
    finish: str
    version: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How every request of a rollout is sampled.

    Temperature 0 is greedy, with log-probs at temperature 1.
    """

    temperature: float
    stop_ids: tuple[int, ...]


class Engine(Protocol):
    """A generator of turns with replaceable weights. All sizes in tokens, all times in seconds."""

    streaming: bool
    version: int

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Answer all requests, in order."""
        ...

    def stream(
        self,
        tasks: Iterable[Callable[[Callable[[Request], Awaitable[Completion]]], Awaitable[Any]]],
        sampling: Sampling,
    ) -> list[Any]:
        """Run one coroutine a game, each given `ask(request)`; results in order.

        Streaming engines only.
        """
        ...

    def update_weights(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> None:
        """From the next request on the engine speaks with these weights (Hugging Face names)."""
        ...

    def sleep(self) -> None:
        """Give memory (weights, cache) back while the trainer works, where any can be freed."""
        ...

    def wake(self, what: str) -> None:
        """Take memory again: "weights" before a push, then "kv_cache" before generating."""
        ...

    def close(self) -> None:
        """End the engine and everything it started."""
        ...
