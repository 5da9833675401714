"""Whoever reads a finished step: an observer of one's own, and what every run has."""

import json
from pathlib import Path

import pytest

from selfplay.apps.report.page import page_html
from selfplay.apps.report.run_files import read_run
from selfplay.checkpoint import checkpoints
from selfplay.config import load_config
from selfplay.errors import OwnFault
from selfplay.metrics.observers import checked_numbers
from tests.helpers.small_games import refusal
from tests.helpers.tiny_run import begin_warm, metrics_of, run_tiny

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = f"{ROOT}/examples/observer/lengths.py:Lengths"
SHORT = ("eval.final_games=1", "eval.talk_games=0")


COUNTING = """
from selfplay.metrics.observer import Observer
class Counting(Observer):
    num = 0
    def on_step(self, step):
        self.num += 1
        return {"num": self.num}
    def state(self):
        return {"num": self.num}
    def restore(self, state):
        self.num = state.get("num", 0)
"""


def test_numbers_of_ones_own_are_in_the_line_and_on_the_page_and_go_on_after_a_resume(
    tmp_path: Path,
) -> None:
    """Lengths are counted by hand from the games of the step, which are all logged. No file of the
    project names them. The other observer keeps a count."""
    folder, file = tmp_path / "run", tmp_path / "counting.py"
    file.write_text(COUNTING)
    begin_warm(folder)
    own = f"observers=[{{{LENGTHS}: {{most: 3}}}}, {file}:Counting]"
    for steps in (2, 3):
        assert run_tiny(folder, own, f"steps={steps}", *SHORT) == 0
    games = [json.loads(line) for line in (folder / "games.jsonl").read_text("utf-8").splitlines()]
    for number, line in enumerate(metrics_of(folder), 1):
        turns = [turn for game in games if game["step"] == number for turn in game["turns"]]
        lengths = [len(turn["text"].split()) for turn in turns]
        assert line["observed/longest"] == max(lengths) > 0
        assert line["observed/long"] == sum(num > 3 for num in lengths)
        assert line["observed/num"] == number
    assert "Longest" in page_html([read_run(folder)])


FAILING = """
from selfplay.metrics.observer import Observer
class Failing(Observer):
    def on_step(self, step):
        return {}["missing"] if step.number == 2 else None
class Unsaved(Observer):
    seen = 0
    def on_step(self, step):
        self.seen = step.number
    def state(self):
        return {"seen": {self.seen}} if self.seen == NUMBER else {}
"""


@pytest.mark.parametrize("steps", [0, 1])
def test_a_state_that_no_checkpoint_holds_ends_the_run_in_one_line(
    steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = tmp_path / "run", tmp_path / f"unsaved_{steps}.py"
    file.write_text(FAILING.replace("NUMBER", str(steps)))
    begin_warm(folder)
    assert run_tiny(folder, f"observers=[{file}:Unsaved]", "save_every=1", *SHORT) == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    rule = "state() must give plain JSON values, got seen={"
    assert line.startswith(f"train.py: observers {file}:Unsaved: {rule}")
    assert len(metrics_of(folder)) == steps and not checkpoints(folder)


def test_one_that_fails_ends_the_run_in_one_line_after_the_step_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = tmp_path / "run", tmp_path / "failing.py"
    file.write_text(FAILING)
    begin_warm(folder)
    assert run_tiny(folder, f"observers=[{file}:Failing]", "save_every=100", *SHORT) == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "observers" in line and "Failing" in line and "step 3" in line
    assert len(metrics_of(folder)) == 2
    assert [each.name for each in checkpoints(folder)] == ["step_000002"]


@pytest.mark.parametrize("given", [{"word": "a"}, {3: 1.0}, [1.0]])
def test_what_an_observer_gives_is_numbers_by_name(given: object) -> None:
    assert checked_numbers({"one": 1, "none": float("nan")}).keys() == {
        "observed/one",
        "observed/none",
    }
    with pytest.raises(OwnFault, match="on_step must return numbers"):
        checked_numbers(given)


@pytest.mark.parametrize(
    ("options", "named"),
    [("{mist: 3}", "nearest is"), ("{most: many}", "most must be a valid integer")],
)
def test_wrong_options_are_refused_by_their_key(options: str, named: str) -> None:
    words = [f"observers=[{{{LENGTHS}: {options}}}]"]
    config = load_config({"model": {"scratch": {"max_positions": 4096}}}, words)
    assert named in refusal("observers", LENGTHS, config)
