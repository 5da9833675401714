"""From episodes to samples with rewards: one seat's game, or one sibling turn of a branch point.

The final reward is at a sample's last trained token, the reward of a single move at the last token
that the seat sampled up to this move. A token's return is the final reward plus the moves' rewards
from this token on. Rewards before the seat's first token are left out.

A token is trained in at most one sample. Without branch points a game gives one sample a seat, in
the group (instance, seat). A branch point moves its turn into samples of their own: each sibling
turn is one sample, rewarded with the mean of its continuations, and the siblings form a group. The
continuations share a state as the games of an instance do, so they form groups too, seat by seat;
they train the turns after the sibling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from selfplay.advantages.sample import Sample
from selfplay.config import AlgorithmConfig, RewardConfig
from selfplay.rollout.branches import siblings_of
from selfplay.rollout.episode import BranchPoint, Episode

UNACCEPTED = 0.5  # with `regret`, the fraction of its value that an unaccepted proposal pays


def episode_samples(
    episodes: Sequence[Episode], *, algorithm: AlgorithmConfig, reward: RewardConfig
) -> list[Sample]:
    """One sample with rewards for each seat of each game; branch points are left out."""
    samples = []
    for episode in episodes:
        for seat in trained_seats(episode):
            sample = seat_sample(episode, seat)
            for point in episode.branches:
                if point.seat == seat:
                    start, end = _turn_range(episode, point)
                    blank = [0] * (end - start)
                    mask = [*sample.mask[:start], *blank, *sample.mask[end:]]
                    sample = replace(sample, mask=mask)
            if 1 in sample.mask:
                sample = replace(sample, group=f"{role_of(episode, seat)} of {episode.instance}")
                samples.append(_rewarded(sample, episode, seat, algorithm, reward))
    return samples


def branch_samples(
    episodes: Sequence[Episode], *, algorithm: AlgorithmConfig, reward: RewardConfig
) -> list[Sample]:
    """Samples of each sibling turn, with the mean reward of its continuations, and of each
    continuation's later turns.

    The played game is sibling 0, continuation 0. It already trains as a game of its instance, so
    its later turns give no sample here.
    """
    samples = []
    for episode in episodes:
        for point in episode.branches:
            for sibling, continuations in enumerate(siblings_of(episode, point)):
                sibling_name = f"turn {point.turn} sibling {sibling}"
                turn = _turn_sample(continuations, point, algorithm, reward)
                turn = replace(
                    turn,
                    name=f"{_name(episode)} {sibling_name}",
                    group=f"turn {point.turn} of {_name(episode)}",
                )
                samples.append(turn)
                for number, continuation in enumerate(continuations):
                    if continuation is not episode:
                        name = f"{sibling_name} continuation {number}"
                        samples += _after(continuation, point, name, algorithm, reward)
    return samples


# --- the reward of a seat -------------------------------------------------------------------------


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


def final_reward(episode: Episode, seat: int, *, config: RewardConfig) -> float:
    """The seat's reward at the end of the game, minus the cost of what it wrote.

    - `score_norm`: the game's own reward, of any sign; in a cooperative game in [0, 1].
    - `accept`: 1 for any agreement.
    - `regret`: the game's own reward after an agreement, else half of what the last proposal would
      have given, so accepting it always gives more.

    The cost is min(1, token_cost * tokens + message_cost * words): of all tokens that the seat
    sampled, refused turns included (Wu et al., CollabLLM, arXiv 2502.00640, section 3), and of the
    words of its messages, without tags and private reasoning.
    """
    outcome, reward = episode.outcome, episode.outcome.rewards[seat]
    if config.kind == "accept":
        reward = float(outcome.agreed)
    elif config.kind == "regret" and not outcome.agreed:
        reward = UNACCEPTED * outcome.proposal_norm
    num_tokens = sum(turn.num_tokens for turn in episode.turns if turn.seat == seat)
    cost = config.token_cost * num_tokens
    if config.message_cost:
        cost += config.message_cost * sum(len(m.split()) for m in episode.messages([seat]))
    return reward - min(1.0, cost)


def move_rewards(episode: Episode, seat: int, *, config: RewardConfig) -> dict[int, float]:
    """The seat's rewards of single moves, by the number of turns before it.

    Empty with the kind accept, which does not use the game's own rewards.
    """
    if config.kind == "accept":
        return {}
    return {
        number: turn.rewards[seat]
        for number, turn in enumerate(episode.turns)
        if turn.rewards and turn.rewards[seat]
    }


def turn_penalties(
    episode: Episode, seat: int, *, config: RewardConfig
) -> tuple[tuple[int, int, float], ...]:
    """The token range [start, end) of each refused turn of the seat, and its penalty."""
    transcript = episode.transcripts[seat]
    if transcript is None or not config.error_penalty:
        return ()
    turns = [turn for turn in episode.turns if turn.seat == seat]
    return tuple(
        (span.start, span.end, config.error_penalty)
        for turn, span in zip(turns, transcript.spans, strict=True)
        if turn.error is not None
    )


# --- samples --------------------------------------------------------------------------------------


def seat_sample(episode: Episode, seat: int) -> Sample:
    """The seat's transcript, without rewards and with advantage 0 on every token."""
    transcript = episode.transcripts[seat]
    assert transcript is not None
    return Sample(
        name=f"{_name(episode)} seat {seat}",
        ids=transcript.ids,
        mask=transcript.mask,
        old_logprobs=transcript.logprobs,
        advantages=[0.0] * len(transcript),
        starts=tuple(transcript.starts),
    )


def trained_seats(episode: Episode) -> list[int]:
    """The seats whose tokens train."""
    return [s for s, t in enumerate(episode.transcripts) if t is not None and 1 in t.mask]


def role_of(episode: Episode, seat: int) -> str:
    """The seat and, if there is one, the partner. Groups and moving averages are kept per role."""
    players = zip(episode.players, episode.transcripts, strict=True)
    partners = [player for player, transcript in players if transcript is None]
    return " beside ".join([f"seat {seat}", *partners])


def _rewarded(
    sample: Sample, episode: Episode, seat: int, algorithm: AlgorithmConfig, config: RewardConfig
) -> Sample:
    """The sample with the seat's rewards at its tokens.

    With `error_credit: turn` each refused turn has its own penalty; otherwise the final reward
    includes all of them. No reward is clamped at 0.
    """
    last = len(sample.mask) - 1 - sample.mask[::-1].index(1)
    reward = final_reward(episode, seat, config=config)
    penalties: tuple[tuple[int, int, float], ...] = ()
    if algorithm.error_credit == "turn":
        all_penalties = turn_penalties(episode, seat, config=config)
        penalties = tuple(penalty for penalty in all_penalties if sample.mask[penalty[0]])
    else:
        reward -= config.error_penalty * episode.num_errors(seat)
    return replace(
        sample,
        reward=reward,
        penalties=penalties,
        move_rewards=_move_tokens(episode, seat, config, last=last),
        role=role_of(episode, seat),
    )


def _move_tokens(
    episode: Episode, seat: int, config: RewardConfig, *, last: int
) -> tuple[tuple[int, float], ...]:
    """The seat's rewards of single moves as (token, reward); no token is after `last`."""
    transcript = episode.transcripts[seat]
    assert transcript is not None
    rewards: dict[int, float] = {}
    for number, reward in move_rewards(episode, seat, config=config).items():
        num_turns = _num_turns(episode, seat, number + 1)
        if num_turns:
            token = min(transcript.spans[num_turns - 1].end - 1, last)
            rewards[token] = rewards.get(token, 0.0) + reward
    return tuple(rewards.items())


def _turn_sample(
    continuations: Sequence[Episode],
    point: BranchPoint,
    algorithm: AlgorithmConfig,
    config: RewardConfig,
) -> Sample:
    """The turn alone, rewarded with the mean reward of its continuations.

    With `error_credit: turn` only its own penalty is subtracted, and no other turn's.
    """
    episode, seat = continuations[0], point.seat
    start, end = _turn_range(episode, point)
    sample = seat_sample(episode, seat)
    per_turn = algorithm.error_credit == "turn"
    reward_of = game_return if per_turn else seat_reward
    value = sum(reward_of(c, seat, config=config) for c in continuations) / len(continuations)
    # Rewards of earlier moves are equal in all continuations and not part of this turn's return.
    before = move_rewards(episode, seat, config=config).items()
    value -= sum(reward for number, reward in before if number < point.turn)
    if per_turn:
        penalties = turn_penalties(episode, seat, config=config)
        value -= sum(penalty for first, _, penalty in penalties if first == start)
    return replace(
        sample,
        ids=sample.ids[:end],  # tokens after the last trained one are not needed
        mask=[0] * start + sample.mask[start:end],
        old_logprobs=sample.old_logprobs[:end],
        advantages=sample.advantages[:end],
        starts=tuple(start for start in sample.starts if start < end),
        reward=value,
        role=role_of(episode, seat),
    )


def _after(
    episode: Episode,
    point: BranchPoint,
    name: str,
    algorithm: AlgorithmConfig,
    config: RewardConfig,
) -> list[Sample]:
    """The turns after the sibling turn, one sample for each seat that had any."""
    samples = []
    for seat in trained_seats(episode):
        sample = seat_sample(episode, seat)
        start = _first_after(episode, point, seat)
        sample = replace(
            sample,
            name=f"{_name(episode)} {name} seat {seat}",
            mask=[0] * start + sample.mask[start:],
            group=f"seat {seat} after turn {point.turn} of {_name(episode)}",
        )
        if 1 in sample.mask:
            samples.append(_rewarded(sample, episode, seat, algorithm, config))
    return samples


def _turn_range(episode: Episode, point: BranchPoint) -> tuple[int, int]:
    """The tokens [start, end) of the branch point's turn in its seat's transcript."""
    transcript = episode.transcripts[point.seat]
    assert transcript is not None
    span = transcript.spans[_num_turns(episode, point.seat, point.turn)]
    return span.start, span.end


def _first_after(episode: Episode, point: BranchPoint, seat: int) -> int:
    """The first token that the seat sampled after the branch point's turn."""
    transcript = episode.transcripts[seat]
    assert transcript is not None
    num_turns, spans = _num_turns(episode, seat, point.turn + 1), transcript.spans
    return spans[num_turns].start if num_turns < len(spans) else len(transcript)


def _num_turns(episode: Episode, seat: int, end: int) -> int:
    """How many of the first `end` turns are the seat's."""
    return sum(turn.seat == seat for turn in episode.turns[:end])


def _name(episode: Episode) -> str:
    return f"instance {episode.instance} episode {episode.index}"
