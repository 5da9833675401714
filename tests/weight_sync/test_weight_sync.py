"""Weight sync without an engine process: buckets, the ledger, layouts and names."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from selfplay.distributed import gather_flat
from selfplay.engines.sglang import weights as sglang_push
from selfplay.weight_sync import push as sync
from tests.helpers.engine_layout import engine_layout

SIZES = {"a": torch.Size([4]), "b": torch.Size([2, 3]), "c": torch.Size([20]), "d": torch.Size([1])}


def test_buckets_keep_order_and_size_limit_and_a_large_parameter_gets_its_own() -> None:
    """In bf16 the four take 8, 12, 40 and 2 bytes."""
    plan = sglang_push.plan_buckets(SIZES, torch.bfloat16, bucket_bytes=20)
    assert plan == [["a", "b"], ["c"], ["d"]]
    assert sglang_push.plan_buckets(SIZES, torch.bfloat16, bucket_bytes=62) == [list("abcd")]
    with pytest.raises(ValueError):
        sglang_push.plan_buckets(SIZES, torch.bfloat16, bucket_bytes=0)


def test_a_buffer_holds_the_cast_parameters_in_order() -> None:
    sources = [torch.arange(4.0), torch.full((2, 3), 1 / 3)]
    flat_N = gather_flat(sources, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert flat_N.dtype == torch.bfloat16
    assert flat_N.tolist() == [0, 1, 2, 3, *[torch.tensor(1 / 3).bfloat16().item()] * 6]


def test_the_ledger_takes_each_parameter_once_and_is_complete_after_the_last() -> None:
    ledger = sglang_push.Ledger(SIZES, complete=True)
    assert ledger.complete
    assert not ledger.expect(["a", "b"])
    ledger.receive(["a", "b"])
    assert not ledger.complete
    with pytest.raises(ValueError, match=r"'a'"):
        ledger.expect(["a", "c"])
    assert ledger.expect(["c", "d"])
    ledger.receive(["c", "d"])
    assert ledger.complete


def test_rows_heads_and_vocabulary_are_split_over_two_ranks() -> None:
    """Two query heads of one row each, one key head that both ranks hold, a vocabulary of three."""
    config = SimpleNamespace(
        num_attention_heads=2, num_key_value_heads=1, head_dim=1, hidden_size=2
    )
    rows = {
        name: torch.tensor(values)
        for name, values in {
            "attn.q_proj.weight": [[1.0, 1.0], [2.0, 2.0]],
            "attn.k_proj.weight": [[3.0, 3.0]],
            "attn.v_proj.weight": [[4.0, 4.0]],
            "attn.o_proj.weight": [[5.0, 6.0], [5.0, 6.0]],
            "mlp.gate_proj.weight": [[1.0, 1.0], [2.0, 2.0]],
            "mlp.up_proj.weight": [[3.0, 3.0], [4.0, 4.0]],
            "embed_tokens.weight": [[7.0, 7.0], [8.0, 8.0], [9.0, 9.0]],
            "norm.weight": [1.0, 2.0],
        }.items()
    }
    second = dict(engine_layout(rows, config, tp_size=2, tp_rank=1))
    assert second["attn.qkv_proj.weight"][:, 0].tolist() == [2, 3, 4]
    assert second["attn.o_proj.weight"].tolist() == [[6], [6]]
    assert second["mlp.gate_up_proj.weight"][:, 0].tolist() == [2, 4]
    assert second["embed_tokens.weight"].shape == (32, 2)
    assert second["norm.weight"].tolist() == [1, 2]
    first = dict(engine_layout(rows, config, tp_size=2, tp_rank=0))
    assert first["embed_tokens.weight"][:4, 0].tolist() == [7, 8, 9, 0]


def test_names_are_those_without_wrapper_modules() -> None:
    inner = nn.Module()
    inner._checkpoint_wrapped_module = nn.Linear(1, 1, bias=False)
    outer = nn.Module()
    outer.layer = inner
    assert [name for name, _ in sync.named_weights(outer)] == ["layer.weight"]
