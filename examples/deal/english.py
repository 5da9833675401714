"""The game of `deal.py` in English, for a model that knows words: books, hats and balls.

python train.py --config examples/deal/english.yaml
"""

import re

from dialop.game import PlayerError
from examples.deal import deal
from examples.deal.deal import NUM_KINDS, TOTAL, minus, words

ROLES, KINDS = deal.ROLES, ("book", "hat", "ball")
Instance, Options, generate_instance, vary = (
    deal.Instance,
    deal.Options,
    deal.generate_instance,
    deal.vary,
)
NAMED = r"\b\d+ (?:book|hat|ball)"
SAYS = (
    "To me each book is worth {}, each hat {} and each ball {}.",
    "A book is worth {} to me, a hat {} and a ball {}. What about you?",
    "My points: book {}, hat {}, ball {}.",
    "I get {} points for a book, {} for a hat and {} for a ball.",
)
TAKES = ("I take {}.", "{} for me.", "Then I take {}.", "I would like {}.")


class English(deal.Deal):
    rules = (
        "Two players share some books, hats and balls. All items together are worth 10 points to "
        "each player, but one item may be worth more to one of them. Talk first; then each player "
        "enters what it takes. If every item is taken once, both are paid the points of both; "
        "otherwise nobody is paid. In your turn write [message] and a sentence, or [split] and "
        "what you take, such as [split] I take 1 book and 2 balls."
    )

    def sees(self, seat):
        text = f"There are {counted(self.instance.counts)}. To you {priced(self.instance, seat)}."
        return text if self.options.messages else f"{text} Nobody may talk."

    def play(self, seat, tag, content):
        if tag == "message":
            return super().play(seat, tag, content)
        if not re.search(NAMED, content.lower()):
            raise PlayerError("no_split", "say how many books, hats or balls you take")
        return super().play(seat, tag, words(taken(content)))

    def measures(self, seats):
        """As in `deal.py`; a statement is what a message says that one item is worth."""
        told = [(valued(text), s) for s, tag, text in self.log if tag == "message" and s in seats]
        pairs = [
            pair for said, s in told for pair in zip(said, self.instance.values[s], strict=True)
        ]
        true = [said == own for said, own in pairs if said is not None]
        told = {"statements": float(len(true)), "true_statements": float(sum(true))}
        return super().measures(()) | told


def counted(numbers):
    """2, 1, 0: "2 books, 1 hat and 0 balls"."""
    first, second, third = (
        f"{num} {kind}{'' if num == 1 else 's'}" for num, kind in zip(numbers, KINDS, strict=True)
    )
    return f"{first}, {second} and {third}"


def priced(instance, seat):
    return "each book is worth {}, each hat {} and each ball {}".format(*instance.values[seat])


def taken(text):
    """The number of each kind, 0 if it is not named: "1 book and 2 balls" is 1, 0, 2."""
    found = (re.search(rf"\b(\d+) {kind}s?\b", text.lower()) for kind in KINDS)
    return tuple(int(each[1]) if each else 0 for each in found)


def valued(text):
    """What each kind is said to be worth, None if it is not: "each hat 2" or "2 points for a hat"
    is None, 2, None."""
    return tuple(of_kind(text.lower(), kind) for kind in KINDS)


def of_kind(text, kind):
    after = rf"\b{kind}s?(?: is| are| at| worth|:)* (\d+)\b(?! (?:points? )?(?:for|book|hat|ball))"
    before = rf"\b(\d+)(?: points?)? for (?:a|each|every|the) {kind}s?\b"
    found = re.search(f"{after}|{before}", text)
    return int(found[1] or found[2]) if found else None


def player(tells):
    """The players `tell` and `guess` of `deal.py` in sentences of four kinds."""

    def move(view, draw):
        counts, own = view.own.split(". To you ")
        counts, own = taken(counts), valued(own)
        _, tag, text = view.log[-1] if view.log else (0, "", "")
        if tag == "split":
            left = minus(counts, taken(text))
            return f"[split] {draw.choice(TAKES).format(counted(left))}"
        told = valued(text) if tells else (None,)
        if None in told and tells and "Nobody" not in view.own:
            return f"[message] {draw.choice(SAYS).format(*own)}"
        other = [TOTAL / sum(counts)] * NUM_KINDS if None in told else told
        triples = zip(counts, own, other, strict=True)
        best = [num if mine > its else 0 for num, mine, its in triples]
        return f"[split] {draw.choice(TAKES).format(counted(best))}"

    return move


SCRIPTS = {"tell": player(True), "guess": player(False)}
new_game, restore = English, English.from_state
