"""Proposals: round trips, lenient forms, and every refusal with its line and valid choices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dialop.game import PlayerError
from dialop.matching.proposal import Pairs, parse_proposal, render_proposal
from dialop.matching.roster import PAPERS, REVIEWERS

TWO = REVIEWERS[:2], PAPERS[:2]
STRAIGHT: Pairs = ((0, 0), (1, 1))
CROSSED: Pairs = ((0, 1), (1, 0))


def read(text: str, reviewers: tuple[str, ...] = TWO[0], papers: tuple[str, ...] = TWO[1]) -> Pairs:
    return parse_proposal(text, reviewers, papers=papers)


@given(st.integers(2, 8).flatmap(lambda n: st.permutations(range(n))), st.booleans())
def test_what_is_written_is_read_back(papers: list[int], brief: bool) -> None:
    size = len(papers)
    pairs = tuple(enumerate(papers))
    names = REVIEWERS[:size], PAPERS[:size]
    text = render_proposal(pairs, names[0], papers=names[1], brief=brief)
    assert read(text, *names) == pairs
    assert read(text.replace("\n", "<br/>"), *names) == pairs
    assert text.startswith("Proposal:") is not brief


@given(st.permutations(range(8)), st.randoms(use_true_random=False))
def test_lines_may_come_in_any_order_and_form(papers: list[int], random: object) -> None:
    lines = [f"{PAPERS[paper]}: {REVIEWERS[r]}" for r, paper in enumerate(papers)]
    random.shuffle(lines)  # type: ignore[attr-defined]
    assert read("\n".join(lines), REVIEWERS, PAPERS) == tuple(enumerate(papers))


@pytest.mark.parametrize(
    "text",
    [
        "Proposal:\nBLEU: Ava Li\nElectra: Daniel Nguyen",
        "Proposal:<br/>&emsp; - BLEU: Ava Li<br/>&emsp; - Electra: Daniel Nguyen",
        "BLEU: Ava<br>Electra: Daniel",
        "bleu:AVA\r\nELECTRA :daniel",
        "**Proposal:**\n\n* **BLEU**: _Ava Li_.\n* **Electra**: Daniel,\n---\n",
        "1. BLEU: Li\n2) Electra: Nguyen",
        "(1) BLEU: Li\n- 2. Electra: Nguyen",
        "### proposal\n• BLEU : Ava Li\n– Electra : Daniel Nguyen",
        "Proposal: BLEU: Ava\nElectra: Daniel",
        "BLEU: a Method for Automatic Evaluation of MT: Ava Li\n"
        "electra: pre training text encoders as discriminators: Daniel Nguyen",
        "```\nBLEU\uff1aAva\nElectra: Daniel\n```",
        "BLEU: AVA Lİ\nElectra: DANİEL",
        "BLEU: Ava LI\u0307\nElectra: danıel",
    ],
)
def test_forgiven_forms(text: str) -> None:
    assert read(text) == STRAIGHT


def test_the_order_of_lines_does_not_change_the_pairs() -> None:
    assert read("Electra: Ava\nBLEU: Daniel") == read("BLEU: Daniel\nElectra: Ava") == CROSSED


# A proposal, the line that is wrong, and the choices that are left.
REFUSED = {
    "BLEU Ava\nElectra: Daniel": (1, "BLEU, Electra"),
    "BLEU: Ava\nGloVe: Daniel": (2, "Electra"),
    "BLEU: Sofia\nElectra: Ava": (1, "Ava Li, Daniel Nguyen"),
    "BLEU: Ava\nElectra: ": (2, "Daniel Nguyen"),
    "BLEU: Ava\nElectra: Li": (2, "Daniel Nguyen"),
    "BLEU: Ava\nBLEU: Daniel": (2, "Electra"),
    "Proposal:\nElectra: Ava": (2, "BLEU"),
    "Proposal:": (1, "BLEU, Electra"),
    "BLEU: Ava\nElectra: Daniel\nBLEU: Ava": (3, "none"),
    "BLEU: Ava\nElectra: Daniel\nGood?": (3, "none"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_refusals_name_the_line_and_the_choices(text: str) -> None:
    line, free = REFUSED[text]
    with pytest.raises(PlayerError, match=rf"^line {line} .*\. Free: {free}$") as refused:
        read(text)
    assert refused.value.kind == "bad_proposal"


def test_brief_refusals_are_short() -> None:
    with pytest.raises(PlayerError) as refused:
        parse_proposal("BLEU: Ava\nElectra: Ava", TWO[0], papers=TWO[1], brief=True)
    assert str(refused.value) == "line 2 uses Ava again. Free: Daniel"


def test_ambiguous_names_are_refused_and_whole_names_win() -> None:
    reviewers = "Ava Li", "Ava Reed", "Reed"
    papers = "A: one", "B: two", "C: three"
    for name in ("Ava", "ava"):
        with pytest.raises(PlayerError, match=r"names more than one reviewer\. Free: Ava Li"):
            read(f"A: {name}\nB: Reed\nC: Li", reviewers, papers)
    assert read("A: Ava Reed\nB: Reed\nC: Li", reviewers, papers) == ((0, 2), (1, 0), (2, 1))


def test_long_lines_are_quoted_short() -> None:
    with pytest.raises(PlayerError) as refused:
        read("y" * 10_000)
    assert len(str(refused.value)) < 120
