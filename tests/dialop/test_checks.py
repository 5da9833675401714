"""`python -m dialop check`: games of this package pass; each check finds a game that breaks it."""

import math
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dialop import scaffold
from dialop.checks import Result, case_of, check_plays
from dialop.cli import main
from dialop.game import Outcome
from dialop.kit import Kit, games
from dialop.turns import TurnView
from tests.helpers import three_rooms
from tests.helpers.shared_work import slow_except
from tests.helpers.three_rooms import ThreeRooms, View


def result_of(name: str, **parts: Any) -> Result:
    """A check of the game of three rooms with these parts of its module replaced."""
    kit = Kit("broken", SimpleNamespace(**{**vars(three_rooms), **parts}))
    (result,) = check_plays(case_of(kit, kit.Options()), (name,))
    return result


def broken(game: type[ThreeRooms]) -> dict[str, Any]:
    """The parts of a module whose games are of this class."""

    def restore(state: Any) -> ThreeRooms:
        whole = three_rooms.restore(state)
        twin = game(whole.instance, whole.options)
        twin.play = whole.play
        return twin

    return {"new_game": game, "restore": restore}


# Small options: with those of the full games the checks take a minute.
CHECKED = {
    "collab": "",
    "matching": "--size 3 --max-value 10",
    "mediation": "--days 1 --keep-flights 4 --events 3",
    "planning": "--sites 8 --slots 2 --preferences 4",
}


@pytest.mark.parametrize("name", slow_except(games(), "collab", "matching"))
def test_the_games_of_this_package_pass(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", name, *CHECKED[name].split()]) == 0, capsys.readouterr().out


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
    capsys.readouterr()
    # A field without `option`, and one of play.
    assert main(["check", "tests.helpers.three_rooms", "--cost", "0.5", "--brief"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 and all(line.startswith("ok ") for line in lines)


def test_what_is_allowed_and_seldom_meant_is_noted() -> None:
    """Seats that are paid differently and score the same; scripts whose moves are refused; tries
    that pay more where they are used up than where the seat loses."""
    plain = result_of("play")
    assert not plain.note and not plain.problem
    unequal = "rewards (0.0, 0.0, -1.0) without seat_scores: all seats score the same"
    stalls = "seat 2 gets 0 for a forfeit, -1 for a loss"
    assert result_of("outcome").note == f"{unequal}; {stalls}: define outcome_of_forfeit(seat)"

    class Forfeited(ThreeRooms):
        paid = -1.0

        def outcome_of_forfeit(self, seat: int) -> Outcome:
            return replace(self.outcome(), rewards=(0.0, 0.0, self.paid))

    class PaidTooLittle(Forfeited):
        paid = -math.inf

    assert result_of("outcome", **broken(Forfeited)).note == unequal
    problem = result_of("outcome", **broken(PaidTooLittle)).problem
    assert problem.startswith("before move 0: outcome_of_forfeit(0) must give rewards as a tuple")

    class Unsure(three_rooms.Player):
        def act(self, view: View) -> str:
            return super().act(view) if next(tries) % 2 else "[meet] me"

    def make_script(spec: str, *, seed: int) -> three_rooms.Player:
        return (Unsure if spec == "guesser" else three_rooms.Player)(spec, seed)

    tries = count()
    line = result_of("play", make_script=make_script).line()
    assert line.startswith("ok play: ") and "; note: 4 of 16 scripted games have invalid m" in line
    assert line.endswith(", such as '[meet] me' of guesser in seat 2: Error: no such move")


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


class OfNothing(scaffold.MyGame):
    def __init__(self) -> None:
        super().__init__(None, None)


def test_a_game_may_count_what_it_refuses() -> None:
    module = {**vars(scaffold), "new_game": ShownTries, "restore": ShownTries.from_state}
    kit = Kit("own", SimpleNamespace(**module))
    (result,) = check_plays(case_of(kit, kit.Options()), ("refusals",))
    assert result.problem == "" and result.unchecked == ""


def test_a_class_that_cannot_be_made_of_instance_and_options_is_refused() -> None:
    with pytest.raises(ValueError, match=r"with \(instance, options\), got __init__\("):
        Kit("own", SimpleNamespace(**{**vars(scaffold), "new_game": OfNothing}))


@pytest.mark.parametrize(
    ("parts", "name", "words"),
    [
        ({"SCRIPT_NAMES": ()}, "play", "defines no SCRIPTS, "),
        ({"SCRIPT_NAMES": (), "SCRIPT": {}}, "play", "; nearest is SCRIPT"),
        ({"vary": lambda instance, seat, *, seed: None}, "views", ""),
    ],
)
def test_what_cannot_be_checked_is_said(parts: dict[str, Any], name: str, words: str) -> None:
    line = result_of(name, **parts).line()
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

    assert result_of("clone", **broken(Drawn)).problem == ""


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
    for name, rule in {
        "matchin": "nearest is matching",
        "no.such.game": "must be one of",
        str(tmp_path / "bad_gam.py"): "nearest is bad_game.py",
        str(bad): "ZeroDivisionError",
        str(shadow): "rename the file",
    }.items():
        assert main(["check", name]) == 2
        out, error = capsys.readouterr()
        assert not out and error.count("\n") == 1 and rule in error, error
