"""Word distances to people: by hand, on a small record, on the recorded games, in a run."""

import json
import math
from itertools import chain
from pathlib import Path

import pytest

from dialop.matching.recorded import said_in
from dialop.rows import read_records
from selfplay.config import GameConfig
from selfplay.errors import SettingsError
from selfplay.evaluation.word_drift import (
    count_words,
    cross_entropy,
    divergence,
    read_people,
    words_of,
)
from tests.helpers.dialop_boards import human_games
from tests.helpers.tiny_run import metrics_of, run_warm

SAID = ("Ava is great at BLEU", "BLEU 9 for Ava?", "I see Daniel Electra 4", "ok")


def record(*messages: str) -> dict[str, object]:
    """A game with these messages and no agreement."""
    log: list[dict[str, object]] = [
        {"type": "message", "player": number % 2, "message": {"data": text}}
        for number, text in enumerate(messages)
    ]
    log.append({"type": "proposal_response", "player": 0, "response": {"accept": False}})
    return {"action_log": log, "table": [[9, 5], [1, 4]]}


@pytest.fixture
def own_record(tmp_path: Path) -> Path:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(record(*SAID)) + "\n" for _ in range(2)))
    return path


# --- by hand ------------------------------------------------------------------------------------


def test_a_word_is_letters_in_lower_case_and_any_number_is_one_word() -> None:
    text = "I don’t see 42, Élodie's BLEU... is it 7.5?"
    assert words_of(text) == ["i", "don't", "see", "0", "élodie's", "bleu", "is", "it", "0", "0"]
    assert words_of(" ?! ") == []


def test_counts_hold_words_and_edges() -> None:
    counts = count_words(["a b", "a", "!"])
    assert counts.single == {"a": 2, "b": 1, "": 2}
    assert counts.pairs == {("", "a"): 2, ("a", "b"): 1, ("a", ""): 1, ("b", ""): 1}
    assert counts.words == {"a": 2, "b": 1}


def test_the_divergence_by_hand() -> None:
    assert divergence({"a": 1, "b": 1}, {"a": 10, "b": 10}) == 0.0
    assert divergence({"a": 3}, {"b": 5}) == 1.0
    # P = (1, 0), Q = (1/2, 1/2), their middle (3/4, 1/4): H = 0.8113, less half of 0 + 1.
    middle = -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))
    assert divergence({"a": 4}, {"a": 1, "b": 1}) == pytest.approx(middle - 0.5)
    assert divergence({"a": 1, "b": 1}, {"a": 4}) == pytest.approx(middle - 0.5)
    with pytest.raises(ValueError, match="words on both sides"):
        divergence({}, {"a": 1})


def test_the_cross_entropy_by_hand() -> None:
    people = count_words(["a b", "a"])
    # Five words with their ends, three kinds and one for all others: p(a) = 3/9, p(end) = 3/9.
    # p(a | start) = (2/2 + 3/9) / 2 = 2/3 and p(end | a) = (1/2 + 3/9) / 2 = 5/12.
    bits = -(math.log2(2 / 3) + math.log2(5 / 12)) / 2
    assert cross_entropy(count_words(["a"]), people) == pytest.approx(bits)
    assert cross_entropy(count_words(["a", "a"]), people) == pytest.approx(bits)
    # An unknown word: p(x | start) = (0 + 1/9) / 2, p(end | x) = 3/9, for x has no count.
    bits = -(math.log2(1 / 18) + math.log2(1 / 3)) / 2
    assert cross_entropy(count_words(["x"]), people) == pytest.approx(bits)
    with pytest.raises(ValueError, match="words on both sides"):
        cross_entropy(count_words([]), people)


def test_the_word_model_is_a_probability() -> None:
    """After any word the probabilities of all words, the end and one new word add up to 1."""
    people = count_words(SAID)
    for before in ("", "ava", "zug"):
        total = 0.0
        for word in [*people.single, "never said"]:
            pair = count_words([])
            pair.pairs[before, word] = 1
            total += 2 ** -cross_entropy(pair, people)
        assert total == pytest.approx(1.0)


# --- files --------------------------------------------------------------------------------------


def test_a_code_is_farther_from_a_record_than_its_own_words(own_record: Path) -> None:
    people = read_people(str(own_record), GameConfig())
    assert people.words["ava"] == 4 and people.words["0"] == 4
    own, code = count_words(SAID), count_words(["zug zag zug", "zag 9"])
    assert divergence(own.words, people.words) == 0.0
    assert 0.5 < divergence(code.words, people.words) < 1.0
    assert cross_entropy(own, people) < 3 < 4 < cross_entropy(code, people)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("{", "line 1: "),
        ('{"table": []}', "line 1: it has no action_log"),
        (json.dumps(record()), "holds no message"),
    ],
)
def test_a_file_without_words_is_refused(text: str, rule: str, tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(text + "\n")
    with pytest.raises(SettingsError, match=f"eval.human_words: .*{rule}"):
        read_people(str(path), GameConfig())
    for name, rule in (("othr.jsonl", "No such file.*nearest is .*other.jsonl"), (".", "Is a dir")):
        with pytest.raises(SettingsError, match=rf"^eval.human_words must be .*got .*: {rule}"):
            read_people(str(tmp_path / name), GameConfig())


def test_people_are_nearer_to_people_than_a_code_is() -> None:
    """Every second recorded game against the others: the least distance a policy could reach."""
    games = [said_in(game) for game in read_records(human_games())]
    some, others = (count_words(chain.from_iterable(games[start::2])) for start in (0, 1))
    assert sum(some.words.values()) > 5000
    terse = count_words(["Ava BLEU 9", "Daniel Electra 7"] * 50)
    code = count_words(["zug zug", "zag"] * 50)
    among, short, away = (
        (divergence(counts.words, others.words), cross_entropy(counts, others))
        for counts in (some, terse, code)
    )
    assert among[0] < 0.1 < 0.5 < short[0] < 0.99 and away[0] == pytest.approx(1.0)
    # A few common words have a low cross-entropy, so both numbers are needed.
    assert 5 < among[1] < 8 < away[1] and short[1] < 8


# --- in a run -----------------------------------------------------------------------------------


def test_a_run_logs_how_far_its_words_are(own_record: Path, tmp_path: Path) -> None:
    file = f"eval.human_words={own_record}"
    run_warm(tmp_path / "run", "eval.every=2", "steps=2", file)
    first, second = metrics_of(tmp_path / "run")
    assert "eval_word_divergence" not in first
    assert 0.0 < second["eval_word_divergence"] < 1.0
    assert second["eval_word_cross_entropy"] > 1.0
