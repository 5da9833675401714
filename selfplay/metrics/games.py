"""What only one game can be asked: sums over a game's moves that its own words give meaning to.

docs/metrics.md gives each its formula and its warning signs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dialop.collab.task import USER, CollabView
from dialop.matching.board import MatchingView
from dialop.matching.statements import count_true
from selfplay.rollout.episode import Episode, Turn


def game_sums(episode: Episode, turns: Sequence[Turn]) -> dict[str, float]:
    """One game's own measures, addable; `turns` are those that count as the policy's."""
    match episode.views[0]:
        case MatchingView():
            return _matching_sums(episode, turns)
        case CollabView():
            return _collab_sums(episode, turns)
    return {}


def messages(episode: Episode, seats: Collection[int]) -> list[tuple[int, str]]:
    """Speaker and words of what these seats told in this game, as the game took it: without the
    tag, and without what was written in private before it."""
    num_legal = sum(turn.error is None for turn in episode.turns)
    log = episode.views[0].log
    played = log[len(log) - num_legal :]
    return [(act.seat, act.text) for act in played if act.kind == "message" and act.seat in seats]


def talk_value(episode: Episode) -> float:
    """Score minus the better seat's solo plan: what talking was worth over the best lone guess."""
    facts = episode.outcome.facts
    return episode.outcome.score_norm - max(facts["solo_0"], facts["solo_1"])


def _matching_sums(episode: Episode, turns: Sequence[Turn]) -> dict[str, float]:
    said = messages(episode, {turn.seat for turn in turns})
    counts = [count_true(episode.views[seat], text) for seat, text in said]
    return {
        "words": float(sum(len(text.split()) for _, text in said)),
        "proposals": float(sum(turn.action == "propose" for turn in turns)),
        "statements": float(sum(stated for _, stated in counts)),
        "true_statements": float(sum(true for true, _ in counts)),
        "talk_value": talk_value(episode),
    }


def _collab_sums(episode: Episode, turns: Sequence[Turn]) -> dict[str, float]:
    said = messages(episode, {turn.seat for turn in turns})
    heard = [turn for turn in episode.turns if turn.seat == USER and turn.error is None]
    facts = episode.outcome.facts
    return {
        "words": float(sum(len(text.split()) for _, text in said)),
        "questions": float(sum("?" in text for _, text in said)),
        "tokens": float(sum(turn.num_tokens for turn in turns)),
        "user_words": float(sum(len(turn.text.split()) for turn in heard)),
        **{name: facts[name] for name in ("interactivity", "judged") if name in facts},
    }
