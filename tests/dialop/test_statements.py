"""Statements in messages: accepted wordings, wordings that state nothing, and round trips."""

from dataclasses import replace

import numpy as np
import pytest

from dialop.logged import Rules
from dialop.matching import wording
from dialop.matching.game import MatchingGame, MatchingInstance
from dialop.matching.generate import MatchingRecipe, generate_instance
from dialop.matching.scripted import own_cells
from dialop.matching.statements import count_true, stated_cells
from tests.helpers.dialop_boards import BRIEF, FULL, SMALL

EIGHT = generate_instance(MatchingRecipe(keep="all"), seed=5, index=0)
AVA_BLEU, AVA_ELECTRA, DANIEL_BLEU, DANIEL_ELECTRA = (0, 0), (0, 1), (1, 0), (1, 1)


@pytest.mark.parametrize(
    "text",
    [
        *("Ava on BLEU is 87", "Ava-BLEU: 87", "Ava BLEU 87", "ava li for bleu: 87!"),
        *("87 for Ava on BLEU.", "I have BLEU at 87 for Li, I think."),
        "Hello there, my best is Ava, who has 87 on BLEU",
        *("BLEU: a Method for Automatic Evaluation of MT - Ava Li = 87", "Ava (BLEU) 87"),
        *("Ava/BLEU=87", "Ava:\n- BLEU 87"),
    ],
)
def test_one_statement_in_many_words(text: str) -> None:
    assert stated_cells(text, SMALL) == [(*AVA_BLEU, 87)]


def test_lists_carry_the_last_named_row_or_column() -> None:
    rows = [(*AVA_BLEU, 8), (*AVA_ELECTRA, 5), (*DANIEL_BLEU, 0)]
    assert stated_cells("Ava: BLEU 8, Electra 5; Daniel: BLEU 0", SMALL) == rows
    assert stated_cells("Ava has 8 on BLEU and 5 on Electra. Daniel has 0 on BLEU.", SMALL) == rows
    assert stated_cells("Ava BLEU 8 Ava Electra 5 Daniel BLEU 0", SMALL) == rows
    columns = [(*AVA_BLEU, 8), (*DANIEL_BLEU, 0), (*DANIEL_ELECTRA, 3)]
    assert stated_cells("BLEU: Ava 8, Daniel 0. Electra: Daniel 3", SMALL) == columns


@pytest.mark.parametrize(
    "text",
    [
        *("", "I see nothing useful here.", "Is Ava on BLEU 87?", "Ava on BLEU is not 87"),
        *("Ava on BLEU is less than 87", "Ava is my number 1", "I rate BLEU 4/10 for Ava"),
        *("Ava on BLEU is 87.5", "Ava on BLEU is 40%", "Sofia on BLEU is 87", "Ava BLEU 87 12"),
        *("Ava on BLEU is 1234567", "BLEU: Ava\nElectra: Daniel"),
        # Another value than 41.
        *("Ava BLEU -41", "Ava BLEU: −41", "Ava BLEU=–41", "Ava BLEU (-41)", "Ava BLEU minus 41"),
        *("Ava BLEU 41,500", "Ava BLEU 3,041", "Ava BLEU 41'000", "Ava BLEU 41^2", "Ava BLEU 41²"),
        *("Ava BLEU 41 percent", "Ava BLEU 41 thousand", "Ava BLEU ≤41", "Ava BLEU ±41"),
        # Denials.
        *("Ava on BLEU isn’t 41", "Ava on BLEU isnt 41", "Ava on BLEU cannot be 41"),
        *("It is wrong that Ava on BLEU has 41", "neither Ava BLEU 41", "I doubt Ava BLEU is 41"),
    ],
)
def test_what_states_nothing(text: str) -> None:
    assert stated_cells(text, SMALL) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Ava BLEU 1, Zoe Electra 0", [(*AVA_BLEU, 1)]),
        ("ava bleu 1, zoe electra 0", [(*AVA_BLEU, 1)]),
        ("Ava BLEU 1. Zoe: BLEU 0, Electra 3; Electra 4", [(*AVA_BLEU, 1)]),
        ("Ava BLEU 1, Electra 0 for Zoe", [(*AVA_BLEU, 1)]),
        ("Ava BLEU 1 Zoe Electra 0", []),
        ("Ava BLEU 1, Zoe is great, Electra 0", [(*AVA_BLEU, 1)]),
        ("BLEU: Ava 1, BERT: Daniel 2, Ava 3", [(*AVA_BLEU, 1)]),
        ("Zoe is great, Ava BLEU 1, Electra 0", [(*AVA_BLEU, 1), (*AVA_ELECTRA, 0)]),
        ("Ava: BLEU 1, and she has 0 on Electra", [(*AVA_BLEU, 1), (*AVA_ELECTRA, 0)]),
        ("DANİEL BLEU 1, danıel Electra 2", [(*DANIEL_BLEU, 1), (*DANIEL_ELECTRA, 2)]),
    ],
)
def test_a_number_beside_a_name_that_the_board_lacks_is_nobodys(
    text: str, expected: list[tuple[int, int, int]]
) -> None:
    """It goes to no name before it, and neither does what follows until the next name."""
    assert stated_cells(text, SMALL) == expected


def test_a_dash_between_a_name_and_a_number_is_no_minus() -> None:
    for text in ("Ava-BLEU-41", "Ava BLEU - 41", "- 41 for Ava on BLEU", "Ava–BLEU – 41"):
        assert stated_cells(text, SMALL) == [(*AVA_BLEU, 41)]


@pytest.mark.parametrize("name", ["Weiß", "İnci", "ﬁona", "ŉora", "ẞara", "ΐan", "ǰan", "Straßﬂe"])
def test_a_statement_about_a_name_whose_folding_is_longer(name: str) -> None:
    """It is about that name and no other, whatever the case in which the name is written."""
    named = replace(SMALL, reviewers=("Ava Li", f"{name} Moe"))
    named.check_board()
    for written in (name, f"{name} Moe", name.upper(), name.lower(), name.casefold()):
        cells = stated_cells(f"Ava BLEU 1, {written} BLEU 0; {written}: Electra 7", named)
        assert cells == [(*AVA_BLEU, 1), (*DANIEL_BLEU, 0), (*DANIEL_ELECTRA, 7)]
        assert stated_cells(f"{written} Electra -7", named) == []
    titled = replace(SMALL, papers=(f"{name}: a Method", "Electra"))
    assert stated_cells(f"Ava Electra 1, Ava {name} 0", titled) == [
        (*AVA_ELECTRA, 1),
        (*AVA_BLEU, 0),
    ]


def test_only_values_the_speaker_sees_are_true() -> None:
    view = MatchingGame(SMALL, FULL).view(0)
    assert count_true(view, "Ava BLEU 3, Daniel Electra 9") == (2, 2)
    assert count_true(view, "Ava BLEU 4, Daniel Electra 9") == (1, 2)
    # 7 is the true value, but only the partner sees that cell.
    assert count_true(view, "Ava Electra 7") == (0, 1)
    assert count_true(view, "hello") == (0, 0)


@pytest.mark.parametrize("instance", [SMALL, EIGHT])
@pytest.mark.parametrize("options", [FULL, BRIEF])
def test_everything_that_scripted_players_tell_reads_back(
    instance: MatchingInstance, options: Rules
) -> None:
    view = MatchingGame(instance, options).view(0)
    cells = own_cells(view)
    texts = {wording.message(cells, view, rng=np.random.default_rng(s)) for s in range(400)}
    assert len(texts) == 1 if options.brief else len(texts) > 50
    for text in texts:
        tag, content = text[: len("[message]")], text[len("[message]") :]
        told = stated_cells(content, view)
        assert tag == "[message]" and sorted(told) == sorted((*c, v) for c, v in cells.items())
        assert count_true(view, content) == (len(cells), len(cells))
    for seed in range(10):
        nothing = wording.message({}, view, rng=np.random.default_rng(seed))
        assert stated_cells(nothing, view) == []
