"""Games with prepared moves: what each seat's transcript holds, how games end."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from dialop.logged import Rules
from dialop.matching.game import MatchingGame
from dialop.tags import MAX_MOVE
from selfplay.advantages.rewards import seat_reward
from selfplay.chat.rendering import Rendering
from selfplay.chat.transcript import Span, Transcript
from selfplay.config import Config, RewardConfig
from selfplay.engines.base import Completion, Request
from selfplay.metrics.step import game_sums
from selfplay.rollout.driver import first_turns, play_games, play_scripted
from selfplay.rollout.episode import Episode, GameSetup, Limits
from selfplay.warm_start.imitation import teacher_games
from tests.helpers.dialop_boards import BEST, BRIEF, SMALL
from tests.helpers.scripted_engine import CUT, StreamEngine, WaveEngine
from tests.helpers.small_games import (
    GAMES,
    LIMITS,
    MESSAGE,
    SAMPLING,
    Lines,
    Proposes,
    boards,
    config_of,
    games_of,
    hand_setups,
    play_one,
    prepared,
    tokens,
)


def play(
    rendering: Rendering, moves: Sequence[tuple[int, str]], limits: Limits = LIMITS, **room: int
) -> Episode:
    return play_one(MatchingGame(SMALL, BRIEF), rendering, moves, limits=limits, **room)


def test_the_transcripts_of_a_game_token_by_token(rendering: Rendering) -> None:
    """Seat 0 sends a message, seat 1 is refused once and proposes, seat 0 accepts."""
    episode = play(rendering, [(0, MESSAGE), (1, "propose it"), (1, BEST), (0, "[accept]")])
    assert episode.ended == "finished" and episode.outcome.score_norm == 1
    assert [turn.action for turn in episode.turns] == ["message", None, "propose", "accept"]
    assert [episode.num_errors(seat) for seat in (0, 1)] == [0, 1]

    prompts = [episode.prompts[seat].user for seat in (0, 1)]
    assert prompts[0] == "Ava BLEU 3\nAva Electra ?\nDaniel BLEU ?\nDaniel Electra 9"
    message, proposal = episode.turns[0].observations[1], episode.turns[2].observations[0]
    assert "BLEU Ava 3" in message and "Electra: Daniel" in proposal
    first, action_ids = rendering.first, rendering.action_ids
    sent, accepted = action_ids(MESSAGE), action_ids("[accept]")
    received = rendering.following(proposal, closed=True)
    seat_0 = episode.transcripts[0]
    opening = first(system="", user=prompts[0])
    assert seat_0.ids == opening + sent + received + accepted
    parts = ((opening, 0), (sent, 1), (received, 0), (accepted, 1))
    assert seat_0.mask == [sampled for ids, sampled in parts for _ in ids]
    assert seat_0.logprobs == [-k * m for ids, m in parts for k in range(1, len(ids) + 1)]

    # The second seat's opening prompt contains the message. Its refused move stays and trains.
    error = episode.turns[1].error
    assert error is not None and error.startswith("Error: ")
    opening = first(system="", user=f"{prompts[1]}\n{message}")
    slip, proposed = action_ids("propose it"), action_ids(BEST)
    repair = rendering.following(error, closed=True)
    seat_1 = episode.transcripts[1]
    assert seat_1.ids == opening + slip + repair + proposed
    parts = ((opening, 0), (slip, 1), (repair, 0), (proposed, 1))
    assert seat_1.mask == [sampled for ids, sampled in parts for _ in ids]
    assert seat_1.spans[0] == Span(len(opening), len(opening) + len(slip))


def test_waves_and_streams_play_the_same_games(rendering: Rendering) -> None:
    waves, stream = (engine(rendering, prepared(*GAMES)) for engine in (WaveEngine, StreamEngine))
    (one, one_stats), (other, other_stats) = (
        play_games(hand_setups(rendering, len(GAMES)), engine, sampling=SAMPLING, limits=LIMITS)
        for engine in (waves, stream)
    )
    assert [e.index for e in one] == [e.index for e in other] == [0, 1, 2, 3]
    for a, b in zip(one, other, strict=True):
        assert (a.turns, a.outcome, a.ended) == (b.turns, b.outcome, b.ended)
        for left, right in zip(a.transcripts, b.transcripts, strict=True):
            assert tokens(left) == tokens(right)
    assert [e.ended for e in one] == ["finished", "finished", "retries", "finished"]
    assert waves.waves == [4, 4, 3, 2, 1]
    assert stream.asked != waves.asked, "with a streaming engine, games overtake each other"
    for stats in (one_stats, other_stats):
        assert stats.num_prompt_tokens == sum(len(r.prompt_ids) for r in waves.asked)
        moves = [rendering.action_ids(text.removesuffix(CUT)) for game in GAMES for _, text in game]
        assert stats.num_generated_tokens == sum(len(ids) for ids in moves) - 1


def test_first_turns_are_drawn_from_the_full_rollout() -> None:
    """Eight of forty games, both seats. A seat reads [game, seat], samples 7 8, reads 9, samples 5
    6: its first turn ends after 7 8."""

    def transcript(*prompt: int) -> Transcript:
        made = Transcript()
        for read, sampled in ((prompt, [7, 8]), ([9], [5, 6])):
            made.observe(read)
            made.act(sampled, logprobs=[-0.5, -0.5])
        return made

    episodes = [
        SimpleNamespace(transcripts=tuple(transcript(game, seat) for seat in (0, 1)))
        for game in range(40)
    ]
    turns = first_turns(episodes, 8, seed=1)
    assert [mask for _, mask in turns] == [[0, 0, 1, 1]] * 8
    assert {tuple(ids[2:]) for ids, _ in turns} == {(7, 8)}
    assert len({tuple(ids) for ids, _ in turns}) == 8
    assert min(ids[0] for ids, _ in turns) < 20 <= max(ids[0] for ids, _ in turns)
    assert {ids[1] for ids, _ in turns} == {0, 1}
    assert first_turns(episodes, 8, seed=1) == turns != first_turns(episodes, 8, seed=2)
    assert len(first_turns(episodes[:1], 8, seed=1)) == 2


@pytest.mark.parametrize("text", ["<think>7\n[message] 7", "ab</think>[THINK] 7\n[message] 7"])
def test_a_move_within_a_thought_never_reaches_the_game(text: str, rendering: Rendering) -> None:
    """Of the policy and of a partner, where private reasoning is allowed, too."""
    moves = [text, f"{text}\n</thinking>{BEST}", "[accept]"]
    for allowed, partner in product((True, False), (False, True)):
        game = MatchingGame(SMALL, Rules(brief=True, private_reasoning=allowed))
        if partner:
            setup = GameSetup(game, (Lines(*moves[:2]), Lines(moves[2])), SMALL.key, 0)
            (episode,) = play_scripted([setup], limits=LIMITS)
        elif allowed:
            episode = play_one(game, rendering, list(zip((0, 0, 1), moves, strict=True)))
        else:
            episode = play_one(game, rendering, [(0, text), (0, BEST), (1, moves[2])])
        first, second, _ = episode.turns
        assert (first.error_kind, first.text, first.observations) == ("cut_off", text, ("", ""))
        assert (second.action, "7" in second.observations[1]) == ("propose", False)


def test_a_partners_move_is_bounded() -> None:
    """Four million line ends would take the other seat's tokenizer most of a minute."""
    texts = ["[message] a" + "\n" * (MAX_MOVE - 12) + end for end in ("bc", "b")]
    setup = GameSetup(MatchingGame(SMALL, BRIEF), (Lines(*texts), Lines()), SMALL.key, 0)
    (episode,) = play_scripted([setup], limits=Limits(1, 1))
    assert [turn.error_kind for turn in episode.turns] == ["cut_off", None]
    assert [len(turn.text) for turn in episode.turns] == [MAX_MOVE] * 2


def test_a_cut_off_move_never_reaches_the_game(rendering: Rendering) -> None:
    """Even if its text would be legal: a model must learn to end its moves."""
    episode = play(rendering, [(0, MESSAGE + CUT), (0, BEST), (1, "[accept]")])
    turn = episode.turns[0]
    assert (turn.error_kind, turn.action) == ("cut_off", None)
    assert turn.observations == ("", "") and turn.error is not None and "cut off" in turn.error
    seat_0 = episode.transcripts[0]
    span = seat_0.spans[0]
    # The end-of-turn token was not sampled. It is added to the context and does not train.
    assert seat_0.ids[span.end] == rendering.end_id
    assert seat_0.mask[span.end - 1 : span.end + 1] == [1, 0]
    error_ids = rendering.following(turn.error, closed=False)
    assert seat_0.ids[span.end : span.end + len(error_ids)] == error_ids


def test_a_game_ends_without_agreement_at_its_limits(rendering: Rendering) -> None:
    talk = [(0, MESSAGE), (1, "[message] ok"), (0, "[message] so"), (1, BEST), (0, "[accept]")]
    stopped = play(rendering, talk, Limits(max_turns=4, max_retries=1))
    assert (stopped.ended, len(stopped.turns), stopped.outcome.score_norm) == ("turns", 4, 0.0)
    in_time = play(rendering, talk, Limits(max_turns=5, max_retries=1))
    assert (in_time.ended, in_time.outcome.score_norm) == ("finished", 1.0)

    slips = [(0, "a"), (0, "b"), (0, "c"), (0, BEST), (1, "[accept]")]
    assert play(rendering, slips, Limits(max_turns=8, max_retries=2)).ended == "retries"
    assert play(rendering, slips, Limits(max_turns=8, max_retries=3)).ended == "finished"
    # A legal move resets the number of retries.
    spread = [(0, "a"), (0, MESSAGE), (1, "b"), (1, BEST), (0, "c"), (0, "[accept]")]
    assert play(rendering, spread, Limits(max_turns=8, max_retries=1)).ended == "finished"


def test_a_seat_out_of_tokens_ends_the_game(rendering: Rendering) -> None:
    """With room for the opening prompt and the message only, the game ends; with five more tokens
    the last request is limited to these."""
    game = hand_setups(rendering)[0].game
    opening = rendering.first(system="", user=game.prompt(0).user)
    moves = [(0, MESSAGE), (1, BEST), (0, "[accept]")]
    proposal = play(rendering, moves).turns[1].observations[0]
    sent, received = rendering.action_ids(MESSAGE), rendering.following(proposal, closed=True)
    full = len(opening) + len(sent) + len(received)
    assert play(rendering, moves, max_game_tokens=full).ended == "tokens"
    engine = WaveEngine(rendering, prepared(moves))
    play_games(
        hand_setups(rendering, max_game_tokens=full + 5, max_new_tokens=50),
        engine,
        sampling=SAMPLING,
        limits=LIMITS,
    )
    assert [r.max_new_tokens for r in engine.asked] == [50, 50, 5]


@pytest.mark.parametrize("room", [1, 5, 49])
def test_a_turn_that_the_games_tokens_cut_off_is_not_refused(
    rendering: Rendering, room: int
) -> None:
    """The seat had no tokens to be shorter. Its tokens train. A turn that `max_new_tokens`
    cuts off at the same length is refused and tried again."""
    opening = len(rendering.first(system="", user=hand_setups(rendering)[0].game.prompt(0).user))
    slip, limits = [(0, MESSAGE * 20), (0, BEST), (1, "[accept]")], Limits(8, max_retries=0)
    cut = play(rendering, slip, limits, max_game_tokens=opening + room, max_new_tokens=50)
    (turn,) = cut.turns
    assert (cut.ended, turn.action, turn.error, turn.num_tokens) == ("tokens", None, None, room)
    assert cut.num_errors(0) == 0 and sum(cut.transcripts[0].mask) == room
    assert seat_reward(cut, 0, config=RewardConfig(error_penalty=1.0)) == 0.0
    counts = game_sums([cut]).measures
    assert counts["turns"] == 1 and not any(
        name.startswith("errors") and counts[name] for name in counts
    )
    shorter = play(rendering, slip, limits, max_game_tokens=999, max_new_tokens=room)
    assert (shorter.ended, shorter.num_errors(0)) == ("retries", 1)
    again = play(rendering, slip, max_game_tokens=opening + 50, max_new_tokens=50)
    assert (again.turns[0].error_kind, again.ended) == ("cut_off", "tokens")


def seeds_of(rendering: Rendering, config: Config, *, step: int) -> list[int]:
    engine = Proposes(rendering, {})
    setups = games_of(boards(4), rendering, config, step=step)
    play_games(setups, engine, sampling=SAMPLING, limits=LIMITS)
    return [request.seed for request in engine.asked]


def test_every_draw_has_its_own_name(rendering: Rendering) -> None:
    """No two turns of any two runs, steps, instances, episodes or seats share a seed."""
    seeds: list[int] = []
    for run_seed, step in product((0, 1), (0, 1, 2)):
        config = config_of(f"seed={run_seed}")
        step_seeds = seeds_of(rendering, config, step=step)
        assert len(step_seeds) == 4 * 4 * 3, "a proposal, then two refused moves of the other seat"
        assert step_seeds == seeds_of(rendering, config, step=step)
        seeds += step_seeds
    assert len(set(seeds)) == len(seeds)


def test_teachers_fill_transcripts_without_an_engine_and_slips_are_not_imitated(
    rendering: Rendering,
) -> None:
    config = config_of("warm_start.teachers=[honest:slip=0.5]")
    setups = teacher_games(
        boards(20),
        teachers=config.warm_start.teachers,
        game=config.game,
        rollout=config.rollout,
        seed=config.seed,
        rendering=rendering,
    )
    episodes = play_scripted(setups, limits=LIMITS)
    num_slips = 0
    for episode in episodes:
        for seat, transcript in enumerate(episode.transcripts):
            turns = [turn for turn in episode.turns if turn.seat == seat]
            for span, turn in zip(transcript.spans, turns, strict=True):
                assert any(transcript.mask[span.start : span.end]) is (turn.error is None)
                assert transcript.ids[span.start : span.end] == rendering.action_ids(turn.text)
            num_slips += episode.num_errors(seat)
    assert num_slips > 5
    with pytest.raises(ValueError, match="hand/0"):
        play_scripted(hand_setups(rendering), limits=LIMITS)


@pytest.mark.parametrize("engine", [WaveEngine, StreamEngine])
def test_an_exception_inside_a_game_names_the_game(
    rendering: Rendering, engine: type[WaveEngine]
) -> None:
    good, bad = hand_setups(rendering, 2)
    bad = replace(bad, players=(Lines(MESSAGE), bad.players[1]))  # has no second move
    texts = prepared(GAMES[0], [(1, MESSAGE)])
    with pytest.raises(IndexError) as caught:
        play_games([good, bad], engine(rendering, texts), sampling=SAMPLING, limits=LIMITS)
    assert "in instance hand/0, episode 1, seat 0" in caught.value.__notes__


def completion(**changes: Any) -> Completion:
    return replace(Completion([5, 6], [-0.5, -1.0], "stop", 3), **changes)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"ids": [5]}, "2 for 1 ids"),
        ({"ids": [], "logprobs": []}, "has 0"),
        ({"ids": [5] * 4, "logprobs": [-1.0] * 4}, "has 4"),
        ({"logprobs": [-0.5, math.nan]}, "has nan"),
        ({"logprobs": [-0.5, -math.inf]}, "has -inf"),
        ({"logprobs": [0.5, -1.0]}, "has 0.5"),
        ({"version": 2}, "step 3"),
    ],
)
@pytest.mark.parametrize("kind", [WaveEngine, StreamEngine])
def test_an_invalid_completion_ends_the_rollout(
    rendering: Rendering, kind: type[WaveEngine], changes: dict[str, Any], part: str
) -> None:
    class Garbage(kind):  # type: ignore[misc, valid-type]
        def answer(self, request: Request) -> Completion:
            return completion(**changes)

    setups = hand_setups(rendering, max_new_tokens=3)
    with pytest.raises(RuntimeError, match="the policy") as caught:
        play_games(
            setups, Garbage(rendering, {}), sampling=SAMPLING, limits=LIMITS, versions={"": 3}
        )
    assert part in str(caught.value)
