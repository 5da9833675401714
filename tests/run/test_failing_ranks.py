"""Two ranks of which one fails: its engine, or the rank itself."""

from pathlib import Path

import pytest

from tests.helpers import processes
from tests.helpers.tiny_run import begin_warm, metrics_of, write_tiny

SCRIPT = processes.TESTS / "helpers" / "train_ranks.py"
ENDS_S = 300.0  # 10 s on an idle machine; left to itself a rank waits for the other for 1,800 s
SETTINGS = ("steps=2", "eval.every=2", "eval.final_games=4", "eval.talk_games=0")


def start(case: str, folder: Path, *more: str, **ranks: int) -> processes.subprocess.Popen[str]:
    begin_warm(folder)
    words = ("--config", str(write_tiny(folder)), f"out={folder}", *SETTINGS, *more)
    return processes.start(SCRIPT, case, *words, **ranks)


@pytest.mark.slow
def test_a_rank_waits_while_the_others_engine_is_restarted(tmp_path: Path) -> None:
    """The run ends as one without faults: the same games, log-probs up to rounding."""
    folders = {case: tmp_path / case / "run" for case in ("none", "engine")}
    for folder in folders.values():
        folder.parent.mkdir()
    runs = {case: start(case, folder, forked=2) for case, folder in folders.items()}
    said = {case: run.communicate(timeout=processes.HANG_S)[0] for case, run in runs.items()}
    for case, run in runs.items():
        assert run.returncode == 0, said[case][-4000:]
    assert said["engine"].count("engine failure 1 of 3 in a row") == 6
    straight, faulty = (metrics_of(folders[case]) for case in ("none", "engine"))
    assert sum(line.pop("num_engine_restarts") for line in straight) == 0
    assert sum(line.pop("num_engine_restarts") for line in faulty) >= 1
    assert faulty == [
        {name: pytest.approx(value, rel=1e-3, abs=1e-5) for name, value in line.items()}
        for line in straight
    ]
    texts = [(folder / "games.jsonl").read_text() for folder in folders.values()]
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "code"),
    [
        ("reward.function", "def f(episode):\n    OUT\n    return episode.outcome.rewards, ()\n"),
        (
            "algorithm.loss",
            "def f(logprobs_M, batch, algorithm):\n    OUT\n"
            "    return -batch.advantages_M * logprobs_M, {}\n",
        ),
        (
            "algorithm.advantage",
            "def f(samples, state, algorithm):\n    OUT\n    return [(0.5, 1.0)] * len(samples)\n",
        ),
    ],
)
def test_ones_own_code_that_exits_on_one_rank_ends_all_after_a_save(
    key: str, code: str, tmp_path: Path
) -> None:
    """In the second step, on rank 1; an advantage on rank 0, whose numbers all ranks use. A save
    needs every rank."""
    folder, own = tmp_path / "run", tmp_path / "leaves.py"
    rank, file = int(key != "algorithm.advantage"), folder / "metrics.jsonl"
    then = f"open({str(file)!r}).read() and sys.exit(0)"
    out = f"os.environ.get('RANK') == '{rank}' and os.path.exists({str(file)!r}) and {then}"
    own.write_text("import os, sys\n" + code.replace("OUT", out))
    run = start("none", folder, f"{key}={own}:f", forked=2)
    said, _ = run.communicate(timeout=ENDS_S)
    assert run.returncode == 1, said[-4000:]
    line = f"{key} {own}:f: leaves.py:3 f: SystemExit: 0"
    assert line in said and "; the state after step 1 is saved, and the same command" in said
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_000001"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "told"),
    [
        pytest.param(
            *("raises", ("exitcode  : 1", "OSError: a bug in rank 1")), marks=pytest.mark.nightly
        ),
        ("killed", ("exitcode  : -9", "Signal 9 (SIGKILL) received by PID")),
    ],
)
def test_a_rank_that_ends_ends_all_by_name(tmp_path: Path, how: str, told: tuple[str, ...]) -> None:
    """torchrun's summary names the rank and its cause; the rank's last lines stand above it.

    A killed rank reports no time, so on a busy machine the other rank's lost connection may stand
    as the root cause and the killed one among the failures.
    """
    run = start(how, tmp_path / "run", torchrun=2)
    output = processes.read_until(run, "MARK failing")
    everyone = processes.tree(run)
    rest, _ = run.communicate(timeout=ENDS_S)
    assert processes.left(everyone) == []
    assert run.returncode != 0
    assert "the last line of rank 1" in output
    summary = rest[rest.index("Failures:" if how == "killed" else "Root Cause") :]
    assert "rank      : 1 (local_rank: 1)" in summary, summary
    for part in told:
        assert part in summary, summary
    assert metrics_of(tmp_path / "run")[-1]["step"] == 1
