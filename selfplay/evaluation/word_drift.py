"""How far the policy's words are from people's: two distances, in bits, of message words.

People's words come from a file of recorded games, which is only read. A word is a run of letters in
lower case, any number counts as one and the same word, and punctuation is none. Knows no engine and
no gradients.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dialop.matching.recorded import said_in
from dialop.rows import read_records
from selfplay.config import Config
from selfplay.config.settings import SettingsError
from selfplay.distributed import World, gather_objects
from selfplay.games import kit_of
from selfplay.metrics.games import messages
from selfplay.rollout.episode import Episode

EDGE = ""  # stands before the first word of a message and after its last
NUMBER = "0"
PAIR_SHARE = 0.5  # what a word's predecessor decides of its probability
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*|\d+")


@dataclass(frozen=True, slots=True)
class WordCounts:
    """What was said: how often each word and each two in a row, a message's edges counted as a
    word. Each message adds one edge to `single` and one before and one after its words to
    `pairs`."""

    single: Counter[str]
    pairs: Counter[tuple[str, str]]

    @property
    def words(self) -> dict[str, int]:
        """The counts of words alone."""
        return {word: count for word, count in self.single.items() if word != EDGE}


def words_of(message: str) -> list[str]:
    """The words of a message, in order."""
    found = (match.group() for match in _WORD.finditer(message.lower().replace("’", "'")))
    return [NUMBER if word[0].isdigit() else word for word in found]


def count_words(messages: Iterable[str]) -> WordCounts:
    """Counts over messages; one without a word counts for nothing."""
    counts = WordCounts(Counter(), Counter())
    for message in messages:
        if words := words_of(message):
            counts.single.update([*words, EDGE])
            counts.pairs.update(zip([EDGE, *words], [*words, EDGE], strict=True))
    return counts


def divergence(one: Mapping[str, int], other: Mapping[str, int]) -> float:
    """Jensen-Shannon divergence of two word distributions in bits (Lin 1991, "Divergence measures
    based on the Shannon entropy"): H((P + Q) / 2) - (H(P) + H(Q)) / 2, 0 for equal shares of each
    word, 1 where no word is common.

    Raises ValueError where one of them has no words.
    """
    num_one, num_other = sum(one.values()), sum(other.values())
    if not num_one or not num_other:
        raise ValueError("a divergence needs words on both sides")
    total = 0.0
    for word in sorted({*one, *other}):
        p, q = one.get(word, 0) / num_one, other.get(word, 0) / num_other
        middle = (p + q) / 2
        total += sum(share / 2 * math.log2(share / middle) for share in (p, q) if share)
    return total


def cross_entropy(said: WordCounts, people: WordCounts) -> float:
    """Bits a word, a message's end included, that a word model of people's messages needs for what
    was said: -1/N sum of log2 p(word | word before).

    The model is a bigram model mixed with a unigram model, p(w | v) = s c(v, w) / c(v) + (1 - s)
    p(w) with s = 1/2 (Jelinek and Mercer 1980), and p(w) = (c(w) + 1) / (C + V + 1), which adds one
    to each of V words and to one more that stands for all words people never used.

    Raises ValueError where one of them has no words.
    """
    num_said, num_people = sum(said.pairs.values()), sum(people.single.values())
    if not num_said or not num_people:
        raise ValueError("a cross-entropy needs words on both sides")
    bits = 0.0
    for (before, word), count in sorted(said.pairs.items()):
        alone = (people.single[word] + 1) / (num_people + len(people.single) + 1)
        seen = people.single[before]
        after = people.pairs[before, word] / seen if seen else alone
        bits -= count * math.log2(PAIR_SHARE * after + (1 - PAIR_SHARE) * alone)
    return bits / num_said


def word_drift(episodes: Iterable[Episode], people: WordCounts, world: World) -> dict[str, float]:
    """Both distances of the policy's legal messages from people's, over all ranks' games; nothing
    where it said no word."""
    parts: Sequence[WordCounts] = gather_objects(count_words(_messages(episodes)), world)
    said = WordCounts(Counter(), Counter())
    for part in parts:
        said.single.update(part.single)
        said.pairs.update(part.pairs)
    if not said.single:
        return {}
    return {
        "word_divergence": divergence(said.words, people.words),
        "word_cross_entropy": cross_entropy(said, people),
    }


@lru_cache(maxsize=1)
def read_people(path: str) -> WordCounts:
    """The words of a .jsonl of recorded games.

    Raises:
        SettingsError: for a file that cannot be read, or in which nothing is said.
    """
    try:
        counts = count_words(_said(Path(path)))
    except (OSError, ValueError) as error:
        raise SettingsError(f"eval.human_words: {error}") from None
    if not counts.single:
        raise SettingsError(f"eval.human_words: {path} holds no message")
    return counts


def _said(path: Path) -> Iterator[str]:
    """The messages of all records. Raises ValueError with the file and line of one without."""
    for number, record in enumerate(read_records(path), start=1):
        try:
            yield from said_in(record)
        except ValueError as error:
            raise ValueError(f"{path} line {number}: {error}") from None


def check_words(config: Config) -> None:
    """Raise SettingsError, before anything starts, where people's words cannot be read."""
    if config.eval.human_words is None:
        return
    if not kit_of(config.game).PLAYED_BY_PEOPLE:
        raise SettingsError(
            f"eval.human_words must be empty for {config.game.name}, which no people recorded, got "
            f"{config.eval.human_words}"
        )
    read_people(config.eval.human_words)


def _messages(episodes: Iterable[Episode]) -> Iterable[str]:
    """The words of each message of a seat that the policy has."""
    for episode in episodes:
        policy = [seat for seat, t in enumerate(episode.transcripts) if t is not None]
        yield from (text for _, text in messages(episode, policy))
