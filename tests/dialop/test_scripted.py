"""Scripted players: their scores, their wording, and that every game ends."""

import statistics
from dataclasses import dataclass, replace
from itertools import combinations, permutations

import numpy as np
import pytest

from dialop.kit import load_kit
from dialop.logged import Rules
from dialop.matching.game import MatchingGame, MatchingInstance
from dialop.matching.generate import MatchingRecipe
from dialop.matching.scripted import (
    best_plan,
    estimate_ratio,
    estimate_top,
    highest_first,
    make_scripted,
    plan_value,
    straying_plan,
    swaps,
)
from tests.helpers.dialop_boards import (
    BEST,
    BRIEF,
    FULL,
    SCALED,
    SILENT,
    SMALL,
    WORST,
    full_boards,
    play,
)

generate = load_kit("matching").generate

TINY = MatchingRecipe(size=2, p_observed=0.5, scale=False, max_value=10, keep="exactly_one")
FULL_THINKING = Rules(private_reasoning=True)
MAX_TURNS = 30


@dataclass(frozen=True)
class Played:
    norm: float
    num_turns: int
    num_messages: int
    num_errors: int


def play_out(
    instance: MatchingInstance, specs: tuple[str, str], *, options: Rules, seed: int
) -> Played:
    game = MatchingGame(instance, options)
    players = [make_scripted(spec, seed=2 * seed + seat) for seat, spec in enumerate(specs)]
    while (seat := game.seat_to_move) is not None and len(game.view(0).log) < MAX_TURNS:
        errors_before = game.view(seat).num_errors_this_turn
        step = game.step(seat, players[seat].act(game.view(seat)))
        assert step.error is None or errors_before == 0, step.error
    log = game.view(0).log
    num_messages = sum(action.kind == "message" for action in log)
    assert game.outcome().agreed
    return Played(game.outcome().score_norm, len(log), num_messages, sum(game.num_errors))


def play_all(
    instances: list[MatchingInstance], specs: tuple[str, str], options: Rules = FULL
) -> list[Played]:
    return [play_out(i, specs, options=options, seed=n) for n, i in enumerate(instances)]


def mean_norm(games: list[Played]) -> float:
    return statistics.fmean(game.norm for game in games)


@pytest.fixture(scope="module")
def twos() -> list[MatchingInstance]:
    return generate(TINY, seed=22, num=200)


def test_scores_on_the_full_game() -> None:
    eights = full_boards()
    assert mean_norm(play_all(eights, ("random", "random"))) == pytest.approx(0.61, abs=0.05)
    assert mean_norm(play_all(eights, ("solo", "solo"))) == pytest.approx(0.774, abs=0.03)
    honest = play_all(eights, ("honest", "honest"))
    assert mean_norm(honest) > 0.97
    assert max(game.num_turns for game in honest) <= 4
    for tell in ("top", "rows"):
        spec = f"honest:tell={tell}"
        assert mean_norm(play_all(eights, (spec, spec))) > 0.93


def test_scores_on_tiny_boards(twos: list[MatchingInstance]) -> None:
    solo = play_all(twos, ("solo", "solo"), BRIEF)
    everything = play_all(twos, ("honest", "honest"), BRIEF)
    top = play_all(twos, ("honest:tell=top", "honest:tell=top"), BRIEF)
    assert mean_norm(solo) == pytest.approx(0.805, abs=0.04)
    assert mean_norm(everything) == 1.0
    assert mean_norm(solo) + 0.05 < mean_norm(top) < 0.97
    assert all(game.num_turns == 2 and game.num_messages == 0 for game in solo)
    assert max(game.num_turns for game in everything) <= 4
    assert statistics.fmean(game.num_messages for game in everything) < 1.2


def test_without_messages_honest_plays_solo(twos: list[MatchingInstance]) -> None:
    for options in (SILENT, replace(BRIEF, messages=False)):
        honest = play_all(twos[:50], ("honest", "honest"), options)
        assert honest == play_all(twos[:50], ("solo", "solo"), options)


@pytest.mark.parametrize("nonsense", ["[message] Ava BLEU 999999", "[message] lalala 7"])
def test_honest_ends_beside_a_chatterbox_that_always_refuses(nonsense: str) -> None:
    game = MatchingGame(SMALL, FULL)
    honest = make_scripted("honest", seed=1)
    while len(game.view(0).log) < MAX_TURNS:
        seat = game.seat_to_move
        text = honest.act(game.view(0)) if seat == 0 else nonsense
        if seat == 1 and game.view(1).pending is not None:
            text = "[reject]"
        assert seat is not None and game.step(seat, text).error is None
    kinds = [action.kind for action in game.view(0).log if action.seat == 0]
    assert kinds[0] == "message" and set(kinds[1:]) == {"propose"}


def test_honest_gives_in_after_two_rejections() -> None:
    game = MatchingGame(SMALL, FULL)
    honest = make_scripted("honest", seed=1)
    play(
        game,
        (0, honest.act(game.view(0))),
        (1, "[message] Ava on Electra is 0, Daniel on BLEU is 0"),
    )
    answers = []
    while game.seat_to_move is not None:
        seat = game.seat_to_move
        if seat == 0:
            text = honest.act(game.view(0))
            answers.append(text.split()[0])
        else:
            text = WORST if game.view(1).pending is None else "[reject]"
        play(game, (seat, text))
    rejections = answers.count("[reject]")
    assert rejections == 2 and answers[-1] == "[accept]" and len(game.view(0).log) <= 14


def test_brief_wording_is_fixed_and_copies_the_prompt() -> None:
    game = MatchingGame(SMALL, BRIEF)
    for seed in (0, 1):
        honest = make_scripted("honest", seed=seed)
        assert honest.act(game.view(0)) == "[message]\nAva BLEU 3\nDaniel Electra 9"
        top = make_scripted("honest:tell=top", seed=seed)
        assert top.act(game.view(0)) == "[message]\nDaniel Electra 9"
        assert make_scripted("solo", seed=seed).act(game.view(0)) == BEST
    play(game, (0, "[message] Ava BLEU 3, Daniel Electra 9"))
    # 3 + 9 beats 7 + 1: the second player plans with both tables and proposes the best at once.
    assert make_scripted("honest", seed=0).act(game.view(1)) == BEST
    teller = make_scripted("honest:reply=tell", seed=0)
    assert teller.act(game.view(1)) == "[message]\nAva Electra 7\nDaniel BLEU 1"
    assert make_scripted("random", seed=0).act(game.view(1)) in (BEST, WORST)


def test_thoughts_are_the_pooled_table_in_levels_and_stay_private() -> None:
    options = Rules(brief=True, private_reasoning=True)
    game = MatchingGame(SMALL, options)
    alone = "Ava BLEU 3\nAva Electra 5\nDaniel BLEU 5\nDaniel Electra 9\n"
    assert make_scripted("solo:think=levels", seed=0).act(game.view(0)) == alone + BEST
    honest = make_scripted("honest:think=levels", seed=0)
    assert honest.act(game.view(0)) == "[message]\nAva BLEU 3\nDaniel Electra 9"
    play(game, (0, "[message] Ava BLEU 3, Daniel Electra 9"))
    pooled = "Ava BLEU 3\nAva Electra 7\nDaniel BLEU 1\nDaniel Electra 9\n"
    step = game.step(1, said := honest.act(game.view(1)))
    assert said == pooled + BEST and step.error is None
    assert "BLEU 1" not in step.observations[0] and BEST in step.observations[0]
    assert honest.act(game.view(0)) == "[accept]"
    # With a hidden scale of 4: two values with maximum 28 give an estimated range up to 42.75.
    scaled = MatchingGame(SCALED, options)
    own = "Ava BLEU 5\nAva Electra 6\nDaniel BLEU 0\nDaniel Electra 5\n[propose]"
    assert make_scripted("solo:think=levels", seed=0).act(scaled.view(1)).startswith(own)
    with pytest.raises(ValueError, match="think=levels needs a game with private_reasoning"):
        honest.act(MatchingGame(SMALL, BRIEF).view(0))


@pytest.mark.parametrize("stray", [0.0, 0.4, 1.0])
def test_a_straying_plan_makes_the_best_of_what_its_strays_leave(stray: float) -> None:
    rng, num_strays = np.random.default_rng(3), 0
    for _ in range(20):
        table = rng.integers(0, 10, (4, 4)).astype(float)
        pairs, strays = straying_plan(table, stray=stray, rng=rng)
        assert [paper for _, paper in pairs] == [0, 1, 2, 3]
        assert sorted(reviewer for reviewer, _ in pairs) == [0, 1, 2, 3]
        worths = {
            plan: sum(table[r, p] for p, r in enumerate(plan)) for plan in permutations(range(4))
        }
        chosen = tuple(reviewer for reviewer, _ in pairs)
        for line, strayed in enumerate(strays):
            # A line that does not stray leaves the best reachable value unchanged.
            before, after = (
                max(w for plan, w in worths.items() if plan[:known] == chosen[:known])
                for known in (line, line + 1)
            )
            assert strayed or after == before
        num_strays += sum(strays)
        assert stray or pairs == best_plan(table)
    # 40 % of 80 lines, within three standard deviations: sqrt(80 x 0.4 x 0.6) = 4.4.
    assert {0.0: num_strays == 0, 0.4: 19 <= num_strays <= 45, 1.0: num_strays == 80}[stray]


def test_a_tried_plan_stands_before_the_proposal_and_its_strays_are_detours() -> None:
    view = MatchingGame(SMALL, Rules(brief=True, private_reasoning=True)).view(0)
    table = "Ava BLEU 3\nAva Electra 5\nDaniel BLEU 5\nDaniel Electra 9\n"
    steady = make_scripted("solo:think=trial", seed=0).lesson(view)
    assert steady.text == f"{table}BLEU: Ava\nElectra: Daniel\n{BEST}" and steady.detours == ()
    tried = set()
    for seed in range(8):
        lesson = make_scripted("solo:think=trial,stray=1", seed=seed).lesson(view)
        assert lesson.text.startswith(table) and lesson.text.endswith(BEST)
        trial = lesson.text[len(table) : -len(BEST)].splitlines()
        names = [lesson.text[start:end] for start, end in lesson.detours]
        assert [line.split(": ")[1] for line in trial] == names
        tried.add(tuple(names))
    assert tried == {("Ava", "Daniel"), ("Daniel", "Ava")}


def test_a_plan_chosen_highest_first_is_improved_until_no_swap_helps() -> None:
    rng, num_swaps, num_strays = np.random.default_rng(5), 0, 0
    for number in range(40):
        table = rng.integers(0, 10, (4, 4))
        pairs, strays = highest_first(table, stray=0.5 * (number % 2), rng=rng)
        open_cells = set(np.ndindex(4, 4))
        for (r, p), strayed in zip(pairs, strays, strict=True):
            assert strayed or table[r, p] == max(table[cell] for cell in open_cells)
            open_cells -= {(a, b) for a, b in open_cells if a == r or b == p}
        assert not open_cells and len(pairs) == 4
        plan, value = {p: r for r, p in pairs}, plan_value(table, pairs)
        for swap in swaps(table, pairs):
            plan |= {p: r for r, p in swap}
            better = plan_value(table, tuple((r, p) for p, r in plan.items()))
            assert sorted(plan.values()) == [0, 1, 2, 3] and better > value
            value, num_swaps = better, num_swaps + 1
        for p, q in combinations(range(4), 2):
            assert table[plan[q], p] + table[plan[p], q] <= table[plan[p], p] + table[plan[q], q]
        num_strays += sum(strays)
    assert num_swaps >= 10 and 20 <= num_strays <= 60  # 80 picks, half of them at random


def test_small_steps_show_each_level_beside_its_value() -> None:
    game = MatchingGame(SMALL, Rules(brief=True, private_reasoning=True))
    play(game, (0, "[message] Ava BLEU 3, Daniel Electra 9"))
    small = make_scripted("honest:think=swaps", seed=0).lesson(game.view(1))
    assert small.detours == ()
    assert small.text == (
        "Mine end at 10, theirs at 10:\nAva BLEU theirs 3=3\nAva Electra 7=7\nDaniel BLEU 1=1\n"
        f"Daniel Electra theirs 9=9\nHighest first:\nDaniel Electra 9\nAva BLEU 3\n{BEST}"
    )
    # Hidden scales: cells that no one has named say so.
    scaled = make_scripted("solo:think=swaps", seed=0).act(
        MatchingGame(SCALED, FULL_THINKING).view(1)
    )
    assert scaled.startswith("Mine end at 40:\nAva BLEU ?=5\nAva Electra 28=6\nDaniel BLEU 4=0\n")
    # A stray pick is a detour, and a swap repairs it.
    texts = []
    for seed in range(8):
        stray = make_scripted("honest:think=swaps,stray=1", seed=seed).lesson(game.view(1))
        texts.append(stray.text)
        assert [stray.text[a:b] for a, b in stray.detours] == stray.text.partition("first:\n")[
            2
        ].splitlines()[:2]
        assert stray.text.endswith(BEST)
    assert sum("Better:\nAva BLEU 3\nDaniel Electra 9\n" in text for text in texts) in range(1, 8)


def test_a_player_of_the_protocol_writes_what_it_hears_and_plans_with_its_own_cells() -> None:
    game = MatchingGame(SMALL, Rules(brief=True, private_reasoning=True))
    play(game, (0, "[message] Ava BLEU 1, Daniel Electra 1"))
    pooled = make_scripted("honest:think=levels", seed=0).act(game.view(1))
    own = make_scripted("honest:think=levels,plan=own", seed=0).act(game.view(1))
    table, _, proposal = own.partition("[propose]\n")
    assert pooled == f"{table}{WORST}" and f"[propose]\n{proposal}" == BEST
    worse = MatchingGame(SMALL, BRIEF)
    play(worse, (0, "[message] Ava BLEU 3, Daniel Electra 9"), (1, "[message] none"), (0, WORST))
    answers = [
        make_scripted(f"honest{plan}", seed=0).act(worse.view(1)) for plan in ("", ":plan=own")
    ]
    assert answers == ["[reject]", "[accept]"]


def test_a_player_that_guesses_the_unseen_cells_proposes_other_plans_that_are_no_worse() -> None:
    instances = full_boards()[:24]
    view = MatchingGame(instances[0], SILENT).view(instances[0].first_seat)
    plans = {
        plan: {make_scripted(f"honest:plan={plan}", seed=seed).act(view) for seed in range(8)}
        for plan in ("own", "guess")
    }
    assert len(plans["own"]) == 1 < len(plans["guess"])
    own, guess, unplanned = (
        statistics.fmean(p.norm for p in play_all(instances, (f"honest:plan={plan}",) * 2))
        for plan in ("own", "guess", "random")
    )
    assert unplanned < own < guess


def test_random_tries_random_plans_without_a_table() -> None:
    view = MatchingGame(SMALL, Rules(brief=True, private_reasoning=True)).view(0)
    plans, seen = {"BLEU: Ava\nElectra: Daniel", "BLEU: Daniel\nElectra: Ava"}, set()
    for seed in range(16):
        lesson = make_scripted("random:think=trial,trials=2", seed=seed).lesson(view)
        thought, _, proposal = lesson.text.partition("[propose]\n")
        moves = (*thought.removesuffix("\n").split("\n\n"), proposal)
        assert len(moves) == 3 and set(moves) <= plans and lesson.detours == ()
        seen.add(moves)
    assert len(seen) > 4
    unthinking = make_scripted("random", seed=3)
    assert unthinking.act(view).startswith("[propose]")


def test_estimates_by_hand() -> None:
    # Three uniform values with maximum 59.5: the estimated end of the range is 59.5 x 4 / 3.
    assert estimate_top({(0, 0): 10, (0, 1): 20, (1, 0): 59}, num_cells=3) == pytest.approx(
        79.33, abs=0.01
    )
    # One cell is seen by both: 99.5 own units are 9.5 units of the partner.
    assert estimate_ratio({(0, 0): 99, (1, 1): 3}, {(0, 0): 9, (0, 1): 5}) == pytest.approx(
        99.5 / 9.5
    )
    assert estimate_ratio({}, {(0, 0): 9}) == 1.0
