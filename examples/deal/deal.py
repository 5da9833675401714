"""Deal or No Deal (Lewis et al. 2017, arXiv 1706.05125) with one binding split: two players talk
about items that they value differently, then each enters what it takes. Without a message the
first split can only follow from its own values, so what talk is worth is exact:

    python -m examples.deal.silent
    python train.py --config examples/deal/deal.yaml
"""

import operator
import random
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from dialop.game import Outcome, PlayerError
from dialop.kit import option
from dialop.turns import TurnGame

ROLES, TOTAL, NUM_KINDS = ("player", "player"), 10, 3


@dataclass(frozen=True)
class Options:
    shared: bool = option(True, "both are paid for both shares; false: each for its own")
    messages: bool = option(True, "allow messages")


@dataclass(frozen=True)
class Instance:
    key: str
    counts: tuple[int, ...]  # of each kind of item
    values: tuple[tuple[int, ...], ...]  # of one item to each player; all are worth TOTAL


class Deal(TurnGame):
    num_seats, tags = 2, ("message", "split")
    instance_type, options_type = Instance, Options
    rules = "Share the items. Write [message] WORDS, or [split] NUMBERS, of each that you take."
    taken = ()  # what each seat has entered, (seat, numbers)

    def sees(self, seat):
        own = f"{words(self.instance.counts)} worth {words(self.instance.values[seat])}"
        return own if self.options.messages else f"{own} silent"

    def play(self, seat, tag, content):
        if tag == "message":
            if self.taken or not self.options.messages:
                raise PlayerError("no_talk", "enter a split")
            return 1 - seat
        own = numbers(content)
        if len(own) != NUM_KINDS or min(minus(self.instance.counts, own)) < 0:
            raise PlayerError("no_split", f"name {NUM_KINDS} numbers that there are")
        self.taken = (*self.taken, (seat, own))
        return 1 - seat if len(self.taken) == 1 else None

    def outcome(self):
        values, counts, over = self.instance.values, self.instance.counts, len(self.taken) == 2
        entered = [share for _, share in sorted(self.taken)]
        agreed = over and minus(counts, entered[0]) == entered[1]
        paid = tuple(map(worth, values, entered)) if agreed else (0, 0)
        joint = sum(paid) / worth(map(max, *values), counts)
        own = tuple(each / TOTAL for each in paid)
        return Outcome(
            over=over,
            agreed=agreed,
            score=float(sum(paid)),
            score_norm=joint,
            rewards=(joint, joint) if self.options.shared else own,
            seat_scores=() if self.options.shared else own,
        )

    def measures(self, seats):
        """Numbers in messages are statements about the own values; a `pareto` game has a deal that
        no other split betters for one player without a loss to the other."""
        values, counts, got = self.instance.values, self.instance.counts, self.outcome()
        told = [(numbers(text), s) for s, tag, text in self.log if tag == "message" and s in seats]
        true = [a == b for said, s in told for a, b in zip(said, values[s], strict=False)]
        paid = tuple(map(worth, values, (share for _, share in sorted(self.taken))))
        pairs = {(worth(values[0], s), worth(values[1], minus(counts, s))) for s in shares(counts)}
        is_best = got.agreed and not any(p != paid and min(minus(p, paid)) >= 0 for p in pairs)
        told = {"statements": float(len(true)), "true_statements": float(sum(true))}
        return {"pareto": float(is_best), **told}


def words(numbers):
    return " ".join(map(str, numbers))


def numbers(text):
    return tuple(int(word) for word in text.split() if word.isascii() and word.isdigit())


def worth(values, share):
    return sum(map(operator.mul, values, share))


def minus(counts, share):
    return tuple(map(operator.sub, counts, share))


def shares(counts):
    return product(*(range(count + 1) for count in counts))


@lru_cache
def able(counts):
    """All values of one item under which these items are worth TOTAL."""
    return [v for v in product(range(TOTAL + 1), repeat=NUM_KINDS) if worth(v, counts) == TOTAL]


COUNTS = [c for c in product(range(1, 6), repeat=NUM_KINDS) if 5 <= sum(c) <= 7]


def generate_instance(options, *, seed, index):
    draw = random.Random(f"{seed} {index}")
    counts = draw.choice(COUNTS)
    return Instance(f"{seed}-{index}", counts, tuple(draw.sample(able(counts), 2)))


def vary(instance, seat, *, seed):
    able_too = [each for each in able(instance.counts) if each not in instance.values]
    other = random.Random(seed).choice(able_too)
    values = (instance.values[0], other) if seat else (other, instance.values[1])
    return Instance(f"{instance.key} varied", instance.counts, values)


def player(tells, least=0):
    """States its values if it `tells`, or takes what it values above the average; refuses a split
    that leaves it less than `least`."""

    def move(view, draw):
        counts, own = map(numbers, view.own.split("worth"))
        _, tag, text = view.log[-1] if view.log else (0, "", "")
        if tag == "split":
            left = minus(counts, numbers(text))
            return f"[split] {words(left if worth(own, left) >= least else counts)}"
        told = numbers(text) if tells else ()
        if tells and len(told) != NUM_KINDS and "silent" not in view.own:
            return f"[message] {words(own)}"
        other = told or [TOTAL / sum(counts)] * NUM_KINDS
        triples = zip(counts, own, other, strict=True)
        return f"[split] {words(num if mine > its else 0 for num, mine, its in triples)}"

    return move


SCRIPTS = {"tell": player(True), "guess": player(False), "fair": player(True, least=3)}
new_game, restore = Deal, Deal.from_state
