"""Metrics that exist in one game only, as sums over its moves.

docs/metrics.md gives the formula and the warning signs of each.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dialop.collab.task import USER, CollabView
from dialop.matching.board import MatchingView
from dialop.matching.statements import count_true
from dialop.tags import drop_reasoning
from selfplay.rollout.episode import Episode, Turn


def game_sums(episode: Episode, turns: Sequence[Turn]) -> dict[str, float]:
    """The sums of the game's own measures; `turns` are those that count as the policy's."""
    match episode.views[0]:
        case MatchingView():
            return _matching_sums(episode, turns)
        case CollabView():
            return _collab_sums(episode, turns)
    sent = messages(episode, {turn.seat for turn in turns})
    return {"words": float(sum(len(text.split()) for _, text in sent)), **episode.measures}


def messages(episode: Episode, seats: Collection[int]) -> list[tuple[int, str]]:
    """(seat, text) of the messages that these seats sent in this game.

    The text is what the game passed on: without the tag and without private reasoning before it.
    """
    if not isinstance(episode.views[0], MatchingView | CollabView):
        sent = [t for t in episode.turns if t.action == "message" and t.seat in seats]
        return [(turn.seat, _content(turn.text)) for turn in sent]
    num_legal = sum(turn.error is None for turn in episode.turns)
    log = episode.views[0].log  # may begin with acts from before this game
    acts = log[len(log) - num_legal :]
    return [(act.seat, act.text) for act in acts if act.kind == "message" and act.seat in seats]


def _content(text: str) -> str:
    """A message without private reasoning and without what comes before its tag's end."""
    text = drop_reasoning(text, ("message",))
    return text.partition("]")[2].strip() if "[message]" in text.lower() else text.strip()


def talk_value(episode: Episode) -> float:
    """The normalized score minus that of the better seat's solo plan: the gain from talking."""
    facts = episode.outcome.facts
    return episode.outcome.score_norm - max(facts["solo_0"], facts["solo_1"])


def _matching_sums(episode: Episode, turns: Sequence[Turn]) -> dict[str, float]:
    sent = messages(episode, {turn.seat for turn in turns})
    counts = [count_true(episode.views[seat], text) for seat, text in sent]
    return {
        "words": float(sum(len(text.split()) for _, text in sent)),
        "proposals": float(sum(turn.action == "propose" for turn in turns)),
        "statements": float(sum(stated for _, stated in counts)),
        "true_statements": float(sum(true for true, _ in counts)),
        "talk_value": talk_value(episode),
    }


def _collab_sums(episode: Episode, turns: Sequence[Turn]) -> dict[str, float]:
    sent = messages(episode, {turn.seat for turn in turns})
    user_turns = [turn for turn in episode.turns if turn.seat == USER and turn.error is None]
    facts = episode.outcome.facts
    return {
        "words": float(sum(len(text.split()) for _, text in sent)),
        "questions": float(sum("?" in text for _, text in sent)),
        "tokens": float(sum(turn.num_tokens for turn in turns)),
        "user_words": float(sum(len(turn.text.split()) for turn in user_turns)),
        **{name: facts[name] for name in ("interactivity", "judged") if name in facts},
    }
