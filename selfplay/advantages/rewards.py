"""From episodes to samples with rewards: one seat's game is a sample.

The final reward is at a sample's last trained token, a single move's reward at the last token that
the seat sampled up to this move. A token's return is the final reward plus the moves' rewards from
this token on. Rewards before the seat's first token are left out. Turns at branch points train
separately (`branches.py`).

Shapes: T tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from dialop.game import LARGEST, all_usable
from selfplay.advantages.sample import Sample
from selfplay.chat.transcript import Span
from selfplay.config import RewardConfig
from selfplay.config.plugins import PLUGINS, function_of, own_call
from selfplay.errors import OwnFault, SettingsError
from selfplay.rollout.episode import Episode

T = TypeVar("T")
UNACCEPTED = 0.5  # with `regret`, the fraction of its value that an unaccepted proposal pays


def episode_samples(episodes: Sequence[Episode], *, reward: RewardConfig) -> list[Sample]:
    """One sample with rewards per seat and game, without its turns at branch points."""
    samples = []
    for episode in episodes:
        for seat in trained_seats(episode):
            sample = seat_sample(episode, seat)
            for point in episode.branches:
                if point.seat == seat:
                    span = spans_until(episode, seat, point.turn + 1)[-1]
                    blank = [0] * (span.end - span.start)
                    mask = [*sample.mask[: span.start], *blank, *sample.mask[span.end :]]
                    sample = replace(sample, mask=mask)
            if 1 in sample.mask:
                sample = replace(sample, group=f"{seating_of(episode, seat)} of {episode.instance}")
                samples.append(rewarded(sample, episode, seat, reward))
    return samples


# --- the rewards of a game: functions for `reward.function` ---------------------------------------

# Per seat at the end of the game, and per seat for each turn, () for none.
Rewards = tuple[Sequence[float], Sequence[Sequence[float]]]


def score_norm(episode: Episode) -> Rewards:
    """The game's own rewards, of any sign; in a cooperative game in [0, 1]."""
    return episode.own_rewards


def accept(episode: Episode) -> Rewards:
    """1 for any agreement, instead of the game's own rewards."""
    return [float(episode.outcome.agreed)] * len(episode.outcome.rewards), ()


def regret(episode: Episode) -> Rewards:
    """The game's own rewards after an agreement, else half the score that the last proposal would
    have given all seats. So accepting it gives more if the game pays all seats its score."""
    rewards, moves = score_norm(episode)
    if not episode.outcome.agreed:
        rewards = [UNACCEPTED * episode.outcome.proposal_norm] * len(rewards)
    return rewards, moves


def message_credit(episode: Episode) -> Rewards:
    """The game's own rewards, and for each turn how much it raised the score the others can reach.

    A seat's potential is the mean score that the other seats can reach (`Game.reach`); a turn earns
    it the potential after minus the potential before. So a lie followed by the truth, or a
    repetition, earns nothing in sum, and a game pays at most the information left to share. A true
    message that makes a worse plan look best costs until others correct it. Unlike potential-based
    shaping (Ng, Harada, Russell 1999) the end does not subtract the potential, which would leave a
    baseline and no credit assignment (docs/notes/methods.md).
    """
    rewards, moves = score_norm(episode)
    reach = episode.game.reach() if episode.game is not None else []
    if not reach:
        raise SettingsError(
            "reward.function message_credit needs a game that implements `reach` of "
            f"dialop/game.py, got one that does not ({name_of(episode)})"
        )
    of_moves = [[(sum(of) - own) / (len(of) - 1) for own in of] for of in reach]
    num_legal = accumulate((turn.action is not None for turn in episode.turns), initial=0)
    potentials, nothing = [of_moves[num] for num in num_legal], [0.0] * len(rewards)
    return rewards, [
        [own + after - before for own, before, after in zip(of or nothing, *pair, strict=True)]
        for of, pair in zip(moves, pairwise(potentials), strict=True)
    ]


def with_rewards(episodes: Sequence[Episode], config: RewardConfig) -> list[Episode]:
    """The games, and the continuations of their branch points, with the rewards of
    `reward.function`, which train; games that already have them are unchanged.

    Raises OwnFault if the function does not give one usable number per seat.
    """
    function = function_of("reward.function", config.function)
    if "options" in signature(function).parameters:
        function = partial(function, options=config.options)
    if config.function not in PLUGINS["reward.function"].built_in:
        function = partial(_reading, function)
    with own_call("reward.function", config.function):
        return [_with_rewards(episode, function) for episode in episodes]


def _reading(function: Callable[[Episode], T], episode: Episode) -> T:
    """The function's result. Raises OwnFault if it changes the episode."""

    def written() -> list[Any]:
        transcripts = [(t.ids[:], t.mask[:], t.logprobs[:]) for t in episode.transcripts if t]
        state = episode.game.state() if episode.game else None
        return [transcripts, dict(episode.measures), dict(episode.outcome.facts), state]

    before, given = written(), function(episode)
    if written() != before:
        raise OwnFault("it must not change the episode")
    return given


def _with_rewards(episode: Episode, function: Callable[..., Any]) -> Episode:
    if episode.paid is not None:
        return episode
    num = len(episode.outcome.rewards)
    try:
        given = function(episode)
    except (Exception, SystemExit) as error:
        error.add_note(f"in {name_of(episode)}")
        raise
    try:
        rewards, moves = given
        moves = moves or [()] * len(episode.turns)
        lists = [rewards, *(of_seats for of_seats in moves if len(of_seats))]
        right = len(moves) == len(episode.turns) and all(
            len(of_seats) == num and all_usable([*of_seats]) for of_seats in lists
        )
    except (TypeError, ValueError):  # not a pair, or a number instead of a list
        right = False
    if not right:
        raise OwnFault(
            f"must return (rewards, turn rewards): {num} finite numbers, one per seat, and () or "
            f"{len(episode.turns)} lists, one per turn, each () or {num} finite numbers, none "
            f"beyond {LARGEST:g}, got {given!r:.300} ({name_of(episode)})"
        )
    paid = tuple(rewards), tuple(map(tuple, moves))
    branches = episode.changed_branches(partial(_with_rewards, function=function))
    return replace(episode, paid=paid, branches=branches)


# --- the reward of a seat -------------------------------------------------------------------------


def seat_reward(episode: Episode, seat: int, *, config: RewardConfig) -> float:
    """The seat's reward for the game: the final reward plus those of single moves, of any sign."""
    moves = move_rewards(episode, seat)
    return final_reward(episode, seat, config=config) + sum(moves.values())


def final_reward(episode: Episode, seat: int, *, config: RewardConfig) -> float:
    """The seat's reward at the end of the game, minus the cost of its text and the penalties of its
    invalid moves.

    The cost is min(1, token_cost * tokens + message_cost * words), over all tokens that the seat
    sampled, including invalid moves (Wu et al., CollabLLM, arXiv 2502.00640, section 3), and the
    words of its messages, without tags and private reasoning.
    """
    num_tokens = sum(turn.num_tokens for turn in episode.turns if turn.seat == seat)
    cost = config.token_cost * num_tokens
    if config.message_cost:
        cost += config.message_cost * sum(len(m.split()) for m in episode.messages([seat]))
    penalty = config.error_penalty * episode.num_errors(seat)
    rewards, _ = episode.paid or episode.own_rewards
    return rewards[seat] - min(1.0, cost) - penalty


def move_rewards(episode: Episode, seat: int) -> dict[int, float]:
    """The seat's rewards for single moves, by the number of turns before the move."""
    _, moves = episode.paid or episode.own_rewards
    return {number: of[seat] for number, of in enumerate(moves) if of and of[seat]}


# --- samples --------------------------------------------------------------------------------------


def seat_sample(episode: Episode, seat: int) -> Sample:
    """The seat's transcript, without rewards and with advantage 0 on every token."""
    transcript = episode.transcripts[seat]
    assert transcript is not None
    return Sample(
        name=sample_name(episode, seat),
        ids=transcript.ids,
        mask=transcript.mask,
        old_logprobs=transcript.logprobs,
        advantages=[0.0] * len(transcript),
        starts=tuple(transcript.starts),
        policy=transcript.policy,
    )


def legal_mask(episode: Episode, seat: int) -> list[int]:
    """The mask of the seat's transcript without its invalid moves."""
    transcript = episode.transcripts[seat]
    assert transcript is not None
    mask = list(transcript.mask)
    turns = [turn for turn in episode.turns if turn.seat == seat]
    for turn, span in zip(turns, transcript.spans, strict=True):
        if turn.error is not None:
            mask[span.start : span.end] = [0] * (span.end - span.start)
    return mask


def trained_seats(episode: Episode) -> list[int]:
    """The seats whose tokens train."""
    return [s for s, t in enumerate(episode.transcripts) if t is not None and 1 in t.mask]


def seating_of(episode: Episode, seat: int) -> str:
    """The seat and its partner, if any: part of the key of groups and moving averages."""
    players = zip(episode.players, episode.transcripts, strict=True)
    partners = [player for player, transcript in players if transcript is None]
    return " beside ".join([f"seat {seat}", *partners])


def rewarded(sample: Sample, episode: Episode, seat: int, config: RewardConfig) -> Sample:
    """The sample with the seat's returns; the only place that sums them. Rewards may be negative:
    none is clamped."""
    returns_T = [final_reward(episode, seat, config=config)] * len(sample.ids)
    for number, reward in move_rewards(episode, seat).items():
        for span in spans_until(episode, seat, number + 1)[-1:]:
            returns_T[: span.end] = [g + reward for g in returns_T[: span.end]]
    return replace(sample, returns=returns_T, seating=seating_of(episode, seat))


def spans_until(episode: Episode, seat: int, num: int) -> list[Span]:
    """The token spans of the seat's turns among the first `num` turns of the game."""
    transcript = episode.transcripts[seat]
    assert transcript is not None
    return transcript.spans[: sum(turn.seat == seat for turn in episode.turns[:num])]


def name_of(episode: Episode) -> str:
    return f"instance {episode.instance} episode {episode.index}"


def sample_name(episode: Episode, seat: int) -> str:
    """The name of the sample of a seat's game."""
    return f"{name_of(episode)} seat {seat}"
