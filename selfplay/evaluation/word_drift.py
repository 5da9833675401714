"""Two distances, in bits, between the words of the policy's messages and people's words.

People's words come from a file of recorded games. A word is a run of letters in lower case; all
numbers count as one word; punctuation does not count. Never sees engines or gradients.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dialop.rows import read_records
from selfplay.config import EvalConfig, GameConfig
from selfplay.distributed import World, gather_objects
from selfplay.errors import SettingsError
from selfplay.metrics.games import messages
from selfplay.partners.checkpoints import nearest_beside
from selfplay.rollout.episode import Episode

EDGE = ""  # stands for the start and the end of a message
NUMBER = "0"
PAIR_SHARE = 0.5  # the weight of the bigram model in the mixture
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*|\d+")


@dataclass(frozen=True, slots=True)
class WordCounts:
    """Counts of words and of pairs of adjacent words. EDGE counts as a word: once per message in
    `single`, and before the first and after the last word in `pairs`."""

    single: Counter[str]
    pairs: Counter[tuple[str, str]]

    @property
    def words(self) -> dict[str, int]:
        """The counts without EDGE."""
        return {word: count for word, count in self.single.items() if word != EDGE}


def words_of(message: str) -> list[str]:
    """The words of a message, in order."""
    words = _WORD.findall(message.lower().replace("’", "'"))
    return [NUMBER if word[0].isdigit() else word for word in words]


def count_words(messages: Iterable[str]) -> WordCounts:
    """Counts over messages; a message without a word is left out."""
    counts = WordCounts(Counter(), Counter())
    for message in messages:
        if words := words_of(message):
            counts.single.update([*words, EDGE])
            counts.pairs.update(zip([EDGE, *words], [*words, EDGE], strict=True))
    return counts


def divergence(one: Mapping[str, int], other: Mapping[str, int]) -> float:
    """Jensen-Shannon divergence of two word distributions in bits (Lin 1991, "Divergence measures
    based on the Shannon entropy"): H((P + Q) / 2) - (H(P) + H(Q)) / 2. It is 0 for equal
    distributions and 1 for distributions without a common word.

    Raises ValueError if either has no words.
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


def cross_entropy(policy: WordCounts, people: WordCounts) -> float:
    """Cross-entropy of the policy's messages under a word model of people's messages, in bits per
    word: -1/N sum of log2 p(word | word before). The end of a message counts as a word.

    The model is a mixture of a bigram and a unigram model (Jelinek and Mercer 1980),
    p(w | v) = s c(v, w) / c(v) + (1 - s) p(w) with s = 1/2 and p(w) = (c(w) + 1) / (C + V + 1).
    The unigram model adds one to the count of each of people's V words and of one word that stands
    for all others.

    Raises ValueError if either has no words.
    """
    num_policy, num_people = sum(policy.pairs.values()), sum(people.single.values())
    if not num_policy or not num_people:
        raise ValueError("a cross-entropy needs words on both sides")
    bits = 0.0
    for (before, word), count in sorted(policy.pairs.items()):
        unigram = (people.single[word] + 1) / (num_people + len(people.single) + 1)
        num_before = people.single[before]
        bigram = people.pairs[before, word] / num_before if num_before else unigram
        bits -= count * math.log2(PAIR_SHARE * bigram + (1 - PAIR_SHARE) * unigram)
    return bits / num_policy


def word_drift(episodes: Iterable[Episode], people: WordCounts, world: World) -> dict[str, float]:
    """Both distances between the policy's legal messages and people's, over all ranks' games; {} if
    the policy used no word. Every rank must call."""
    parts: Sequence[WordCounts] = gather_objects(count_words(_messages(episodes)), world)
    policy = WordCounts(Counter(), Counter())
    for part in parts:
        policy.single.update(part.single)
        policy.pairs.update(part.pairs)
    if not policy.single:
        return {}
    return {
        "word_divergence": divergence(policy.words, people.words),
        "word_cross_entropy": cross_entropy(policy, people),
    }


@lru_cache(maxsize=1)
def read_people(path: str, game: GameConfig) -> WordCounts:
    """The words of a .jsonl of recorded games.

    Raises:
        SettingsError: for a file that cannot be read or holds no message.
    """
    try:
        counts = count_words(_recorded_messages(Path(path), game))
    except OSError as error:
        near = nearest_beside(Path(path), lambda each: each.suffix == ".jsonl")
        raise SettingsError(
            "eval.human_words must be a readable .jsonl file of recorded games, got "
            f"{path}: {error.strerror or error}{near}"
        ) from None
    except ValueError as error:
        raise SettingsError(f"eval.human_words: {error}") from None
    if not counts.single:
        raise SettingsError(f"eval.human_words: {path} holds no message")
    return counts


def _recorded_messages(path: Path, game: GameConfig) -> Iterator[str]:
    """The messages of all records. Raises ValueError with the file and line of a bad record."""
    for number, record in enumerate(read_records(path), start=1):
        try:
            yield from game.kit.recorded_messages(record)
        except ValueError as error:
            raise ValueError(f"{path} line {number}: {error}") from None


def check_words(eval_settings: EvalConfig, game: GameConfig) -> None:
    """Raise SettingsError, before anything starts, if people's words cannot be read."""
    path = eval_settings.human_words
    if path is None:
        return
    if not game.kit.PLAYED_BY_PEOPLE:
        raise SettingsError(
            f"eval.human_words must be empty for {game.name}, which has no recorded games of "
            f"people, got {path}"
        )
    read_people(path, game)


def _messages(episodes: Iterable[Episode]) -> Iterable[str]:
    """The text of each legal message of the policy's seats."""
    for episode in episodes:
        policy = [seat for seat, t in enumerate(episode.transcripts) if t is not None]
        yield from (text for _, text in messages(episode, policy))
