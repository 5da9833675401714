"""Golden playthroughs and rules of the matching game, on boards small enough to check by hand."""

from dataclasses import replace

import pytest

from dialop.logged import Rules
from dialop.matching.game import MatchingGame
from dialop.specs import nearest
from tests.helpers.dialop_boards import BEST, BRIEF, FULL, SCALED, SMALL, WORST, play


def test_golden_brief_game() -> None:
    game = MatchingGame(SMALL, BRIEF)
    assert game.prompt(0).system == ""
    assert game.prompt(0).user == "Ava BLEU 3\nAva Electra ?\nDaniel BLEU ?\nDaniel Electra 9"
    assert game.prompt(1).user == "Ava BLEU ?\nAva Electra 7\nDaniel BLEU 1\nDaniel Electra ?"
    step = game.step(0, "[message] Ava BLEU 3, Daniel Electra 9")
    assert step.observations == ("", "Partner:\nAva BLEU 3, Daniel Electra 9")
    step = game.step(1, "[propose]\nBLEU: Daniel\nElectra: Ava")
    assert step.observations == ("Partner: [propose]\nBLEU: Daniel\nElectra: Ava", "")
    step = game.step(0, "[reject]")
    assert step.observations == ("Your move.", "Partner: [reject]")
    assert game.seat_to_move == 0
    step = game.step(0, BEST)
    assert step.observations == ("", "Partner: [propose]\nBLEU: Ava\nElectra: Daniel")
    assert not game.outcome().agreed and game.outcome().rewards == (0.0, 0.0)
    step = game.step(1, "[accept]")
    assert step.observations == ("Partner: [accept]", "")
    outcome = game.outcome()
    assert (outcome.over, outcome.agreed, outcome.score, outcome.score_norm) == (True, True, 12, 1)
    assert outcome.rewards == (1.0, 1.0)
    assert outcome.facts == {"best": 12.0, "solo_0": 1.0, "solo_1": 8 / 12}


def test_golden_full_game() -> None:
    game = MatchingGame(SCALED, FULL)
    system, user = game.prompt(0).system, game.prompt(0).user
    assert "unknown factor" in system and "[message]" in system and "BLEU: Daniel Nguyen" in system
    assert user == (
        ",BLEU: a Method for Automatic Evaluation of MT,"
        "Electra: Pre-training Text Encoders as Discriminators\n"
        "Ava Li,7,\n"
        "Daniel Nguyen,,22"
    )
    assert game.prompt(1).user.endswith("\nAva Li,,28\nDaniel Nguyen,4,\n\nYou move first.")
    step = game.step(1, "[Message]  Two lines,\nboth kept. ")
    assert step.observations == ("Partner: [message] Two lines,\n  both kept.", "")
    step = game.step(0, "  [PROPOSE] proposal:<br/>&emsp; - Electra: Li<br/>&emsp; - BLEU: Daniel")
    shown = "Partner: [propose]\nProposal:\nBLEU: Daniel Nguyen\nElectra: Ava Li\n"
    assert step.observations == ("", shown + "You can only answer [accept] or [reject].")
    step = game.step(1, "[reject] too little")
    rejected = "You rejected the proposal. It is your move again."
    assert step.observations == ("Partner: [reject]", rejected)
    play(game, (1, WORST), (0, "[accept] fine"))
    outcome = game.outcome()
    assert outcome.score == 8 and outcome.score_norm == pytest.approx(8 / 12)


def test_unscaled_boards_tell_the_unknown_value_and_scaled_ones_do_not() -> None:
    assert "counts as 5, the average" in MatchingGame(SMALL, FULL).prompt(0).system
    assert MatchingGame(SMALL, FULL).view(0).public_unknown == 5
    assert "counts as the average value" in MatchingGame(SCALED, FULL).prompt(0).system
    assert MatchingGame(SCALED, FULL).view(0).public_unknown is None


def test_a_view_holds_nothing_of_the_partner() -> None:
    fields = set(type(MatchingGame(SMALL, FULL).view(0)).__slots__)
    assert not fields & {"instance", "table", "masks", "scales", "best", "solo", "facts"}
    other = replace(SMALL, key="hand/2", table=((3, 2), (8, 9)), solo=(12.0, 8.0))
    # The boards differ only where seat 0 sees nothing, so seat 0 cannot tell them apart.
    for options in (FULL, BRIEF):
        one, two = MatchingGame(SMALL, options), MatchingGame(other, options)
        assert one.prompt(0) == two.prompt(0) and one.view(0) == two.view(0)
        assert one.prompt(1) != two.prompt(1)


def test_private_reasoning_is_allowed_only_on_request_and_never_shown() -> None:
    text = "I think [propose] comes later.\n<think>[message] no</think>\n Well\n[message] Hello"
    assert MatchingGame(SMALL, FULL).step(0, text).error_kind == "no_tag"
    game = MatchingGame(SMALL, Rules(private_reasoning=True))
    assert game.step(0, text).observations == ("", "Partner: [message] Hello")
    assert game.view(1).log[0].text == "Hello"
    assert game.step(1, "no tag anywhere").error_kind == "no_tag"
    assert game.step(1, "thinking\n[accept]").error_kind == "nothing_pending"


def test_a_board_worth_nothing_scores_one_for_any_agreement() -> None:
    empty = replace(SMALL, table=((0, 0), (0, 0)), best=0, solo=(0.0, 0.0))
    game = play(MatchingGame(empty, FULL), (0, BEST), (1, "[accept]"))
    assert game.outcome().score == 0 and game.outcome().score_norm == 1


@pytest.mark.parametrize(
    "names",
    [
        ("Jose\u0301 Li", "Ann Ray"),
        ("Jose\u0301 Li", "Jos\u00e9 Li"),
        ("Zo\u0308e", "Ann"),
        ("Ki\u0302n Bo", "Ann"),
    ],
)
def test_names_in_another_unicode_form_are_refused_with_the_cause(names: tuple[str, str]) -> None:
    """Both forms look the same, so the error shows the characters."""
    with pytest.raises(ValueError, match=r"'.*\\u03.*' and must be in the Unicode form NFKC"):
        replace(SMALL, reviewers=names).check_board()


def test_a_near_choice_that_looks_the_same_is_told_with_the_cause() -> None:
    said = nearest("re\u0301sume\u0301.yaml", ["r\u00e9sum\u00e9.yaml", "other.yaml"])
    assert said.endswith(".yaml, which is written in another Unicode form (NFC, NFD)")
    assert nearest("resume.yaml", ["resumes.yaml"]) == "; nearest is resumes.yaml"


def test_the_cells_of_a_board_are_below_its_max_value() -> None:
    """The largest cell of the small board is 9."""
    SMALL.check_board()
    with pytest.raises(ValueError, match=r"table\[1\]\[1\] .* 0 to 8.* got 9"):
        replace(SMALL, max_value=9).check_board()
