"""Intervals of paired differences: coverage and width in many samples, against a bootstrap's."""

import numpy as np
import pytest

from bench.paired_intervals import CHOSEN, NOT_COVERED, UNSEEN, intervals, main, study
from selfplay.evaluation.tables import mean_interval, paired_interval

NIGHTLY = [pytest.mark.slow, pytest.mark.nightly]


@pytest.mark.parametrize(
    ("num_games", "num"),
    [
        (57, 500),
        *(pytest.param(n, 4_000, marks=NIGHTLY) for n in (57, 64, 128, 256, 1024)),
    ],
)
@pytest.mark.parametrize("name", CHOSEN | UNSEEN)
def test_they_cover_the_mean_in_93_of_100_samples_at_1_5_bootstraps(
    name: str, num_games: int, num: int
) -> None:
    found = study((CHOSEN | UNSEEN)[name], num_games, num=num)
    covered, width = found["paired_interval"]
    assert covered >= 0.93
    assert width <= 1.5 * found["bootstrap"][1]
    assert width <= found["mean_interval"][1] * 1.001


@pytest.mark.parametrize("differences", [*CHOSEN.values(), *NOT_COVERED.values()])
def test_the_study_has_the_intervals_of_the_reports(differences: dict[float, int]) -> None:
    """Up to what their random weights differ by: the study draws fewer, once for all samples."""
    every = np.repeat(list(differences), list(differences.values()))
    sample = np.random.default_rng(1).choice(every, 64)
    for name, ends in intervals(sample[None]).items():
        if name != "bootstrap":
            real = {"mean_interval": mean_interval(sample, lowest=-1.0)}
            real["paired_interval"] = paired_interval(sample)
            _, low, high = real[name]
            assert ends[:, 0] == pytest.approx([low, high], abs=0.08 * (high - low))


def test_losses_that_a_sample_does_not_have_are_not_covered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The page of metrics says so: about half of the samples of 64 games have none."""
    found = study(*NOT_COVERED.values(), 64, num=500)
    assert 0.4 < found["paired_interval"][0] < 0.6 and found["mean_interval"][0] > 0.97
    main(["--num", "20", "--games", "20"])
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(CHOSEN | UNSEEN | NOT_COVERED)
