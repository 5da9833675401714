"""Any game of this package as a PettingZoo AEC environment; the default is matching.

    from dialop.bridges.pettingzoo import DialogueEnv
    env = DialogueEnv("matching", size=4)

Actions are texts. An observation is a zero-padded vector of UTF-8 bytes, and `text_of(observation)`
is its text: what the agent has read since its last legal move, at first its prompt, after a refused
move the error. Agents are named ROLE_SEAT.
"""

from __future__ import annotations

import string
from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv

from dialop.game import Game
from dialop.kit import load_kit

_CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n\t"
MAX_ACTION, MAX_OBSERVATION = 4_000, 16_384  # characters, bytes


def text_of(observation: np.ndarray) -> str:
    """The text of an observation."""
    return observation.tobytes().rstrip(b"\0").decode("utf-8", "replace")


class DialogueEnv(AECEnv):
    """One game at a time, of instances that `reset(seed=...)` selects.

    A legal move pays its `Step.rewards`; the end pays `Outcome.rewards`. A game is truncated after
    `max_turns` legal moves, or when one turn has had more than `max_retries` refused tries. Only
    the last `MAX_OBSERVATION` bytes of a longer text are observed.
    """

    metadata = {  # noqa: RUF012 (PettingZoo reads it from the class)
        "name": "dialop_v0",
        "render_modes": ["ansi", "human"],
        "is_parallelizable": False,
    }

    def __init__(
        self,
        game: str = "matching",
        *,
        max_turns: int = 30,
        max_retries: int = 2,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._kit = load_kit(game)
        self._options = self._kit.Options(**options)
        self._max_turns, self._max_retries = max_turns, max_retries
        self.render_mode = render_mode
        self.possible_agents = [f"{role}_{seat}" for seat, role in enumerate(self._kit.ROLES)]
        self._actions = {
            agent: spaces.Text(MAX_ACTION, min_length=0, charset=_CHARACTERS)
            for agent in self.possible_agents
        }
        self._observations = {
            agent: spaces.Box(0, 255, (MAX_OBSERVATION,), np.uint8)
            for agent in self.possible_agents
        }
        self._stream, self._index = 0, 0
        self._game: Game | None = None

    def observation_space(self, agent: str) -> spaces.Box:
        """The texts that an agent may read."""
        return self._observations[agent]

    def action_space(self, agent: str) -> spaces.Text:
        """The texts that an agent may send; most of them are refused."""
        return self._actions[agent]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Start the next instance of the stream; `seed` selects a stream and its first instance."""
        if seed is not None:
            self._stream, self._index = seed, 0
        (instance,) = self._kit.generate(self._options, seed=self._stream, start=self._index, num=1)
        self._index += 1
        self._game = self._kit.new_game(instance, self._options)
        self.agents = list(self.possible_agents)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in self.agents}
        self._num_legal = self._num_refused = 0
        self._last = ""
        self._unread = {}
        for seat, agent in enumerate(self.agents):
            prompt = self._game.prompt(seat)
            self._unread[agent] = "\n\n".join(t for t in (prompt.system, prompt.user) if t)
        assert self._game.seat_to_move is not None
        self.agent_selection = self.agents[self._game.seat_to_move]

    def observe(self, agent: str) -> np.ndarray:
        """What the agent has read since its last legal move: uint8 [MAX_OBSERVATION]."""
        content = self._unread[agent].encode("utf-8", "replace")[-MAX_OBSERVATION:]
        observation = np.zeros(MAX_OBSERVATION, np.uint8)
        observation[: len(content)] = np.frombuffer(content, np.uint8)
        return observation

    def step(self, action: str | None) -> None:
        """Try a move of the agent whose turn it is."""
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        assert self._game is not None and action is not None
        seat = self.possible_agents.index(agent)
        self._cumulative_rewards[agent] = 0.0
        self._clear_rewards()
        step = self._game.step(seat, action)
        self._last = f"{agent}: {action}" + (f"\n({step.error})" if step.error else "")
        self.infos[agent] = {"error_kind": step.error_kind} if step.error else {}
        if step.error is None:
            self._num_legal, self._num_refused = self._num_legal + 1, 0
            self._unread[agent] = ""
            for reader, text in zip(self.possible_agents, step.observations, strict=True):
                self._unread[reader] = "\n".join(t for t in (self._unread[reader], text) if t)
            self._pay(step.rewards)
        else:
            self._num_refused += 1
            self._unread[agent] = step.error
        self._finish()
        self._accumulate_rewards()
        if self.render_mode == "human":
            self.render()

    def _finish(self) -> None:
        """End the game if it is over or at a limit; else say whose turn it is."""
        assert self._game is not None
        outcome, mover = self._game.outcome(), self._game.seat_to_move
        stopped = self._num_legal >= self._max_turns or self._num_refused > self._max_retries
        if mover is None or stopped:
            self._pay(outcome.rewards)
            for agent in self.agents:
                self.terminations[agent] = mover is None
                self.truncations[agent] = mover is not None
                self.infos[agent] = {**self.infos[agent], "score_norm": outcome.score_norm}
        if mover is not None:
            self.agent_selection = self.possible_agents[mover]

    def _pay(self, rewards: tuple[float, ...]) -> None:
        for agent, reward in zip(self.possible_agents, rewards, strict=False):
            self.rewards[agent] += reward

    def render(self) -> str | None:
        """The last try at a move: returned ("ansi") or printed ("human")."""
        if self.render_mode == "human":
            print(self._last)
            return None
        return self._last

    def close(self) -> None:
        """Nothing to free."""
