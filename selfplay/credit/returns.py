"""Samples with what they earned: of a seat's whole game, of a turn that was tried, of its futures.

A token stands in the loss of at most one sample. A game without branch points gives one sample a
seat, in the group (instance, seat). A branch point takes its turn out of that sample: each sibling
turn becomes a sample that trains this turn alone, its reward the mean of its futures, its group the
branch point. The games that were played on from the point have a state in common, so they are a
group as the games of an instance are, seat by seat; there the turns after the siblings train.
Floats only; no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from selfplay.config import AlgorithmConfig, RewardConfig
from selfplay.credit.rewards import game_return, seat_reward, turn_penalties
from selfplay.credit.sample import Sample
from selfplay.rollout.branches import siblings_of
from selfplay.rollout.episode import BranchPoint, Episode


def episode_samples(
    episodes: Sequence[Episode], *, algorithm: AlgorithmConfig, reward: RewardConfig
) -> list[Sample]:
    """Each seat's game with its reward, without the turns that branch points credit."""
    found = []
    for episode in episodes:
        for seat in trained_seats(episode):
            sample = seat_sample(episode, seat)
            for point in episode.branches:
                if point.seat == seat:
                    sample = _without_turn(sample, episode, point)
            if 1 in sample.mask:
                group = f"{role_of(episode, seat)} of {episode.instance}"
                found.append(
                    _rewarded(
                        sample, episode, seat, group=group, algorithm=algorithm, config=reward
                    )
                )
    return found


def branch_samples(
    episodes: Sequence[Episode], *, algorithm: AlgorithmConfig, reward: RewardConfig
) -> list[Sample]:
    """Every sibling turn with its value as its reward, and the games after it with theirs.

    The trunk trains after its own turn as a game of its instance, so it is left out of the latter.
    """
    found = []
    for episode in episodes:
        for point in episode.branches:
            for sibling, continuations in enumerate(siblings_of(episode, point)):
                place = f"turn {point.turn} sibling {sibling}"
                turn = _turn_sample(continuations, point, algorithm=algorithm, config=reward)
                found.append(
                    replace(
                        turn,
                        name=f"{_name(episode)} {place}",
                        group=f"turn {point.turn} of {_name(episode)}",
                    )
                )
                for number, continuation in enumerate(continuations):
                    if continuation is not episode:
                        found += _after(
                            continuation,
                            point,
                            f"{place} future {number}",
                            algorithm=algorithm,
                            config=reward,
                        )
    return found


def seat_sample(episode: Episode, seat: int) -> Sample:
    """The seat's transcript, no advantage on any token yet."""
    transcript = episode.transcripts[seat]
    assert transcript is not None
    return Sample(
        name=f"{_name(episode)} seat {seat}",
        ids=transcript.ids,
        mask=transcript.mask,
        old_logprobs=transcript.logprobs,
        advantages=[0.0] * len(transcript),
    )


def trained_seats(episode: Episode) -> list[int]:
    """The seats whose tokens train."""
    return [s for s, t in enumerate(episode.transcripts) if t is not None and 1 in t.mask]


def role_of(episode: Episode, seat: int) -> str:
    """The seat, and beside a partner that partner: what a baseline may depend on."""
    partners = [
        player
        for player, transcript in zip(episode.players, episode.transcripts, strict=True)
        if transcript is None
    ]
    return " beside ".join([f"seat {seat}", *partners])


def _turn_sample(
    continuations: Sequence[Episode],
    point: BranchPoint,
    *,
    algorithm: AlgorithmConfig,
    config: RewardConfig,
) -> Sample:
    """The turn alone, worth the mean reward of its futures.

    Where refused turns are charged one by one, it bears its own charge and no other turn's.
    """
    episode, seat = continuations[0], point.seat
    start, end = _range(episode, point)
    sample = _cut(seat_sample(episode, seat), end)
    sample = replace(sample, mask=[0] * start + sample.mask[start:])
    if algorithm.error_credit == "turn":
        penalties = turn_penalties(episode, seat, config=config)
        value = sum(
            game_return(continuation, seat, config=config) for continuation in continuations
        ) / len(continuations)
        value -= sum(penalty for first, _, penalty in penalties if first == start)
    else:
        value = sum(
            seat_reward(continuation, seat, config=config) for continuation in continuations
        ) / len(continuations)
    return replace(sample, rewards=[0.0] * (end - 1) + [value], role=role_of(episode, seat))


def _after(
    continuation: Episode,
    point: BranchPoint,
    place: str,
    *,
    algorithm: AlgorithmConfig,
    config: RewardConfig,
) -> list[Sample]:
    """The turns after the one that was tried, one sample a seat that had any."""
    found = []
    for seat in trained_seats(continuation):
        sample = seat_sample(continuation, seat)
        start = _first_after(continuation, point, seat)
        sample = replace(sample, mask=[0] * start + sample.mask[start:])
        if 1 in sample.mask:
            sample = replace(sample, name=f"{_name(continuation)} {place} seat {seat}")
            group = f"seat {seat} after turn {point.turn} of {_name(continuation)}"
            found.append(
                _rewarded(
                    sample, continuation, seat, group=group, algorithm=algorithm, config=config
                )
            )
    return found


def _rewarded(
    sample: Sample,
    episode: Episode,
    seat: int,
    *,
    group: str,
    algorithm: AlgorithmConfig,
    config: RewardConfig,
) -> Sample:
    """The sample in its group, with the seat's reward at its last trained token.

    Where refused turns are charged one by one, each charge stands at its own turn and nothing is
    cut at 0.
    """
    rewards = [0.0] * len(sample.ids)
    last = len(sample.mask) - 1 - sample.mask[::-1].index(1)
    penalties: tuple[tuple[int, int, float], ...] = ()
    if algorithm.error_credit == "turn":
        all_penalties = turn_penalties(episode, seat, config=config)
        penalties = tuple(penalty for penalty in all_penalties if sample.mask[penalty[0]])
        rewards[last] = game_return(episode, seat, config=config)
        for _, end, penalty in penalties:
            rewards[end - 1] -= penalty
    else:
        rewards[last] = seat_reward(episode, seat, config=config)
    role = role_of(episode, seat)
    return replace(sample, rewards=rewards, penalties=penalties, group=group, role=role)


def _without_turn(sample: Sample, episode: Episode, point: BranchPoint) -> Sample:
    start, end = _range(episode, point)
    return replace(sample, mask=[*sample.mask[:start], *[0] * (end - start), *sample.mask[end:]])


def _cut(sample: Sample, end: int) -> Sample:
    """The sample's first tokens: nothing behind the last trained one has to be read."""
    return replace(
        sample,
        ids=sample.ids[:end],
        mask=sample.mask[:end],
        old_logprobs=sample.old_logprobs[:end],
        advantages=sample.advantages[:end],
    )


def _range(episode: Episode, point: BranchPoint) -> tuple[int, int]:
    """The tokens [start, end) of the turn that was tried in the transcript of its seat."""
    transcript = episode.transcripts[point.seat]
    assert transcript is not None
    tries = sum(turn.seat == point.seat for turn in episode.turns[: point.turn])
    span = transcript.spans[tries]
    return span.start, span.end


def _first_after(episode: Episode, point: BranchPoint, seat: int) -> int:
    """Where the seat's tokens begin that were sampled after the turn that was tried."""
    transcript = episode.transcripts[seat]
    assert transcript is not None
    tries = sum(turn.seat == seat for turn in episode.turns[: point.turn + 1])
    spans = transcript.spans
    return spans[tries].start if tries < len(spans) else len(transcript)


def _name(episode: Episode) -> str:
    return f"instance {episode.instance} episode {episode.index}"
