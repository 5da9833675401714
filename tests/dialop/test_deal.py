"""The example with one binding split: its rules by hand, and what silence can reach."""

from itertools import groupby, permutations
from operator import itemgetter
from pathlib import Path
from statistics import fmean

import pytest

from dialop.checks import check_kit
from dialop.kit import load_kit
from examples.deal.deal import COUNTS, Instance, Options, able, shares, words, worth
from examples.deal.english import valued
from examples.deal.silent import bound_of, silent_bound

GAME = Path(__file__).resolve().parents[2] / "examples/deal/deal.py"
KIT = load_kit(str(GAME))
# 2, 1 and 3 items, worth 3, 4, 0 to one player and 1, 2, 2 to the other: at best 6 + 4 + 6.
HAND = Instance("hand", (2, 1, 3), ((3, 4, 0), (1, 2, 2)))


@pytest.mark.parametrize("options", [Options(), Options(shared=False), Options(messages=False)])
def test_the_game_passes_the_checks_in_at_most_150_lines(options: Options) -> None:
    assert len(GAME.read_text(encoding="utf-8").splitlines()) <= 150
    given = KIT.Options(shared=options.shared, messages=options.messages)
    assert not [line.line() for line in check_kit(KIT, given) if line.problem]


def test_a_deal_by_hand() -> None:
    game = KIT.new_game(HAND, Options())
    assert game.prompt(1).user == "2 1 3 worth 1 2 2"
    for seat, text, kind in (
        (0, "[message] 3 4 1", None),
        (1, "[split] 0 0 4", "no_split"),
        (1, "[split] 3", "no_split"),
        (1, "[split] 0 0 3", None),
        (0, "[message] wait", "no_talk"),
        (0, "[split] 2 1 0", None),
    ):
        assert game.step(seat, text).error_kind == kind
    outcome = game.outcome()
    assert outcome.over and outcome.agreed
    assert (outcome.score, outcome.score_norm, outcome.rewards) == (16, 1.0, (1.0, 1.0))
    said = {"statements": 3.0, "true_statements": 2.0}  # the third kind is worth 0, not 1
    assert game.measures((0,)) == {"pareto": 1.0, **said}
    assert game.measures((1,))["statements"] == 0


@pytest.mark.parametrize(
    ("first", "second", "paid", "pareto"),
    [
        ("2 1 0", "0 0 3", (1.0, 0.6), 1.0),
        ("2 0 3", "0 1 0", (0.6, 0.2), 0.0),  # 2 0 0 leaves more to the other
        ("2 1 0", "0 0 2", (0.0, 0.0), 0.0),
        ("2 1 0", "2 1 3", (0.0, 0.0), 0.0),
    ],
)
def test_each_is_paid_its_own_share_only_if_the_splits_fit(
    first: str, second: str, paid: tuple[float, float], pareto: float
) -> None:
    game = KIT.new_game(HAND, Options(shared=False))
    for seat, text in enumerate((first, second)):
        assert game.step(seat, f"[split] {text}").error is None
    outcome = game.outcome()
    assert outcome.over and outcome.agreed == (sum(paid) > 0)
    assert outcome.rewards == outcome.seat_scores == paid
    assert game.measures((0, 1))["pareto"] == pareto


def test_without_messages_the_first_move_is_a_split() -> None:
    game = KIT.new_game(HAND, Options(messages=False))
    assert game.step(0, "[message] 3 4 0").error_kind == "no_talk"
    assert game.measures((0, 1))["pareto"] == 0.0 == game.outcome().score


def test_instances_are_those_of_the_paper() -> None:
    """5 to 7 items, each kind at least once; both value all of them at 10, in two ways."""
    for instance in KIT.generate(Options(), seed=3, num=200):
        assert 5 <= sum(instance.counts) <= 7 and min(instance.counts) >= 1
        assert {worth(values, instance.counts) for values in instance.values} == {10}
        assert instance.values[0] != instance.values[1]


def test_the_bound_of_silence_is_what_the_best_splits_are_paid_in_the_game() -> None:
    """5, 1 and 1 items: each split of each view is played against every other view."""
    counts, found = (5, 1, 1), []
    pairs = list(permutations(able(counts), 2))
    assert len(pairs) == 18 * 17  # 5a + b + c = 10: 11, 6 and 1 ways
    for _, group in groupby(pairs, key=itemgetter(0)):
        instances = [Instance("one", counts, pair) for pair in group]
        means = []
        for share in shares(counts):
            left = tuple(c - s for c, s in zip(counts, share, strict=True))
            scores = []
            for instance in instances:
                game = KIT.new_game(instance, Options(messages=False))
                for seat, part in enumerate((share, left)):
                    assert game.step(seat, f"[split] {words(part)}").error is None
                scores.append(game.outcome().score_norm)
            means.append(fmean(scores))
        found.append(max(means))
    assert bound_of(counts) == pytest.approx(fmean(found))


def test_telling_reaches_the_best_and_guessing_stays_below_the_bound() -> None:
    """Over 500 games; the order of the three kinds does not matter to the bound."""
    bound = silent_bound([(1, 1, 3), (1, 1, 5)])
    assert bound == pytest.approx(silent_bound([(3, 1, 1), (1, 5, 1)]))
    assert len(COUNTS) == 6 + 10 + 15
    scores: dict[str, list[float]] = {"tell": [], "guess": []}
    for instance in KIT.generate(Options(), seed=0, num=500):
        for name, found in scores.items():
            game, script = KIT.new_game(instance, Options()), KIT.make_script(name, seed=1)
            while (seat := game.seat_to_move) is not None:
                assert game.step(seat, script.act(game.view(seat))).error is None
            found.append(game.outcome().score_norm)
    assert fmean(scores["tell"]) == 1.0
    assert 0.8 < fmean(scores["guess"]) < 0.9164 == pytest.approx(silent_bound(), abs=5e-5)


ENGLISH = load_kit(str(GAME.with_name("english.py")))


@pytest.mark.parametrize("messages", [True, False])
def test_the_game_in_english_passes_the_checks(messages: bool) -> None:
    given = ENGLISH.Options(messages=messages)
    assert not [line.line() for line in check_kit(ENGLISH, given) if line.problem]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("To me each book is worth 3, each hat 4 and each ball 0.", (3, 4, 0)),
        ("I get 3 points for a book, 4 for a hat and 0 for a ball.", (3, 4, 0)),
        ("My points: Book 3, hats: 12.", (3, 12, None)),
        ("I want 2 books and 1 hat, not the ball.", (None, None, None)),
    ],
)
def test_what_a_message_in_english_says_of_the_values(
    text: str, said: tuple[int | None, ...]
) -> None:
    assert valued(text) == said


def test_a_deal_in_english_by_hand() -> None:
    """The same game as with numbers: the third kind is worth 0 to the first player, not 1."""
    game = ENGLISH.new_game(HAND, ENGLISH.Options())
    assert game.prompt(0).user == (
        "There are 2 books, 1 hat and 3 balls. "
        "To you each book is worth 3, each hat 4 and each ball 0."
    )
    for seat, text, kind in (
        (0, "[message] My points: book 3, hat 4, ball 1.", None),
        (1, "[split] the balls", "no_split"),
        (1, "[split] 4 balls", "no_split"),
        (1, "[split] I take all 3 balls, 3 balls I say.", None),
        (0, "[split] 1 Hat and 2 books", None),
    ):
        assert game.step(seat, text).error_kind == kind
    outcome = game.outcome()
    assert (outcome.score, outcome.score_norm, outcome.rewards) == (16, 1.0, (1.0, 1.0))
    said = {"statements": 3.0, "true_statements": 2.0}
    assert game.measures((0, 1)) == {"pareto": 1.0, **said}


def test_players_in_english_score_as_those_with_numbers() -> None:
    for name in ("tell", "guess"):
        for instance in KIT.generate(Options(), seed=0, num=60):
            scores = []
            for kit in (KIT, ENGLISH):
                game, script = kit.new_game(instance, kit.Options()), kit.make_script(name, seed=1)
                while (seat := game.seat_to_move) is not None:
                    assert game.step(seat, script.act(game.view(seat))).error is None
                scores.append(game.outcome().score_norm)
            assert scores[0] == scores[1]
