"""The table of methods over their first steps, on numbers that can be followed by hand."""

import json
from pathlib import Path

import pytest

from bench.methods_curves import main, mean, smoothed


def write_run(folder: Path, scores: list[float], **more: float) -> Path:
    folder.mkdir()
    lines = [{"step": n, "score": s, **more} for n, s in enumerate(scores, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_means_are_over_the_named_steps_and_runs_too_short_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        write_run(tmp_path / "default_s0", [0.1] * 10 + [0.4] * 10, messages=1.0),
        write_run(tmp_path / "default_s1", [0.1] * 10 + [0.6] * 10, messages=0.5),
        write_run(tmp_path / "rloo_s0", [0.9] * 10 + [0.8] * 15),
        write_run(tmp_path / "rloo_s1", [0.9] * 19),
    ]
    words = [*map(str, runs), "--steps", "11", "20", "--out", str(tmp_path / "figures")]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert "| default | 2 | 0.500 | 0.400, 0.600 | 0.750 |" in printed.out
    assert "| rloo | 1 | 0.800 | 0.800, 0.800 | - |" in printed.out
    assert "rloo_s1 has 19 steps, 20 are needed" in printed.err
    assert (tmp_path / "figures" / "method_rloo.svg").read_text().startswith("<svg")
    assert main([str(tmp_path)]) == 2
    assert "must be named METHOD_sSEED" in capsys.readouterr().err


def test_a_curve_has_a_point_for_ten_steps() -> None:
    steps = [{"step": float(n), "score": n / 100} for n in range(1, 26)]
    points = smoothed(steps)
    assert [point["step"] for point in points] == [10, 20]
    assert [point["score"] for point in points] == pytest.approx([0.055, 0.155])
    assert mean(steps, "score", first=25) == 0.25
