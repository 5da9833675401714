"""Shared prefixes: a layout by hand, its properties, and equal log-probs and gradients."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from selfplay.advantages.sample import Sample
from selfplay.config import ScratchConfig
from selfplay.distributed import init_world
from selfplay.learner.batch import (
    MicroBatch,
    layout,
    micro_batches,
    pack,
    shared_lengths,
    split,
)
from selfplay.model.attention import register_packed_attention
from selfplay.model.policy import policy_logprobs, scratch_model
from tests.helpers.tolerance import tolerance

CPU = torch.device("cpu")
VOCAB = 61
SHAPE = ScratchConfig(
    width=32, layers=2, heads=4, kv_heads=2, mlp_width=48, max_positions=128, vocab_size=VOCAB
)
FORWARD = VOCAB + 2 * 32 + 2 * (2 * 32 + 2 * 32 + 8 + 40 + 32 + 48)
NATS = 5.0


def sample(name: str, prompt: list[int], reply: list[int], scale: float = 1.0) -> Sample:
    ids, mask = prompt + reply, [0] * len(prompt) + [1] * len(reply)
    logprobs = [-scale * m * (i + 1) for i, m in enumerate(mask)]
    return Sample(name, ids, mask, logprobs, [2.0 * value for value in logprobs])


def test_a_layout_by_hand() -> None:
    """Two samples share 7 8 9, the third goes on from the first sampled token of the second."""
    samples = [
        sample("a", [7, 8, 9], [1, 2]),
        sample("b", [7, 8, 9], [3, 4]),
        sample("c", [7, 8, 9], [3, 5]),
        sample("d", [6], [2]),
    ]
    assert shared_lengths([s.ids for s in samples]) == [0, 3, 4, 0]
    batch = pack(samples, device=CPU)
    row = batch.row
    assert row.prefixes is not None
    assert row.ids_N.tolist() == [7, 8, 9, 1, 2, 3, 4, 5, 6, 2]
    assert row.positions_N.tolist() == [0, 1, 2, 3, 4, 3, 4, 4, 0, 1]
    assert row.cu_seqlens_S1.tolist() == [0, 5, 7, 8, 10]
    assert row.max_seqlen == 5
    sequences = [[0, 1, 2, 3, 4], [0, 1, 2, 5, 6], [0, 1, 2, 5, 7], [8, 9]]
    assert row.prefixes.tokens_K.tolist() == list(chain.from_iterable(sequences))
    assert row.prefixes.cu_seqlens_S1.tolist() == [0, 5, 10, 15, 17]
    # The 9 at index 2 predicts the first sampled token of three samples, with three advantages.
    assert row.predict_M.tolist() == [2, 3, 2, 5, 2, 5, 8]
    assert batch.targets_M.tolist() == [1, 2, 3, 4, 3, 5, 2]
    assert [batch.names[i] for i in batch.sample_M] == ["a", "a", "b", "b", "c", "c", "d"]
    assert batch.old_logprobs_M.tolist() == [-4.0, -5.0, -4.0, -5.0, -4.0, -5.0, -2.0]


def test_few_shared_tokens_are_computed_again() -> None:
    samples = [sample("a", [1, *range(10, 20)], [2]), sample("b", [1, *range(20, 30)], [2])]
    assert layout([s.ids for s in samples]) is None
    assert pack(samples, device=CPU).row.prefixes is None


SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12)


@given(SEQUENCES, st.integers(1, 40))
def test_every_token_of_every_sequence_is_in_the_row_once(
    sequences: list[list[int]], budget: int
) -> None:
    batches = split([[sequence] for sequence in sequences], budget=budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(sequences)))
    for batch in batches:
        row = [sequences[i] for i in batch]
        shared = shared_lengths(row)
        made = layout(row)
        assert len(batch) == 1 or sum(made.new if made else map(len, row)) <= budget
        if made is None:
            continue
        assert all(length >= 1 for length in made.new)
        own, ids, start = iter(made.new), {}, 0
        for sequence, prefix in zip(row, shared, strict=True):
            path = made.tokens_K[start : start + len(sequence)].tolist()
            start += len(sequence)
            num = next(own)
            assert len(sequence) == prefix + num
            for position, (token, place) in enumerate(zip(sequence, path, strict=True)):
                # One index of the row always stands for one token at one position.
                assert ids.setdefault(place, (token, position)) == (token, position)
        assert sorted(ids) == list(range(sum(made.new)))


SEQUENCE = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@given(st.lists(st.lists(SEQUENCE, max_size=4), max_size=8), st.integers(1, 60))
def test_samples_of_several_sequences_stay_within_the_budget(
    samples: list[list[list[int]]], budget: int
) -> None:
    """Rows of more than one sample hold at most `budget` tokens, shared prefixes once or not."""
    batches = split(samples, budget=budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(samples)))
    for batch in batches:
        row = [sequence for i in batch for sequence in samples[i]]
        made = layout(row) if row else None
        num = sum(made.new) if made else sum(map(len, row))
        with_tokens = [i for i in batch if samples[i]]
        assert len(with_tokens) <= 1 or num <= budget


REPLIES = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@given(st.lists(st.tuples(st.integers(0, 60), REPLIES), min_size=1, max_size=10), st.booleans())
@example([(8, [2] * 43), (8, [1] * 44), (20, [3] * 32)], True)
def test_a_micro_batch_computes_at_most_its_budget(
    games: list[tuple[int, list[int]]], share_prefixes: bool
) -> None:
    """Games with the first tokens of one prompt: rows in which sharing saves little, too."""
    prompt = [i % 5 for i in range(60)]
    samples = [sample(str(i), [4, *prompt[:num]], own) for i, (num, own) in enumerate(games)]
    made = list(
        micro_batches(samples, init_world(device="cpu"), budget=100, share_prefixes=share_prefixes)
    )
    assert sorted(i for indices, _ in made for i in indices) == list(range(len(games)))
    assert all(len(indices) == 1 or len(batch.row.ids_N) <= 100 for indices, batch in made)


def tree() -> list[Sample]:
    """A group of three with a long prompt, a branch off its second, a repeated sample, a sequence
    that is another's beginning, and one alone."""
    generator = torch.Generator().manual_seed(0)

    def draw(num: int) -> list[int]:
        return torch.randint(0, VOCAB, (num,), generator=generator).tolist()

    prompt, other = draw(20), draw(12)
    turn = draw(4)
    group = [sample(f"g{i}", prompt, reply) for i, reply in enumerate((draw(3), turn, draw(9)))]
    branch = sample("branch", prompt, turn + draw(5))
    twice = [replace(group[2], name="again"), sample("alone", other, draw(7))]
    return [*group, branch, *twice]


def models() -> dict[str, PreTrainedModel]:
    register_packed_attention()
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5,
    }  # fmt: skip
    made: dict[str, PreTrainedModel] = {"plain": scratch_model(SHAPE, seed=3)}
    for name, config, kind in (
        ("window", MistralConfig(**sizes), MistralForCausalLM),
        ("softcap", Gemma2Config(**sizes, attn_logit_softcapping=2.0), Gemma2ForCausalLM),
    ):
        config._attn_implementation = "packed"
        torch.manual_seed(0)
        made[name] = kind(config).eval()
    return made


def scores(model: PreTrainedModel, batches: list[MicroBatch]) -> dict[str, torch.Tensor]:
    """The log-probs of each sample; the sum of their squares goes into the gradients."""
    model.zero_grad()
    found: dict[str, torch.Tensor] = {}
    for batch in batches:
        logprobs_M, _ = policy_logprobs(model, batch.row, batch.targets_M, temperature=1.0)
        logprobs_M.square().sum().backward()
        for index, name in enumerate(batch.names):
            found[name] = logprobs_M[batch.sample_M == index].detach()
    return found


@pytest.mark.parametrize("name", ["plain", "window", "softcap"])
def test_log_probs_and_gradients_are_those_of_each_sample_alone(name: str) -> None:
    model, samples = models()[name], tree()
    ((_, batch),) = micro_batches(samples, init_world(device="cpu"), budget=1000)
    together = [batch]
    assert together[0].row.prefixes is not None
    # 20 + 3 + 9 + 9 for the prompt's tree (the repeated sample computes its last token again), 19.
    assert len(together[0].row.ids_N) == 20 + 3 + 9 + 9 + 1 + 19
    ours = scores(model, together)
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    theirs = scores(model, [pack([one], device=CPU) for one in samples])
    for key in theirs:
        assert (ours[key] - theirs[key]).abs().max() < tolerance(FORWARD, scale=NATS), key
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            difference = (gradients[key] - parameter.grad).abs().max()
            bound = tolerance(3 * FORWARD + 100) * parameter.grad.abs().max()
            assert difference < bound, key
