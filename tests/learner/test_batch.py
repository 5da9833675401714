"""Packing by hand: trained positions, their values, and how samples fill micro-batches."""

from dataclasses import replace

import pytest
import torch

from selfplay.advantages.advantages import imitated
from selfplay.advantages.sample import Sample
from selfplay.distributed import init_world
from selfplay.learner.batch import (
    deal,
    micro_batches,
    num_trained_tokens,
    pack,
    split,
)

CPU = torch.device("cpu")
# Prompt 10 11, sampled 12 13, observed 14, sampled 15.
LONG = Sample(
    "long", [10, 11, 12, 13, 14, 15], [0, 0, 1, 1, 0, 1], [0, 0, -1, -2, 0, -3], [0, 0, 5, 5, 0, 5]
)
# Prompt 20, sampled 21.
SHORT = Sample("short", [20, 21], [0, 1], [0, -4], [0, -6])


def test_packing_by_hand() -> None:
    batch = pack([LONG, SHORT], device=CPU)
    assert batch.row.ids_N.tolist() == [10, 11, 12, 13, 14, 15, 20, 21]
    assert batch.row.positions_N.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert batch.row.cu_seqlens_S1.tolist() == [0, 6, 8]
    assert batch.row.cu_seqlens_S1.dtype == torch.int32
    assert batch.row.max_seqlen == 6
    # The token before each trained one predicts it; the 15 at LONG's end never predicts the 20.
    assert batch.row.predict_M.tolist() == [1, 2, 4, 6]
    assert batch.targets_M.tolist() == [12, 13, 15, 21]
    assert batch.old_logprobs_M.tolist() == [-1.0, -2.0, -3.0, -4.0]
    assert batch.advantages_M.tolist() == [5.0, 5.0, 5.0, -6.0]
    assert [batch.names[i] for i in batch.sample_M] == ["long", "long", "long", "short"]


def test_what_follows_the_last_trained_token_is_left_out() -> None:
    """SHORT then hears 22 23; a second sequence, from 24 on, has one trained token and hears 26."""
    heard = Sample("heard", [20, 21, 22, 23], [0, 1, 0, 0], [0, -4, 0, 0], [0, -6, 0, 0])
    twice = Sample(
        "twice", [20, 21, 22, 24, 25, 26], [0, 1, 0, 0, 1, 0], [0.0] * 6, [0.0] * 6, starts=(3,)
    )
    assert heard.longest == 2
    assert pack([heard, LONG], device=CPU).row.ids_N.tolist() == [20, 21, *LONG.ids]
    assert pack([twice], device=CPU).row.ids_N.tolist() == [20, 21, 24, 25]
    found, expected = (pack([LONG, s], device=CPU) for s in (heard, SHORT))
    for name in ("targets_M", "advantages_M", "old_logprobs_M", "sample_M"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist()


def test_the_first_token_of_a_transcript_cannot_be_trained() -> None:
    bad = Sample("bad", [1, 2], [1, 1], [0.0, 0.0], [1.0, 1.0])
    with pytest.raises(ValueError):
        pack([SHORT, bad], device=CPU)


def test_a_sample_of_arrays_is_packed_as_one_of_lists() -> None:
    """What is imitated has an array of ids, bytes as its mask, advantage 1 and no log-probs."""
    made = [imitated(one.name, one.ids, one.mask, one.starts) for one in (LONG, SHORT)]
    plain = [
        replace(one, old_logprobs=[0.0] * len(one.ids), advantages=[float(m) for m in one.mask])
        for one in (LONG, SHORT)
    ]
    assert [[*one.ids] for one in made] == [one.ids for one in plain]
    world = init_world(device="cpu")
    batches = [[b for _, b in micro_batches(each, world, budget=100)] for each in (made, plain)]
    for (found,), (expected,) in [batches]:
        for name in ("targets_M", "advantages_M", "old_logprobs_M", "sample_M"):
            assert torch.equal(getattr(found, name), getattr(expected, name))
            assert getattr(found, name).dtype == getattr(expected, name).dtype
        assert torch.equal(found.row.ids_N, expected.row.ids_N)
        assert found.advantages_M.tolist() == [1.0] * num_trained_tokens(made)


def test_a_row_s_tensors_are_aligned_though_one_copy_moves_them() -> None:
    """Kernels read 16 bytes at once. Five trained tokens take 20 of them."""
    one = replace(LONG, mask=[0, 1, 1, 1, 1, 1], columns={"prior": [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]})
    batch = pack([one], device=CPU)
    tensors = [batch.targets_M, batch.advantages_M, batch.old_logprobs_M, batch.columns["prior"]]
    tensors += [batch.row.ids_N, batch.row.cu_seqlens_S1, batch.row.predict_M]
    assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
    batch.targets_M.zero_()  # another tensor is not changed by it, in autograd's eyes too
    assert [tensor._version for tensor in tensors] == [1, *[0] * (len(tensors) - 1)]
    assert batch.columns["prior"].tolist() == [1.5, 2.5, 3.5, 4.5, 5.5]
    assert batch.old_logprobs_M.tolist() == [0.0, -1.0, -2.0, 0.0, -3.0]


def test_split_by_hand() -> None:
    """Longest first; 9 is over the budget and gets its own, then 5, then 4 + 2 fill 6."""
    samples = [[range(num)] for num in (4, 9, 2, 5)]
    assert split(samples, budget=6, share_prefixes=False) == [[1], [3], [0, 2]]
    assert split([], budget=6) == []


def test_samples_move_to_another_rank_only_to_balance_tokens() -> None:
    """Rank 0 has 9 + 6 + 2 tokens, rank 1 has 4 + 3. The difference is 10, so a sample of at most 5
    may move: the 2. The difference is then 6, and no sample of at most 3 is left."""
    assert deal([[9, 6, 2], [4, 3]], tp=1) == [[(0, 0), (0, 1)], [(0, 2), (1, 0), (1, 1)]]
    assert deal([[5, 5], [5, 4]], tp=1) == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]
    # Only the first of four ranks leads an engine; two rows of two.
    assert deal([[3, 3, 3, 3], [], [], []], tp=2) == [[(0, 0), (0, 1)], [(0, 2), (0, 3)]]


def test_trained_tokens_do_not_depend_on_the_budget() -> None:
    samples, world = [LONG, SHORT, LONG], init_world(device="cpu")
    assert num_trained_tokens(samples) == 7
    for budget, num_batches in ((100, 1), (8, 2), (2, 3)):
        batches = list(micro_batches(samples, world, budget=budget, share_prefixes=False))
        assert len(batches) == num_batches
        assert sorted(i for indices, _ in batches for i in indices) == [0, 1, 2]
        assert sum(len(batch.targets_M) for _, batch in batches) == 7
