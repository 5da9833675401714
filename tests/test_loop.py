"""examples/loop.py and the examples of single parts: they run, and give the trainer's numbers."""

import runpy
from pathlib import Path

import pytest

from examples.loop import Loop
from selfplay.config import load_config
from selfplay.distributed import init_world
from tests.helpers.tiny_run import finished, metrics_of, weights_of, write_tiny

ROOT = Path(__file__).resolve().parents[1]
LOOP = ROOT / "examples" / "loop.py"
PARTS = sorted((ROOT / "examples" / "parts").glob("*.py"))
SETTINGS = ("algorithm.kl=0.05", "algorithm.minibatches=2", "optim.warmup_steps=2")


def test_the_loop_takes_the_trainers_steps(tmp_path: Path) -> None:
    """The games, losses and gradients of each step are those of `train.py` under the same settings,
    whose engine uses the learner's own weights, and so are the last weights, bit for bit. Means
    over tokens are summed in another order."""
    run = finished(*SETTINGS)
    config = load_config(write_tiny(tmp_path / "loop"), [f"out={tmp_path / 'loop'}", *SETTINGS])
    loop = Loop(config, run / "warm_start", init_world(device="cpu"))
    for found, expected in zip(loop.steps(), metrics_of(run), strict=True):
        for name in ("step", "score", "grad_norm", "lr", "num_optimizer_steps"):
            assert found[name] == expected[name], name
        for name in ("policy_loss", "entropy", "ratio_mean", "clip_share", "mismatch_mean"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-9), name
    trained = weights_of(run / "final")
    own = dict(loop.model.named_parameters())
    assert all(own[name].equal(trained[name]) for name in own)


def test_the_loop_has_at_most_200_lines_and_a_part_ten() -> None:
    assert len(LOOP.read_text().splitlines()) <= 200
    for path in PARTS:
        lines = [line for line in path.read_text().splitlines() if line and line[0] not in '#"']
        assert len(lines) <= 10, path.name


@pytest.mark.parametrize("path", PARTS, ids=lambda path: path.stem)
def test_an_example_of_a_part_prints_what_it_says(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last line of the file, a comment, is what it prints."""
    runpy.run_path(str(path))
    assert f"# {capsys.readouterr().out.strip()}" == path.read_text().splitlines()[-1]
