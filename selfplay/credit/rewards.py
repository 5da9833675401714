"""What each seat of an episode earns. Floats only; the advantage never overwrites the reward."""

from __future__ import annotations

from collections.abc import Sequence

from selfplay.config import CollabConfig, RewardConfig
from selfplay.rollout.episode import Episode


def seat_reward(episode: Episode, seat: int, *, config: RewardConfig) -> float:
    """What the game was worth to the seat less its own refused moves, never below 0 (but for
    collab, where a part is a cost).

    Both seats share what the game is worth; a penalty of `error_penalty` a refused move falls on
    the erring seat alone.
    """
    charged = game_return(episode, seat, config=config) - config.error_penalty * episode.num_errors(
        seat
    )
    return charged if config.kind == "collab" else max(0.0, charged)


def game_return(episode: Episode, seat: int, *, config: RewardConfig) -> float:
    """What the game itself was worth to the seat, in [0, 1]; the sum of its parts in collab.

    `score_norm` is the game's own reward; `accept` 1 for any agreement; `regret` the game's own
    reward after an agreement, else `table_share` of what the last proposal would have brought:
    table_share * (1 - regret), where regret is the share of the best value that the proposal gives
    away. As `table_share` is below 1, accepting that proposal would always have earned more.
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
    """The parts of a conversation's reward, weighted and clamped: their sum is
    R(t | g) = R_task(t, g) + R_interactivity(t) - min(cost * tokens(t), clamp).

    Source: Wu et al., CollabLLM, arXiv 2502.00640, the conversation-level reward of section 3; the
    multiturn-aware reward of one reply is the mean of R over sampled futures of it, which
    `rollout.branch` draws. R_task is the game's grade, R_interactivity the mark in the outcome's
    facts (a rubric's or a judge's), both in [0, 1] before weighting. The tokens are those that the
    seat sampled, refused tries included; the user's words are not its own to save, and cost
    nothing.
    """
    num_tokens = sum(turn.num_tokens for turn in episode.turns if turn.seat == seat)
    parts = {
        "accuracy": config.accuracy * episode.outcome.rewards[seat],
        "interactivity": config.interactivity * episode.outcome.facts["interactivity"],
        "token_cost": -config.token_cost * num_tokens,
    }
    return {name: max(-config.clamp, min(config.clamp, part)) for name, part in parts.items()}


def part_sums(episodes: Sequence[Episode], *, config: RewardConfig) -> dict[str, float]:
    """Each part of the reward summed over conversations, for the log; nothing of other rewards."""
    sums: dict[str, float] = {}
    for episode in episodes if config.kind == "collab" else ():
        for seat, transcript in enumerate(episode.transcripts):
            if transcript is not None:
                for name, part in collab_parts(episode, seat, config=config.collab).items():
                    sums[name] = sums.get(name, 0.0) + part
    return sums
