"""What only one game can be asked: sums over a game's moves that its own words give meaning to.

docs/metrics.md gives each its formula and its warning signs.
"""

from __future__ import annotations

from collections.abc import Sequence

from dialop.board import MatchingView
from dialop.collab.task import USER, CollabView
from dialop.statements import count_true
from selfplay.play import Episode, Turn


def game_sums(episode: Episode, turns: Sequence[Turn]) -> dict[str, float]:
    """One game's own measures, addable; `turns` are those that count as the policy's."""
    match episode.views[0]:
        case MatchingView():
            return _matching_sums(episode, turns)
        case CollabView():
            return _collab_sums(episode, turns)
    return {}


def talk_value(episode: Episode) -> float:
    """Score minus the better seat's solo plan: what talking was worth over the best lone guess."""
    facts = episode.outcome.facts
    return episode.outcome.score_norm - max(facts["solo_0"], facts["solo_1"])


def _matching_sums(episode: Episode, turns: Sequence[Turn]) -> dict[str, float]:
    said = [turn for turn in turns if turn.action == "message"]
    counts = [count_true(episode.views[turn.seat], turn.text) for turn in said]
    return {
        "words": float(sum(len(turn.text.partition("]")[2].split()) for turn in said)),
        "proposals": float(sum(turn.action == "propose" for turn in turns)),
        "statements": float(sum(stated for _, stated in counts)),
        "true_statements": float(sum(true for true, _ in counts)),
        "talk_value": talk_value(episode),
    }


def _collab_sums(episode: Episode, turns: Sequence[Turn]) -> dict[str, float]:
    said = [turn for turn in turns if turn.action == "message"]
    heard = [turn for turn in episode.turns if turn.seat == USER and turn.error is None]
    facts = episode.outcome.facts
    return {
        "words": float(sum(len(turn.text.split()) for turn in said)),
        "questions": float(sum("?" in turn.text for turn in said)),
        "tokens": float(sum(turn.num_tokens for turn in turns)),
        "user_words": float(sum(len(turn.text.split()) for turn in heard)),
        **{name: facts[name] for name in ("interactivity", "judged") if name in facts},
    }
