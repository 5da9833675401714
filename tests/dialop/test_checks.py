"""`python -m dialop check`: games of this package pass; each check finds a game that breaks it."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from dialop import checks, scaffold
from dialop.checks import Result, check_kit
from dialop.cli import main
from dialop.game import Outcome, Prompt, Step
from dialop.kit import Kit, games
from dialop.turns import TurnView
from tests.helpers import three_rooms
from tests.helpers.three_rooms import CLERK, Instance, Options, ThreeRooms, View


def results_of(**parts: Any) -> dict[str, Result]:
    """The checks of the game of three rooms with these parts of its module replaced."""
    kit = Kit("broken", SimpleNamespace(**{**vars(three_rooms), **parts}))
    return {result.name: result for result in check_kit(kit, kit.Options())}


def broken(game: type[ThreeRooms]) -> dict[str, Any]:
    """The parts of a module whose games are of this class."""

    def restore(state: Any) -> ThreeRooms:
        whole = three_rooms.restore(state)
        twin = game(whole.instance, whole.options)
        twin.play = whole.play
        return twin

    return {"new_game": game, "restore": restore}


@pytest.mark.parametrize(
    "name", [n if n == "collab" else pytest.param(n, marks=pytest.mark.slow) for n in games()]
)
def test_the_games_of_this_package_pass(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", name]) == 0, capsys.readouterr().out


def test_a_module_passes_and_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "tests.helpers.three_rooms"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 and all(line.startswith("ok ") for line in lines)


def test_an_option_that_is_named_as_a_word_of_the_command_keeps_its_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path(scaffold.__file__).read_text(encoding="utf-8")
    field = "    largest: int = option("
    named = '    seed: int = 7\n    game: str = "x"\n    num: int = 3\n'
    (tmp_path / "named.py").write_text(text.replace(field, named + field), encoding="utf-8")
    assert main(["check", str(tmp_path / "named.py"), "--seed", "1", "--largest", "5"]) == 0
    assert capsys.readouterr().out.count("ok ") == 10
    assert main(["check", "matching", "--seed"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_game_is_checked_with_the_options_that_are_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    game = str(Path(__file__).resolve().parents[2] / "examples" / "meeting" / "meeting.py")
    assert main(["check", game, "--num-days", "3"]) == 0
    assert main(["check", game, "--num-days", "0"]) == 2
    assert capsys.readouterr().err.endswith("error: num_days must be 2 to 7, got 0\n")
    assert main(["check", game, "--num_days", "3"]) == 2
    # A field without `option`, and one of play.
    assert main(["check", "tests.helpers.three_rooms", "--cost", "0.5", "--brief"]) == 0


def test_measures_are_those_of_any_seats() -> None:
    class OfAllAlone(ThreeRooms):
        def measures(self, seats: Any) -> dict[str, float]:
            said = sum(seat in seats for seat, *_ in self.play.log)
            return {"share": 1.0 / said if len(seats) == 3 else float("nan")}

    problem = results_of(**broken(OfAllAlone))["outcome"].problem
    assert problem.startswith("at the end: measures of seats [0] must give a number")


def test_what_is_allowed_and_seldom_meant_is_noted() -> None:
    """Seats that are paid differently and score the same; scripts whose moves are refused; tries
    that pay more where they are used up than where the seat loses."""
    results = results_of()
    assert not results["play"].note and not results["play"].problem
    unequal = "rewards (0.0, 0.0, -1.0) and no seat_scores: all seats score the same"
    stalls = "seat 2 gets 0 where its tries are used up, -1 where it loses"
    assert results["outcome"].note == f"{unequal}; {stalls}: define outcome_of_forfeit(seat)"

    class Forfeited(ThreeRooms):
        paid = -1.0

        def outcome_of_forfeit(self, seat: int) -> Outcome:
            return replace(self.outcome(), rewards=(0.0, 0.0, self.paid))

    class PaidTooLittle(Forfeited):
        paid = -math.inf

    class Drawn(ThreeRooms):
        def outcome(self) -> Outcome:
            return replace(super().outcome(), rewards=(0.0,) * 3, seat_scores=(0.5,) * 3)

    class DrawnOrForfeited(Drawn, Forfeited): ...

    assert results_of(**broken(Forfeited))["outcome"].note == unequal
    alone = "no scripted game has a loser to compare a forfeit with"
    assert results_of(**broken(Drawn))["outcome"].note == alone
    assert not results_of(**broken(DrawnOrForfeited))["outcome"].note
    problem = results_of(**broken(PaidTooLittle))["outcome"].problem
    assert problem.startswith("before move 0: outcome_of_forfeit(0) must give rewards as a tuple")

    class Unsure(three_rooms.Player):
        def act(self, view: View) -> str:
            return super().act(view) if next(tries) % 2 else "[meet] me"

    def make_script(spec: str, *, seed: int) -> three_rooms.Player:
        return (Unsure if spec == "guesser" else three_rooms.Player)(spec, seed)

    tries = count()
    line = results_of(make_script=make_script)["play"].line()
    assert line.startswith("ok play: ") and "; note: 4 of 16 scripted games have refused m" in line
    assert line.endswith(", such as '[meet] me' of guesser in seat 2: Error: no such move")


# --- a broken game for each check ---------------------------------------------------------------


class StaleClone(ThreeRooms):
    """Clones share the record of play."""

    def clone(self) -> ThreeRooms:
        twin = type(self)(self.instance, self.options)
        twin.play = replace(self.play, num_errors=[*self.play.num_errors])
        return twin


class TalkativeRefusal(ThreeRooms):
    """A refused move is shown to the others."""

    def step(self, seat: int, text: str) -> Step:
        step = super().step(seat, text)
        return step if step.error is None else replace(step, observations=(text, text, text))


class AnyoneMoves(ThreeRooms):
    """A seat may move out of turn."""

    def _read(self, seat: int, text: str) -> tuple[str, str]:
        mover = self.play.to_move
        if mover is not None and seat < CLERK:
            self.play.to_move = seat
        try:
            return super()._read(seat, text)
        finally:
            self.play.to_move = mover


class OpenPrompts(ThreeRooms):
    """The clerk's prompt holds a caller's number."""

    def prompt(self, seat: int) -> Prompt:
        prompt = super().prompt(seat)
        return replace(prompt, user=f"{prompt.user} {self.instance.numbers[0]}")


class OpenViews(ThreeRooms):
    """Every seat's view holds the first caller's number."""

    def view(self, seat: int) -> View:
        return replace(super().view(seat), number=self.instance.numbers[0])


class OpenReplies(ThreeRooms):
    """Caller 1 reads caller 0's number when the clerk is told."""

    def step(self, seat: int, text: str) -> Step:
        step = super().step(seat, text)
        if step.error is None and seat == 1 and self.play.to_move is not None:
            shown = (*step.observations[:2], f"caller 1: x {self.instance.numbers[0]}")
            return replace(step, observations=shown)
        return step


class TooGoodAScore(ThreeRooms):
    def outcome(self) -> Outcome:
        return replace(super().outcome(), score_norm=1.5)


class NoSeat(ThreeRooms):
    """After the first move it is a seat's turn that the game does not have."""

    @property
    def seat_to_move(self) -> int | None:
        return 7 if self.play.log else 0


class NoOutcome(ThreeRooms):
    def outcome(self) -> Outcome:
        raise KeyError("score")


class NeverEnds(ThreeRooms):
    """Moves are accepted after the end."""

    def step(self, seat: int, text: str) -> Step:
        if self.play.to_move is None:
            return Step(seat, "message", None, None, ("", "", ""))
        return super().step(seat, text)


class SilentMove(ThreeRooms):
    """Whoever moves next reads nothing."""

    def step(self, seat: int, text: str) -> Step:
        step = super().step(seat, text)
        return step if step.error else replace(step, observations=("", "", ""))


class Raises(ThreeRooms):
    """A number too long for int raises."""

    def _read(self, seat: int, text: str) -> tuple[str, str]:
        if "\ud800" in text:
            text.encode()
        return super()._read(seat, text)


class Forgeable(ThreeRooms):
    """A message may have any lines, also one like the tool's answer."""

    def _read(self, seat: int, text: str) -> tuple[str, str]:
        if text.startswith("[message]") and seat == self.play.to_move != CLERK:
            return "message", text.removeprefix("[message] ")
        return super()._read(seat, text)


class Deaf(ThreeRooms):
    """The clerk's moves are refused."""

    def step(self, seat: int, text: str) -> Step:
        if seat == CLERK:
            return Step(seat, None, "Error: speak up", "no_voice", ("", "", ""))
        return super().step(seat, text)


class SharedList(ThreeRooms):
    """All games share the list of what was said, and pay less the longer it is."""

    said: ClassVar[list[str]] = []

    def step(self, seat: int, text: str) -> Step:
        step = super().step(seat, text)
        self.said.extend([text] if step.error is None else [])
        return step

    def outcome(self) -> Outcome:
        return replace(super().outcome(), score=1 / (1 + len(self.said)))


class SharedAtTheEnd(SharedList):
    """The list begins anew with each game, and only the end shows it."""

    def __init__(self, instance: Instance, options: Options) -> None:
        super().__init__(instance, options)
        self.said.clear()

    def outcome(self) -> Outcome:
        return super().outcome() if self.play.to_move is None else ThreeRooms.outcome(self)


def test_a_game_that_does_not_end_tells_its_last_move_and_the_refusal() -> None:
    problem = results_of(**broken(Deaf))["play"].problem
    assert " of 400 moves of scripted players were legal and the game goes on; " in problem
    assert re.search(r"the last move of \w+, '.+' of seat 2, was refused: Error: speak up", problem)


class Mute:
    """A scripted player that forgets to return its move."""

    def act(self, view: View) -> None:
        pass


def mute_clerk(spec: str, *, seed: int) -> Any:
    return Mute() if spec == "clerk" else three_rooms.make_script(spec, seed=seed)


def forgetful(state: Any) -> ThreeRooms:
    """A restored game that has lost what it was told."""
    game = three_rooms.restore(state)
    game.play.told = {}
    return game


def same_key(options: Options, *, seed: int, index: int) -> Instance:
    return replace(three_rooms.generate_instance(options, seed=seed, index=index), key="x")


def restless(options: Options, *, seed: int, index: int) -> Instance:
    number = next(_calls)
    return Instance(f"{seed} {index} {number}", (number, number))


def one_stream(options: Options, *, seed: int, index: int) -> Instance:
    return three_rooms.generate_instance(options, seed=0, index=index)


_calls = count()


BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("seeding", {"generate_instance": same_key}, "printable key"),
    ("seeding", {"generate_instance": restless}, "equal instances"),
    ("seeding", {"generate_instance": one_stream}, "another seed"),
    ("play", {"SCRIPT_NAMES": ("caller", "nobody")}, "unknown scripted player"),
    (
        "play",
        {"make_script": mute_clerk},
        "script clerk of seat 2 must return its move as a text, ",
    ),
    ("play", broken(SilentMove), "must read something"),
    ("play", broken(NoSeat), "seat_to_move must be a seat or None, got 7; the last move of"),
    ("clone", broken(StaleClone), "changed the game"),
    ("clone", broken(SharedList), "class?): outcome().score, got 0."),
    ("clone", broken(SharedAtTheEnd), "must end alike (state that all games share, "),
    ("refusals", broken(TalkativeRefusal), "must show nothing"),
    ("refusals", broken(AnyoneMoves), "out of turn"),
    ("views", broken(OpenPrompts), "the prompt of seat"),
    ("views", broken(OpenViews), "view"),
    ("views", broken(OpenReplies), "reads what only seat 0 sees"),
    ("outcome", broken(NoOutcome), "raised test_checks.py:"),
    ("outcome", broken(TooGoodAScore), "in [0, 1]"),
    ("outcome", broken(NeverEnds), "after the end"),
    ("state", {"restore": forgetful}, "another state"),
    ("fuzz", broken(Raises), "UnicodeEncodeError"),
    ("forgery", broken(Forgeable), "can forge this text of the game: '"),
    ("pages", {"forms": lambda game, seat: []}, "must not be empty"),
    ("pages", {"board": lambda game, seat: {"cells": {1}}}, "not JSON serializable"),
    ("pages", {"picture": lambda game, num: ({}, [])}, "shorter"),
]


@pytest.mark.parametrize(("name", "parts", "words"), BROKEN)
def test_each_check_finds_a_game_that_breaks_it(
    name: str, parts: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {each: check for each, check in checks._CHECKS.items() if each == name}
    monkeypatch.setattr(checks, "_CHECKS", own)  # without the time of the others
    result = results_of(**parts)[name]
    assert words in result.problem and "\n" not in result.line()
    assert result.line().startswith(f"FAILED {name}: ")


@pytest.mark.parametrize("game", [NoOutcome, TooGoodAScore])
def test_one_mistake_fails_one_check(game: type[ThreeRooms]) -> None:
    """Refusals, states and random texts ask for the outcome too."""
    lines = [result.line() for result in results_of(**broken(game)).values()]
    assert [line for line in lines if line.startswith("FAILED ")] == [lines[2]]
    assert "FAILED outcome: " in lines[2]
    assert "not checked fuzz: it fails as outcome does" in lines


# --- mistakes of a TurnGame ----------------------------------------------------------------------


class EarlyAnswer(scaffold.MyGame):
    """A refused answer is kept."""

    def play(self, seat: int, tag: str, content: str) -> int | None:
        self.answer = content if tag == "answer" else ""
        return super().play(seat, tag, content)


class CountedTries(scaffold.MyGame):
    """Refused answers, which no state shows, make the game pay less."""

    tries = 0

    def play(self, seat: int, tag: str, content: str) -> int | None:
        self.tries += 1
        return super().play(seat, tag, content)

    def outcome(self) -> Outcome:
        return replace(super().outcome(), score=1 / max(self.tries, 1) if self.answer else 0.0)


@dataclass(frozen=True, slots=True)
class CountingView(TurnView):
    refused: int = 0


class ShownTries(scaffold.MyGame):
    """Each seat sees, and the outcome's facts tell, how many moves were refused."""

    def view(self, seat: int) -> TurnView:
        view = super().view(seat)
        return CountingView(view.seat, view.own, view.log, view.seat_to_move, sum(self._num_errors))

    def outcome(self) -> Outcome:
        refused = float(sum(self._num_errors)) if self.seat_to_move is None else 0.0
        return replace(super().outcome(), facts={"refused": refused})


class NoReturn(scaffold.MyGame):
    """A return is missing, so the first move ends the game."""

    def play(self, seat: int, tag: str, content: str) -> None:
        super().play(seat, tag, content)


class Probe(scaffold.MyGame):
    """No script probes, and a probe of a word that a seat reads raises."""

    tags = (*scaffold.MyGame.tags, "probe")

    def play(self, seat: int, tag: str, content: str) -> int | None:
        if tag == "probe" and content.lower() in self.sees(seat).lower().split():
            raise KeyError(content)
        return super().play(seat, tag, content)


class NotANumber(scaffold.MyGame):
    def outcome(self) -> Outcome:
        return replace(super().outcome(), rewards=(float("nan"),) * 2)


class Unmade(scaffold.MyGame):
    """The attributes of TurnGame are not set."""

    def __init__(self, instance: Any, options: Any) -> None:
        self.instance, self.options = instance, options


class OfNothing(scaffold.MyGame):
    def __init__(self) -> None:
        super().__init__(None, None)


@pytest.mark.parametrize(
    ("game", "name", "words"),
    [
        (EarlyAnswer, "refusals", "a refused move changed outcome().over, got True, before False"),
        (CountedTries, "refusals", "changed how the game ends: outcome().score, got 0."),
        (
            NoReturn,
            "outcome",
            "is to move (`play` returned no seat, which ends the game), ",
        ),
        (NotANumber, "outcome", "must give rewards as a tuple of one number a seat, got (nan, "),
        (Probe, "fuzz", "[probe]"),
        (Unmade, "seeding", "Unmade.__init__ of game own must call super().__init__(instance, "),
    ],
)
def test_a_mistake_in_a_game_of_turns_fails_one_check_that_says_what_it_is(
    game: type[scaffold.MyGame], name: str, words: str
) -> None:
    module = {**vars(scaffold), "new_game": game, "restore": game.from_state}
    kit = Kit("own", SimpleNamespace(**module))
    failed = [result for result in check_kit(kit, kit.Options()) if result.problem]
    assert [result.name for result in failed] == [name] and words in failed[0].problem


def test_a_game_may_count_what_it_refuses() -> None:
    module = {**vars(scaffold), "new_game": ShownTries, "restore": ShownTries.from_state}
    kit = Kit("own", SimpleNamespace(**module))
    results = {result.name: result for result in check_kit(kit, kit.Options())}
    assert results["refusals"].problem == "" and results["refusals"].unchecked == ""


def test_a_class_that_cannot_be_made_of_instance_and_options_is_refused() -> None:
    with pytest.raises(ValueError, match=r"with \(instance, options\), got __init__\("):
        Kit("own", SimpleNamespace(**{**vars(scaffold), "new_game": OfNothing}))


@pytest.mark.parametrize(
    ("parts", "name", "words"),
    [
        ({"SCRIPT_NAMES": ()}, "play", "names no SCRIPTS, "),
        ({"SCRIPT_NAMES": (), "SCRIPT": {}}, "play", "; nearest is SCRIPT"),
        ({"vary": lambda instance, seat, *, seed: None}, "views", ""),
    ],
)
def test_what_cannot_be_checked_is_said(parts: dict[str, Any], name: str, words: str) -> None:
    line = results_of(**parts)[name].line()
    assert line.startswith(f"not checked {name}: ") and words in line


def test_views_of_arrays_or_of_plain_objects_are_no_shared_state() -> None:
    """An array has no one truth of ==, and an object without == does not equal its own copy."""

    @dataclass(frozen=True)
    class Seen(View):
        table: Any = None
        pen: Any = None

    class Drawn(ThreeRooms):
        def view(self, seat: int) -> View:
            return Seen(**vars(super().view(seat)), table=np.eye(2), pen=object())

    assert results_of(**broken(Drawn))["clone"].problem == ""


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("ROLES", "ab", "tuple of names"),
        ("Options", int, "must be a dataclass"),
        ("new_game", None, ""),
    ],
)
def test_a_module_that_declares_itself_wrongly_is_refused(
    part: str, value: Any, words: str
) -> None:
    parts = {**vars(three_rooms), part: value}
    if value is None:
        del parts[part]
    with pytest.raises(ValueError, match=words or f"must define {part}"):
        Kit("broken", SimpleNamespace(**parts))


def test_scripts_of_one_cast_are_one_baseline() -> None:
    """A caller's games and a clerk's have the same three players."""
    parts = {name: part for name, part in vars(three_rooms).items() if name != "BASELINES"}
    assert Kit("own", SimpleNamespace(**parts)).BASELINES == ("caller", "calculator", "guesser")
    with pytest.raises(ValueError, match=r"seated\('caller'\) of game own .*ZeroDivisionError"):
        Kit("own", SimpleNamespace(**{**parts, "seated": lambda _: 1 / 0}))


def test_a_name_that_is_no_game_gets_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    bad = tmp_path / "bad_game.py"
    bad.write_text("ROLES = 1 / 0\n")
    shadow = tmp_path / "json.py"
    shadow.write_text("")
    names: list[tuple[str, Callable[[str], bool]]] = [
        ("matchin", lambda line: "nearest is matching" in line),
        ("no.such.game", lambda line: "must be one of" in line),
        (str(tmp_path / "bad_gam.py"), lambda line: "nearest is bad_game.py" in line),
        (str(bad), lambda line: "ZeroDivisionError" in line),
        (str(shadow), lambda line: "rename the file" in line),
    ]
    for name, expected in names:
        assert main(["check", name]) == 2
        out, error = capsys.readouterr()
        assert not out and error.count("\n") == 1 and expected(error), error
