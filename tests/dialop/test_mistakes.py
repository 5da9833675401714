"""A mistake in a game of one's own is named, by `dialop check` and where a run starts or plays.

Each row changes a part of a right game's file.
"""

from pathlib import Path
from typing import NamedTuple

import pytest

from dialop.checks import case_of, check_kit, check_plays
from dialop.kit import load_kit
from selfplay.config import Config, load_config
from selfplay.evaluation.evaluate import evaluate_scripted
from tests.helpers.changed_games import changed


class Wrong(NamedTuple):
    """What stands in a part's place, and what a run says of it, or the check that fails and what it
    says. Parts of a message are joined by "…"."""

    change: dict[str, str]
    run: str = ""
    check: str = ""


def settings(game: Path) -> Config:
    small = ["model.scratch={}", "rollout.max_game_tokens=99", "warm_start=off"]
    return load_config(None, [*small, f"game.name={game}"])


def names(said: str, needle: str) -> bool:
    """Whether these parts of the message occur in order, in one line."""
    place = 0
    for part in needle.split("…"):
        place = said.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return "\n" not in said


FREE = '"free: " + " ".join(self.instance.free[seat])'
NEXT, PAID, NAMED = "None if self.day else 1 - seat", "(score, score)", '{"days_named": float('
MEETING = [
    Wrong({FREE: "7"}, "sees must return a text, got 7"),
    Wrong({"def sees(": "def seen("}, "Meeting of game … must define sees"),
    Wrong({NEXT: "3"}, "Meeting.play must return a seat, 0 to 1, or None, got 3"),
    Wrong({NEXT: "None"}, "over=True … to move (`play` returned no seat"),
    Wrong({NEXT: "self.show(2, 'x')"}, "Meeting.show must be given a seat, 0 to 1, …got 2 and 'x'"),
    Wrong({NEXT: "self.show(0, 7)"}, "Meeting.show must be given a seat, …got 0 and 7"),
    Wrong({PAID: "score"}, "must give rewards as a tuple of one number per seat, …got 1.0"),
    Wrong({PAID: "(1e308, -1e308)"}, "at most 1e+15 in size, got (1e+308, …own_….py:"),
    Wrong({"Outcome(over=over": "dict(over=over"}, "must give an Outcome, got {'over': "),
    Wrong(
        {"rewards=paid": "rewards=paid, facts={'d': 'x'}"}, "a finite number for each of its fac"
    ),
    Wrong({NAMED: "{0: str("}, "measures() must give a number for each name"),
    Wrong({NAMED: '{"messages": float('}, "not give the name of a …of every run, got 'messages'"),
    Wrong({NAMED: '{"statements": float('}, "give both of statements and true_state"),
    Wrong({"return Instance(": "return ("}, "must return an instance with a text `key`, got "),
    Wrong(
        {"return Instance(": "return exit() and ("},
        "generate_instance … at index 0: own_…: SystemExit: ",
    ),
    Wrong(
        {"return Instance(": "return {}[7] and ("},
        "generate_instance … at index 0: own_…: KeyError: 7",
    ),
    Wrong({"num_seats, tags =": "seats, tags ="}, "Meeting of game … must define num_seats"),
    Wrong({'2, ("message", "meet")': '2, "meet"'}, "tags of Meeting … must be a tuple of texts, "),
    Wrong({'2, ("message", "meet")': '2, ("Meet",)'}, "must be in lower case…got ['Meet']"),
    Wrong({"option(6,": "option('six',"}, "the default of num_days must be a number, got 'six'"),
    Wrong({"option(6,": "option(9,"}, "the default of num_days must be 2 to 7, got 9"),
    Wrong(
        {'{"tell": tell, "': '{"tell": tell}.keys() or {"'}, "SCRIPTS of …must be a dict of func"
    ),
    Wrong({'f"[meet] {common}" if told': "None if told"}, "player tell must return a text, got"),
]
SEED, STEP = 'random.Random(f"{seed} {index}")', "        play = self.play\n"
DONE = "tuple(observations), rewards)"
SAID = {"num_seats = 3": "num_seats, said = 3, []"}
SAID |= {
    "log.append((seat, kind, content))": "log.append((seat, kind, content)); self.said.append(7)"
}
LESS = "score=1 / (1 + len(self.said))"
NOTHING = 'None, None, ("", "", ""))\n'
DEAF = '        if seat == CLERK: return Step(2, None, "Error: eh?", "eh", ("",) * 3)\n'
AFTER = f'        if play.to_move is None: return Step(seat, "message", {NOTHING}'
NUMBERS = 'if not content.replace(" ", "").isdigit() or not content.isascii() or not short:'
ROOMS = [
    Wrong(
        {"return Step(seat, kind": "Step(seat, kind"}, "a Step with an action or an error, got N"
    ),
    Wrong({DONE: "tuple(observations)[:1])"}, "observations must be one text per seat, got"),
    Wrong({DONE: "tuple(observations), (1e999,) * 3)"}, "rewards must be one finite number per"),
    Wrong({STEP: f"{STEP}        exit(0)\n"}, "own_….py:…step: SystemExit: 0"),
    Wrong({"return Prompt(": 'return "hello" or Prompt('}, "must give a Prompt, got 'hello'"),
    Wrong({'play["log"] = [list(entry)': 'play["log"] = [{1} or list(entry)'}, "plain JSON"),
    Wrong({"score_norm=score": "score_norm=1.5"}, "give score_norm and seat_scores in [0, 1], got"),
    Wrong(
        {"rewards=rewards,": "rewards=rewards, seat_scores=(0.5, -0.25, 1.0),"},
        "ThreeRooms.outcome() must give score_norm and seat_scores in [0, 1], got …three",
    ),
    Wrong({'f"three-{seed}-{index}"': '"x"'}, check="seeding: unique, printable key"),
    Wrong(
        {SEED: "random.Random(next(CALLS))", "CLERK = 2": "CLERK, CALLS = 2, iter(range(10**6))"},
        check="seeding: equal instances",
    ),
    Wrong({SEED: "random.Random(index)", "three-{seed}": "3"}, check="seeding: another seed"),
    Wrong(
        {"spec not in SCRIPT_NAMES": 'spec not in ("caller", "clerk")'},
        check="play: unknown scripted player",
    ),
    Wrong(
        {'return f"[answer] {sum(': 'f"[answer] {sum('},
        check="play: script clerk of seat 2 must return its move as a text, ",
    ),
    Wrong({DONE: '("", "", ""), rewards)'}, check="play: must read something"),
    Wrong(
        {"return self.play.to_move": "return 7 if self.play.log else 0"},
        check="play: seat_to_move must be a seat or None, got 7; the last move of",
    ),
    Wrong(
        {STEP: STEP + DEAF},
        check="play:  of 400 moves of scripted players were legal and the game is not over; …"
        "' of seat 2, was refused: Error: eh?",
    ),
    Wrong({"copy.deepcopy(self.play)": "copy.copy(self.play)"}, check="clone: changed the game"),
    Wrong(SAID | {" score=score,": f" {LESS},"}, check="clone: class?): outcome().score, got 0."),
    Wrong(
        SAID
        | {" score=score,": f" {LESS} if over else score,", "Play()": "Play(); self.said.clear()"},
        check="clone: must end alike (state that all games share, ",
    ),
    Wrong(
        {'error.kind, ("", "", ""))': "error.kind, (text,) * 3)"},
        check="refusals: must show nothing",
    ),
    Wrong(
        {"if seat != self.play.to_move": "if seat == CLERK != self.play.to_move"},
        check="refusals: out of turn",
    ),
    Wrong(
        {'own = "clerk" if': 'own = f"clerk {self.instance.numbers[0]}" if'},
        check="views: the prompt of seat",
    ),
    Wrong(
        {"None if seat == CLERK else self.instance.numbers[seat]": "self.instance.numbers[0]"},
        check="views: view",
    ),
    Wrong(
        {'f"caller {seat}: {content}"': 'f"{content} {self.instance.numbers[0]}"'},
        check="views: reads what only seat 0 sees",
    ),
    Wrong(
        {"right = answer is not None and": 'right = {}["score"] and'}, check="outcome: raised own_"
    ),
    Wrong({"score_norm=score": "score_norm=1.5"}, check="outcome: in [0, 1]"),
    Wrong({STEP: STEP + AFTER}, check="outcome: after the end"),
    Wrong(
        {'{"tool_calls": float(len(calls))}': '{"x": 1.0 if len(seats) == 3 else float("nan")}'},
        check="outcome: at the end: measures of seats [0] must give a number",
    ),
    Wrong({"Play(**play)": 'Play(**play | {"told": {}})'}, check="state: another state"),
    Wrong({"= text.partition": "= text.encode().decode().partition"}, check="fuzz: Unicode"),
    Wrong(
        {NUMBERS: 'if seat == CLERK and not content.replace(" ", "").isdigit():'},
        check="forgery: can forge this text of the game: '",
    ),
    *(
        Wrong({"def phrases(": f"def {page}\n\n\ndef phrases("}, check=f"pages: {said}")
        for page, said in (
            ("forms(game, seat): return []", "must not be empty"),
            ('board(game, seat): return {"cells": {1}}', "not JSON serializable"),
            ("picture(game, num): return {}, []", "shorter"),
        )
    ),
]
PLAY = '        if tag == "answer" and not content'
SEEN = f'        if tag == "probe" and content in self.sees(seat).split(): {{}}[7]\n{PLAY}'
INIT = '    answer = ""\n\n    def __init__(self, i, options): self.instance = i\n'
TRIES = {PLAY: f"        self.tries += 1\n{PLAY}", 'answer = ""': 'answer, tries = "", 0'}
TURNS = [
    Wrong(
        {PLAY: f'        self.answer = content if tag == "answer" else ""\n{PLAY}'},
        check="refusals: an invalid move changed outcome().over, got True, before False",
    ),
    Wrong(
        TRIES | {"float(self.answer": "(1 / (1 + self.tries)) * (self.answer"},
        check="refusals: changed how the game ends: outcome().score, got 0.",
    ),
    Wrong(
        {"return None if self.answer else 1 - seat": "pass"},
        check="outcome: is to move (`play` returned no seat, which ends the game), ",
    ),
    Wrong(
        {"(score, score)": "(float('nan'),) * 2"},
        check="outcome: must give rewards as a tuple of one number per seat, …got (nan, ",
    ),
    Wrong(
        {'("message", "answer")': '("message", "answer", "probe")', PLAY: SEEN},
        check="fuzz: [probe]",
    ),
    Wrong(
        {'    answer = ""\n': INIT},
        check="seeding: MyGame.__init__ of game …must call super().__init__(instance, ",
    ),
]
ROWS = [
    (game, row)
    for game, rows in (("meeting", MEETING), ("rooms", ROOMS), ("turns", TURNS))
    for row in rows
]
IDS = [f"{game} {row.check or row.run}"[:70] for game, row in ROWS]


def played(game: Path) -> None:
    """A start, and the games of scripts."""
    config = settings(game)
    instances = config.game.kit.generate(config.game.options, seed=0, num=4)
    spec = config.game.kit.SCRIPT_NAMES[0]
    evaluate_scripted(instances, spec=spec, game=config.game, rollout=config.rollout)


@pytest.mark.parametrize(("game", "row"), ROWS, ids=IDS)
def test_a_mistake_in_a_game_of_ones_own_is_named(game: str, row: Wrong, tmp_path: Path) -> None:
    own = changed(tmp_path, game, row.change)
    if row.run:
        with pytest.raises(ValueError) as refused:
            played(own)
        assert names(str(refused.value), row.run), refused.value
        return
    name, _, said = row.check.partition(": ")
    kit = load_kit(str(own))
    if game == "turns" or name in ("seeding", "play"):
        found = check_kit(kit, kit.Options())
    else:  # without the time of the other checks
        found = check_plays(case_of(kit, kit.Options()), (name,))
    results = {result.name: result for result in found}
    line = results[name].line()
    assert line.startswith(f"FAILED {name}: ") and names(line, said), line
    if game == "turns":
        assert [each.name for each in results.values() if each.problem] == [name]


@pytest.mark.parametrize(
    "change",
    [{"score_norm=score": "score_norm=1.5"}, {"right = answer": 'right = {}["x"] or answer'}],
)
def test_one_mistake_fails_one_check(change: dict[str, str], tmp_path: Path) -> None:
    """Refusals, states and random texts ask for the outcome too."""
    kit = load_kit(str(changed(tmp_path, "rooms", change)))
    lines = [result.line() for result in check_kit(kit, kit.Options())]
    assert [line for line in lines if line.startswith("FAILED ")] == [lines[2]]
    assert "FAILED outcome: " in lines[2]
    assert "not checked fuzz: it fails as outcome does" in lines


def test_a_score_may_be_rounded_up_and_rewards_may_be_any_numbers(tmp_path: Path) -> None:
    close = {"score_norm=score": "score_norm=score * (1 + 1e-12)"}
    played(changed(tmp_path, "rooms", close | {"rewards=rewards": "rewards=(-7.0, 7.0, 0.0)"}))
