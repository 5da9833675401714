"""What each seat of an episode earns. Floats only; the advantage never overwrites the reward."""

from __future__ import annotations

from selfplay.config import RewardConfig
from selfplay.play import Episode


def seat_reward(episode: Episode, seat: int, *, config: RewardConfig) -> float:
    """The seat's reward in [0, 1] less its own refused moves, never below 0.

    Both seats share what the game is worth; a penalty of `error_penalty` a refused move falls on
    the erring seat alone.
    """
    return max(
        0.0, worth(episode, seat, config=config) - config.error_penalty * episode.num_errors(seat)
    )


def worth(episode: Episode, seat: int, *, config: RewardConfig) -> float:
    """What the game itself was worth to the seat, in [0, 1].

    `score_norm` is the game's own reward; `accept` 1 for any agreement; `regret` the game's own
    reward after an agreement, else `table_share` of what the last proposal would have brought:
    table_share * (1 - regret), where regret is the share of the best value that the proposal gives
    away. As `table_share` is below 1, accepting that proposal would always have earned more.
    """
    outcome = episode.outcome
    if config.kind == "accept":
        return float(outcome.agreed)
    if config.kind == "regret" and not outcome.agreed:
        return config.table_share * outcome.proposal_norm
    return outcome.rewards[seat]


def turn_charges(
    episode: Episode, seat: int, *, config: RewardConfig
) -> tuple[tuple[int, int, float], ...]:
    """The token range [start, end) of each refused turn of the seat, and its penalty."""
    transcript = episode.transcripts[seat]
    if transcript is None or not config.error_penalty:
        return ()
    tries = [turn for turn in episode.turns if turn.seat == seat]
    return tuple(
        (span.start, span.end, config.error_penalty)
        for turn, span in zip(tries, transcript.spans, strict=True)
        if turn.error is not None
    )
