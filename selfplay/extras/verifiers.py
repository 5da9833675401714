"""Environments of verifiers (Prime Intellect, 0.4) as games: `game.name: verifiers:TASKSET`, or
`verifiers:TASKSET:ENVIRONMENT` for one that is paired with a taskset, such as gsm8k:user-sim.

Each agent of the environment is a seat. Its `run` and `finalize` play as they are, with the seats'
moves as the answers of its agents; its rewards and the task's are the seats' rewards. Nothing of
its harnesses runs: no program, sandbox or server of tools. An environment that needs one is
refused. The environments' coroutines run on one event loop in a thread.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import random
import re
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import islice
from types import SimpleNamespace
from typing import Any

try:
    import verifiers.v1 as vf
    from verifiers.v1.agent import Segment
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.envs.single_agent import SingleAgentEnv
    from verifiers.v1.episode import EnvInfo, Episode
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.types import AssistantMessage, SystemMessage, UserMessage
    from verifiers.v1.utils.decorators import invoke_all
    from verifiers.v1.utils.loaders import (
        env_config_type,
        environment_class,
        load_environment,
        resolve_env_config,
        taskset_class,
    )
except ImportError as error:
    raise ValueError(
        f"game.name verifiers:ID needs verifiers 0.4 ({error}); `pip install verifiers==0.4.0` in "
        "an environment of its own installs it (docs/verifiers.md)"
    ) from error

from dialop.game import Game, GameError, Outcome, Prompt, Step
from dialop.kit import option
from dialop.shown import error_line

PREFIX = "verifiers:"
_CALL = re.compile(r"\[[^\[\]]+\]")  # a move inside a text
TIMEOUT_S = 60.0  # that an environment may take between two moves


@dataclass(frozen=True)
class Options:
    """Settings of all environments."""

    config: dict[str, Any] = field(default_factory=dict)
    """the environment's own settings, as its `--env` has them: {taskset: {...}, ...}"""
    num_tasks: int = option(1000, "how many of the taskset's first tasks are drawn from", low=1)
    lowest: float = option(0.0, "the reward that is score 0")
    highest: float = option(1.0, "the reward that is score 1")


@dataclass(frozen=True, slots=True)
class Instance:
    """One task, by its position in the taskset."""

    key: str
    position: int


@dataclass(frozen=True, slots=True)
class View:
    """What a seat has read, and whose turn it is."""

    seat: int
    texts: tuple[str, ...]
    seat_to_move: int | None


@lru_cache(maxsize=1)
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process's environments, in a thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


class _Play:
    """A running episode: what it asks of the seats, each seat's system text, and its end."""

    def __init__(self, env: Any, task: Any, names: list[str]) -> None:
        self.names, self.asked = names, deque[tuple[int, str, asyncio.Future[str]]]()
        self.opened: dict[int, str] = {}
        self.num_answers = 0
        self.ended = False
        self.error: Exception | None = None
        self._episode = Episode(env=EnvInfo(id=env.config.env_id), task=_task_of(task))
        self._changed = threading.Event()
        self._future = asyncio.run_coroutine_threadsafe(self._run(env, task), _loop())
        self._wait()

    def cancel(self) -> None:
        """End the episode, whose seats will not answer."""
        self._future.cancel()

    def answer(self, text: str) -> None:
        """Give the first asked seat's answer, and wait for what follows."""
        _, _, future = self.asked.popleft()
        self.num_answers += 1
        _loop().call_soon_threadsafe(future.set_result, text)
        self._wait()

    def _wait(self) -> None:
        """Wait until a seat is asked or the episode has ended.

        Raises GameError after `TIMEOUT_S` seconds, as an environment does that waits for the
        network.
        """
        while not self.asked and not self.ended:
            if not self._changed.wait(TIMEOUT_S):
                raise GameError(f"an environment must ask or end within {TIMEOUT_S:g} s")
            self._changed.clear()

    def rewards(self) -> tuple[float, ...]:
        """For each seat the mean reward of its conversations; 0 without one or after an error."""
        traces = [] if self.error else self._episode.traces
        found = [[t.reward for t in traces if t.agent.name == name] for name in self.names]
        return tuple(float(sum(each) / len(each)) if each else 0.0 for each in found)

    async def ask(self, seat: int, text: str) -> str:
        """A seat's next move."""
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.asked.append((seat, text, answer))
        self._changed.set()
        return await answer

    async def _run(self, env: Any, task: Any) -> None:
        """The environment's own hooks in their order, as in its `run_episode`.

        An error ends the episode, whose seats are then paid 0.
        """
        traces, specs = self._episode.traces, env._agent_specs.items()
        seats = enumerate(specs)
        agents = {name: _Agent(self, seat, spec, traces) for seat, (name, spec) in seats}
        try:
            await env.setup(SimpleNamespace(**agents))
            await env.run(task, SimpleNamespace(**agents))
            await env.finalize(task, self._episode)
        except Exception as error:  # noqa: BLE001
            self.error = error
            _tell(type(env).__name__, error_line(error))
        self.ended = True
        self._changed.set()


@lru_cache(maxsize=64)
def _tell(name: str, why: str) -> None:
    """Print once why episodes end with reward 0."""
    print(f"game.name {PREFIX}: {name} failed, its seats get 0: {why}", file=sys.stderr, flush=True)


class _Held:
    """An episode that games hold; it ends with the last of them."""

    def __init__(self, play: _Play) -> None:
        self.play = play

    def __del__(self) -> None:
        self.play.cancel()


class _Agent:
    """A seat as an environment's agent."""

    def __init__(self, play: _Play, seat: int, config: Any, traces: list[Any]) -> None:
        self._play, self._seat, self.config, self._traces = play, seat, config, traces
        self.trainable = True

    async def run(self, task: Any, **_: Any) -> Any:
        """One answer to the task's prompt, as by an agent that calls no tools. Returns its trace,
        with the task's rewards.
        """
        async with self.interaction(task) as interaction:
            await interaction.turn()
        return interaction.trace

    @asynccontextmanager
    async def interaction(self, task: Any, **_: Any) -> AsyncIterator[_Interaction]:
        """A conversation turn by turn; at its end the task's own rewards are added to its trace.

        Raises GameError for a task that needs more than texts.
        """
        if why := unbridged(task):
            raise GameError(why)
        trace = Trace(task=_task_of(task), agent=AgentInfo(config=self.config))
        trace.agent.name, trace.agent.trainable = self._play.names[self._seat], self.trainable
        interaction = _Interaction(self._play, self._seat, task, trace, self.config.max_turns)
        yield interaction
        trace.is_completed = trace.ok = True
        await task.score(trace)
        self._traces.append(trace)

    async def provision(self, *_: Any, **__: Any) -> Any:
        """Refuse to make a sandbox."""
        raise GameError("the environment must not need a sandbox")


class _Interaction:
    """An agent's conversation, whose answers are a seat's moves."""

    def __init__(self, play: _Play, seat: int, task: Any, trace: Any, limit: int | None) -> None:
        self.trace, self._task, self._limit = trace, task, limit
        self._play, self._seat, data = play, seat, task.data
        self._waiting = data.prompt_text
        system = data.system_prompt or ""
        for kind, text in ((SystemMessage, system), (UserMessage, self._waiting)):
            if text:
                self._add(kind(content=text))
        if seat not in play.opened:
            play.opened[seat] = system
        else:  # a later conversation of the same seat
            self._waiting = "\n\n".join(text for text in (system, self._waiting) if text)

    def _add(self, message: Any, *, sampled: bool = False) -> None:
        parent = len(self.trace.nodes) - 1 if self.trace.nodes else None
        self.trace.nodes.append(MessageNode(parent=parent, message=message, sampled=sampled))

    async def turn(self, message: str | None = None) -> Any:
        """The seat's answer to a user's text, after the task's own prompt if it is the first.

        The segment is terminated, without an answer, by the agent's limit of turns or the task's
        stop.
        """
        stops = self._task.hooks("stop")
        stopped = await invoke_all(stops, {"task": self._task.data, "trace": self.trace})
        if any(stopped) or (self._limit is not None and self.trace.num_turns >= self._limit):
            return Segment(messages=[], terminated=True)
        if message is not None:
            self._add(UserMessage(content=message))
        texts, self._waiting = (self._waiting, message), ""
        reply = await self._play.ask(self._seat, "\n\n".join(text for text in texts if text))
        answer = AssistantMessage(content=reply)
        self._add(answer, sampled=True)
        return Segment(messages=[answer])


def _task_of(task: Any) -> Any:
    kind = type(task).__name__
    return TraceTask(type=kind, data=task.data, key=task.key, hash=task.hash)


def unbridged(task: Any) -> str:
    """Why the seats cannot play a task: what it needs beside texts; "" if they can.

    Only the task's class and data are read; nothing of it runs.
    """
    kind = type(task)
    needs = {
        "a sandbox": kind.NEEDS_CONTAINER or task.data.image,
        "a sandbox for its set-up": kind.setup is not vf.Task.setup,
        "servers of tools (MCP)": kind.toolsets(task.config),
        "judges, which call the network": task.config.judges,
        "a sandbox for its rewards": [
            each
            for each in (*task.hooks("reward"), *task.hooks("metric"))
            if "runtime" in inspect.signature(each).parameters
        ],
    }
    found = [need for need, has in needs.items() if has]
    return f"{kind.__name__} cannot be a game: it needs {found[0]}" if found else ""


@lru_cache(maxsize=16)
def _env_of(name: str, config: str) -> Any:
    """The environment of `TASKSET[:ENVIRONMENT]` with these settings, as JSON."""
    taskset, _, env = name.partition(":")
    given = json.loads(config)
    given["taskset"] = {"id": taskset, **given.get("taskset", {})}
    return load_environment(resolve_env_config(given | ({"id": env} if env else {})))


@lru_cache(maxsize=16)
def _tasks_of(name: str, config: str) -> tuple[list[Any], Iterator[Any]]:
    return [], iter(_env_of(name, config).taskset)


def _tasks(name: str, options: Options) -> list[Any]:
    """The first tasks of the taskset, at most `num_tasks`, each read once in a process.

    Raises GameError for a taskset without any.
    """
    found, rest = _tasks_of(name, json.dumps(options.config, sort_keys=True))
    found.extend(islice(rest, max(0, options.num_tasks - len(found))))
    if not found:
        raise GameError(f"game.name {PREFIX}{name}: the taskset must have a task, got none")
    return found[: options.num_tasks]


class VerifiersGame(Game):
    """One episode of an environment. A move is a `message` if its words reach another seat and no
    [move] is in it.

    A game and its copies share the running episode until one of them moves; another then plays its
    moves again in an episode of its own.
    """

    def __init__(self, name: str, instance: Instance, options: Options) -> None:
        self.name, self.instance, self.options = name, instance, options
        self._env = _env_of(name, json.dumps(options.config, sort_keys=True))
        self.num_seats = len(self._env._agent_specs)
        self._moves: list[str] = []
        self._held = self._started()
        self._opening = [""] * self.num_seats
        if (asked := self._asked) is not None:
            self._opening[asked[0]] = asked[1]
        self._texts = [[text] for text in self._opening]

    def _started(self) -> _Held:
        """An episode after this game's moves."""
        task = _tasks(self.name, self.options)[self.instance.position]
        if why := unbridged(task):
            raise GameError(f"game.name {PREFIX}{self.name}: {why}")
        play = _Play(self._env, task, list(self._env._agent_specs))
        for text in self._moves:
            play.answer(text)
        self._read(play)
        return _Held(play)

    def _read(self, play: _Play) -> None:
        """Keep what the game needs of an episode that a copy may continue: who is asked, the seats'
        system texts and, at the end, their rewards.
        """
        self._asked = play.asked[0][:2] if play.asked else None
        self._systems = dict(play.opened)
        self._rewards = () if self._asked else play.rewards()
        self._failed = play.error is not None

    @property
    def seat_to_move(self) -> int | None:
        """The seat that the environment asks, None when it has ended."""
        return None if self._asked is None else self._asked[0]

    def prompt(self, seat: int) -> Prompt:
        """The seat's system text, and what it is asked first; in a restored game all its texts."""
        return Prompt(self._systems.get(seat, ""), self._opening[seat])

    def step(self, seat: int, text: str) -> Step:
        """Give the environment an answer, and read whom it asks next.

        The environment judges answers itself, so only a move out of turn is invalid here.
        """
        if seat != self.seat_to_move:
            over = self.seat_to_move is None
            kind, why = ("over", "the game is over") if over else ("not_your_turn", "wait")
            return Step(seat, None, f"Error: {why}", kind, ("",) * self.num_seats)
        if self._held.play.num_answers != len(self._moves):
            self._held = self._started()
        self._held.play.answer(text)
        self._moves.append(text)
        self._read(self._held.play)
        observations = [""] * self.num_seats
        if self._asked is not None:
            observations[self._asked[0]] = self._asked[1] or "Your turn."
        for each, read in enumerate(observations):
            self._texts[each].append(read)
        said = text.strip()
        heard = any(said in read for s, read in enumerate(observations) if s != seat and said)
        says = heard and not _CALL.search(text)
        return Step(seat, "message" if says else "move", None, None, tuple(observations))

    def clone(self) -> VerifiersGame:
        """An independent copy."""
        twin = copy.copy(self)
        twin._moves, twin._texts = list(self._moves), [list(texts) for texts in self._texts]
        return twin

    def view(self, seat: int) -> View:
        """The texts that the seat has read."""
        return View(seat, tuple(self._texts[seat]), self.seat_to_move)

    def measures(self, seats: Collection[int]) -> dict[str, float]:
        """1 if the environment failed, as by an answer that it cannot read; its rewards are 0."""
        return {"failed_environments": float(self._failed)}

    def outcome(self) -> Outcome:
        """Each seat's reward: the mean over its conversations of the sum of their rewards.

        A finished episode is agreed. Its scores are the rewards mapped to [0, 1] by `lowest` and
        `highest`.
        """
        over, options = self.seat_to_move is None, self.options
        rewards = self._rewards if over else (0.0,) * self.num_seats
        spread = options.highest - options.lowest
        scores = tuple(min(1.0, max(0.0, (r - options.lowest) / spread)) for r in rewards)
        scores = scores if over else (0.0,) * self.num_seats
        mean = sum(scores) / self.num_seats
        return Outcome(
            over=over, agreed=over, score=mean, score_norm=mean, rewards=rewards, seat_scores=scores
        )

    def state(self) -> dict[str, Any]:
        """The task and the moves, which are played again to restore the game."""
        return {
            "name": self.name,
            "instance": asdict(self.instance),
            "options": asdict(self.options),
            "moves": list(self._moves),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> VerifiersGame:
        """The game described by `state()`."""
        game = cls(state["name"], Instance(**state["instance"]), Options(**state["options"]))
        for text in state["moves"]:
            if game.seat_to_move is not None:
                game.step(game.seat_to_move, text)
        game._opening = ["\n".join(filter(None, texts)) for texts in game._texts]
        return game


def module_of(name: str) -> SimpleNamespace:
    """A game module in the form that dialop/kit.py reads, for `TASKSET[:ENVIRONMENT]`.

    Raises:
        ValueError: for one that is not installed, cannot be read or has no agents.
    """
    taskset, _, env_id = name.partition(":")
    try:
        kind = environment_class(taskset, env_id)
        config = env_config_type(taskset, env_id)
        if kind is SingleAgentEnv:
            taskset_class(taskset)
    except Exception as error:
        raise ValueError(
            f"game.name {PREFIX}{name} must be a taskset that is installed here, or TASKSET:ENV: "
            f"{error_line(error)}"
        ) from error
    roles = tuple(
        role for role, of in config.model_fields.items() if isinstance(of.default, AgentConfig)
    )
    if not roles:
        raise ValueError(f"game.name {PREFIX}{name} must have agents, got none")

    def generate_instance(options: Options, *, seed: int, index: int) -> Instance:
        position = random.Random(f"{seed} {index}").randrange(len(_tasks(name, options)))
        return Instance(f"{name}-{seed}-{index}", position)

    return SimpleNamespace(
        ROLES=roles,
        POLICY_SEATS=_trained(kind, config, roles),
        Options=Options,
        generate_instance=generate_instance,
        new_game=lambda instance, options: VerifiersGame(name, instance, options),
        restore=VerifiersGame.from_state,
    )


def _trained(kind: Any, config: Any, roles: tuple[str, ...]) -> tuple[int, ...]:
    """The seats that the environment's `setup` leaves trainable; all if it cannot tell.

    It is called on an environment without settings, as a game's roles are known before its options.
    """
    env = kind.__new__(kind)  # it may need settings, which `setup` does not read
    env.config = config.model_construct()
    agents = SimpleNamespace(**{role: SimpleNamespace(trainable=True) for role in roles})
    future = asyncio.run_coroutine_threadsafe(env.setup(agents), _loop())
    try:
        future.result(TIMEOUT_S)
    except Exception:  # noqa: BLE001
        return tuple(range(len(roles)))
    trained = (seat for seat, role in enumerate(roles) if getattr(agents, role).trainable)
    return tuple(trained) or tuple(range(len(roles)))
