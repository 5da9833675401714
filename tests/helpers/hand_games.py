"""The games of this package on instances made by hand, as the tests of all games play them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dialop.collab.game import CollabGame
from dialop.collab.task import CollabOptions
from dialop.logged import LoggedGame, Rules
from dialop.matching.game import MatchingGame
from dialop.mediation.game import MediationGame
from dialop.planning.board import PlanningOptions
from dialop.planning.game import PlanningGame
from tests.helpers import collab_tasks, dialop_boards, mediation_games, planning_cities

Moves = Sequence[tuple[int, str]]


@dataclass(frozen=True)
class HandGame:
    """A game by hand: its class, instance and options, and legal moves from its start to its end.

    `pieces` are what random texts are made of.
    """

    kind: type[LoggedGame]
    instance: Any
    options: Any
    moves: Moves
    pieces: tuple[str, ...]

    def new(self, **changes: Any) -> Any:
        """A new game, with these options changed."""
        return self.kind(self.instance, replace(self.options, **changes))  # type: ignore[call-arg]


def comparable(state: dict[str, Any]) -> dict[str, Any]:
    """A state without its error counts, the only thing a refused move may change."""
    play = {k: v for k, v in state["play"].items() if not k.startswith("num_errors")}
    return {**state, "play": play}


BEST, WORST = dialop_boards.BEST, dialop_boards.WORST
PLAN, BEST_PLAN = planning_cities.PLAN, planning_cities.BEST
trip = mediation_games.proposal
TAGS = ("[message]", "[propose]", "[accept]", "[reject]", "[Propose]", "[think]", "[", "]")
ODD = ("</think>", "\u2028", "\ud800", "\x00", "\u017f", "\u0130", "9" * 50, "\n", " ", ", ")
_NAMES = ("Proposal:", "BLEU", "Electra", "Ava", "Daniel", "Ava Li", "nguyen", BEST, WORST)
_BETWEEN = (": ", ":", "<br/>", "- ", "1. ", "**", " and ", " is ", "3", "87", "?", "&#x110000;")
_QUERY = ("[tool] Search", "(", ")", "fields=", "filters=", "sort_by=", "limit=", "text_query=")
_SITES = ("Saul's", "The Dive", "Atlas Park", "The Mall", "NULL", "null", "distance_to(", "price")
_SIGNS = ("==", "<=", "=", '"', "'", "True", "4", "desc", "$40", "e999", "nan", "²", PLAN)
_TRIPS = ("0:", "1:", "all:", "user 0: id 0", "user 1: id 1", "to user 1:", "0: [message] y")
_ENDS = ("[answer]", "[end]", "[ANSWER ]", "8", "hm", "\\frac", "\\boxed{", "}", "/", "%", "=")


def _matching(instance: Any, first: int) -> HandGame:
    second = 1 - first
    moves = [(first, "[message] Ava BLEU 3"), (second, "[message] I see."), (first, WORST)]
    moves += [(second, "[reject]"), (second, BEST), (first, "[accept]")]
    return HandGame(MatchingGame, instance, Rules(), moves, (*_NAMES, *_BETWEEN))


HAND_GAMES = {
    "matching": _matching(dialop_boards.SMALL, 0),
    "matching, scaled": _matching(dialop_boards.SCALED, 1),
    "planning": HandGame(
        PlanningGame,
        planning_cities.HAND,
        PlanningOptions(),
        [
            *((0, "[message] I like live music."), (1, "[tool] Search(fields=[live music])")),
            *((1, "[propose] [The Dive, NULL, NULL]"), (0, "[message] Go on."), (1, PLAN)),
            *((0, "[reject]"), (0, "[message] No."), (1, "[message] Fine."), (0, "[message] So?")),
            *((1, BEST_PLAN), (0, "[accept]")),
        ],
        (*_QUERY, *_SITES, *_SIGNS),
    ),
    "mediation": HandGame(
        MediationGame,
        mediation_games.SMALL,
        Rules(),
        [
            *((0, "[message] Morning."), (1, "[message] Anything."), (2, "0: [message] hm")),
            *((0, "[message] so"), (2, trip(2, 1)), (0, "[accept]"), (1, "[reject]")),
            *((1, "[message] dear"), (2, trip(0, 0)), (0, "[accept]"), (1, "[accept]")),
        ],
        (*_TRIPS, trip(1, 1), "[message] x"),
    ),
    "collab": HandGame(
        CollabGame,
        collab_tasks.NUMBER,
        CollabOptions(),
        [
            *((1, "What number?"), (0, "My number is 5."), (1, "[message] Sure?"), (0, "yes")),
            (1, "so 5 + 3:\n[answer] 8"),
        ],
        _ENDS,
    ),
    "collab, ended by the user": HandGame(
        CollabGame,
        collab_tasks.LETTER,
        CollabOptions(),
        [(1, "Hello."), (0, "Never mind.\n[end]")],
        _ENDS,
    ),
}
