"""Environments of verifiers (Prime Intellect, 0.4) as games: `game.name: verifiers:TASKSET`, or
`verifiers:TASKSET:ENVIRONMENT` for one that is paired with a taskset, such as gsm8k:user-sim.

Each agent of the environment is a seat. Its `run` and `finalize` play as they are, with the seats'
moves as the answers of its agents; its rewards and the task's are the seats' rewards. Nothing of
its harnesses runs: no program, sandbox or server of tools. What needs one is refused before a game,
where its task shows it, or by the call that asks for it. The environments' coroutines run on one
event loop in a thread.
"""

from __future__ import annotations

import asyncio
import atexit
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
    from verifiers.v1.dialects import parse_message
    from verifiers.v1.envs.single_agent import SingleAgentEnv
    from verifiers.v1.episode import EnvInfo, Episode
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.types import AssistantMessage, SystemMessage, UserMessage, content_text
    from verifiers.v1.utils.decorators import discover_decorated, invoke_all
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

from pydantic import ValidationError

from dialop.game import Game, GameError, Outcome, Prompt, Step
from dialop.kit import option
from dialop.shown import error_line

PREFIX = "verifiers:"
_CALL = re.compile(r"\[[^\[\]]+\]")  # a move inside a text
_ANY = "bash"  # the harness of agents that name none; it may have tools that no task needs
TIMEOUT_S = 60.0  # that an environment may take between two moves


@dataclass(frozen=True)
class Options:
    """Settings of all environments."""

    config: dict[str, Any] = field(default_factory=dict)
    """the environment's own settings, as its `--env` has them: {taskset: {...}, ...}"""
    num_tasks: int = option(1000, "how many of the taskset's first tasks are drawn from", low=1)
    lowest: float = option(0.0, "the reward that is score 0")
    highest: float = option(1.0, "the reward that is score 1")

    def __post_init__(self) -> None:
        """Raises ValueError for rewards between which there is no score."""
        if not self.lowest < self.highest:
            raise ValueError(f"lowest must be below highest, got {self.lowest} and {self.highest}")


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
    """The event loop of this process's environments, in a thread. Episodes end with the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    atexit.register(lambda: asyncio.run_coroutine_threadsafe(_end_all(), loop).result(TIMEOUT_S))
    return loop


async def _end_all() -> None:
    """Cancel the loop's other tasks, so that none is left when it is gone."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _Play:
    """A running episode: what it asks of the seats, each seat's system text, and its end."""

    def __init__(self, name: str, env: Any, task: Any) -> None:
        self.name, self.names = name, list(env._agent_specs)
        self.asked = deque[tuple[int, str, asyncio.Future[str]]]()
        self.opened: dict[int, str] = {}
        self.num_answers = 0
        self.ended = False
        self.error: Exception | None = None
        self.unbridged = ""
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

        Raises GameError for a call that cannot be bridged, and after `TIMEOUT_S` seconds, as for an
        environment that waits for the network.
        """
        while not self.asked and not self.ended:
            if not self._changed.wait(TIMEOUT_S):
                raise GameError(
                    f"game.name {PREFIX}{self.name} must ask or end within {TIMEOUT_S:g} s"
                )
            self._changed.clear()
        if self.unbridged:
            raise GameError(self.unbridged)

    def refused(self, need: str) -> GameError:
        """The error of a call that cannot be bridged, which ends the game even if it is caught."""
        self.unbridged = f"game.name {PREFIX}{self.name} cannot be a game: it needs {need}"
        return GameError(self.unbridged)

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
            if not self.unbridged:
                _tell(self.name, error_line(error))
        self.ended = True
        self._changed.set()


@lru_cache(maxsize=64)
def _tell(name: str, why: str) -> None:
    """Print once why episodes end with reward 0."""
    print(f"game.name {PREFIX}{name} failed, its seats get 0: {why}", file=sys.stderr, flush=True)


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

    async def run(self, task: Any, **more: Any) -> Any:
        """One answer to the task's prompt, as by an agent that calls no tools. Returns its trace,
        with the task's rewards.
        """
        async with self.interaction(task, **more) as interaction:
            await interaction.turn()
            interaction.trace.stop("agent_completed")
        return interaction.trace

    @asynccontextmanager
    async def interaction(
        self, task: Any, on_trace: Any = None, **more: Any
    ) -> AsyncIterator[_Interaction]:
        """A conversation turn by turn; at its end the task's own rewards are added to its trace.

        Raises GameError for a task that needs more than texts, or is given a sandbox or tools.
        """
        given = (f"{name!r} of an agent" for name, value in more.items() if value)
        if need := unbridged(task) or next(given, ""):
            raise self._play.refused(need)
        trace = Trace(task=_task_of(task), agent=AgentInfo(config=self.config))
        trace.agent.name, trace.agent.trainable = self._play.names[self._seat], self.trainable
        if on_trace is not None:
            on_trace(trace)
        interaction = _Interaction(self._play, self._seat, task, trace, self.config.max_turns)
        yield interaction
        trace.ok = True
        trace.stop("user_closed")  # unless it has stopped
        await task.score(trace)
        self._traces.append(trace)

    def __getattr__(self, name: str) -> Any:
        """Refuse what an agent has beside conversations, such as `provision`, a sandbox."""
        raise _refused(self, name, "agent")


def _refused(one: Any, name: str, what: str) -> Exception:
    """The error of an attribute that an agent or a conversation has only in verifiers.

    It is GameError, so that a game does not go on without what its environment asked for.
    """
    if name.startswith("_"):  # also those of copies and of a class that is not set up
        return AttributeError(name)
    refused: Exception = one._play.refused(f"{name!r} of an {what}")
    return refused


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

    def __getattr__(self, name: str) -> Any:
        """Refuse what a conversation has beside turns, such as `steer`."""
        raise _refused(self, name, "interaction")

    def _add(self, message: Any, *, sampled: bool = False) -> None:
        parent = len(self.trace.nodes) - 1 if self.trace.nodes else None
        self.trace.nodes.append(MessageNode(parent=parent, message=message, sampled=sampled))

    async def turn(self, message: Any = None) -> Any:
        """The seat's answer to a user's text or messages, after the task's own prompt if it is the
        first.

        The segment is terminated, without an answer, by the agent's limit of turns or the task's
        stop.
        """
        stops = self._task.hooks("stop")
        stopped = await invoke_all(stops, {"task": self._task.data, "trace": self.trace})
        reasons = [each.__name__ for each, now in zip(stops, stopped, strict=True) if now]
        if self._limit is not None and self.trace.num_turns >= self._limit:
            reasons.insert(0, "max_turns")
        if reasons:
            self.trace.stop(reasons[0])
            return Segment(messages=[], terminated=True)
        if message is not None and not isinstance(message, str):
            given = [parse_message(m) if isinstance(m, dict) else m for m in message]
            if _shows_more(given):
                raise self._play.refused(_SHOWN)
            message = "\n\n".join(content_text(each.content) for each in given)
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


_SHOWN = "images, or a prompt with messages of others than a user"


def _shows_more(messages: Any) -> bool:
    """Whether there is more in these messages than a user's texts.

    An image would be left out by `content_text`, and an answer of an agent be read as a user's.
    """
    return any(
        each.role != "user"
        or not (isinstance(each.content, str) or all(p.type == "text" for p in each.content))
        for each in messages
    )


def unbridged(task: Any) -> str:
    """What the seats lack to play a task, beside texts; "" if they can play it.

    Only the task's class and data are read; nothing of it runs.
    """
    kind, data = type(task), task.data
    signals = (*task.hooks("reward"), *task.hooks("metric"))
    reads = {name for each in signals for name in inspect.signature(each).parameters}
    stops = {name for each in task.hooks("stop") for name in inspect.signature(each).parameters}
    needs = {
        "a sandbox": kind.NEEDS_CONTAINER or data.image,
        "a sandbox for its set-up": kind.setup is not vf.Task.setup,
        "a sandbox for its end": kind.finalize is not vf.Task.finalize,
        "servers of tools (MCP)": kind.toolsets(task.config),
        "skills, which a harness installs": data.skills,
        "judges, which call the network": task.config.judges,
        "a sandbox for its rewards": "runtime" in reads,
        "to read or change requests": stops - {"task", "trace"}
        or discover_decorated(task, "intercept"),
        _SHOWN: not isinstance(data.prompt, str) and _shows_more(data.prompt or ()),
    }
    return next((need for need, has in needs.items() if has), "")


@lru_cache(maxsize=16)
def _env_of(name: str, config: str) -> Any:
    """The environment of `TASKSET[:ENVIRONMENT]` with these settings, as JSON.

    Raises GameError for settings that do not fit, and for an environment that cannot be opened or
    has resources of its own.
    """
    taskset, _, env = name.partition(":")
    given = json.loads(config)
    try:
        given["taskset"] = {"id": taskset} | given.get("taskset", {})
        found: Any = load_environment(resolve_env_config(given | ({"id": env} if env else {})))
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        rule = f"game.options.config must fit {PREFIX}{name}, got {config}"
        raise GameError(f"{rule}: {'; '.join(wrong)}") from error
    except Exception as error:
        raise GameError(
            f"game.name {PREFIX}{name} cannot be opened: {error_line(error)}"
        ) from error
    given = [each.harness or found._default_harness for each in found._agent_specs.values()]
    chosen = [each.id for each in given if each.id not in ("null", _ANY)]
    needs = {
        f"the harness {''.join(chosen[:1])}": chosen,
        "servers of tools (MCP)": found.taskset.toolsets(found.taskset.config),
        "resources of its own": type(found).start is not vf.Env.start,
    }
    for need in (need for need, has in needs.items() if has):
        raise GameError(f"game.name {PREFIX}{name} cannot be a game: it needs {need}")
    return found


@lru_cache(maxsize=16)
def _tasks_of(name: str, config: str) -> tuple[list[Any], Iterator[Any]]:
    return [], iter(_env_of(name, config).taskset)


def _tasks(name: str, options: Options) -> list[Any]:
    """The first tasks of the taskset, at most `num_tasks`, each read once in a process.

    Raises GameError for a taskset without any.
    """
    found, rest = _tasks_of(name, json.dumps(options.config, sort_keys=True))
    try:
        found.extend(islice(rest, max(0, options.num_tasks - len(found))))
    except Exception as error:
        raise GameError(f"game.name {PREFIX}{name} gives no task: {error_line(error)}") from error
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
        if need := unbridged(task):
            raise GameError(f"game.name {PREFIX}{self.name} cannot be a game: it needs {need}")
        play = _Play(self.name, self._env, task)
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
