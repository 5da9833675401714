"""The transformers engine: log-probs equal the trainer's, samples depend on their seed alone."""

import weakref
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from selfplay.advantages.sample import Sample
from selfplay.engines import hf
from selfplay.engines.base import Completion, Request, Sampling
from selfplay.engines.hf import HFEngine, first_batch
from selfplay.model.attention import register_packed_attention
from tests.helpers.tiny_run import FORWARD, LOGPROB, VOCAB, tiny_model, trainer_logprobs
from tests.helpers.tolerance import assert_near, near

# Many stop tokens, so that an untrained model meets one soon.
STOPS = tuple(range(30))
SAMPLING = Sampling(temperature=1.0, stop_ids=())
# Prompts of 3 to 17 tokens, two of them equal, with unequal limits.
PROMPTS = [tuple(100 + (7 * row + i) % 150 for i in range(3 + 2 * row)) for row in range(8)]
REQUESTS = [
    Request(prompt_ids=prompt, max_new_tokens=4 + 3 * row, seed=1000 + row)
    for row, prompt in enumerate([PROMPTS[0], *PROMPTS])
]

# The same behind the same rules.
RULES = tuple(100 + 11 * i % 150 for i in range(67))
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


def by_trainer(
    model: PreTrainedModel,
    requests: Sequence[Request],
    answers: Sequence[Completion],
    *,
    temperature: float = 1.0,
) -> torch.Tensor:
    """The trainer's log-probs of all answers' tokens."""
    samples = [as_sample(r, c) for r, c in zip(requests, answers, strict=True)]
    return trainer_logprobs(model, samples, temperature=temperature)


def logprobs_of(answers: Sequence[Completion]) -> torch.Tensor:
    return torch.tensor([p for completion in answers for p in completion.logprobs])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_text_scores_what_it_was_sampled_with(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer behind its prompt, in one pass or in several."""
    engine = HFEngine(tiny_model())
    answers = engine.generate_batch(REQUESTS, replace(SAMPLING, temperature=temperature))
    texts = [[*r.prompt_ids, *c.ids] for r, c in zip(REQUESTS, answers, strict=True)]
    for most in (16_384, 40):
        monkeypatch.setattr(hf, "MAX_PASS_TOKENS", most)
        scores = engine.score(texts, temperature=temperature)()
        assert [len(of) for of in scores] == [len(text) - 1 for text in texts]
        found = [p for of, c in zip(scores, answers, strict=True) for p in of[-len(c.ids) :]]
        assert_near(torch.tensor(found), logprobs_of(answers), FORWARD)


def following(requests: Sequence[Request], answers: Sequence[Completion]) -> list[Request]:
    """The next turns: each seat reads its own answer and a few tokens more."""
    return [
        replace(r, prompt_ids=(*r.prompt_ids, *c.ids, 7, 90 + i % 3, 8), seed=r.seed + 100)
        for i, (r, c) in enumerate(zip(requests, answers, strict=True))
    ]


def num_beginnings(texts: Iterable[Sequence[int]]) -> int:
    """How many different texts the given ones begin with."""
    return len({tuple(text[: i + 1]) for text in texts for i in range(len(text))})


def shapes_of(model: PreTrainedModel) -> list[tuple[int, ...]]:
    """The list to which each forward pass of the model appends its rows and columns of new tokens,
    and the columns of keys that its mask covers."""
    shapes: list[tuple[int, ...]] = []

    def record(_: object, __: object, words: dict[str, torch.Tensor]) -> None:
        shapes.append((*words["input_ids"].shape, words["attention_mask"].shape[-1]))

    model.register_forward_pre_hook(record, with_kwargs=True)
    return shapes


def generate(
    requests: Sequence[Request],
    *,
    temperature: float = 1.0,
    max_batch: int = 512,
    stops: tuple[int, ...] = STOPS,
) -> list[Completion]:
    engine = HFEngine(tiny_model(), max_batch=max_batch)
    return engine.generate_batch(requests, Sampling(temperature=temperature, stop_ids=stops))


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("requests", [REQUESTS, BEHIND_RULES], ids=["short", "behind rules"])
def test_logprobs_are_the_trainers(
    arch: str, temperature: float, requests: Sequence[Request]
) -> None:
    model = tiny_model(arch)
    answers = HFEngine(model).generate_batch(
        requests, Sampling(temperature=temperature, stop_ids=STOPS)
    )
    expected = by_trainer(model, requests, answers, temperature=temperature)
    got = logprobs_of(answers)
    assert len({len(c.ids) for c in answers}) > 2, "unequal lengths test the cache"
    assert_near(got, expected, FORWARD)


def test_a_sliding_window_counts_no_padding() -> None:
    """Prompts of unequal length share more tokens than the window has, also in the second turn of a
    rollout."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    register_packed_attention()
    config = MistralConfig(vocab_size=VOCAB, sliding_window=40, **sizes, **heads)
    config._attn_implementation = "packed"
    torch.manual_seed(0)
    model = MistralForCausalLM(config).eval()
    engine = HFEngine(model)
    with engine.rollout():
        requests = BEHIND_RULES
        for _ in range(2):
            answers = engine.generate_batch(requests, SAMPLING)
            assert_near(logprobs_of(answers), by_trainer(model, requests, answers), FORWARD)
            requests = following(requests, answers)


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
    requests = [replace(r, max_new_tokens=2) for r in [*REQUESTS, long]]
    model = tiny_model()
    shapes = shapes_of(model)
    answers = HFEngine(model).generate_batch(requests, SAMPLING)
    assert (1, 1, 251) in shapes and max(keys for rows, _, keys in shapes if rows > 1) < 50
    assert [c.ids for c in answers[:-1]] == [c.ids for c in generate(requests[:-1], stops=())]


@pytest.mark.parametrize("at_once", [1, 200, hf.MAX_PASS_TOKENS])
def test_what_prompts_begin_with_is_computed_once(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """In however many passes; without padding."""
    monkeypatch.setattr(hf, "MAX_PASS_TOKENS", at_once)
    model = tiny_model()
    shapes = shapes_of(model)
    one_token = [replace(request, max_new_tokens=1) for request in BEHIND_RULES]
    answers = HFEngine(model).generate_batch(one_token, SAMPLING)
    computed = [tokens for _, tokens, _ in shapes]
    assert sum(computed) == len(RULES) + sum(map(len, PROMPTS)), "and equal prompts as one"
    assert len(computed) == {1: 8, 200: 4}.get(at_once, 1)
    assert_near(logprobs_of(answers), by_trainer(model, one_token, answers), FORWARD)


def test_a_later_turn_computes_only_what_its_seat_has_read_since() -> None:
    """That are its last sampled token, which nothing followed, and what came after it. Two seats
    with one prompt, some that ended early and a new one are among them."""
    model = tiny_model()
    engine, shapes = HFEngine(model), shapes_of(model)
    new = Request(prompt_ids=(*RULES, 5, 6), max_new_tokens=9, seed=3)
    with engine.rollout():
        first = engine.generate_batch(BEHIND_RULES, Sampling(temperature=1.0, stop_ids=STOPS))
        requests = [*following(BEHIND_RULES, first), new]
        before = {
            tuple(r.prompt_ids) + tuple(c.ids[:-1])
            for r, c in zip(BEHIND_RULES, first, strict=True)
        }
        shapes.clear()
        second = engine.generate_batch(requests, Sampling(temperature=1.0, stop_ids=STOPS))
        texts = [r.prompt_ids for r in requests]
        assert shapes[0][:2] == (1, num_beginnings([*before, *texts]) - num_beginnings(before))
        assert shapes[0][1] <= 4 * len(requests)
        third = following(requests, second)
        answers = engine.generate_batch(third, Sampling(temperature=1.0, stop_ids=STOPS))
    assert_near(logprobs_of(second), by_trainer(model, requests, second), FORWARD)
    assert_near(logprobs_of(answers), by_trainer(model, third, answers), FORWARD)
    assert [c.ids for c in second] == [c.ids for c in generate(requests)]
    assert [c.ids for c in answers] == [c.ids for c in generate(third)]


def test_a_prompt_that_is_known_is_answered_as_before() -> None:
    """Also one that a longer text begins with."""
    engine = HFEngine(tiny_model())
    shorter = [replace(r, prompt_ids=r.prompt_ids[:-1]) for r in BEHIND_RULES]
    with engine.rollout():
        first = engine.generate_batch(BEHIND_RULES, SAMPLING)
        again = engine.generate_batch(BEHIND_RULES, SAMPLING)
        parts = engine.generate_batch(shorter, SAMPLING)
    for one, other in ((again, first), (parts, generate(shorter, stops=()))):
        assert [c.ids for c in one] == [c.ids for c in other]
        assert_near(logprobs_of(one), logprobs_of(other), FORWARD)


def test_no_answer_comes_from_keys_of_old_weights() -> None:
    """Pushed in a rollout, or changed in place after one as an optimizer step does; a call outside
    of a rollout keeps nothing."""
    model, new = tiny_model(seed=0), tiny_model(seed=1)
    engine = HFEngine(model)
    expected = [
        HFEngine(m).generate_batch(BEHIND_RULES, SAMPLING) for m in (tiny_model(seed=0), new)
    ]
    with engine.rollout():
        before = engine.generate_batch(BEHIND_RULES, SAMPLING)
        engine.update_weights(new.named_parameters(), version=1)
        after = engine.generate_batch(BEHIND_RULES, SAMPLING)
    assert_near(logprobs_of(before), logprobs_of(expected[0]), FORWARD)
    assert_near(logprobs_of(after), logprobs_of(expected[1]), FORWARD)
    for rollout in (engine.rollout, nullcontext):
        change_in_place(model, tiny_model(seed=0))
        with rollout():
            before = engine.generate_batch(BEHIND_RULES, SAMPLING)
        change_in_place(model, new)
        with rollout():
            after = engine.generate_batch(BEHIND_RULES, SAMPLING)
        assert_near(logprobs_of(before), logprobs_of(expected[0]), FORWARD)
        assert_near(logprobs_of(after), logprobs_of(expected[1]), FORWARD)


def change_in_place(model: PreTrainedModel, other: PreTrainedModel) -> None:
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)


def test_a_rollout_leaves_no_keys_in_memory_even_if_it_fails() -> None:
    engine = HFEngine(tiny_model())
    with pytest.raises(ZeroDivisionError), engine.rollout():
        engine.generate_batch(BEHIND_RULES, SAMPLING)
        kept = weakref.ref(engine._tree)
        assert len(kept()) > len(RULES)
        raise ZeroDivisionError
    assert kept() is None


def test_what_a_rollout_keeps_is_bounded() -> None:
    """Batches of at most two rows of 17 tokens and eight new ones: never more than twice their 50
    tokens before a batch, and answers do not change."""
    engine = HFEngine(tiny_model(), max_batch=2)
    sizes = []
    with engine.rollout():
        for start in range(0, 40, 2):
            prompts = [tuple(100 + (start + i + 3 * k) % 150 for k in range(17)) for i in range(2)]
            requests = [Request(prompt, 8, seed=start + i) for i, prompt in enumerate(prompts)]
            answers = engine.generate_batch(requests, SAMPLING)
            assert [c.ids for c in answers] == [c.ids for c in generate(requests, stops=())]
            sizes.append(len(engine._tree))
    assert 100 < max(sizes) <= 3 * 50 and sizes[0] <= 50
    assert any(b < a for a, b in pairwise(sizes))


def test_requests_are_computed_once_as_long_as_their_tokens_are_the_same() -> None:
    """Greedy answers to three prompts stay three rows. Sampled ones are as many rows in a step as
    there are different texts before it."""
    model = tiny_model()
    shapes = shapes_of(model)
    requests = [Request(PROMPTS[i % 3], 6, seed=i) for i in range(12)]
    HFEngine(model).generate_batch(requests, Sampling(temperature=0.0, stop_ids=()))
    assert [rows for rows, _, _ in shapes] == [1] + [3] * 5
    shapes.clear()
    answers = HFEngine(model).generate_batch(requests, SAMPLING)
    beginnings = [
        {
            (*request.prompt_ids, *answer.ids[:num])
            for request, answer in zip(requests, answers, strict=True)
        }
        for num in range(6)
    ]
    rows = [rows for rows, _, _ in shapes[1:]]
    assert rows == [len(texts) for texts in beginnings[1:]] and 3 < rows[0] <= rows[4] <= 12


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


def test_greedy_takes_the_likeliest_token_whatever_the_seed() -> None:
    model = tiny_model()
    engine, sampling = HFEngine(model), Sampling(temperature=0.0, stop_ids=())
    one, other = engine.generate_batch([Request(PROMPTS[1], 6, seed) for seed in (1, 2)], sampling)
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
    answers = HFEngine(model).generate_batch(
        requests, Sampling(temperature=temperature, stop_ids=())
    )
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
    before = engine.generate_batch(REQUESTS, sampling)
    engine.update_weights(tiny_model(seed=1).named_parameters(), version=7)
    after = engine.generate_batch(REQUESTS, sampling)
    fresh = HFEngine(tiny_model(seed=1)).generate_batch(REQUESTS, sampling)
    assert [c.ids for c in after] == [c.ids for c in fresh] != [c.ids for c in before]
    assert {c.version for c in before} == {0} and {c.version for c in after} == {7}
    with pytest.raises(KeyError, match="lm_tail"):
        engine.update_weights([("lm_tail", torch.zeros(1))], version=8)
    assert engine.version == 7


def test_generating_does_not_change_the_model() -> None:
    model = tiny_model().train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    HFEngine(model).generate_batch(REQUESTS, Sampling(temperature=1.0, stop_ids=STOPS))
    assert model.training
    assert all(
        torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters()
    )
