"""Kuhn poker (Kuhn 1950): three cards, one chip each in the pot, one bet of a second chip. The best
play is known and mixed, so how far a policy is from it is exact (docs/exploitability.md).

    python train.py --config examples/kuhn/kuhn.yaml
"""

import itertools
import random
from dataclasses import dataclass

from dialop.game import Outcome
from dialop.turns import TurnGame

ROLES, CARDS = ("player", "player"), "JQK"


@dataclass(frozen=True)
class Options:
    pass


@dataclass(frozen=True)
class Instance:
    key: str
    cards: tuple[str, str]  # of each seat


class Kuhn(TurnGame):
    num_seats, tags, bare = 2, ("pass", "bet"), ("pass", "bet")
    instance_type, options_type = Instance, Options
    rules = "Kuhn poker. Write [pass] or [bet]. The higher card wins, unless a bet is passed."

    def sees(self, seat):
        return f"card {self.instance.cards[seat]}"

    def legal_moves(self):
        return ("[pass]", "[bet]")

    def play(self, seat, tag, content):
        moves = [*(each for _, each, _ in self.log), tag]
        return 1 - seat if moves in (["pass"], ["bet"], ["pass", "bet"]) else None

    def outcome(self):
        chips = won(self.instance.cards, [tag for _, tag, _ in self.log])
        return paid(chips, over=self.seat_to_move is None)

    def outcome_of_forfeit(self, seat):
        return paid(-2 if seat == 0 else 2, over=False)


def won(cards, moves):
    """The chips that seat 0 wins, 0 before the end."""
    higher = 1 if CARDS.index(cards[0]) > CARDS.index(cards[1]) else -1
    match moves:
        case ["pass", "pass"]:
            return higher
        case ["bet", "pass"]:
            return 1
        case ["pass", "bet", "pass"]:
            return -1
        case ["bet", "bet"] | ["pass", "bet", "bet"]:
            return 2 * higher
    return 0


def paid(chips, *, over):
    scores = ((2 + chips) / 4, (2 - chips) / 4)
    return Outcome(
        over=over,
        agreed=over,
        score=float(chips),
        score_norm=scores[0],
        rewards=(float(chips), float(-chips)),
        seat_scores=scores,
    )


DEALS = list(itertools.permutations(CARDS, 2))


def deals(options):
    """All deals with their probabilities."""
    return [(Instance("".join(cards), cards), 1 / len(DEALS)) for cards in DEALS]


def generate_instance(options, *, seed, index):
    """Six instances in a row are the six deals, in random order."""
    block, number = divmod(index, len(DEALS))
    cards = random.Random(f"{seed} {block}").sample(DEALS, len(DEALS))[number]
    return Instance(f"{seed}-{index}", cards)


def vary(instance, seat, *, seed):
    """The same deal with the third card for this seat."""
    cards = list(instance.cards)
    (cards[seat],) = set(CARDS) - set(cards)
    return Instance(f"{instance.key} varied", tuple(cards))


def blind(view, draw):
    return draw.choice(["[pass]", "[bet]"])


def moody(view, draw):
    """Bets with a probability that is random, but one of its own for each information set."""
    seen = f"{view.seat} {view.own} {[tag for _, tag, _ in view.log]}"
    return "[bet]" if draw.random() < random.Random(seen).uniform(0.1, 0.9) else "[pass]"


def honest(view, draw):
    """Bets and calls with a king, and sometimes calls with a queen."""
    card, facing = view.own[-1], bool(view.log) and view.log[-1][1] == "bet"
    return "[bet]" if card == "K" or (card == "Q" and facing and draw.random() < 0.5) else "[pass]"


SCRIPTS = {"blind": blind, "moody": moody, "honest": honest}
new_game, restore = Kuhn, Kuhn.from_state
