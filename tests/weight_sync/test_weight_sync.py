"""Weight sync without an engine process: buckets, the ledger, layouts and names."""

import pytest
import torch
from torch import nn

from selfplay.distributed import gather_flat
from selfplay.engines.sglang import buckets
from selfplay.weight_sync import push as sync

SIZES = {"a": torch.Size([4]), "b": torch.Size([2, 3]), "c": torch.Size([20]), "d": torch.Size([1])}


def test_buckets_keep_order_and_size_limit_and_a_large_parameter_gets_its_own() -> None:
    """In bf16 the four take 8, 12, 40 and 2 bytes."""
    plan = buckets.plan_buckets(SIZES, torch.bfloat16, bucket_bytes=20)
    assert plan == [["a", "b"], ["c"], ["d"]]
    assert buckets.plan_buckets(SIZES, torch.bfloat16, bucket_bytes=62) == [list("abcd")]
    with pytest.raises(ValueError):
        buckets.plan_buckets(SIZES, torch.bfloat16, bucket_bytes=0)


def test_a_buffer_holds_the_cast_parameters_in_order() -> None:
    sources = [torch.arange(4.0), torch.full((2, 3), 1 / 3)]
    flat_N = gather_flat(sources, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert flat_N.dtype == torch.bfloat16
    assert flat_N.tolist() == [0, 1, 2, 3, *[torch.tensor(1 / 3).bfloat16().item()] * 6]


def test_the_ledger_takes_each_parameter_once_and_is_complete_after_the_last() -> None:
    ledger = buckets.Ledger(SIZES, complete=True)
    assert ledger.complete
    assert not ledger.expect(["a", "b"])
    ledger.receive(["a", "b"])
    assert not ledger.complete
    with pytest.raises(ValueError, match=r"'a'"):
        ledger.expect(["a", "c"])
    assert ledger.expect(["c", "d"])
    ledger.receive(["c", "d"])
    assert ledger.complete


def test_names_are_those_without_wrapper_modules() -> None:
    inner = nn.Module()
    inner._checkpoint_wrapped_module = nn.Linear(1, 1, bias=False)
    outer = nn.Module()
    outer.layer = inner
    assert [name for name, _ in sync.named_weights(outer)] == ["layer.weight"]
