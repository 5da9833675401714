"""Many texts, long texts, many games: no exception, and time and memory at most linear in the
input."""

import random
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from dialop.collab import grading, numbers, value
from dialop.collab.game import CollabGame
from dialop.collab.script import content_words, sentences
from dialop.collab.task import ASSISTANT, USER, CollabOptions
from dialop.game import PlayerError
from dialop.logged import Rules
from dialop.marks import read_mark
from dialop.matching.game import MatchingGame
from dialop.matching.proposal import parse_proposal
from dialop.matching.statements import count_true, stated_cells
from dialop.mediation import moves
from dialop.mediation.game import MediationGame
from dialop.mediation.statements import read_statements
from dialop.planning.board import PlanningOptions
from dialop.planning.game import PlanningGame
from dialop.planning.preferences import stated_in
from dialop.planning.proposal import parse_plan
from dialop.planning.search import parse_query
from dialop.tags import drop_reasoning, split_move
from selfplay.chat.rendering import Rendering
from selfplay.engines.base import Completion, Request
from selfplay.evaluation.report import fenced
from selfplay.extras.published import instances_of
from selfplay.extras.sandbox import code_of
from selfplay.rollout.driver import play_games
from selfplay.rollout.episode import Limits
from tests.helpers.collab_tasks import LETTER, NUMBER
from tests.helpers.dialop_boards import BEST, SMALL, WORST
from tests.helpers.mediation_games import SMALL as CALENDARS
from tests.helpers.planning_cities import HAND as CITY
from tests.helpers.scripted_engine import StreamEngine, WaveEngine
from tests.helpers.small_games import SAMPLING, boards, config_of, games_of

# What the parsers look for, and what has broken other parsers.
PIECES = (
    *("[message]", "[propose]", "[accept]", "[reject]", "[answer]", "[end]", "[Propose", "]", "["),
    *("Proposal:", "BLEU", "Electra", "Ava", "Daniel", "Ava Li", "nguyen", BEST, WORST),
    *("My number is ", "Add ", " to my number.", "</think>", "<think>", "<br", "<br/>", "&emsp;"),
    *("&#", "&#x", "&#0;", "&#x110000;", "&amp", ";", "9" * 30, "-3.5e", "1e999", "½"),
    *(": ", ":", "\n", "\r\n", "\t", " ", "- ", "1. ", "**", ", ", " and ", " is ", "3", "87", "?"),
    *("\\boxed{", "\\frac{", "\\frac12", "}", "{", "$", "%", "/", "^", "\\circ", "\\text{", "```"),
    *("```python\n", '{"interactivity": ', "0.5}", '"', "'", "n't", "\u017f", "\u0130", "\u2028"),
    *("[tool] ", "Search(", "fields=[name", "filters=[", "price < 20", ")", "Saul's", "NULL"),
    *("all: ", "user 0: ", "id 1", " costs ", "(3) 5/6 10:00 AM - 5/6 12:00 PM", "0 -4", "0: "),
    *("\ud800", "\x00", "\x1b[2J", "\u202e", "\u0301", "\u0316", "\ufdfa", "\U0001f600", "\u0663"),
)
OPTIONS = [
    (
        Rules(brief=brief, private_reasoning=thinks),
        CollabOptions(brief, thinks),
        PlanningOptions(brief=brief, private_reasoning=thinks),
        Rules(brief=brief, private_reasoning=thinks),
    )
    for brief in (False, True)
    for thinks in (False, True)
]


def text_of(rng: random.Random) -> str:
    """Pieces in any order, or characters of any kind."""
    if rng.random() < 0.2:
        return "".join(chr(rng.randrange(0x110000)) for _ in range(rng.randrange(40)))
    pieces = [rng.choice(PIECES) for _ in range(rng.randrange(14))]
    if rng.random() < 0.02:  # more digits than Python reads as a number
        pieces.insert(rng.randrange(len(pieces) + 1), "9" * 5000)
    return "".join(pieces)


def refusable(read: Callable[[str], object]) -> Callable[[str], None]:
    """A parser of moves, which may refuse."""

    def parse(text: str) -> None:
        try:
            read(text)
        except PlayerError:
            return

    return parse


def row(text: str) -> None:
    """Parse as a published solution, which may be refused."""
    try:
        instances_of([("row 0", {"prompt": "a", "completion": text})], name="set")
    except ValueError:
        return


def statements(text: str) -> None:
    assert all(0 <= value < 10**6 for _, _, value in stated_cells(text, SMALL))


NAMES = [site.name for site in CITY.sites]


def marks(text: str) -> None:
    mark = read_mark(text, "interactivity")
    assert mark is None or 0.0 <= mark <= 1.0


# Every function that parses text of a model or a person.
READERS: dict[str, Callable[[str], object]] = {
    **{
        f"proposal, brief {brief}": refusable(
            lambda text, brief=brief: parse_proposal(
                text, SMALL.reviewers, papers=SMALL.papers, brief=brief
            )
        )
        for brief in (False, True)
    },
    "plan": refusable(lambda text: parse_plan(text, NAMES, slots=3)),
    "query": refusable(lambda text: parse_query(text, NAMES)),
    "preferences": stated_in,
    "flights": refusable(lambda text: moves.parse_proposal(text, (3, 2))),
    "recipient": moves.split_recipient,
    "agent's reasoning": lambda text: drop_reasoning(text, ("message", "propose"), moves.TO),
    "costs": lambda text: [read_statements(text, brief) for brief in (False, True)],
    "row": row,
    "statements": statements,
    "tag": split_move,
    "reasoning": lambda text: drop_reasoning(text, ("message", "propose")),
    "number": lambda text: value.equal_values(text, "8"),
    "target": lambda text: value.equal_values("8", text),
    "bleu": lambda text: grading.bleu(text, LETTER.target),
    "code": code_of,
    "solve": lambda text: numbers.solve(NUMBER.request, text),
    "change": numbers.change,
    "content": content_words,
    "sentences": sentences,
    "mark": marks,
    "fence": fenced,
}


def fuzz(num: int, *, seed: int) -> None:
    """Pass every text to every parser, and as a move to every game."""
    rng = random.Random(seed)
    for number in range(num):
        text = text_of(rng)
        try:
            for read in READERS.values():
                read(text)
            matching, collab, planning, mediation = OPTIONS[number % 4]
            game = MatchingGame(SMALL, matching)
            game.step(0, text)
            step = game.step(game.seat_to_move or 0, text)
            assert (step.error is None) == (step.action is not None)
            num_true, num_stated = count_true(game.view(0), text)
            assert 0 <= num_true <= num_stated
            talk = CollabGame(NUMBER, collab)
            talk.step(ASSISTANT, text)
            talk.step(USER, text)
            assert 0.0 <= talk.outcome().score <= 1.0
            for other in (PlanningGame(CITY, planning), MediationGame(CALENDARS, mediation)):
                for seat in range(other.num_seats):
                    other.step(seat, text)
        except Exception as error:
            error.add_note(f"seed {seed}, text {number}: {text!r:.500}")
            raise


@pytest.mark.slow
@pytest.mark.parametrize("num", [2_000, pytest.param(20_000, marks=pytest.mark.nightly)])
def test_texts_raise_nothing(num: int) -> None:
    fuzz(num, seed=0)


# --- long texts ---------------------------------------------------------------------------------

# A start, a repeated unit, an end: texts on which a parser could backtrack.
LONG = (
    *(("", " ", "x"), ("", "\n", "x"), ("", "a", ""), ("", "1", "x"), ("", "[", "")),
    *(("", "{", ""), ("", "`", ""), ("", "```\n", ""), ("```", " ", "x"), ("^", " ", "x")),
    *(("$", " ", "x"), ("1", " ", "x"), ("1", ",", "x"), ("\\frac", " ", "x")),
    *(("", "\\frac{", ""), ("", "\\boxed{", ""), ("{", '"interactivity"', "")),
    *(("<br", " ", "x"), ("&#", "9", ";"), ("&#x", "9", ";"), ("", "&#", "")),
    *(("Ava", " ", "x"), ("", "Ava BLEU 3 ", ""), ("", "\u0301\u0316", "x")),
    *(("[message] ", "\t", ""), ("", "My number is 1", ""), ("", "a. ", "")),
    *(("[", "Saul's, ", "]"), ("Search(", "fields=[", ")"), ("", "user 0: ", "")),
    *(("", "1=", "2"), ("", "½", "x"), ("x", "*", "x"), ("", "answer is ", ""), ("", "1 2", "x")),
    *(("", "id 1 costs ", ""), ("", "(1) 5/6 ", ""), ("all", " ", "x"), ("0 ", "\t", "x")),
)


def cpu_s(read: Callable[[str], object], text: str) -> float:
    """The least CPU time of three calls, in seconds."""
    seconds = []
    for _ in range(3):
        began_s = time.process_time()
        read(text)
        seconds.append(time.process_time() - began_s)
        if seconds[-1] > 0.5:
            break
    return min(seconds)


NIGHTLY = (pytest.mark.slow, pytest.mark.nightly)
FAST = ("statements", "proposal, brief True")


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=NIGHTLY) for n in READERS]
)
def test_time_is_at_most_linear_in_the_text(name: str) -> None:
    """From 20,000 to 40,000 characters quadratic time would grow by 4. One clock reading may be
    off, three in a row are not."""
    read = READERS[name]
    for start, unit, end in LONG:
        for _ in range(3):
            short, long = (
                cpu_s(read, start + unit * (num // len(unit)) + end) for num in (20_000, 40_000)
            )
            if long <= 3 * short + 0.002:
                break
        else:
            pytest.fail(f"{name} of {unit!r} after {start!r}: {short:.4f} s, then {long:.4f} s")


# --- many games ---------------------------------------------------------------------------------

MOVES = ("[message] I see Ava BLEU 3 and Daniel Electra 9", BEST, "[accept]", "[reject]", "no tag")


class Says(WaveEngine):
    """Answers with one of the moves, chosen by the request's seed; stores no request."""

    def answer(self, request: Request) -> Completion:
        ids = self.rendering.action_ids(MOVES[request.seed % len(MOVES)])
        return Completion(ids, [-1.0] * len(ids), "stop", 0)


class SaysInAStream(StreamEngine):
    answer = Says.answer


def play(num: int, engine: WaveEngine, rendering: Rendering) -> list[Any]:
    setups = games_of(boards(num // 4), rendering, config_of())
    limits = Limits(max_turns=12, max_retries=1)
    episodes, _ = play_games(setups, engine, sampling=SAMPLING, limits=limits)
    return episodes


def num_calls(work: Callable[[], object]) -> int:
    """How many functions of Python and of C the work calls in this thread."""
    num = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal num
        num += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return num


@pytest.mark.load
@pytest.mark.parametrize("kind", [Says, SaysInAStream])
def test_ten_thousand_games_at_once_cost_what_a_hundred_do_each(
    kind: type[WaveEngine], rendering: Rendering
) -> None:
    """Calls of functions per game within 1.05, memory within 1.2."""
    engine = kind(rendering, {})
    assert len(play(100, engine, rendering)) == 100  # warms up caches
    calls, sizes = {}, {}
    for num in (100, 10_000):
        calls[num] = num_calls(lambda num=num: play(num, engine, rendering)) / num
        tracemalloc.start()
        episodes = play(num, engine, rendering)
        sizes[num] = tracemalloc.get_traced_memory()[1] / num
        tracemalloc.stop()
        del episodes
    print({num: f"{size / 1024:.1f} KiB a game" for num, size in sizes.items()})
    print({num: f"{number:.0f} calls a game" for num, number in calls.items()})
    assert calls[10_000] < 1.05 * calls[100]
    assert sizes[10_000] < 1.2 * sizes[100]
