"""An environment of verifiers with two agents that talk: one knows a number, the other guesses it.

    PYTHONPATH=examples/verifiers python train.py \
        --config examples/verifiers/secret_number.yaml out=runs/number
"""

import random
from itertools import count

import verifiers.v1 as vf

__all__ = ["SecretNumberEnv", "SecretNumberTaskset"]


class NumberData(vf.TaskData):
    number: int


class NumberTask(vf.Task[NumberData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.number))


class SecretNumberConfig(vf.EnvConfig):
    teller: vf.AgentConfig = vf.AgentConfig()
    guesser: vf.AgentConfig = vf.AgentConfig()


class SecretNumberEnv(vf.Env[SecretNumberConfig]):
    """The teller says something, the guesser answers; both are paid for the right number."""

    async def run(self, task, agents):
        told = vf.Task(vf.TaskData(system_prompt="Tell your number.", prompt=None))
        async with (
            agents.teller.interaction(told) as teller,
            agents.guesser.interaction(task) as guesser,
        ):
            said = await teller.turn(f"Your number is {task.data.number}.")
            await guesser.turn(f"The other says: {said.last_reply}")

    async def finalize(self, task, episode):
        traces = {trace.agent.name: trace for trace in episode.traces}
        traces["teller"].record_reward("understood", traces["guesser"].reward)


class SecretNumberTaskset(vf.Taskset[NumberTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for index in count():
            number = random.Random(index).randrange(10)
            text = "Answer with the number alone."
            yield NumberTask(NumberData(number=number, system_prompt=text, prompt=None))
