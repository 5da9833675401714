"""What a person reads of a step in the terminal."""

import sys

import pytest

from selfplay.advantages.advantages import CreditStats
from selfplay.apps.console import Console, head_line, step_line
from selfplay.config import Config
from selfplay.distributed import init_world
from selfplay.metrics.observer import Step


def test_a_validation_counts_in_the_rest_as_often_as_it_came() -> None:
    """Steps take 1 s each; one validation of 60 s, in the 20th of 30 steps, is 2 s a step."""
    console = Console(Config(), init_world(device="cpu"))
    for step in range(30):
        rare = {"eval_s": 60.0} if step == 19 else {}
        left_s = console.remaining_s(10, {"step_s": 1.0 + rare.get("eval_s", 0.0), **rare})
    assert left_s == pytest.approx(10 * (1.0 + 2.0))


def test_the_line_of_a_step_has_its_numbers_in_their_places_and_fits_a_terminal() -> None:
    """Each number ends where its heading ends, in a full line and in one that has few."""
    metrics = {
        "step": 999, "score": 0.98765, "agreement": 0.99, "messages": 12.345, "errors": 10.5,
        "entropy": 10.25, "mismatch_mean": 1.2e-5, "tokens_per_s": 123_456.0, "play_s": 123.4,
        "update_s": 123.4, "push_s": 13.3, "log_s": 1.2, "zero_variance_groups": 0.405,
    }  # fmt: skip
    head, line = head_line(num_steps=1000), step_line(metrics, num_steps=1000, remaining_s=7640.0)
    few = {"step": 3, "score": 0.5, "tokens_per_s": 321.0, "play_s": 1.0, "entropy": None}
    seats = {"reward": 0.4375, "reward_std": 0.73, "reward/0": 1.0, "reward/1": -0.125}
    idle = {"num_optimizer_steps": 0.0, "zero_variance_groups": 1.0}
    other = step_line(few | seats | idle | {"eval_score": 0.25}, num_steps=1000)
    expected = {
        "step": ("999/1000", "3/1000"), "score": ("0.988", "0.500"), "eval": ("-", "0.250"),
        "reward": ("-", "0.438±0.73"), "agree": ("0.99", "-"), "msgs": ("12.35", "-"),
        "errors": ("10.500", "-"), "entropy": ("10.250", "-"), "flat": ("40%", "100%"),
        "mismatch": ("1e-05", "-"), "left": ("2h07m", "-"), "tok/s": ("123.5k", "321"),
    }  # fmt: skip
    assert head.split() == [*expected]
    for heading, words in expected.items():
        end = head.index(heading) + len(heading)
        assert (line[:end].split()[-1], other[:end].split()[-1]) == words, heading
    assert line.endswith(" 123.5k play 123s update 123s") and len(line) <= 120
    assert other.endswith("321 no update seats 1.00 -0.12")
    assert "no update" not in step_line(few, num_steps=200)


def test_each_of_several_policies_has_its_entropy_under_its_own_head_and_none_is_cut() -> None:
    """Of six policies the last one's number ends where its heading does, beyond column 120."""
    names = tuple(f"negotiator_{n}" for n in range(6))
    metrics = {"step": 7, "score": 0.5} | {f"entropy/{n}": i + 0.25 for i, n in enumerate(names)}
    metrics |= {f"mismatch_mean/{name}": 1e-7 * (i + 1) for i, name in enumerate(names)}
    head = head_line(num_steps=10, policies=names)
    line = step_line(metrics, num_steps=10, policies=names)
    for number, name in enumerate(names):
        end = head.index(f"entropy/{name}") + len(f"entropy/{name}")
        assert line[:end].split()[-1] == f"{number}.250"
    assert line.split()[-3:] == ["6e-07", "-", "-"] and len(line) == len(head) > 120


@pytest.mark.parametrize("terminal", [True, False])
def test_every_nth_line_stays_and_the_end_counts_the_steps_without_an_update(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 120 steps the first after a resume at 50, and every third; 23 had equal groups, 10 of them
    before it, and another had a gradient that is not finite. A terminal shows the others until the
    next."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    before, console = (Console(Config(steps=120), init_world(device="cpu")) for _ in range(2))
    for number in range(1, 121):
        more = {50: {"eval_score": 0.5}, 60: {"num_skipped_steps": 1.0}}.get(number, {})
        line = {"step": number, "step_s": 1.0, "num_optimizer_steps": float(number % 5 != 0)} | more
        each = before if number <= 50 else console
        if number == 51:
            console.restore(before.state())
            capsys.readouterr()
        each.on_step(Step(number, [], [], line, CreditStats(0, 0), {}))
    console.close()
    text = capsys.readouterr().out.replace("\x1b[K", "")
    *lines, last = text.splitlines() if not terminal else text.split("\n")[:-1]
    stay = [words[0] for line in lines if (words := line.rpartition("\r")[2].split())[0] != "step"]
    assert stay == ["51/120", *(f"{n}/120" for n in range(54, 121, 3))]
    assert ("52/120" in text) is terminal
    assert last == "23 of 120 steps made no update: all groups were equal"
