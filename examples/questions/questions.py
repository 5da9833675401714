"""Twenty questions about 64 objects with rare attributes, which the asker knows by heart. What the
best questions need is known, so what the policy asks in addition is exact.

    python train.py --config examples/questions/questions.yaml
"""

import random
from dataclasses import dataclass
from functools import cache
from itertools import product

from dialop.game import Outcome, PlayerError
from dialop.kit import NoOptions
from dialop.turns import TurnGame

ROLES = ("asker", "answerer")
OBJECTS = ["".join(letters) for letters in product("BDFGKLMN", "AEIOUYRS")]
ATTRIBUTES = "abcdefghijkl"
EVERY = (1 << len(OBJECTS)) - 1  # a set of objects is a number with a bit for each


@dataclass(frozen=True)
class Instance:
    key: str
    thing: str


def have():
    """The set of objects that have each attribute, a share of about 0.2 to 0.3. No two objects have
    the same attributes. Of the tables of seeds 0 to 59, one on which little is left to luck."""
    draw = random.Random(20)
    shares, rows = [draw.uniform(0.2, 0.3) for _ in ATTRIBUTES], []
    while len(rows) < len(OBJECTS):
        row = tuple(draw.random() < share for share in shares)
        rows += [row] if row not in rows else []
    return [sum(row[n] << at for at, row in enumerate(rows)) for n in range(len(ATTRIBUTES))]


HAVE = dict(zip(ATTRIBUTES, have(), strict=True))


def is_true(attribute, thing):
    return HAVE[attribute] >> OBJECTS.index(thing) & 1 == 1


def parts(left):
    """The attributes that tell these objects apart, with those that have them; even ones first."""
    some = ((each, left & with_it) for each, with_it in HAVE.items() if 0 < left & with_it < left)
    return sorted(some, key=lambda pair: abs(2 * pair[1].bit_count() - left.bit_count()))


def least(num):
    """The fewest answers that name each of `num` objects, over all objects: a full binary tree."""
    depth = num.bit_length() - 1
    return num * depth + 2 * (num - (1 << depth))


@cache
def fewest(left):
    """The answers that the best questions need, over all of these objects, exactly."""
    best = 1 << 30 if left.bit_count() > 1 else 0
    halves = [(least(a.bit_count()) + least((left ^ a).bit_count()), a) for _, a in parts(left)]
    for bound, yes in sorted(halves):
        if left.bit_count() + bound >= best:
            break
        best = min(best, left.bit_count() + fewest(yes) + fewest(left ^ yes))
    return best


OPTIMUM = fewest(EVERY) / len(OBJECTS)


class Questions(TurnGame):
    num_seats, tags, bare = 2, ("ask", "yes", "no", "guess"), ("yes", "no")
    instance_type, options_type = Instance, NoOptions
    rules = "Write [ask] ATTRIBUTE or [guess] OBJECT. The other says [yes] or [no]."
    guess = ""

    def sees(self, seat):
        has = (each for each in ATTRIBUTES if is_true(each, self.instance.thing))
        return f"object {self.instance.thing}: {' '.join(has)}" if seat else "ask"

    def play(self, seat, tag, content):
        if (tag in ("ask", "guess")) != (seat == 0):
            raise PlayerError("not_yours", "ask or guess" if seat == 0 else "say [yes] or [no]")
        if tag == "ask" and content not in HAVE:
            raise PlayerError("no_attribute", f"ask one of {ATTRIBUTES}")
        if tag == "guess" and content not in OBJECTS:
            raise PlayerError("no_object", "name an object")
        self.guess = content if tag == "guess" else ""
        self.show(1 - seat, content if seat == 0 else tag)
        return None if self.guess else 1 - seat

    def outcome(self):
        num, right = len(answered(self.log)), self.guess == self.instance.thing
        score = min(1.0, OPTIMUM / max(num, 1)) if right else 0.0
        over, same = bool(self.guess), {"score_norm": score, "rewards": (score, score)}
        return Outcome(over=over, agreed=over, score=float(num), **same)

    def measures(self, seats):
        """Questions `asked` and `right` guesses; answers of these seats are statements."""
        thing, pairs = self.instance.thing, answered(self.log)
        true = [is_true(each, thing) == (tag == "yes") for each, tag in pairs if 1 in seats]
        told = {"statements": float(len(true)), "true_statements": float(sum(true))}
        return {"asked": float(len(pairs)), "right": float(self.guess == thing), **told}


def answered(log):
    return [(log[n - 1][2], tag) for n, (_, tag, _) in enumerate(log) if tag in ("yes", "no")]


def vary(instance, seat, *, seed):
    other = random.Random(seed).choice(sorted({*OBJECTS} - {instance.thing}))
    return Instance(f"{instance.key} varied", other) if seat == 1 else None


def asker(share):
    """Asks one of the most even `share` of the attributes that tell; 0: greedy information gain."""

    def move(view, draw):
        left = EVERY
        for attribute, answer in answered(view.log):
            left &= HAVE[attribute] if answer == "yes" else ~HAVE[attribute]
        able = parts(left)
        if not able:
            return f"[guess] {OBJECTS[max(left.bit_length() - 1, 0)]}"
        return f"[ask] {draw.choice(able[: max(1, round(share * len(able)))])[0]}"

    return move


def truthful(view, draw):
    return "[yes]" if view.log[-1][2] in view.own.split()[2:] else "[no]"


def seated(spec):
    return ("greedy" if spec == "truthful" else spec, "truthful")


def phrases(instances, options, *, split_lines):
    moves = [f"[ask] {each}" for each in ATTRIBUTES] + [f"[guess] {each}" for each in OBJECTS]
    return [*OBJECTS, *moves, "[yes]", "[no]"]


def generate_instance(options, *, seed, index):
    return Instance(f"{seed}-{index}", random.Random(f"{seed} {index}").choice(OBJECTS))


SCRIPTS = {"greedy": asker(0), "half": asker(0.5), "any": asker(1), "truthful": truthful}
new_game, restore = Questions, Questions.from_state
