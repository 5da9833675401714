"""The house grows only on purpose: what it weighs and how long a step is, each under a limit.

A commit that lowers a number lowers its limit. One that raises a number says why in the table.
`python -m tests.helpers.house --step` prints today's numbers.
"""

import json
import os
import subprocess
import sys
import tomllib
from typing import NamedTuple

import pytest

from tests.helpers.house import ROOT, weight


class Limit(NamedTuple):
    most: float
    why: str = ""  # it was raised


# Code lines (no docstrings, comments, blank lines) of a folder; `core` is marked in docs/design.md.
WEIGHT = {
    "core": Limit(
        13623,
        "digests of data, frozen weights, a KL's reference and a game's code, so that a resume is"
        " not another run in silence 59; files of a run that stay 7; rewards at branch points 3",
    ),
    "selfplay": Limit(
        24818,
        "as core; reports, cards and pages of one game; a resting policy's own updates; no command"
        " writes over a run",
    ),
    "extras": Limit(2792, "the three splits of a data set are replaced together"),
    "dialop": Limit(7958, "what a check rests on, what is replaced, the nearest file"),
    "tests": Limit(36356, "claims on the above"),
    "bench": Limit(3635, "methods told apart by model, policies and code; no bench of nothing"),
    "settings": Limit(95, "several policies in one run, each with its own settings"),
}
# Of `selfplay/`, in the second step of `configs/talk.yaml` with one layer on the hf engine.
STEP = {
    "files of a step": Limit(55, "doors: methods, observers, opponents, play, engines, policies"),
    "functions of a step": Limit(
        351, "as above; the page's memory and tokens; checkpoints that monitors go back to"
    ),
    "lines of a step": Limit(
        3293,
        "as above; whose request failed, moments of policies in turn; a small model's cast and"
        " the kept gradient of its logits; a rule on an observer's number that may still come",
    ),
    "frames to a move": Limit(12),
    "frames to weights": Limit(9, "a push is one function, for a step and for going back"),
}
DOCSTRING_LINES = 2.81  # a function: the least
SLACK = 0.01  # so far a limit may lie above its number


def check(found: dict[str, float], limits: dict[str, Limit]) -> None:
    for name, limit in limits.items():
        assert found[name] <= limit.most, f"{name}: {found[name]} > {limit.most}; say why it rises"
        least = limit.most * (1 - SLACK) - 1
        assert found[name] >= least, f"{name} fell to {found[name]}: lower its limit {limit.most}"


@pytest.fixture(scope="module")
def weighed() -> dict[str, float]:
    return weight()


def test_the_code_weighs_no_more_than_it_did(weighed: dict[str, float]) -> None:
    check(weighed, WEIGHT)


def test_no_line_is_won_by_a_docstring_or_a_longer_line(weighed: dict[str, float]) -> None:
    assert weighed["docstring lines a function"] >= DOCSTRING_LINES
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["tool"]["ruff"]["line-length"] == 100


def test_a_step_runs_through_no_more_than_it_did() -> None:
    """In a process of its own: what another test has cached would not be executed again."""
    command = [sys.executable, "-m", "tests.helpers.house", "--step"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check(json.loads(done.stdout[done.stdout.rindex("\n{") :]), STEP)
