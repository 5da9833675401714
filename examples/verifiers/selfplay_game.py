"""A game of selfplay as an environment of verifiers, with an agent for each seat. Playable with its
own command, here the meeting game:

    PYTHONPATH=.:examples/verifiers vf-eval selfplay_game -n 2 -m MODEL ...   # docs/verifiers.md
"""

from itertools import count

import verifiers.v1 as vf
from pydantic import Field

from dialop.kit import load_kit

__all__ = ["SelfplayEnv", "SelfplayTaskset"]


class SelfplayTasksetConfig(vf.TasksetConfig):
    game: str = "matching"
    """a game of selfplay, a module or the path of a .py file"""
    options: dict = Field(default_factory=dict)
    """the game's settings, as `game.options`"""
    seed: int = 0


class InstanceData(vf.TaskData):
    game: str
    options: dict
    seed: int


class InstanceTask(vf.Task[InstanceData]):
    """One instance; it is played and paid by the environment."""


class SelfplayTaskset(vf.Taskset[InstanceTask, SelfplayTasksetConfig]):
    INFINITE = True

    def load(self):
        config = self.config
        for index in count():
            yield InstanceTask(
                InstanceData(
                    name=f"{config.game}#{index}",
                    prompt=None,
                    game=config.game,
                    options=config.options,
                    seed=config.seed,
                )
            )


class SelfplayConfig(vf.EnvConfig):
    seat0: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    seat1: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    max_turns: int = Field(30, ge=1)
    """legal moves of a game over both seats, as `rollout.max_turns`"""
    max_retries: int = Field(2, ge=0)
    """retries after an invalid move, as `rollout.max_retries`"""


class SelfplayEnv(vf.Env[SelfplayConfig]):
    """Each seat reads its texts as in selfplay, and is paid the game's own reward."""

    async def run(self, task, agents):
        data = task.data
        kit = load_kit(data.game)
        options = kit.Options(**data.options)
        (instance,) = kit.generate(options, seed=data.seed, start=data.idx or 0, num=1)
        game = kit.new_game(instance, options)
        if game.num_seats != 2:
            raise ValueError(f"taskset.game must have two seats, got {game.num_seats}")
        prompts = [game.prompt(seat) for seat in range(2)]
        tasks = [vf.Task(vf.TaskData(idx=data.idx, system_prompt=p.system)) for p in prompts]
        async with (
            agents.seat0.interaction(tasks[0]) as first,
            agents.seat1.interaction(tasks[1]) as second,
        ):
            seats = first, second
            unread = [prompt.user for prompt in prompts]
            legal = refused = 0
            while (seat := game.seat_to_move) is not None and legal < self.config.max_turns:
                segment = await seats[seat].turn(unread[seat])
                if segment.terminated:
                    break
                step = game.step(seat, segment.last_reply)
                unread[seat] = step.error or ""
                for each, text in enumerate(step.observations):
                    unread[each] = "\n".join(line for line in (unread[each], text) if line)
                legal += step.error is None
                refused = refused + 1 if step.error else 0
                if refused > self.config.max_retries:
                    break
        stuck = game.seat_to_move is not None and refused
        outcome = game.outcome_of_forfeit(game.seat_to_move) if stuck else game.outcome()
        for interaction, reward in zip(seats, outcome.rewards, strict=True):
            interaction.trace.record_reward("game", float(reward))
            interaction.trace.record_metric("score", float(outcome.score_norm))
            interaction.trace.record_metric("agreed", float(outcome.agreed))
