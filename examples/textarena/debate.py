"""TextArena's debate with a jury of your own: a model behind any chat endpoint, asked as often as
the jury has members, each time with another seed.

    JURY_URL=http://127.0.0.1:8000/v1 JURY_MODEL=NAME python train.py --config own_game \
        game.name=examples/textarena/debate.py warm_start=off out=runs/debate
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import httpx

from selfplay.extras.textarena import module_of

URL = os.environ.get("JURY_URL", "http://127.0.0.1:8000/v1") + "/chat/completions"
MODEL, KEY = os.environ.get("JURY_MODEL", "judge"), os.environ.get("JURY_KEY", "none")
TASK = "You are a fair juror. Answer with one of these options, and nothing else: {}."


@lru_cache(maxsize=10_000)
def answer(question, options, seed):
    """The answer of the juror with this seed; equal questions get equal answers."""
    system = {"role": "system", "content": TASK.format(", ".join(options))}
    messages = [system, {"role": "user", "content": question}]
    body = {"model": MODEL, "messages": messages, "seed": seed}
    key = {"Authorization": f"Bearer {KEY}"}
    try:
        got = httpx.post(URL, json=body, headers=key, timeout=60).raise_for_status()
        return got.json()["choices"][0]["message"]["content"]
    except (httpx.HTTPError, LookupError, ValueError) as error:
        raise ValueError(f"JURY_URL must be a jury's chat endpoint, got {URL}: {error}") from None


class Jury:
    """What TextArena asks: each option's share of the votes."""

    def __init__(self, options, jury_size):
        self.options, self.size = tuple(options), jury_size

    def evaluate(self, context):
        with ThreadPoolExecutor(self.size) as pool:
            jobs = [pool.submit(answer, context, self.options, n) for n in range(self.size)]
        said = [job.result().lower() for job in jobs]
        votes = [next((o for o in self.options if o.lower() in text), None) for text in said]
        num = sum(vote is not None for vote in votes)
        if not num:
            raise ValueError(f"JURY_MODEL must vote for one of {self.options}, got {said[0]!r:.80}")
        return {option: votes.count(option) / num for option in self.options}


globals().update(vars(module_of("Debate-v0", jury_class=Jury)))
