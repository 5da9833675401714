"""Packed log-probs equal those of each sequence alone; models are created, exported and loaded."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedModel,
)

from selfplay.config import ScratchConfig
from selfplay.errors import SettingsError
from selfplay.model.attention import PackedRow
from selfplay.model.policy import (
    empty_model,
    export,
    load_model,
    policy_logprobs,
    scratch_model,
)
from selfplay.model.stored import Stored
from tests.helpers.tolerance import tolerance

VOCAB = 61
SHAPE = ScratchConfig(
    width=32, layers=2, heads=4, kv_heads=2, mlp_width=48, max_positions=128, vocab_size=VOCAB
)
# One far longer than the rest, one of a single token, one without scored tokens.
LENGTHS = (7, 40, 1, 12, 3, 16)
# Roundings in a forward and a backward pass; the size of logits and log-probs in nats.
FORWARD = VOCAB + 2 * 32 + 2 * (2 * 32 + 2 * 32 + 8 + max(LENGTHS) + 32 + 48)
GRADIENT, NATS = 3 * FORWARD + sum(LENGTHS), 5.0


def packed(seed: int = 0) -> tuple[list[torch.Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(0, VOCAB, (n,), generator=generator) for n in LENGTHS]
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    predict = torch.cat(
        [torch.arange(bounds[i], bounds[i + 1] - 1) for i in range(len(LENGTHS)) if i != 4]
    )
    ids = torch.cat(sequences)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    row = PackedRow(ids, positions, bounds.to(torch.int32), max(LENGTHS), predict)
    return sequences, {"row": row, "targets_M": ids[predict + 1]}


def one_by_one(
    model: PreTrainedModel, sequences: list[torch.Tensor], temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hugging Face's own forward pass and log_softmax, one sequence at a time."""
    logprobs, entropies = [], []
    for index, ids in enumerate(sequences):
        if index == 4:
            continue
        log_probs = torch.log_softmax(model(ids[None]).logits[0, :-1] / temperature, dim=-1)
        logprobs.append(log_probs.gather(1, ids[1:, None])[:, 0])
        entropies.append(-(log_probs.exp() * log_probs).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize(("arch", "tied"), [("qwen2", True), ("qwen3", True), ("llama", False)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_packed_scores_and_gradients_are_those_of_each_sequence_alone(
    arch: str, tied: bool, temperature: float
) -> None:
    model = scratch_model(
        replace(SHAPE, arch=arch), seed=3, pad_token_id=0, tie_word_embeddings=tied
    )
    sequences, row = packed()
    ours = policy_logprobs(model, **row, temperature=temperature)
    ours[0].sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    plain = scratch_model(
        replace(SHAPE, arch=arch), seed=3, pad_token_id=0, tie_word_embeddings=tied
    )
    plain.set_attn_implementation("eager")
    expected = one_by_one(plain, sequences, temperature)
    expected[0].sum().backward()
    for a, b in zip(ours, expected, strict=True):
        assert (a - b).abs().max() < tolerance(FORWARD, scale=NATS)
    for name, parameter in plain.named_parameters():
        difference = (gradients[name] - parameter.grad).abs().max() / parameter.grad.abs().max()
        assert difference < tolerance(GRADIENT), name


def test_generation_with_a_cache_uses_ordinary_attention() -> None:
    """Without `packed_kwargs` masks work as usual: none, 2-D padding, an explicit 4-D one."""
    model = scratch_model(SHAPE, seed=3, pad_token_id=0).eval()
    plain = scratch_model(SHAPE, seed=3, pad_token_id=0).eval()
    plain.set_attn_implementation("eager")
    ids = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5]])
    padding = (ids != 0).long()
    positions = (padding.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        both = [
            m(ids, attention_mask=padding, position_ids=positions).logits for m in (model, plain)
        ]
        real = padding.bool()
        assert (both[0] - both[1])[real].abs().max() < tolerance(FORWARD, scale=NATS)
        causal = torch.ones(5, 5, dtype=torch.bool).tril()
        mask = causal[None, None] & real[:, None, None, :] | torch.eye(5, dtype=torch.bool)
        explicit = model(ids, attention_mask=mask, position_ids=positions).logits
        assert (explicit - both[0])[real].abs().max() < tolerance(FORWARD, scale=NATS)
        cache = DynamicCache(config=model.config)
        model(ids[1:, :3], past_key_values=cache)
        last = [model(ids[1:, i : i + 1], past_key_values=cache).logits[0, 0] for i in (3, 4)]
        assert (torch.stack(last) - both[0][1, 3:]).abs().max() < tolerance(FORWARD, scale=NATS)


def test_scratch_models_depend_on_the_seed_alone() -> None:
    state = torch.get_rng_state()
    first = scratch_model(SHAPE, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    again, other = (scratch_model(SHAPE, seed=s) for s in (5, 6))
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert first.lm_head.weight.std().item() == pytest.approx(SHAPE.init_range, rel=0.05)


def test_the_padding_token_is_trained() -> None:
    model = scratch_model(SHAPE, seed=5, pad_token_id=0, tie_word_embeddings=False)
    ids, bounds = torch.tensor([4, 0, 7]), torch.tensor([0, 3], dtype=torch.int32)
    row = PackedRow(ids, torch.arange(3), bounds, 3, torch.tensor([1]))
    policy_logprobs(model, row, torch.tensor([7]), temperature=1.0)[0].sum().backward()
    assert model.get_input_embeddings().weight.grad[0].abs().max() > 0


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_is_a_standard_folder(tied: bool, tmp_path: Path) -> None:
    model = scratch_model(SHAPE, seed=5, eos_token_id=2, tie_word_embeddings=tied)
    export(model, None, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["dtype"] == "float32"
    assert config["eos_token_id"] == 2
    assert "packed" not in json.dumps(config)
    back = AutoModelForCausalLM.from_pretrained(tmp_path)
    ours = load_model(str(tmp_path), device="cpu", dtype=torch.float32)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, back.get_parameter(name))
        assert torch.equal(parameter, ours.get_parameter(name))
    assert ours.config._attn_implementation == "packed"
    half = load_model(str(tmp_path), device="cpu", dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 3}, "are missing, such as model.layers.2"),
        ({"hidden_size": 48}, r"the shapes .* \[\d+, 48\] for model\.embed_tokens.* got \["),
        ({"intermediate_size": 50}, r"the shapes .* 50\] for model\.layers\.0\.mlp\.down_proj"),
        ({"vocab_size": 1000}, r"the shapes .* \[1000, \d+\] for model\.embed_tokens\.weight, got"),
        ({"num_attention_heads": 1}, r"the shapes .* for model\.layers\.0\.self_attn\.\w_proj"),
        ({"hidden_act": "none"}, r"cannot be loaded: KeyError: 'none'"),
    ],
)
def test_tensors_that_are_not_the_configs_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In one line, in one process and in shards; transformers would draw the missing ones at
    random, after a report of many lines."""
    export(scratch_model(SHAPE, seed=5), None, tmp_path)
    config = tmp_path / "config.json"
    settings = json.loads(config.read_text()) | change
    settings["layer_types"] = ["full_attention"] * settings["num_hidden_layers"]
    config.write_text(json.dumps(settings))
    capfd.readouterr()
    with pytest.raises(SettingsError, match=message) as refused:
        load_model(str(tmp_path), device="cpu", dtype=torch.float32)
    assert "\n" not in str(refused.value) and capfd.readouterr() == ("", "")
    if "the shapes" in message:
        with pytest.raises(SettingsError, match="the shapes"):
            Stored(tmp_path, empty_model(AutoConfig.from_pretrained(tmp_path), dtype=torch.float32))
