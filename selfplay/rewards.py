"""What each seat of an episode earns. Floats only; the advantage never overwrites the reward."""

from __future__ import annotations

from selfplay.config import RewardConfig
from selfplay.play import Episode


def seat_reward(episode: Episode, seat: int, *, config: RewardConfig) -> float:
    """The seat's reward in [0, 1]: the game's normalised score (or 1 for any agreement), less its
    own refused moves.

    Both seats share the score; a penalty of `error_penalty` a refused move falls on the erring seat
    alone and never takes the reward below 0.
    """
    base = (
        episode.outcome.rewards[seat]
        if config.kind == "score_norm"
        else float(episode.outcome.agreed)
    )
    return max(0.0, base - config.error_penalty * episode.num_errors(seat))
