"""A chat model that marks how interactive each conversation was, where the settings ask for one.

It replaces the rubric's mark in the outcome's facts, from which reward and measures read it; where
the judge gave none, the rubric's stays. Marks lie in [0, 1]. Knows no torch and no gradients.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack

from dialop.collab.task import NAMES
from selfplay.config import Config
from selfplay.config.player_spec import parse_spec
from selfplay.credit.dynamic_sampling import Played
from selfplay.data.seeds import named_seed
from selfplay.distributed import World
from selfplay.engines.base import Message, Request
from selfplay.engines.endpoint import Endpoint, endpoint_key
from selfplay.rollout.episode import Episode

_MAX_NEW_TOKENS = 300
_RULES = """\
You mark how well an assistant worked together with a user who had not said all that was needed. \
You read what the user wanted and the whole conversation. Consider three things, each from 0 to 1:
- understanding: did the assistant grasp what the user wanted, and were its messages clear?
- questions: did it ask for what was missing, precisely and only where it was needed?
- help: did it offer something useful on the way, such as choices or a draft?
The mark is their mean. Whether the result is right does not count here. Answer with one sentence \
of reason and then, on a line of its own, JSON such as {"interactivity": 0.6}."""
_MARK = re.compile(r"\{[^{}]*\}")


def make_judge(config: Config, world: World, *, cleanup: ExitStack) -> Endpoint | None:
    """The judge that the settings name, on a rank that plays; None for the rubric. `cleanup` will
    end its threads."""
    collab = config.reward.collab
    if config.reward.kind != "collab" or collab.judge == "rubric":
        return None
    key = endpoint_key(config.endpoint)
    if not world.replica.leads:
        return None
    model, url = parse_spec(collab.judge).address
    judge = Endpoint(model, url, settings=config.endpoint, key=key)
    cleanup.callback(judge.close)
    return judge


def judge_interactivity(played: Played, judge: Endpoint | None) -> Played:
    """The same games, all marked at once, and with them the futures of their branch points: facts
    get the judge's `interactivity` and whether it was `judged` (1.0 or 0.0)."""
    if judge is None:
        return played
    games = [game for episode in played[0] for game in _with_continuations(episode)]
    waiting = [judge.submit(_question(episode)) for episode in games]
    for episode, answer in zip(games, waiting, strict=True):
        said = answer.result()
        found = read_mark(said.text) if said.finish == "stop" else None
        facts = episode.outcome.facts
        facts["judged"] = float(found is not None)
        if found is not None:
            facts["interactivity"] = found
    return played


def read_mark(text: str) -> float | None:
    """The last mark in an answer, None where there is none or it lies outside [0, 1]."""
    for found in reversed(_MARK.findall(text)):
        try:
            value = json.loads(found).get("interactivity")
        except (ValueError, RecursionError):
            continue
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
            return float(value)
    return None


def _with_continuations(episode: Episode) -> Iterator[Episode]:
    yield episode
    for point in episode.branches:
        yield from point.continuations.values()


def _question(episode: Episode) -> Request:
    view = episode.views[0]  # the user's, which holds the goal
    talk = [("user", view.request), *((NAMES[said.seat], said.text) for said in view.log)]
    lines = "\n\n".join(f"{name}: {text}" for name, text in talk)
    told = f"What the user wanted:\n{view.goal}\n\nThe conversation:\n{lines}"
    return Request(
        prompt_ids=(),
        max_new_tokens=_MAX_NEW_TOKENS,
        seed=named_seed("judge", episode.instance, episode.index, lines),
        messages=(Message("system", _RULES), Message("user", told)),
    )
