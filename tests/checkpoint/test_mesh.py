"""A checkpoint written on one mesh is read on any other, whole."""

import pytest

from tests.helpers.processes import two_ranks
from tests.helpers.tiny_run import GRADIENT
from tests.helpers.tolerance import tolerance
from tests.helpers.two_ranks import KINDS

# An iteration of Muon multiplies a singular value, and its rounding, by 3.4445 at most.
AMPLIFIED = 3.4445**5


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_goes_to_other_meshes_and_back(kind: str) -> None:
    """Two FSDP ranks, one process, two tensor-parallel ranks, two FSDP ranks. A critic and adapters
    go without tensor parallel, which they do not support. With bf16 weights only a mesh of ranks
    computes in fp32, so there the gradients are not compared."""
    report = two_ranks(f"moved {kind}", part="slow")
    assert report["same"] == 1.0, "weights, reference and moments come back bit for bit"
    assert report["num"] > 0
    if kind != "bf16":
        assert report["gradient"] < tolerance(GRADIENT)
    if kind == "muon":
        assert report["step"] < tolerance(GRADIENT, scale=AMPLIFIED)


def test_each_rank_reads_back_the_files_that_it_wrote_and_a_save_stays_whole_or_unchanged() -> None:
    """Together they read each file once. A byte changed in any file is found, and what a rank's
    disk refuses is told by all ranks and leaves the save before."""
    report = two_ranks("sealed")
    first, second = report["read"]
    assert first and len(second) == 4
    assert all(name.startswith("state/__1_") for name in second)
    assert not any(name.startswith("state/__1_") for name in first)
    assert report["whole"] is None
    assert sorted(report["found"]) == sorted([*first, *second, "manifest.json"])
    assert all(found.startswith(name) for name, found in report["found"].items())
    assert report["told"][0] == report["told"][1] and "Input/output error" in report["told"][0]
    assert report["left"] == ["step_000001"]
