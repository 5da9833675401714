"""Two ranks with FSDP2 shards push to an engine that they share; then a rank fails. Two policies on
two ranks."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import processes
from tests.helpers.engine_layout import engine_layout
from tests.helpers.tiny_run import begin_warm, metrics_of, same_weights, write_tiny
from tests.sglang import tiny

HERE = pathlib.Path(__file__).resolve().parent


@dataclass(frozen=True)
class Ran:
    marks: dict[str, dict[str, Any]]
    folder: pathlib.Path
    returncode: int
    left: list[Any]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("ranks")
    arguments = [tiny.save(folder / "model"), str(folder)]
    path = (HERE, HERE / "stand_ins")
    process = processes.start(HERE / "ranks_script.py", *arguments, forked=2, path=path)
    output = processes.read_until(process, "MARK failing")
    everyone = processes.tree(process)[1:]
    left = processes.left(everyone)
    rest, _ = process.communicate(timeout=processes.HANG_S)
    return Ran(processes.marks(output + rest), folder, process.returncode, left)


def test_two_ranks_push_to_an_engine_two_ranks_wide(ran: Ran) -> None:
    measured = ran.marks["wide"]
    assert min(measured["stale"]) > 0.1
    assert max(measured["fresh"]) < 1e-4
    assert measured["version"] == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_of_the_wide_engine_holds_its_slices_bit_for_bit(ran: Ran, rank: int) -> None:
    held = load_file(next(ran.folder.glob(f"model-rank-{rank}-*.safetensors")))
    reference = torch.load(ran.folder / "reference.pt", weights_only=False)
    layout = engine_layout(reference, tiny.build().config, tp_size=2, tp_rank=rank)
    wanted = {name: tensor.detach() for name, tensor in layout}
    # The tied embedding is written once, under this name.
    wanted["lm_head.weight"] = wanted.pop("model.embed_tokens.weight")
    assert wanted.keys() == held.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_of_the_wide_engine_is_compared_with_the_gathered_shards(
    ran: Ran, rank: int
) -> None:
    """Each compares more than half of all elements, because both hold the norms."""
    compared = ran.marks[f"compared {rank}"]
    assert compared["before"] > 0 and compared["after"] == 0
    num = sum(parameter.numel() for parameter in tiny.build().parameters())
    assert num / 2 < ran.marks[f"counted {rank}"]["num"] < num


@pytest.mark.parametrize("rank", [0, 1])
def test_a_push_of_another_model_is_refused_on_every_rank(ran: Ran, rank: int) -> None:
    assert "inner." in ran.marks[f"refused {rank}"]["error"]


def test_an_exception_in_one_rank_ends_them_all(ran: Ran) -> None:
    """Rank 0 waits in a barrier and is killed; its engine's processes end with it."""
    assert ran.returncode != 0 and ran.left == []


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", [(), ("parallel.tp=2", "engine.tp_size=2")], ids=["fsdp", "tp"])
def test_two_ranks_train_two_policies_each_with_engines_of_its_own(
    tmp_path: pathlib.Path, mesh: tuple[str, ...]
) -> None:
    """Shards and an engine a rank, or layers divided and an engine two ranks wide. In the second
    step each engine samples with the first one's update; a push compares its weights' bits."""
    begin_warm(folder := tmp_path / "run")
    policies = "policies={one: {seats: [0]}, other: {seats: [1], optim: {lr: 3.0e-4}}}"
    words = (f"out={folder}", policies, "steps=2", "eval.final_games=2", "engine.kind=sglang")
    words += (f"engine.fast={str(tiny.ENGINE['fast']).lower()}", "engine.max_cache_tokens=8192")
    config = ("--config", str(write_tiny(folder)))
    train, path = HERE.parents[1] / "train.py", (HERE / "stand_ins",)
    process = processes.start(train, *config, *words, *mesh, forked=2, path=path)
    said, _ = process.communicate(timeout=2 * processes.HANG_S)
    assert process.returncode == 0, said[-4000:]
    lines = metrics_of(folder)
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        for name in ("one", "other"):
            assert line[f"num_trained_tokens/{name}"] > 0
            assert line[f"mismatch_max/{name}"] < 1e-4 > line[f"sync_check_mismatch/{name}"]
    assert not same_weights(folder / "final" / "one", folder / "final" / "other")
