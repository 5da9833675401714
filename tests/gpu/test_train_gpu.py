"""train.py itself on GPUs: steps of self-play with SGLang engines on every mesh."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import small

AWAY = "parallel.offload=all"
MESHES = [
    pytest.param(1, 1, 1, [], id="1", marks=pytest.mark.one_gpu),
    pytest.param(2, 1, 1, [AWAY], id="fsdp2, two engines", marks=pytest.mark.two_gpus),
    pytest.param(2, 2, 2, [], id="tp2, one wide engine", marks=pytest.mark.two_gpus),
    pytest.param(4, 2, 2, [], id="fsdp2 x tp2, two wide engines", marks=pytest.mark.four_gpus),
]


@pytest.mark.parametrize(("num", "tp", "engine_tp", "more"), MESHES)
def test_a_run_trains_pushes_and_ends_on_each_mesh(
    num: int, tp: int, engine_tp: int, more: list[str], tmp_path: Path
) -> None:
    """The engine starts beside the warm start; its log-probs are the trainer's in the first step
    and after each push."""
    out = tmp_path / "run"
    words = (f"parallel.tp={tp}", f"engine.tp_size={engine_tp}", *more)
    said = small.run(out, *words, num=num if num > 1 else 0)
    assert said.index("engine up") < said.index("the warm start is finished")
    for step in small.steps_of(out, 2):
        assert AWAY in more or step["sync_check_mismatch"] < 0.03
        assert step["mismatch_kl"] < 0.01
    assert (out / "final" / "config.json").exists()
    assert (out / "checkpoints" / "step_000002" / "progress.json").exists()


@pytest.mark.two_gpus
@pytest.mark.parametrize("divided", [(), ("parallel.tp=2", "engine.tp_size=2")], ids=["fsdp", "tp"])
def test_two_policies_train_push_and_end_on_two_gpus(
    divided: tuple[str, ...], tmp_path: Path
) -> None:
    """Each has its own engine on each GPU, or one wide engine; NCCL joins the ranks of both."""
    out, pair = tmp_path / "run", "policies={first: {seats: [0]}, second: {seats: [1]}}"
    small.run(out, pair, *divided, num=2)
    for step in small.steps_of(out, 2):
        for name in ("first", "second"):
            assert step[f"sync_check_mismatch/{name}"] < 0.03
            assert step[f"mismatch_kl/{name}"] < 0.01
    assert all((out / "final" / name / "config.json").exists() for name in ("first", "second"))
