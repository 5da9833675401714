"""The reward of each seat of an episode. Pure functions over floats."""

from __future__ import annotations

from collections.abc import Sequence

from selfplay.config import CollabConfig, RewardConfig
from selfplay.rollout.episode import Episode


def seat_reward(episode: Episode, seat: int, *, config: RewardConfig) -> float:
    """The game's return to the seat minus the penalties of its refused moves.

    Each seat pays for its own errors. The result may have any sign.
    """
    penalty = config.error_penalty * episode.num_errors(seat)
    return game_return(episode, seat, config=config) - penalty


def game_return(episode: Episode, seat: int, *, config: RewardConfig) -> float:
    """The seat's return from the game: its final reward and its rewards of single moves."""
    moves = move_rewards(episode, seat, config=config)
    return final_reward(episode, seat, config=config) + sum(moves.values())


def move_rewards(episode: Episode, seat: int, *, config: RewardConfig) -> dict[int, float]:
    """The seat's rewards of single moves, by the number of tries before the move.

    Empty with the kinds accept and collab, which do not use the game's own rewards.
    """
    if config.kind in ("accept", "collab"):
        return {}
    return {
        number: turn.rewards[seat]
        for number, turn in enumerate(episode.turns)
        if turn.rewards and turn.rewards[seat]
    }


def final_reward(episode: Episode, seat: int, *, config: RewardConfig) -> float:
    """The seat's reward at the end of the game.

    - `score_norm`: the game's own reward, of any sign; in a cooperative game in [0, 1].
    - `accept`: 1 for any agreement.
    - `regret`: the game's own reward after an agreement, else `table_share` times what the last
      proposal would have given. `table_share` is below 1, so accepting always gives more.
    """
    outcome = episode.outcome
    if config.kind == "collab":
        return sum(collab_parts(episode, seat, config=config.collab).values())
    if config.kind == "accept":
        return float(outcome.agreed)
    if config.kind == "regret" and not outcome.agreed:
        return config.table_share * outcome.proposal_norm
    return outcome.rewards[seat]


def turn_penalties(
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


def collab_parts(episode: Episode, seat: int, *, config: CollabConfig) -> dict[str, float]:
    """The weighted and clamped parts of a conversation's reward:

    R(t | g) = R_task(t, g) + R_interactivity(t) - min(cost * tokens(t), clamp)

    Source: Wu et al., CollabLLM, arXiv 2502.00640, section 3. The multiturn-aware reward of one
    reply is the mean of R over its sampled continuations (`rollout.branch`). R_task is the game's
    grade and R_interactivity the judge's mark in the outcome's facts, both in [0, 1] before
    weighting. tokens(t) counts the tokens that this seat sampled, refused tries included.
    """
    num_tokens = sum(turn.num_tokens for turn in episode.turns if turn.seat == seat)
    parts = {
        "accuracy": config.accuracy * episode.outcome.rewards[seat],
        "interactivity": config.interactivity * episode.outcome.facts["interactivity"],
        "token_cost": -config.token_cost * num_tokens,
    }
    return {name: max(-config.clamp, min(config.clamp, part)) for name, part in parts.items()}


def part_sums(episodes: Sequence[Episode], *, config: RewardConfig) -> dict[str, float]:
    """Each part of collab's reward summed over conversations, for the log; {} for other rewards."""
    sums: dict[str, float] = {}
    for episode in episodes if config.kind == "collab" else ():
        for seat, transcript in enumerate(episode.transcripts):
            if transcript is not None:
                for name, part in collab_parts(episode, seat, config=config.collab).items():
                    sums[name] = sums.get(name, 0.0) + part
    return sums
