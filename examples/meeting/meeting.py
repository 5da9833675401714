"""Two players with private calendars must meet on a day on which both are free."""

import random
from dataclasses import dataclass, replace

from dialop.forms import Form, say
from dialop.game import Outcome, PlayerError
from dialop.kit import option
from dialop.turns import TurnGame

ROLES, DAYS = ("player", "player"), ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


@dataclass(frozen=True)
class Options:
    num_days: int = option(6, "days of a week", low=2, high=7)


@dataclass(frozen=True)
class Instance:
    key: str
    free: tuple[tuple[str, ...], ...]  # each player's free days; at least one is common


class Meeting(TurnGame):
    num_seats, tags = 2, ("message", "meet")
    instance_type, options_type = Instance, Options
    rules = "Meet on a day on which both are free. "
    rules += "Write [message] WORDS, or [meet] DAY to end."
    day = ""

    def sees(self, seat):
        return "free: " + " ".join(self.instance.free[seat])

    def play(self, seat, tag, content):
        if tag == "meet" and content not in DAYS:
            raise PlayerError("no_day", f"name one of {' '.join(DAYS)}")
        self.day = content if tag == "meet" else ""
        return None if self.day else 1 - seat  # who moves next

    def outcome(self):
        over, free = bool(self.day), self.instance.free
        score = float(all(self.day in days for days in free))
        paid = (score, score)
        return Outcome(over=over, agreed=over, score=score, score_norm=score, rewards=paid)

    def measures(self, seats):  # for metrics and reports: the days that these players have named
        texts = [text for seat, tag, text in self.log if tag == "message" and seat in seats]
        return {"days_named": float(sum(day in DAYS for text in texts for day in text.split()))}


def generate_instance(options, *, seed, index):
    draw, week = random.Random(f"{seed} {index}"), DAYS[: options.num_days]
    common = draw.choice(week)
    free = tuple(tuple(d for d in week if d == common or draw.random() < 0.3) for _ in ROLES)
    return Instance(f"{seed}-{index}", free)


def vary(instance, seat, *, seed):  # another calendar of this seat, for checks and evaluations
    common = random.Random(seed).choice(instance.free[1 - seat])
    days = tuple(d for d in DAYS if d == common or d not in instance.free[seat])
    return replace(instance, free=(instance.free[0], days) if seat else (days, instance.free[1]))


def tell(view, draw):  # states its free days, then meets on one that the other has stated
    own, told = view.own.split()[1:], [text.split() for seat, _, text in view.log]
    common = draw.choice([day for day in own if told and day in told[-1]] or own)
    return f"[meet] {common}" if told else f"[message] {' '.join(own)}"


SCRIPTS = {"tell": tell, "guess": lambda view, draw: f"[meet] {draw.choice(view.own.split()[1:])}"}
new_game, restore = Meeting, Meeting.from_state


# The rest is for pages: a player's calendar, the finished game, the moves of a person.
def board(game, seat):
    marks = ["free" if day in game.instance.free[seat] else "" for day in DAYS]
    return {"rows": ["you"], "columns": DAYS, "cells": [marks]}


def picture(game, num):
    own = [board(game, seat) for seat in (0, 1)]
    table = {**own[0], "rows": ROLES, "cells": [each["cells"][0] for each in own], "own": own}
    moves = game.log[len(game.log) - num :]
    return table, [{"notes": [[f"{tag}: {text}"]]} for _, tag, text in moves]


def forms(game, seat):
    return [say(), Form("Meet", "[meet] ", choices=[("day", [(day, day) for day in DAYS])])]
