"""The judge: a chat model that rates how interactive each conversation was.

Only the game collab uses it, and only if the settings name one. Its rating in [0, 1] replaces the
rubric's rating in the outcome's facts, which rewards and metrics read. Without a valid rating the
rubric's is kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

from dialop.collab.task import NAMES
from selfplay.config import EndpointConfig, RewardConfig
from selfplay.config.player_spec import parse_spec
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


def make_judge(
    reward: RewardConfig, endpoint: EndpointConfig, world: World, *, cleanup: ExitStack
) -> Endpoint | None:
    """The judge that `reward.collab.judge` names; None for the rubric and on ranks that play no
    games.

    `cleanup` ends its threads. Raises SettingsError if the variable with the API key is not set.
    """
    if reward.kind != "collab" or reward.collab.judge == "rubric":
        return None
    key = endpoint_key(endpoint)
    if not world.replica.leads:
        return None
    model, url = parse_spec(reward.collab.judge).address
    judge = Endpoint(model, url, settings=endpoint, key=key)
    cleanup.callback(judge.close)
    return judge


def judge_interactivity(episodes: list[Episode], judge: Endpoint | None) -> list[Episode]:
    """The games with the judge's marks, including the continuations of branch points.

    Each outcome's facts get `judged` (1.0 or 0.0) and, if the judge gave a mark, `interactivity`.
    All requests are sent at once.
    """
    if judge is None:
        return episodes
    answers = {
        id(game): judge.submit(_question(game))
        for episode in episodes
        for game in (episode, *_continuations(episode))
    }

    def with_mark(game: Episode) -> Episode:
        answer = answers[id(game)].result()
        mark = read_mark(answer.text) if answer.finish == "stop" else None
        facts = {**game.outcome.facts, "judged": float(mark is not None)}
        if mark is not None:
            facts["interactivity"] = mark
        branches = tuple(
            replace(
                point,
                continuations={
                    place: with_mark(continuation)
                    for place, continuation in point.continuations.items()
                },
            )
            for point in game.branches
        )
        return replace(game, outcome=replace(game.outcome, facts=facts), branches=branches)

    return [with_mark(episode) for episode in episodes]


def read_mark(text: str) -> float | None:
    """The last valid mark in an answer; None if it has no mark in [0, 1]."""
    for candidate in reversed(_MARK.findall(text)):
        try:
            value = json.loads(candidate).get("interactivity")
        except (ValueError, RecursionError):
            continue
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
            return float(value)
    return None


def _continuations(episode: Episode) -> Iterator[Episode]:
    for point in episode.branches:
        yield from point.continuations.values()


def _question(episode: Episode) -> Request:
    view = episode.views[0]  # the user's view contains the goal
    messages = [("user", view.request), *((NAMES[entry.seat], entry.text) for entry in view.log)]
    conversation = "\n\n".join(f"{name}: {text}" for name, text in messages)
    prompt = f"What the user wanted:\n{view.goal}\n\nThe conversation:\n{conversation}"
    return Request(
        prompt_ids=(),
        max_new_tokens=_MAX_NEW_TOKENS,
        seed=named_seed("judge", episode.instance, episode.index, conversation),
        messages=(Message("system", _RULES), Message("user", prompt)),
    )
