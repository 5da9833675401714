"""Checks on a small random copy, on the CPU, that a family is computed as transformers computes it.

The copy has each kind of layer once, narrow layers, a small vocabulary, a window shorter than the
text, and caps low enough to matter. The check takes seconds for a model of any size, and needs no
weights. It compares three passes with transformers' own eager forward pass: the trainer's packed
rows, the same with weights read in shards, and the hf engine.

A difference is the largest of any token's log-prob, in nats.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from dialop.shown import error_line
from selfplay.advantages.sample import Sample
from selfplay.distributed import fill_shards
from selfplay.engines.base import Request, Sampling
from selfplay.engines.hf import HFEngine
from selfplay.learner.batch import pack
from selfplay.model.families import head_width
from selfplay.model.policy import empty_model, load_model, loading_quietly, policy_logprobs
from selfplay.model.stored import Stored

# In fp32 a log-prob of a few nats has an error of 1e-6 to 5e-6 after a few narrow layers; a missing
# part changes it by 1e-2 or more. Some families amplify rounding errors (attention scores without
# scaling): there the bound is NOISES times the effect of rounding all weights once, at most MOST.
BOUND, NOISES, MOST = 1e-4, 30.0, 1e-2
WINDOW, VOCAB_SIZE = 6, 96
TEXTS = (7, 24, 3)  # tokens of each; the second is longer than the window
# Upper bounds on a config's keys.
NARROW = {
    "intermediate_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32, "q_lora_rank": 32, "kv_lora_rank": 32, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "sliding_window": WINDOW,
    "final_logit_softcapping": 2.0, "attn_logit_softcapping": 0.5,
}  # fmt: skip


def small_config(config: PretrainedConfig) -> PretrainedConfig:
    """The config of the copy: each kind of layer once (at least two layers), at most 4 heads."""
    small = copy.deepcopy(config)
    num = config.num_hidden_layers
    lists: dict[str, Any] = {
        key: value
        for key, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == num and num > 1
    }
    kinds = list(zip(*lists.values(), strict=True)) if lists else [()] * num
    layers = sorted({kinds.index(kind) for kind in kinds} | {0, num - 1} | set(range(min(2, num))))
    for key, value in lists.items():
        setattr(small, key, [value[i] for i in layers])
    small.num_hidden_layers = len(layers)
    for key, most in NARROW.items():
        value = getattr(config, key, None)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > most:
            setattr(small, key, most)
    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if heads > 4:
        width = head_width(config)
        small.num_attention_heads = 4
        if groups is not None:
            small.num_key_value_heads = 4 if groups == heads else min(2, groups)
        small.hidden_size = 4 * width
    small.vocab_size = VOCAB_SIZE
    small.pad_token_id = small.bos_token_id = small.eos_token_id = None
    return small


def shake(model: PreTrainedModel) -> None:
    """Draw weights of order one, also for biases and norms, whose defaults have no effect."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(1.5 * noise / math.sqrt(parameter.shape[-1]))
            else:
                parameter.add_(0.3 * noise)


def eager_logprobs(
    model: PreTrainedModel,
    ids: Sequence[int],
    *,
    last: int,
    device: torch.device | None = None,
) -> Tensor:
    """Log-probs of the `last` tokens by the model's own forward pass on one unpacked text, on the
    CPU, in nats. `device` is the device of the ids (default: the model's)."""
    text = torch.tensor([list(ids)], device=device or model.device)
    with torch.no_grad():
        logits = model(input_ids=text, use_cache=False, logits_to_keep=last + 1).logits
    logprobs = logits[0, -last - 1 : -1].float().log_softmax(-1).gather(1, text[0, -last:, None])
    return logprobs[:, 0].cpu()


def packed_logprobs(model: PreTrainedModel, texts: Sequence[Sequence[int]]) -> Tensor:
    """The trainer's log-probs of all tokens except each text's first, in one packed row."""
    samples = [
        Sample("text", [*ids], [0] + [1] * (len(ids) - 1), old_logprobs=[], advantages=[])
        for ids in texts
    ]
    batch = pack(samples, device=torch.device("cpu"), share_prefixes=False)
    logprobs_M, _ = policy_logprobs(model, batch.row, batch.targets_M, temperature=1.0)
    return logprobs_M


def _rounded(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose weights are all rounded up or down by one fp32 step."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in other.parameters():
            signs = torch.randn(parameter.shape, generator=generator).sign()
            parameter.mul_(1.0 + torch.finfo(torch.float32).eps * signs)
    return other


def whole_copy(folder: Path) -> PreTrainedModel:
    return load_model(str(folder), device="cpu", dtype=torch.float32).eval()


def in_shards(folder: Path) -> PreTrainedModel:
    """The folder's model, created on the meta device and filled as shards are."""
    model = empty_model(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    fill_shards(model, Stored(folder, model).read, torch.device("cpu"))
    return model.eval()


def check_copy(config: PretrainedConfig, *, engine: bool) -> str | None:
    """What differs from transformers on a small random copy; None if nothing does.

    `engine` includes the hf engine. Global random generators do not change.
    """
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, VOCAB_SIZE, (num,), generator=generator).tolist() for num in TEXTS]
    with tempfile.TemporaryDirectory() as name, torch.random.fork_rng(devices=[]):
        try:
            plain = _plain_copy(config, Path(name))
            eager = [eager_logprobs(plain, ids, last=len(ids) - 1) for ids in texts]
        except Exception as error:  # noqa: BLE001 — the reason is printed
            why = error_line(error)
            print(f"start check: cannot make a small copy of {config.model_type} ({why})")
            return None
        return _compared(Path(name), plain, texts, eager, engine=engine)


def _plain_copy(config: PretrainedConfig, folder: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    small = AutoModelForCausalLM.from_config(small_config(config), dtype=torch.float32)
    shake(small)
    with loading_quietly():
        small.save_pretrained(folder)
        plain: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    return plain.eval()


def _compared(
    folder: Path,
    plain: PreTrainedModel,
    texts: Sequence[list[int]],
    eager: Sequence[Tensor],
    *,
    engine: bool,
) -> str | None:
    expected = torch.cat(list(eager))
    moved = eager_logprobs(_rounded(plain), texts[1], last=TEXTS[1] - 1)
    bound = min(max(BOUND, NOISES * _largest(moved - eager[1])), MOST)
    ways = {"the trainer's packed rows": whole_copy, "weights read in shards": in_shards}
    for what, read in ways.items():
        try:
            with torch.no_grad():
                difference = _largest(packed_logprobs(read(folder), texts) - expected)
        except Exception as error:  # noqa: BLE001 — the reason is returned
            return f"{what} cannot be computed ({error_line(error)})"
        if not difference <= bound:
            return f"{what} differ by {difference:.2g} nats from its eager forward pass"
    return _engine_differs(whole_copy(folder), plain, texts, bound=bound) if engine else None


def _engine_differs(
    model: PreTrainedModel, plain: PreTrainedModel, texts: Sequence[list[int]], *, bound: float
) -> str | None:
    requests = [Request(ids, 12, seed) for seed, ids in enumerate(texts[:2])]
    sampling = Sampling(temperature=1.0, stop_ids=())
    try:
        completions = HFEngine(model).generate_batch(requests, sampling)
    except Exception as error:  # noqa: BLE001 — the reason is returned
        return f"the hf engine cannot generate ({error_line(error)})"
    for ids, completion in zip(texts[:2], completions, strict=True):
        eager = eager_logprobs(plain, [*ids, *completion.ids], last=len(completion.ids))
        difference = _largest(eager - torch.tensor(completion.logprobs))
        if not difference <= bound:
            return f"the hf engine differs by {difference:.2g} nats from its eager forward pass"
    return None


def _largest(differences: Tensor) -> float:
    return float(differences.abs().max())
