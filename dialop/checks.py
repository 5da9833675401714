"""The checks that every game must pass: `python -m dialop check my_game.py`.

The checks play games with the scripted players of the game's module (dialop/kit.py) and test that
the game does what the interface promises (dialop/game.py). They know no rules of any game. A check
that needs something the module lacks reports that instead of passing.
"""

from __future__ import annotations

import copy
import json
import math
import random
import re
import string
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import partial
from itertools import islice, product
from typing import Any

from dialop.game import Game, Outcome, Step, wrong_measures, wrong_outcome, wrong_state, wrong_step
from dialop.kit import Kit
from dialop.shown import error_line
from dialop.tags import split_move

NUM_INSTANCES = 4
_NOTE = "note: "  # the start of a finding that is not a problem
MAX_MOVES = 400
JUNK = ("", " ", "[", "[]", "[dance] now", "[message", "\x00", "\ud800", "🙂", "1e999", "None")


class Unchecked(Exception):
    """The game's module lacks what a check needs."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one check: its name, the promise it tests, and the problem ("" for none).
    `unchecked` says why the check could not run, "" if it ran; `note` reports what is allowed but
    seldom intended."""

    name: str
    promise: str
    problem: str = ""
    unchecked: str = ""
    note: str = ""

    @property
    def rule(self) -> str:
        """The problem without the place where it occurred and the value seen."""
        return self.problem.partition(", got ")[0].rpartition(": ")[2]

    def line(self) -> str:
        """The result in one line."""
        if self.problem:
            return f"FAILED {self.name}: {self.problem}"
        if self.unchecked:
            return f"not checked {self.name}: {self.unchecked}"
        return f"ok {self.name}: {self.promise}" + (f"; note: {self.note}" if self.note else "")


@dataclass(frozen=True, slots=True)
class Played:
    """A game that scripted players have played: its instance and their legal moves. `last` is the
    last try and the game's answer to it, `refused` the last invalid move, "" for none; `shown` is
    what the game showed at its end, empty if a move was invalid."""

    instance: Any
    moves: tuple[tuple[int, str], ...]
    over: bool
    last: str = ""
    refused: str = ""
    shown: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Case:
    """The input of the checks: a game, its options, instances and played games."""

    kit: Kit
    options: Any
    instances: tuple[Any, ...]
    plays: tuple[Played, ...]

    def new(self, played: Played) -> Game:
        return self.kit.new_game(played.instance, self.options)

    def positions(self) -> Iterator[tuple[Game, Played, int]]:
        """Each game before each of its moves; a check must work on clones."""
        for played in self.plays:
            game = self.new(played)
            for number, move in enumerate(played.moves):
                yield game, played, number
                game.step(*move)


def check_kit(kit: Kit, options: Any, *, seed: int = 0) -> list[Result]:
    """Run all checks with these options of the game.

    An exception in the game's code fails the check that ran it.
    """
    promise = "instance i depends on the seed, i and the options alone"
    results = [_run("seeding", promise, lambda: _seeding(kit, options, seed))]
    try:
        case = case_of(kit, options, seed=seed)
    except Exception as error:  # noqa: BLE001 (any code of the game may raise anything)
        problem = f"a game of scripted players raised {error_line(error)}"
        return once([*results, Result("play", _PLAY, problem)])
    return once(results + check_plays(case))


def case_of(kit: Kit, options: Any, *, seed: int = 0) -> Case:
    """A few instances, and one game per script and instance."""
    instances = tuple(kit.generate(options, seed=seed, num=NUM_INSTANCES))
    every = product(kit.SCRIPT_NAMES, instances)
    plays = tuple(play_scripts(kit, options, one, spec, seed=seed) for spec, one in every)
    return Case(kit, options, instances, plays)


def once(results: Sequence[Result]) -> list[Result]:
    """The results, with each broken rule failing only the first check that found it."""
    first: dict[str, str] = {}
    return [
        replace(each, problem="", unchecked=f"it fails as {met} does")
        if each.problem and (met := first.setdefault(each.rule, each.name)) != each.name
        else each
        for each in results
    ]


def check_plays(case: Case, names: Collection[str] = ()) -> list[Result]:
    """Run the checks with these names, or all checks, on played games."""
    return [
        _run(name, promise, partial(check, case))
        for name, (check, promise) in _CHECKS.items()
        if not names or name in names
    ]


def _run(name: str, promise: str, check: Callable[[], Iterator[str]]) -> Result:
    try:
        notes = []
        for found in check():
            if not found.startswith(_NOTE):
                return Result(name, promise, found)
            notes.append(found.removeprefix(_NOTE))
        return Result(name, promise, note="; ".join(notes))
    except Unchecked as error:
        return Result(name, promise, unchecked=str(error))
    except Exception as error:  # noqa: BLE001 (any code of the game may raise anything)
        return Result(name, promise, f"raised {error_line(error)}")


def play_scripts(kit: Kit, options: Any, instance: Any, spec: str, *, seed: int) -> Played:
    """Play a game of scripted players, one of them with this spec, to its end or `MAX_MOVES`."""
    game = kit.new_game(instance, options)
    names = kit.seated(spec)
    scripts = [kit.make_script(name, seed=seed + n) for n, name in enumerate(names)]
    moves: list[tuple[int, str]] = []
    last, last_refused = "", ""
    for _ in range(MAX_MOVES):
        seat = game.seat_to_move
        if seat is None:
            break
        if seat not in range(game.num_seats):
            raise ValueError(f"seat_to_move must be a seat or None, got {seat!r}; {last}")
        text = scripts[seat].act(game.view(seat))
        if not isinstance(text, str):
            said = f"the script {names[seat]} of seat {seat} must return its move as a text"
            raise TypeError(f"{said}, got {text!r} after {len(moves)} moves")
        step = game.step(seat, text)
        refusal = "was legal"
        if step.error is None:
            moves.append((seat, text))
        else:
            refusal = f"was refused: {step.error[:200]}"
            last_refused = f"{text[:80]!r} of {spec} in seat {seat}: {step.error[:200]}"
        last = f"the last move of {spec}, {text[:80]!r} of seat {seat}, {refusal}"
    shown = {} if last_refused else copy.deepcopy(_shows(game))
    return Played(instance, tuple(moves), game.seat_to_move is None, last, last_refused, shown)


# --- the checks: each yields its problems; `_run` stops at the first ------------------------------


def _seeding(kit: Kit, options: Any, seed: int) -> Iterator[str]:
    first = kit.generate(options, seed=seed, num=NUM_INSTANCES)
    keys = [instance.key for instance in first]
    if len(set(keys)) < len(keys) or not all(isinstance(k, str) and k.isprintable() for k in keys):
        yield f"each instance needs a unique, printable key, got {keys}"
    if first != kit.generate(options, seed=seed, num=NUM_INSTANCES):
        yield "generate_instance must return equal instances for equal arguments"
    other = kit.generate(options, seed=seed + 1, num=NUM_INSTANCES)
    if set(keys) & {instance.key for instance in other}:
        yield "another seed must give instances with other keys"
    seats, new = range(len(kit.ROLES)), partial(kit.new_game, options=options)
    texts = [
        [[game.prompt(seat) for seat in seats] for game in map(new, stream)]
        for stream in (first, other)
    ]
    starts_vary = any(text != texts[0][0] for text in texts[0])
    if starts_vary and texts[0] == texts[1]:
        yield "another seed must give other instances"


def _play(case: Case) -> Iterator[str]:
    if not case.plays:
        near = case.kit.near("SCRIPTS")
        raise Unchecked(f"the module defines no SCRIPTS, so the other checks play no move{near}")
    if refused := [played.refused for played in case.plays if played.refused]:
        num = f"{len(refused)} of {len(case.plays)} scripted games have invalid moves"
        yield f"{_NOTE}{num}, such as {refused[0]}"
    for played in case.plays:
        if not played.over:
            num = f"{len(played.moves)} of {MAX_MOVES} moves of scripted players were legal"
            yield f"{num} and the game is not over; {played.last}"
        game = case.new(played)
        for seat in range(game.num_seats):
            prompt = game.prompt(seat)
            if not prompt.user or prompt != game.prompt(seat):
                yield f"prompt({seat}) must be the same text each time and not empty"
        unread = [True] * game.num_seats
        for number, (seat, text) in enumerate(played.moves):
            if game.seat_to_move != seat:
                yield f"move {number} must be seat {seat}'s again if the same moves are repeated"
            step = game.step(seat, text)
            if problem := _wrong_step(game, step, seat, unread):
                yield f"move {number} ({text[:40]!r}): {problem}"


def _wrong_step(game: Game, step: Step, seat: int, unread: list[bool]) -> str:
    """The problem with the result of a legal move, "" for none.

    `unread[seat]` says whether the seat has unread text before its next move, initially its prompt.
    It is updated in place.
    """
    mover = game.seat_to_move
    if step.seat != seat or not step.action or step.error is not None or step.error_kind:
        return f"a legal move has the mover's seat, an action and no error, got {step}"
    if problem := wrong_step(game, step):
        return problem
    unread[seat] = False
    unread[:] = (old or bool(new) for old, new in zip(unread, step.observations, strict=True))
    if mover is not None and not unread[mover]:
        return f"seat {mover} moves next and must read something since its last move"
    return ""


def _clone(case: Case) -> Iterator[str]:
    for played in case.plays:
        yield from _beside(case, played)
    for game, played, number in case.positions():
        seat, text = played.moves[number]
        state, shown, twin = game.state(), copy.deepcopy(_shows(game)), game.clone()
        if type(twin) is not type(game) or twin.state() != state:
            yield f"a clone before move {number} differs from its game"
        if what := _changed(shown, twin):
            yield f"a clone before move {number} must show what its game does: {what}"
        one = twin.step(seat, text)
        if game.state() != state:
            yield f"move {number} of a clone changed the game it was taken from"
        if what := _changed(shown, game):
            yield f"move {number} of a clone changed the game it was taken from: {what}"
        twin = game.clone()
        child = twin.clone()
        other = twin.step(seat, text)
        if what := _changed(shown, child):
            yield f"move {number} of a game changed its clone: {what}"
        if not _same(one, other):
            yield f"two clones answered move {number} differently: {one} and {other}"


def _beside(case: Case, played: Played) -> Iterator[str]:
    """The problems of two new games of the same instance, played one after the other."""
    one, two = case.new(played), case.new(played)
    start = copy.deepcopy(_shows(one))
    for move in played.moves:
        two.step(*move)
    shared = "(state that all games share, such as a list of the class?)"
    if what := _changed(start, one):
        yield f"a new game changed while another was played {shared}: {what}"
    for move in played.moves:
        one.step(*move)
    for game in (one, two):
        if what := _changed(played.shown, game):
            yield f"the same moves in another new game must end alike {shared}: {what}"


def _shows(game: Game) -> dict[str, Any]:
    """What a game shows now: its outcome, unless reading it raises, and the view of each seat."""
    shown = {f"view({seat})": game.view(seat) for seat in range(game.num_seats)}
    with suppress(Exception):  # the check of the outcome reports it
        shown["outcome()"] = game.outcome()
    return shown


def _changed(before: dict[str, Any], game: Game) -> str:
    """The first part of `before`, a copy of what `_shows` gave, that the game shows otherwise now,
    or ""."""
    now = _shows(game) if before else {}
    for name, old in before.items():
        new: Any = now.get(name)
        parts = [(name, old, new)]
        if is_dataclass(old) and type(old) is type(new):
            names = [each.name for each in fields(old)]
            parts = [(f"{name}.{n}", getattr(old, n), getattr(new, n)) for n in names]
        for part, old_part, new_part in parts:
            if not _same(old_part, new_part):
                return f"{part}, got {repr(new_part)[:80]}, before {repr(old_part)[:80]}"
    return ""


def _same(old: Any, new: Any) -> bool:
    """Whether two values are equal. Arrays and values with NaN are compared by their texts; a value
    that does not equal its own copy never differs."""
    try:
        equal = bool(old == new) or not bool(copy.deepcopy(new) == new)
        return equal or ("nan" in repr(new) and repr(old) == repr(new))
    except (ValueError, RuntimeError):  # `==` of arrays has no truth value
        return repr(old) == repr(new)


def _refusals(case: Case) -> Iterator[str]:
    moves = [text for played in case.plays for _, text in played.moves]
    junk = (*JUNK, *dict.fromkeys(f"{_head(text)}🙂" for text in moves if split_move(text)))
    for game, played, number in islice(case.positions(), 40):
        legal, before, tried = played.moves[number][1], _changeable(game), game.clone()
        for seat in range(game.num_seats):
            out_of_turn = (legal,) if seat != game.seat_to_move else ()
            for text in (*junk, *out_of_turn):
                twin = game.clone()
                step = twin.step(seat, text)
                if step.error is not None:
                    tried.step(seat, text)
                moved = "a seat moved out of turn" if out_of_turn and not step.error else ""
                if problem := moved or _wrong_refusal(twin, step, before):
                    yield f"before move {number}, {text[:40]!r} of seat {seat}: {problem}"
        for seat, text in played.moves[number:]:
            tried.step(seat, text)
        ended = {name: each for name, each in played.shown.items() if name == "outcome()"}
        what = _changed(ended, tried)  # a view or a fact may count invalid moves
        if what and not what.startswith("outcome().facts"):
            yield f"invalid moves before move {number} changed how the game ends: {what}"


def _changeable(game: Game) -> tuple[Any, ...]:
    """The parts of a game that an invalid move must not change."""
    return game.seat_to_move, game.outcome(), _without_errors(game.state())


def _wrong_refusal(game: Game, step: Step, before: tuple[Any, ...]) -> str:
    """The problem with an invalid move and the game after it; "" for a legal move."""
    if step.error is None:
        return ""
    if step.action is not None or not step.error:
        return f"an invalid move has a text for its mover and no action, got {step}"
    if not step.error_kind or not step.error_kind.replace("_", "").isalpha():
        return f"error_kind must be a short word, got {step.error_kind!r}"
    if any(step.observations) or len(step.observations) != game.num_seats or any(step.rewards):
        return "an invalid move must show nothing to any seat and reward none"
    mover, outcome, state = before
    if game.seat_to_move != mover:
        return f"an invalid move changed whose move it is, got {game.seat_to_move}, before {mover}"
    if what := _changed({"outcome()": outcome}, game):
        return f"an invalid move changed {what}"
    if _without_errors(game.state()) != state:
        return "an invalid move changed the state (only keys that start with num_errors may change)"
    return ""


def _without_errors(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_errors(v) for k, v in value.items() if not k.startswith("num_errors")}
    return value


def _views(case: Case) -> Iterator[str]:
    if not case.kit.has("vary"):
        near = case.kit.near("vary")
        raise Unchecked(f"the module has no vary(instance, seat, *, seed){near}")
    num_varied = 0
    for played in case.plays[: 2 * NUM_INSTANCES]:
        for seat in range(len(case.kit.ROLES)):
            varied = case.kit.vary(played.instance, seat, seed=1)
            if varied is not None:
                num_varied += 1
                other = case.kit.new_game(varied, case.options)
                yield from _leaks(case.new(played), other, played, seat)
    if case.plays and not num_varied:
        raise Unchecked("vary returned None for every instance and seat")


def _leaks(game: Game, varied: Game, played: Played, seat: int) -> Iterator[str]:
    """The places where another seat's knowledge depends on what only `seat` sees, while both games
    have the same legal moves."""
    others = [other for other in range(game.num_seats) if other != seat]
    if (game.prompt(seat), game.view(seat)) == (varied.prompt(seat), varied.view(seat)):
        yield f"vary(instance, {seat}) must change what seat {seat} reads or knows"
    for other in others:
        if game.prompt(other) != varied.prompt(other):
            yield f"the prompt of seat {other} shows what only seat {seat} sees"
    for number, (mover, text) in enumerate(played.moves):
        for other in others:
            if game.view(other) != varied.view(other):
                yield f"before move {number}, view({other}) shows what only seat {seat} sees"
        one, two = game.step(mover, text), varied.step(mover, text)
        if two.error is not None or varied.seat_to_move != game.seat_to_move:
            return  # what is legal may depend on what the mover knows
        if game.seat_to_move is None:
            return  # the end may reveal everything
        for other in others:
            if mover != seat and one.observations[other] != two.observations[other]:
                yield f"after move {number}, seat {other} reads what only seat {seat} sees"


def _outcome(case: Case) -> Iterator[str]:
    forfeited: dict[int, float] = {}  # the most that a forfeit pays each seat
    special = False  # whether the game has a separate outcome for forfeits
    for game, _, number in case.positions():
        if problem := wrong_outcome(game, game.outcome()):
            yield f"before move {number}: outcome() {problem}"
        if (seat := game.seat_to_move) is not None:
            outcome = game.outcome_of_forfeit(seat)
            if problem := wrong_outcome(game, outcome):
                yield f"before move {number}: outcome_of_forfeit({seat}) {problem}"
            special = special or outcome != game.outcome()
            forfeited[seat] = max(outcome.rewards[seat], forfeited.get(seat, -math.inf))
    unequal, ends = "", list[Outcome]()
    for played in case.plays:
        game = case.new(played)
        for move in played.moves:
            game.step(*move)
        final = game.outcome()
        if len(set(final.rewards)) > 1 and not final.seat_scores:
            unequal = f"rewards {final.rewards} without seat_scores: all seats score the same"
        if problem := wrong_outcome(game, final):
            yield f"at the end: outcome() {problem}"
        ends.append(final)
        every = range(game.num_seats)
        for seats in (every, *((seat,) for seat in every)):
            if problem := wrong_measures(game.measures(seats)):
                yield f"at the end: measures of seats {[*seats]} {problem}"
        for seat in range(game.num_seats) if game.seat_to_move is None else ():
            for text in {*JUNK, *(text for _, text in played.moves)}:
                step = game.step(seat, text)
                if step.error is None or game.outcome() != final or game.seat_to_move is not None:
                    yield f"after the end, {text[:40]!r} of seat {seat} was accepted or changed it"
    if unequal:
        yield _NOTE + unequal
    if stalls := _stalls([end for end in ends if len(set(end.rewards)) > 1], forfeited):
        yield f"{_NOTE}{stalls}: define outcome_of_forfeit(seat)"
    elif (
        ends and not special and all(end.seat_scores and len(set(end.rewards)) == 1 for end in ends)
    ):
        yield f"{_NOTE}no scripted game has a loser to compare a forfeit with"


def _stalls(ends: Sequence[Outcome], forfeited: dict[int, float]) -> str:
    """The problem if a forfeit pays a seat more than its worst of these ends, else ""."""
    for seat, paid in forfeited.items() if ends else ():
        if paid > (worst := min(end.rewards[seat] for end in ends)):
            return f"seat {seat} gets {paid:g} for a forfeit, {worst:g} for a loss"
    return ""


def _state(case: Case) -> Iterator[str]:
    if not case.kit.has("restore"):
        yield "the module must define restore(state)"
    for game, played, number in case.positions():
        seat, text = played.moves[number]
        state = game.state()
        if problem := wrong_state(state):
            yield f"state() before move {number} {problem}"
        plain = json.loads(json.dumps(state))
        if plain != state:
            yield f"JSON changes state() before move {number} (tuples, keys that are not strings)"
        twin, copied = case.kit.restore(plain), game.clone()
        if twin.state() != state or twin.seat_to_move != game.seat_to_move:
            yield f"the game restored before move {number} has another state or mover"
        for each in range(game.num_seats):
            if twin.view(each) != game.view(each):
                yield f"the game restored before move {number} has another view({each})"
        one, other = twin.step(seat, text), copied.step(seat, text)
        if not (_same(one, other) and _same(twin.outcome(), copied.outcome())):
            yield f"the game restored before move {number} plays on differently"


def _fuzz(case: Case) -> Iterator[str]:
    draw = random.Random(0)
    texts = [text for played in case.plays for _, text in played.moves] or list(JUNK)
    for instance in case.instances:
        game = case.kit.new_game(instance, case.options)
        others = _of_other_tags(game, texts)
        unread = [True] * game.num_seats
        for _ in range(150):
            if game.seat_to_move is None:
                game = case.kit.new_game(instance, case.options)
                unread = [True] * game.num_seats
            seat = draw.randrange(game.num_seats)
            if draw.random() < 0.7 and game.seat_to_move is not None:
                seat = game.seat_to_move
            other = others and draw.random() < 0.3
            text = draw.choice(others) if other else _mutated(draw.choice(texts), draw)
            before = _changeable(game)
            try:
                step = game.step(seat, text)
            except Exception as error:  # noqa: BLE001 (that is the question)
                yield f"step({seat}, {text[:60]!r}) raised {error_line(error)}"
            problem = _wrong_refusal(game, step, before)
            if not problem and (wrong := wrong_outcome(game, game.outcome())):
                problem = f"outcome() {wrong}"
            if step.error is None:
                problem = problem or _wrong_step(game, step, seat, unread)
            if problem:
                yield f"{text[:40]!r} of seat {seat}: {problem}"


def _of_other_tags(game: Game, texts: Sequence[str]) -> list[str]:
    """Moves with the tags of a TurnGame that no script uses: without content, with the contents of
    the scripts' moves, and with words of the prompts."""
    moves = [move for move in map(split_move, texts) if move is not None]
    shown = " ".join(game.prompt(seat).user for seat in range(game.num_seats))
    contents = dict.fromkeys(["", *(content for _, content in moves), *re.findall(r"\w+", shown)])
    unused = set(getattr(game, "tags", ())) - {tag for tag, _ in moves}
    return [f"[{tag}] {content}" for tag in sorted(unused) for content in contents]


def _mutated(text: str, draw: random.Random) -> str:
    """The text with random characters or words replaced, removed, doubled or inserted."""
    for _ in range(draw.choice((0, 1, 1, 2, 4))):
        start = draw.randrange(len(text) + 1)
        end = min(len(text), start + draw.choice((0, 1, 1, 3, 10)))
        letters = draw.choice((string.printable, "[]:,-\n ", "é🙂\u2028\x00ſİ９\ud800"))
        new = "".join(draw.choice(letters) for _ in range(draw.choice((0, 1, 2, 5))))
        text = text[:start] + draw.choice((new, new, text[start:end] * 2, "\n")) + text[end:]
    return text


def _forgery(case: Case) -> Iterator[str]:
    """Messages that contain a line of the game's own text about another kind of move."""
    shown = []
    for game, played, number in case.positions():
        step = game.clone().step(*played.moves[number])
        shown += [(step.action, text) for text in step.observations if text]
    if not any(action == "message" for action, _ in shown):
        raise Unchecked('no scripted player makes a legal move of the action "message"')
    written = [text for action, text in shown if action != "message"]
    for game, played, number in case.positions():
        seat, text = played.moves[number]
        twin = game.clone()
        split = split_move(text)
        if twin.step(seat, text).action != "message" or split is None or not split[1]:
            continue
        for line in sorted(set(written))[:8]:
            step = game.clone().step(seat, f"{_head(text)}ok\n{line}")
            for reader, observation in enumerate(step.observations):
                if f"\n{line}\n" in f"\n{observation}\n" and reader != seat:
                    yield f"a message can forge this text of the game: {line[:80]!r}"


def _head(text: str) -> str:
    """A move up to its content."""
    return text[: len(text.rstrip()) - len((split_move(text) or ("", ""))[1])]


def _pages(case: Case) -> Iterator[str]:
    """What pages draw raises no error, is plain JSON and has a form for each mover."""
    for game, played, number in case.positions():
        seat = played.moves[number][0]
        if not case.kit.forms(game, seat):
            yield f"before move {number}, forms(game, {seat}) must not be empty"
        shown = [case.kit.board(game, each) for each in range(game.num_seats)]
        json.dumps([*shown, *map(asdict, case.kit.forms(game, seat))], allow_nan=False)
        if number == len(played.moves) - 1 and case.kit.has("restore"):
            game.step(*played.moves[number])
            turns = [{"error": None} for _ in played.moves]
            json.dumps(case.kit.picture(game.state(), turns), allow_nan=False)


_PLAY = "scripted players finish their games; each move is answered as promised"
# Each check and the promise it tests.
_CHECKS: dict[str, tuple[Callable[[Case], Iterator[str]], str]] = {
    "play": (_play, _PLAY),
    "outcome": (_outcome, "the outcome is valid at any time and final at the end"),
    "clone": (_clone, "a clone continues like its game, and no game changes another"),
    "refusals": (_refusals, "an invalid move or one out of turn changes nothing but error counts"),
    "views": (_views, "no seat reads or knows what only another seat sees"),
    "state": (_state, "a game restored from its state, through JSON, continues like it"),
    "fuzz": (_fuzz, "no text makes the game raise an error"),
    "forgery": (_forgery, "a message cannot contain a line that reads like the game's own"),
    "pages": (_pages, "what pages draw is plain JSON, and each mover has a form"),
}
