"""The transformers engine: log-probs equal the trainer's, samples depend on their seed alone."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from tiny_run import FORWARD, LOGPROB, VOCAB, tiny_model, trainer_logprobs
from tolerance import assert_near, near
from transformers import MistralConfig, MistralForCausalLM

from selfplay.credit.sample import Sample
from selfplay.engines.base import Completion, Request, Sampling
from selfplay.engines.hf import LEAST_SHARED, HFEngine, first_batch
from selfplay.model.attention import register_packed_attention

# Many stop tokens, so that an untrained model meets one soon.
STOPS = tuple(range(30))
# Prompts of 3 to 17 tokens, two of them equal, with unequal limits.
PROMPTS = [tuple(100 + (7 * row + i) % 150 for i in range(3 + 2 * row)) for row in range(8)]
REQUESTS = [
    Request(prompt_ids=prompt, max_new_tokens=4 + 3 * row, seed=1000 + row)
    for row, prompt in enumerate([PROMPTS[0], *PROMPTS])
]

# The same behind the same rules, which are long enough to be computed once.
RULES = tuple(100 + 11 * i % 150 for i in range(LEAST_SHARED + 3))
BEHIND_RULES = [replace(r, prompt_ids=(*RULES, *r.prompt_ids)) for r in REQUESTS]


def as_sample(request: Request, completion: Completion) -> Sample:
    num_prompt = len(request.prompt_ids)
    return Sample(
        name="",
        ids=[*request.prompt_ids, *completion.ids],
        mask=[0] * num_prompt + [1] * len(completion.ids),
        old_logprobs=[0.0] * num_prompt + completion.logprobs,
        advantages=[0.0] * (num_prompt + len(completion.ids)),
    )


def generate(
    requests: Sequence[Request],
    *,
    temperature: float = 1.0,
    max_batch: int = 512,
    stops: tuple[int, ...] = STOPS,
) -> list[Completion]:
    engine = HFEngine(tiny_model(), max_batch=max_batch)
    return engine.generate(requests, Sampling(temperature=temperature, stop_ids=stops))


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("requests", [REQUESTS, BEHIND_RULES], ids=["short", "behind rules"])
def test_logprobs_are_the_trainers(
    arch: str, temperature: float, requests: Sequence[Request]
) -> None:
    model = tiny_model(arch)
    answers = HFEngine(model).generate(requests, Sampling(temperature=temperature, stop_ids=STOPS))
    samples = [as_sample(r, c) for r, c in zip(requests, answers, strict=True)]
    expected = trainer_logprobs(model, samples, temperature=temperature)
    got = torch.tensor([p for completion in answers for p in completion.logprobs])
    assert len({len(c.ids) for c in answers}) > 2, "unequal lengths test the cache"
    assert_near(got, expected, FORWARD)


def test_a_sliding_window_counts_no_padding() -> None:
    """Prompts of unequal length share more tokens than are computed once, and than the window."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    register_packed_attention()
    config = MistralConfig(vocab_size=VOCAB, sliding_window=40, **sizes, **heads)
    config._attn_implementation = "packed"
    torch.manual_seed(0)
    model = MistralForCausalLM(config).eval()
    answers = HFEngine(model).generate(BEHIND_RULES, Sampling(temperature=1.0, stop_ids=()))
    samples = [as_sample(r, c) for r, c in zip(BEHIND_RULES, answers, strict=True)]
    got = torch.tensor([p for completion in answers for p in completion.logprobs])
    assert_near(got, trainer_logprobs(model, samples, temperature=1.0), FORWARD)


@pytest.mark.parametrize("requests", [REQUESTS, BEHIND_RULES], ids=["short", "behind rules"])
def test_a_completion_does_not_depend_on_its_batch(requests: Sequence[Request]) -> None:
    together = generate(requests)
    alone = [generate([request])[0] for request in requests]
    reversed_order = generate(requests[::-1])[::-1]
    split = generate(requests, max_batch=2)
    for other in (alone, reversed_order, split):
        assert [c.ids for c in other] == [c.ids for c in together]
        assert [c.finish for c in other] == [c.finish for c in together]
        for a, b in zip(other, together, strict=True):
            assert a.logprobs == near(b.logprobs, FORWARD, scale=LOGPROB)


@pytest.mark.parametrize(
    ("prompts", "steps", "num"),
    [
        ([5] * 8, 1, 8),
        ([100] * 3 + [1100], 24, 4),  # 3,000 tokens of padding, 3,072 are needed to cut
        ([100] * 3 + [1100], 23, 3),
        ([100] * 4 + [1100] * 4 + [9100], 30, 4),  # cut twice: 64,000 tokens, then 4,000
        ([7], 1, 1),
        ([1, 10_000], 600, 2),
    ],
)
def test_a_batch_is_cut_where_padding_costs_more_than_decode_steps(
    prompts: list[int], steps: int, num: int
) -> None:
    assert first_batch(prompts, steps) == num


def test_a_long_prompt_does_not_lengthen_the_others() -> None:
    long = replace(REQUESTS[0], prompt_ids=tuple(range(10, 60)) * 5)
    requests = [replace(r, max_new_tokens=1) for r in [*REQUESTS, long]]
    shapes: list[tuple[int, ...]] = []
    model = tiny_model()

    def record(_: object, __: object, words: dict[str, torch.Tensor]) -> None:
        shapes.append(tuple(words["input_ids"].shape))

    model.register_forward_pre_hook(record, with_kwargs=True)
    answers = HFEngine(model).generate(requests, Sampling(temperature=1.0, stop_ids=()))
    assert (1, 250) in shapes and max(width for rows, width in shapes if rows > 1) < 50
    assert [c.ids for c in answers[:-1]] == [c.ids for c in generate(requests[:-1], stops=())]


def test_a_long_beginning_that_prompts_share_is_computed_once() -> None:
    model, computed = tiny_model(), 0

    def count(_: object, __: object, words: dict[str, torch.Tensor]) -> None:
        nonlocal computed
        computed += words["input_ids"].numel()

    model.register_forward_pre_hook(count, with_kwargs=True)
    one_token = [replace(request, max_new_tokens=1) for request in BEHIND_RULES]
    HFEngine(model).generate(one_token, Sampling(temperature=1.0, stop_ids=()))
    longest = max(len(r.prompt_ids) for r in REQUESTS)
    assert computed == len(RULES) + len(PROMPTS) * longest, "and equal prompts as one"


def test_requests_are_computed_once_as_long_as_their_tokens_are_the_same() -> None:
    """Greedy answers to three prompts stay three rows. Sampled ones are as many rows in a step as
    there are different texts before it."""
    model, rows = tiny_model(), []

    def record(_: object, __: object, words: dict[str, torch.Tensor]) -> None:
        rows.append(words["input_ids"].shape[0])

    model.register_forward_pre_hook(record, with_kwargs=True)
    requests = [Request(PROMPTS[i % 3], 6, seed=i) for i in range(12)]
    HFEngine(model).generate(requests, Sampling(temperature=0.0, stop_ids=()))
    assert rows == [3] * 6
    rows.clear()
    answers = HFEngine(model).generate(requests, Sampling(temperature=1.0, stop_ids=()))
    beginnings = [
        {
            (*request.prompt_ids, *answer.ids[:num])
            for request, answer in zip(requests, answers, strict=True)
        }
        for num in range(6)
    ]
    assert rows == [len(texts) for texts in beginnings] and 3 < rows[1] <= rows[5] <= 12


def test_equal_prompts_differ_by_seed_alone() -> None:
    requests = [Request(PROMPTS[2], 12, seed) for seed in (1, 2, 3, 1)]
    answers = generate(requests, stops=())
    assert answers[0].ids == answers[3].ids
    assert len({tuple(c.ids) for c in answers}) == 3


def test_the_stop_token_is_kept_and_each_request_has_its_own_limit() -> None:
    requests = [Request(PROMPTS[i % 8], 1 + i % 9, seed=i) for i in range(64)]
    answers = generate(requests)
    for request, completion in zip(requests, answers, strict=True):
        assert len(completion.ids) == len(completion.logprobs) <= request.max_new_tokens
        assert not set(completion.ids[:-1]) & set(STOPS)
        if completion.ids[-1] in STOPS:
            assert completion.finish == "stop"
        else:
            assert completion.finish == "length"
            assert len(completion.ids) == request.max_new_tokens
    assert {c.finish for c in answers} == {"stop", "length"}


def test_a_shorter_limit_only_truncates() -> None:
    (long,) = generate([Request(PROMPTS[3], 20, seed=5)], stops=())
    (short,) = generate([Request(PROMPTS[3], 8, seed=5)], stops=())
    assert short.ids == long.ids[:8]


def test_greedy_takes_the_likeliest_token_whatever_the_seed() -> None:
    model = tiny_model()
    engine, sampling = HFEngine(model), Sampling(temperature=0.0, stop_ids=())
    one, other = engine.generate([Request(PROMPTS[1], 6, seed) for seed in (1, 2)], sampling)
    ids = list(PROMPTS[1])
    with torch.no_grad():
        for token, logprob in zip(one.ids, one.logprobs, strict=True):
            expected_V = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            assert token == int(expected_V.argmax())
            assert logprob == near(float(expected_V.max()), FORWARD, scale=LOGPROB)
            ids.append(token)
    assert one.ids == other.ids


def test_samples_follow_the_softmax_at_the_temperature() -> None:
    """One token for each of 4,000 seeds: common tokens' shares are within four standard errors."""
    model, num, temperature = tiny_model(), 4000, 0.7
    requests = [Request(PROMPTS[0], 1, seed) for seed in range(num)]
    answers = HFEngine(model).generate(requests, Sampling(temperature=temperature, stop_ids=()))
    with torch.no_grad():
        logits_V = model(torch.tensor([PROMPTS[0]])).logits[0, -1]
    expected_V = (logits_V / temperature).softmax(-1).double()
    shares_V = torch.bincount(torch.tensor([c.ids[0] for c in answers]), minlength=VOCAB) / num
    common_V = expected_V > 0.01
    errors_V = (expected_V * (1 - expected_V) / num).sqrt()
    assert common_V.sum() > 5
    assert ((shares_V - expected_V).abs() < 4 * errors_V)[common_V].all()


def test_new_weights_are_used_from_the_next_request_on() -> None:
    engine, sampling = HFEngine(tiny_model(seed=0)), Sampling(temperature=1.0, stop_ids=())
    before = engine.generate(REQUESTS, sampling)
    engine.update_weights(tiny_model(seed=1).named_parameters(), version=7)
    after = engine.generate(REQUESTS, sampling)
    fresh = HFEngine(tiny_model(seed=1)).generate(REQUESTS, sampling)
    assert [c.ids for c in after] == [c.ids for c in fresh] != [c.ids for c in before]
    assert {c.version for c in before} == {0} and {c.version for c in after} == {7}
    with pytest.raises(KeyError, match="lm_tail"):
        engine.update_weights([("lm_tail", torch.zeros(1))], version=8)
    assert engine.version == 7


def test_generating_does_not_change_the_model() -> None:
    model = tiny_model().train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    HFEngine(model).generate(REQUESTS, Sampling(temperature=1.0, stop_ids=STOPS))
    assert model.training
    assert all(
        torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters()
    )


def test_no_requests_give_no_answers() -> None:
    assert generate([]) == []


def test_answers_come_in_the_order_of_the_requests() -> None:
    """The engine sorts by length inside; the k-th answer is still the k-th request's."""
    limits = [9, 2, 7, 1, 5]
    requests = [Request(PROMPTS[7 - i], n, seed=i) for i, n in enumerate(limits)]
    answers = generate(requests, stops=())
    assert [len(c.ids) for c in answers] == limits
    assert all(a != b for a, b in pairwise(c.ids for c in answers))
