"""Two players split items that they value differently, each for itself (Lewis et al., Deal or No
Deal, arXiv 1706.05125): a game whose seats have different rewards."""

import itertools
import operator
import random
from dataclasses import dataclass

from dialop.game import Outcome, PlayerError
from dialop.kit import option
from dialop.turns import TurnGame

ROLES, ITEMS, TOTAL = ("player", "player"), ("book", "hat", "ball"), 10


@dataclass(frozen=True)
class Options:
    most: int = option(3, "largest number of one item", low=1, high=5)


@dataclass(frozen=True)
class Instance:
    key: str
    counts: tuple[int, ...]  # of each item
    values: tuple[
        tuple[int, ...], ...
    ]  # of one item to each player; all items together are worth TOTAL


class Split(TurnGame):
    num_seats, tags, bare = 2, ("message", "offer", "accept"), ("accept",)
    instance_type, options_type = Instance, Options
    rules = (
        "Split the items; each keeps what its share is worth to it, without a deal nothing. Write "
        "[message] WORDS, [offer] NUMBERS (of each item for yourself), or [accept]."
    )
    shares = ((), ())  # of the pending offer, by seat
    agreed = False

    def sees(self, seat):
        return f"{words(self.instance.counts)} worth {words(self.instance.values[seat])}"

    def play(self, seat, tag, content):
        if tag == "offer":
            own = numbers(content)
            rest = minus(self.instance.counts, own)
            if len(own) != len(ITEMS) or min(rest) < 0:
                raise PlayerError("no_split", f"name {len(ITEMS)} numbers that there are")
            self.shares = (own, rest) if seat == 0 else (rest, own)
        if tag == "accept":
            if not self.log or self.log[-1][:2] != (1 - seat, "offer"):
                raise PlayerError("nothing_pending", "there is no offer to accept")
            self.agreed = True
        return None if self.agreed else 1 - seat

    def outcome(self):
        values, counts = self.instance.values, self.instance.counts
        paid = tuple(map(worth, values, self.shares)) if self.agreed else (0, 0)
        best = worth(map(max, *values), counts)
        own = tuple(value / TOTAL for value in paid)
        return Outcome(
            over=self.agreed,
            agreed=self.agreed,
            score=float(sum(paid)),
            score_norm=sum(paid) / best,
            rewards=own,
            facts={"best": float(best)},
            seat_scores=own,
        )


def words(numbers):
    return " ".join(map(str, numbers))


def numbers(text):
    return tuple(int(word) for word in text.split() if word.isascii() and word.isdigit())


def worth(values, share):
    return sum(map(operator.mul, values, share))


def minus(counts, share):
    return tuple(map(operator.sub, counts, share))


def generate_instance(options, *, seed, index):
    draw = random.Random(f"{seed} {index}")
    while True:
        counts = tuple(draw.randint(1, options.most) for _ in ITEMS)
        able = [v for v in itertools.product(range(8), repeat=3) if worth(v, counts) == TOTAL]
        if len(able) > 1:
            return Instance(f"{seed}-{index}", counts, tuple(draw.sample(able, 2)))


def player(wants):
    """A player that accepts a share worth at least `wants`, any share after five moves, and offers
    to keep a share worth just that."""

    def move(view, draw):
        own = numbers(view.own)
        counts, values = own[:3], own[3:]
        if view.log and view.log[-1][1] == "offer":
            left = minus(counts, numbers(view.log[-1][2]))
            if worth(values, left) >= wants or len(view.log) >= 5:
                return "[accept]"
        shares = list(itertools.product(*(range(c + 1) for c in counts)))
        able = [share for share in shares if worth(values, share) >= wants]
        return f"[offer] {words(min(able, key=lambda s: (worth(values, s), sum(s))))}"

    return move


SCRIPTS = {"fair": player(5), "greedy": player(8), "soft": player(2)}
new_game, restore = Split, Split.from_state
