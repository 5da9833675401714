"""A checkpoint written on one mesh is read on any other, whole."""

import pytest

from tests.helpers.processes import two_ranks
from tests.helpers.shared_work import slow_except
from tests.helpers.tiny_run import GRADIENT
from tests.helpers.tolerance import tolerance

FAST = ("weights",)
# An iteration of Muon multiplies a singular value, and its rounding, by 3.4445 at most.
AMPLIFIED = 3.4445**5


@pytest.mark.parametrize("kind", slow_except([*FAST, "muon", "bf16", "critic", "adapters"], *FAST))
def test_a_checkpoint_goes_to_other_meshes_and_back(kind: str) -> None:
    """Two FSDP ranks, one process, two tensor-parallel ranks, two FSDP ranks. A critic and adapters
    go without tensor parallel, which they do not support. With bf16 weights only a mesh of ranks
    computes in fp32, so there the gradients are not compared."""
    report = two_ranks(f"moved {kind}", part="fast" if kind in FAST else "slow")
    assert report["same"] == 1.0, "weights, reference and moments come back bit for bit"
    assert report["num"] > 0
    if kind != "bf16":
        assert report["gradient"] < tolerance(GRADIENT)
    if kind == "muon":
        assert report["step"] < tolerance(GRADIENT, scale=AMPLIFIED)
