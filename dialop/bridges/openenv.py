"""Any game of this package as an OpenEnv environment; the default is matching.

    from dialop.bridges.openenv import Say, DialogueEnvironment, app
    env = DialogueEnvironment("matching", seat=0, partner="honest", size=4)
    observation = env.reset(seed=0)
    observation = env.step(Say(text="[message] hello"))

OpenEnv's agent plays one seat of the game. Scripted players of the game play the others and move
immediately. `app` serves the environment over HTTP.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

from dialop.game import Game, Script
from dialop.kit import load_kit


class Say(Action):
    """A try at a move."""

    text: str


class Heard(Observation):
    """The new text for the seat since its last try: at first its prompt, after a refused try the
    error. `score_norm` is the game's score so far in [0, 1]. `reward` is the agent's own.
    """

    text: str = ""
    error_kind: str | None = None
    score_norm: float = 0.0


class Table(State):
    """The key of the instance, and the legal moves of all seats so far."""

    instance: str = ""
    num_legal: int = 0


class DialogueEnvironment(Environment[Say, Heard, Table]):
    """One game at a time. `reset(seed=...)` selects a stream and its first instance; without a seed
    the next one follows.

    A game is done at its end, after `max_turns` legal moves of all seats, or when the agent has had
    more than `max_retries` refused tries in one turn.

    Raises:
        ValueError: for a seat or a scripted player that the game does not have.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(
        self,
        game: str = "matching",
        *,
        seat: int = 0,
        partner: str = "honest",
        max_turns: int = 30,
        max_retries: int = 2,
        **options: Any,
    ) -> None:
        super().__init__()
        self._kit = load_kit(game)
        if seat not in range(len(self._kit.ROLES)):
            raise ValueError(f"seat must be 0 to {len(self._kit.ROLES) - 1}, got {seat}")
        self._options = self._kit.Options(**options)
        self._seat, self._partner = seat, self._kit.seated(partner)
        self._max_turns, self._max_retries = max_turns, max_retries
        self._stream, self._index = 0, 0
        self._kit.make_script(partner, seed=0)
        self._game: Game | None = None

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Heard:
        """Start a game; the partners move first where it is their turn."""
        if seed is not None:
            self._stream, self._index = seed, 0
        (instance,) = self._kit.generate(self._options, seed=self._stream, start=self._index, num=1)
        self._index += 1
        self._game = self._kit.new_game(instance, self._options)
        self._scripts: list[Script] = [
            self._kit.make_script(spec, seed=self._stream + index)
            for index, spec in enumerate(self._partner)
        ]
        self._table = Table(episode_id=episode_id, instance=instance.key)
        self._num_refused, self._done = 0, False
        prompt = self._game.prompt(self._seat)
        self._unread = [text for text in (prompt.system, prompt.user) if text]
        return self._heard(self._move_partners())

    def step(self, action: Say, timeout_s: float | None = None, **kwargs: Any) -> Heard:
        """Try a move, and let the partners move up to the agent's next turn."""
        if self._game is None or self._done:
            raise ValueError("the game is over: call reset first")
        self._table.step_count += 1
        step = self._game.step(self._seat, action.text)
        if step.error is not None:
            self._num_refused += 1
            self._done = self._num_refused > self._max_retries
            self._unread = [step.error]
            return self._heard(self._final_reward(), error_kind=step.error_kind)
        self._num_refused, self._unread = 0, []
        return self._heard(self._take(step.observations, step.rewards) + self._move_partners())

    @property
    def state(self) -> Table:
        """The instance and the number of moves."""
        return self._table

    def _take(self, observations: tuple[str, ...], rewards: tuple[float, ...]) -> float:
        """Store what the agent reads of a legal move; return the agent's reward for the move."""
        self._table.num_legal += 1
        if observations[self._seat]:
            self._unread.append(observations[self._seat])
        return rewards[self._seat] if rewards else 0.0

    def _move_partners(self) -> float:
        """Scripted moves up to the agent's turn or the end; returns the agent's reward for them."""
        assert self._game is not None
        reward, num_tries = 0.0, 0
        while (mover := self._game.seat_to_move) not in (None, self._seat):
            if self._table.num_legal >= self._max_turns or num_tries > 4 * self._max_turns:
                break
            assert mover is not None
            num_tries += 1
            step = self._game.step(mover, self._scripts[mover].act(self._game.view(mover)))
            if step.error is None:
                reward += self._take(step.observations, step.rewards)
        over = self._game.seat_to_move is None
        self._done = over or self._game.seat_to_move != self._seat
        self._done = self._done or self._table.num_legal >= self._max_turns
        return reward + self._final_reward()

    def _final_reward(self) -> float:
        assert self._game is not None
        return self._game.outcome().rewards[self._seat] if self._done else 0.0

    def _heard(self, reward: float, *, error_kind: str | None = None) -> Heard:
        assert self._game is not None
        return Heard(
            done=self._done,
            reward=reward,
            text="\n".join(self._unread),
            error_kind=error_kind,
            score_norm=self._game.outcome().score_norm,
        )


def app(game: str = "matching", **settings: Any) -> FastAPI:
    """A web application that serves the environment, for `uvicorn`."""
    return create_fastapi_app(lambda: DialogueEnvironment(game, **settings), Say, Heard)
