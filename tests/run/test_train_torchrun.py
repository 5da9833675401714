"""Two processes, on one host or on two, play the same games and take the same step as one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from tests.helpers.processes import HANG_S, free_port, on_ranks, start
from tests.helpers.tiny_run import (
    RUN_GAP,
    RUN_STEP,
    begin_warm,
    metrics_of,
    run_tiny,
    same_weights,
    weights_of,
    write_tiny,
)
from tests.helpers.tolerance import near

ROOT = Path(__file__).resolve().parents[2]
# Three instances over two ranks are uneven, and so are their micro-batches; the KL term and the
# imitation losses must not depend on that. Sibling turns may be on different ranks and
# still form one group.
SETTINGS = (
    *("steps=2", "rollout.instances=3", "optim.tokens_per_microbatch=256", "algorithm.kl=0.1"),
    *("methods.resample.instances=2", "methods.auxiliary_imitation.weight=0.1"),
    *(
        "methods.auxiliary_imitation.games=3",
        "eval.every=2",
        "rollout.play=branches",
        "rollout.options.turns=first",
    ),
    *("rollout.options.per_game=2", "rollout.options.siblings=3", "methods.best_games.weight=0.5"),
)


# Metrics of one step that do not depend on how its sums are split.
EXACT = (
    *("score", "agreement", "errors", "words", "num_games", "num_groups", "zero_variance_groups"),
    *("num_trained_tokens", "num_generated_tokens"),
)
BRANCHES = ("branch_variance", "num_branch_points", "num_branch_games", "zero_variance_branches")
# A run that keeps all kinds of state: baselines, a pool, a reference.
MESHES = (
    *("save_every=1", "keep_checkpoints=9", "optim.schedule=constant", "rollout.instances=6"),
    *("rollout.partners=[self,pool*2]", "policy_pool.every=1"),
    *("algorithm={advantage: ema, kl: 0.1}", "optim.tokens_per_microbatch=256"),
)


def words_of(folder: Path, settings: tuple[str, ...]) -> list[str]:
    return ["--config", str(write_tiny(folder)), f"out={folder}", *settings]


def launch(
    folder: Path, where: list[str], *, launcher: str = "torch.distributed.run"
) -> subprocess.Popen[str]:
    """`torchrun WHERE train.py …`, or the same by another launcher."""
    return subprocess.Popen(
        [sys.executable, "-m", launcher, *where, "train.py", *words_of(folder, SETTINGS)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(launched: subprocess.Popen[str]) -> tuple[int, str]:
    """The launch's exit status and output."""
    try:
        output, _ = launched.communicate(timeout=HANG_S)
    finally:
        launched.terminate()  # also ends the ranks of torchrun that hang
    return launched.returncode, output


def run_on(num_ranks: int, folder: Path, settings: tuple[str, ...] = SETTINGS) -> str:
    """What ranks on one host print."""
    words = words_of(folder, settings)
    returncode, output = ended(start(ROOT / "train.py", *words, forked=num_ranks))
    assert returncode == 0, output[-40000:]
    return output


def run_on_two_hosts(folders: list[Path]) -> tuple[int, str]:
    """Two ranks of which each sees a host of its own, as torchrun would tell it."""

    def trains() -> int:
        folder = folders[int(os.environ["RANK"])]
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        return train.main(words_of(folder, SETTINGS))

    return ended(on_ranks(2, trains))


@pytest.mark.slow
def test_two_ranks_take_the_step_of_one_and_so_do_two_hosts(tmp_path: Path) -> None:
    """Two ranks split the sums differently, so their results equal one rank's up to rounding. Two
    ranks on two hosts split them like two on one, so even the rounding is equal."""
    one, two, hosts = tmp_path / "one", tmp_path / "two", tmp_path / "hosts"
    for folder in (one, two, hosts):  # rounding would add up over the warm start's 100 steps
        begin_warm(folder)
    assert run_tiny(one, *SETTINGS) == 0
    run_on(2, two)
    returncode, output = run_on_two_hosts([hosts, hosts])
    assert returncode == 0, output[-40000:]
    assert metrics_of(hosts) == metrics_of(two)

    alone, shared = metrics_of(one), metrics_of(two)
    assert [line["step"] for line in shared] == [1, 2]
    for name in (*EXACT, *BRANCHES):
        assert shared[0][name] == pytest.approx(alone[0][name], abs=1e-12), name
    assert shared[0].keys() == alone[0].keys()
    for name in ("policy_loss", "imitation_loss", "grad_norm", "entropy", "ratio_mean"):
        assert shared[0][name] == near(alone[0][name], RUN_STEP), name
    # Adam moves a weight by the sign of its gradient, so a weight whose gradient is only rounding
    # may move either way: after the first step the runs are close, but not up to rounding.
    assert shared[1]["kl_reference"] == pytest.approx(alone[1]["kl_reference"], rel=1e-2)
    assert all(line["mismatch_max"] < RUN_GAP for line in shared), (
        "each rank's engine got the new weights"
    )
    assert shared[1]["eval_score"] == pytest.approx(alone[1]["eval_score"], abs=0.2)

    assert same_weights(two / "final", hosts / "final")
    on_one, on_two = weights_of(one / "final"), weights_of(two / "final")
    start = weights_of(one / "warm_start")
    moved, apart = (
        sum(float((other[name] - on_one[name]).square().sum()) ** 0.5 for name in on_one)
        for other in (start, on_two)
    )
    assert apart < 0.01 * moved
    held_out = json.loads((two / "held_out_before.json").read_text())
    assert len(held_out["sampled"]["scores"]) == 4


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("mesh", [(), ("parallel.tp=2", "engine.tp_size=2")], ids=["fsdp", "tp"])
def test_two_ranks_take_the_step_of_one_for_each_of_two_policies(
    tmp_path: Path, mesh: tuple[str, ...]
) -> None:
    """Ranks that shard the weights, and ranks that divide the layers: the games are those of one
    rank, and each policy learns the same from its own seat, up to rounding."""
    policies = "policies={first: {seats: [0]}, second: {seats: [1], optim: {lr: 2.0e-3}}}"
    settings = (*MESHES[:4], "algorithm.kl=0.1", "steps=1", policies)
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        begin_warm(folder, *settings)
    assert run_tiny(one, *settings) == 0
    run_on(2, two, (*settings, *mesh))
    (alone,), (shared,) = metrics_of(one), metrics_of(two)
    assert shared.keys() == alone.keys()
    for name in ("score", "errors", "num_games", "num_generated_tokens", "num_trained_tokens"):
        assert shared[name] == pytest.approx(alone[name], abs=1e-12), name
    start = weights_of(one / "warm_start")
    for policy in ("first", "second"):
        for name in ("policy_loss", "grad_norm", "entropy", "ratio_mean"):
            key = f"{name}/{policy}"
            assert shared[key] == near(alone[key], RUN_STEP), key
        on_one, on_two = (weights_of(folder / "final" / policy) for folder in (one, two))
        moved, apart = (
            sum(float((other[name] - on_one[name]).square().sum()) ** 0.5 for name in on_one)
            for other in (start, on_two)
        )
        assert apart < 0.01 * moved


@pytest.mark.slow
@pytest.mark.nightly
def test_accelerate_and_torchrun_launch_the_same_ranks(tmp_path: Path) -> None:
    """Two ranks on this CPU, by torchrun on two hosts; the metrics of all steps and the policy are
    equal to the last bit."""
    begin_warm(tmp_path / "torchrun", *SETTINGS)
    shutil.copytree(tmp_path / "torchrun", tmp_path / "accelerate")
    shape = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "two"]
    with free_port() as port:
        where = [*shape, "--rdzv-endpoint", f"127.0.0.1:{port}"]
        hosts = [launch(tmp_path / "torchrun", where) for _ in range(2)]
        launched = [ended(host) for host in hosts]
    where = ["launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    where += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    module = "accelerate.commands.accelerate_cli"
    launched.append(ended(launch(tmp_path / "accelerate", where, launcher=module)))
    for returncode, output in launched:
        assert returncode == 0, output[-40000:]
    assert metrics_of(tmp_path / "accelerate") == metrics_of(tmp_path / "torchrun")
    assert same_weights(tmp_path / "torchrun/final", tmp_path / "accelerate/final")


@pytest.mark.slow
def test_hosts_that_do_not_share_the_run_folder_are_refused(tmp_path: Path) -> None:
    returncode, output = run_on_two_hosts([tmp_path / "here", tmp_path / "there"])
    assert returncode != 0
    assert "out must be a folder on storage that all hosts share, got " in output


def weights_after(run: Path, step: int) -> dict[str, torch.Tensor]:
    return weights_of(run / "checkpoints" / f"step_{step:06d}" / "hf")


def state_after(run: Path, step: int) -> dict[str, Any]:
    """All saved state that is not in tensors, without the number of ranks and of logged games, all
    of which are rank 0's."""
    path = run / "checkpoints" / f"step_{step:06d}" / "progress.json"
    progress = json.loads(path.read_text())
    assert progress.pop("ranks") in (1, 2)
    assert progress["state"]["num_lines"].pop("games.jsonl") > 0
    return progress


def assert_alike(one: Any, other: Any) -> None:
    """Equal values, numbers up to the rounding of a step's sums."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        one, other = list(one.values()), [other[name] for name in one]
    if isinstance(one, list):
        assert len(one) == len(other)
        for mine, yours in zip(one, other, strict=True):
            assert_alike(mine, yours)
    else:
        assert one == (near(other, RUN_STEP) if isinstance(other, float) else other)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_goes_on_over_two_ranks_over_one_and_over_two_that_divide_layers(
    tmp_path: Path,
) -> None:
    """After each change the next step equals, up to rounding, the step without the change: its
    metrics, its weights and all state that is saved."""
    two = tmp_path / "two"
    begin_warm(two, *MESHES)
    run_on(2, two, (*MESHES, "steps=1"))
    one = shutil.copytree(two, tmp_path / "one")
    assert "ranks (2 -> 1)" in run_on(1, one, (*MESHES, "steps=2"))
    run_on(2, two, (*MESHES, "steps=2"))
    back = shutil.copytree(one, tmp_path / "back")
    said = run_on(2, back, (*MESHES, "steps=3", "parallel.tp=2", "engine.tp_size=2"))
    told = ("ranks (1 -> 2)", "engine.tp_size: 1 -> 2", "parallel.tp: 1 -> 2")
    assert all(part in said for part in told), said
    run_on(1, one, (*MESHES, "steps=3"))
    for step, changed, same in ((2, one, two), (3, back, one)):
        mine, yours = (metrics_of(run)[step - 1] for run in (changed, same))
        assert mine.keys() == yours.keys() and mine["num_trained_tokens"] > 0
        for name in EXACT:
            assert mine[name] == pytest.approx(yours[name], abs=1e-12), name
        for name in ("policy_loss", "grad_norm", "entropy", "ratio_mean", "kl_reference"):
            assert mine[name] == near(yours[name], RUN_STEP), name
        assert_alike(state_after(changed, step), state_after(same, step))
        state = state_after(changed, step)["state"]["policies"][""]
        assert state["baselines"]
        assert state["partners"]["pool"] == list(range(step + 1))
        before, ours, theirs = (
            weights_after(run, number)
            for run, number in ((changed, step - 1), (changed, step), (same, step))
        )
        moved, apart = (
            sum(float((other[name] - ours[name]).square().sum()) ** 0.5 for name in ours)
            for other in (before, theirs)
        )
        print(f"step {step}: moved {moved:.3g}, apart {apart:.3g}")
        assert 0 < apart < 0.01 * moved
