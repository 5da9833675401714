"""Progress of a phase in an output that is not a terminal."""

import sys

import pytest

from selfplay.metrics.progress import progress


def test_progress_without_a_terminal_prints_lines_only_when_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert list(progress(range(5), "short")) == [0, 1, 2, 3, 4]
    for at_once in (False, True):
        with progress(100, "play", at_once=at_once) as bar:
            bar.delay = 0
            bar.start_t -= 40
            bar.last_print_t -= 40
            bar.update(50)
    assert capsys.readouterr().err.splitlines() == [
        "play 50/100, 00:40 gone, 00:40 left",
        "play 50/100, 00:40 gone",
    ]
