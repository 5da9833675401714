"""The losses are TRL's, number for number: loss and every gradient within 1e-5 in fp32.

TRL's own `_compute_loss` runs unchanged on a padded batch that TRL scores; this project's policy
loss runs on the same samples in two packed micro-batches. The attributes that TRL reads from a
trainer are set here, so nothing is trained, loaded or generated. docs/losses.md lists where the two
define a setting differently; the settings below translate.
"""

import math
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from selfplay.advantages.sample import Sample
from selfplay.learner.batch import micro_batches
from selfplay.learner.update import denominator, surrogate_term
from selfplay.methods.recompute import importance_weights
from tests.helpers.small_updates import config_of, learner_of, some_samples
from tests.helpers.tiny_run import GRADIENT, LOGPROB, tiny_model
from tests.helpers.tolerance import tolerance

PROMPT, TEMPERATURE, LENGTH = 3, 0.8, 24
SEQUENCE = "algorithm.aggregation=sequence_mean"
CONSTANT = (f"algorithm.aggregation={LENGTH}",)
HIGHER = ("algorithm.clip_low=0.1", "algorithm.clip_high=0.15")
GSPO = ("algorithm.loss=gspo", "algorithm.clip_low=0.02", "algorithm.clip_high=0.03")
OF_SEQUENCE = {"importance_sampling_level": "sequence", "epsilon_low": 0.02, "epsilon_high": 0.03}

# TRL's settings, and this project's for the same loss.
VARIANTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "grpo": ({"loss_type": "grpo"}, (SEQUENCE,)),
    "bnpo": ({"loss_type": "bnpo"}, ()),
    "dapo": ({"loss_type": "dapo", "epsilon_low": 0.1, "epsilon_high": 0.15}, HIGHER),
    "dr_grpo": ({"loss_type": "dr_grpo"}, CONSTANT),
    "gspo": ({"loss_type": "grpo", **OF_SEQUENCE}, (SEQUENCE, *GSPO)),
    "luspo": (
        {"loss_type": "luspo", **OF_SEQUENCE},
        (*GSPO, "algorithm.aggregation=1"),
    ),
    # TRL's epsilon_high is the cap itself, and the weight has no lower bound.
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.15},
        ("algorithm.loss=cispo", "algorithm.clip_low=1.0", "algorithm.clip_high=0.15"),
    ),
    "delta": ({"loss_type": "bnpo", "delta": 1.25}, ("algorithm.dual_clip=1.25",)),
    "beta": ({"loss_type": "bnpo", "beta": 0.3}, ("algorithm.kl=0.3",)),
    "beta in grpo": ({"loss_type": "grpo", "beta": 0.3}, (SEQUENCE, "algorithm.kl=0.3")),
    "unbiased beta": (
        {"loss_type": "bnpo", "beta": 0.3, "use_bias_correction_kl": True},
        ("algorithm.kl=0.3", "algorithm.kl_estimator=k3_ratio"),
    ),
    "entropy": ({"loss_type": "bnpo", "entropy_coef": 0.2}, ("algorithm.entropy=0.2",)),
}


def plain(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that takes padded batches and scores them as TRL does."""
    from trl.trainer.utils import add_fused_lm_head

    config = Qwen2Config(**{**model.config.to_dict(), "attn_implementation": "eager"})
    copy = Qwen2ForCausalLM(config)
    copy.load_state_dict(model.state_dict())
    add_fused_lm_head(copy, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    return copy.train()


def trl_trainer(model: PreTrainedModel, *, weighted: bool, **settings: Any) -> Any:
    """The attributes of a trainer that `_compute_loss` reads, at TRL's defaults or `settings`."""
    from accelerate import Accelerator
    from trl.trainer.grpo_trainer import GRPOTrainer

    trainer = GRPOTrainer.__new__(GRPOTrainer)
    entropy = settings.get("entropy_coef", 0.0)
    args = {
        "delta": settings.get("delta"),
        "use_bias_correction_kl": settings.get("use_bias_correction_kl", False),
        "steps_per_generation": 1,
    }
    vars(trainer).update(
        args=SimpleNamespace(**args),
        model=model,
        accelerator=Accelerator(cpu=True),
        loss_type=settings["loss_type"],
        importance_sampling_level=settings.get("importance_sampling_level", "token"),
        epsilon_low=settings.get("epsilon_low", 0.2),
        epsilon_high=settings.get("epsilon_high", 0.2),
        beta=settings.get("beta", 0.0),
        entropy_coef=entropy,
        _entropy_bonus_enabled=entropy > 0,
        use_adaptive_entropy=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=weighted,
        vllm_importance_sampling_correction=weighted,
        max_completion_length=LENGTH,
        current_gradient_accumulation_steps=1,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
    )
    return trainer


def padded(samples: list[Sample]) -> dict[str, torch.Tensor]:
    """A batch in TRL's format: completions padded on the right, tokens that were not sampled masked
    like a tool's."""
    longest = max(len(s.ids) for s in samples) - PROMPT

    def completions(lists: list[list[Any]]) -> torch.Tensor:
        return torch.tensor([row[PROMPT:] + [0] * (longest + PROMPT - len(row)) for row in lists])

    num_tokens = sum(sum(s.mask) for s in samples)
    return {
        "prompt_ids": torch.tensor([s.ids[:PROMPT] for s in samples]),
        "prompt_mask": torch.ones(len(samples), PROMPT, dtype=torch.long),
        "completion_ids": completions([s.ids for s in samples]),
        "completion_mask": completions([[1] * len(s.ids) for s in samples]),
        "tool_mask": completions([s.mask for s in samples]),
        "old_per_token_logps": completions([s.old_logprobs for s in samples]),
        "advantages": torch.tensor([s.advantages[-1] for s in samples]),
        "num_items_in_batch": torch.tensor(num_tokens),
    }


def theirs(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    samples: list[Sample],
    *,
    weights: torch.Tensor | None = None,
    **trl_settings: Any,
) -> tuple[float, dict[str, torch.Tensor]]:
    copy, inputs = plain(model), padded(samples)
    trainer = trl_trainer(copy, weighted=weights is not None, **trl_settings)
    if weights is not None:
        inputs["importance_sampling_ratio"] = weights
    if "beta" in trl_settings:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        with torch.no_grad():
            inputs["ref_per_token_logps"], _, _ = trainer._get_per_token_logps_and_entropies(
                plain(reference), ids, mask, inputs["completion_ids"].size(1)
            )
    loss = trainer._compute_loss(copy, inputs)
    names, parameters = zip(*copy.named_parameters(), strict=True)
    return float(loss.detach()), dict(
        zip(names, torch.autograd.grad(loss, parameters), strict=True)
    )


def ours(
    model: PreTrainedModel, reference: PreTrainedModel, samples: list[Sample], *overrides: str
) -> tuple[float, dict[str, torch.Tensor]]:
    config = config_of(*overrides, f"rollout.temperature={TEMPERATURE}")
    learner = learner_of(model, reference=reference if config.algorithm.kl else None)
    term = surrogate_term(samples, config)
    batches = [batch for _, batch in micro_batches(samples, learner.world, budget=100)]
    assert len(batches) == 2
    losses = [term.objective(learner, batch)[0] for batch in batches]
    loss = torch.cat(losses).sum() / denominator(term)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return float(loss.detach()), dict(
        zip(names, torch.autograd.grad(loss, parameters), strict=True)
    )


def assert_equal(
    one: tuple[float, dict[str, torch.Tensor]], other: tuple[float, dict[str, torch.Tensor]]
) -> None:
    assert abs(one[0] - other[0]) < tolerance(GRADIENT, scale=LOGPROB)
    gap = sum(float((one[1][n] - g).square().sum()) for n, g in other[1].items())
    size = sum(float(g.square().sum()) for g in other[1].values())
    assert math.sqrt(gap / size) < tolerance(GRADIENT)


@pytest.fixture(scope="module")
def played() -> tuple[PreTrainedModel, PreTrainedModel, list[Sample]]:
    """A model, another as reference, and eight samples whose ratios leave every clip range."""
    model = tiny_model()
    return model, tiny_model(seed=3).requires_grad_(False), some_samples(model, shift=0.4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_are_those_of_trl(played: Any, variant: str) -> None:
    trl_settings, settings = VARIANTS[variant]
    assert_equal(ours(*played, *settings), theirs(*played, **trl_settings))


def test_every_variant_differs_from_the_others(played: Any) -> None:
    """No two variants share a gradient norm; otherwise equality with TRL would prove little."""
    norms = [
        math.sqrt(sum(float(g.square().sum()) for g in ours(*played, *settings)[1].values()))
        for _, settings in VARIANTS.values()
    ]
    assert all(abs(a - b) > 1e-4 * a for i, a in enumerate(norms) for b in norms[i + 1 :])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weighs_the_loss_as_in_trl(played: Any, level: str) -> None:
    """TRL's `token_truncate` and `sequence_truncate`. It computes the weights while it generates,
    by the clamp below."""
    model, reference, samples = played
    cap = 1.2 if level == "token" else 1.8
    generator = torch.Generator().manual_seed(5)
    gaps = [0.3 * torch.randn(len(s.ids), generator=generator) for s in samples]
    masks = padded(samples)["tool_mask"]
    gaps_BT = torch.zeros(masks.shape)
    weighted = []
    for row, (sample, gap) in enumerate(zip(samples, gaps, strict=True)):
        gaps_BT[row, : len(sample.ids) - PROMPT] = gap[PROMPT:]
        log_ratios_K = [g for g, m in zip(gap.tolist(), sample.mask, strict=True) if m]
        left = iter(importance_weights(log_ratios_K, level=level, cap=cap))
        weights = [next(left) if m else 0.0 for m in sample.mask]
        weighted.append(replace(sample, columns={"importance": weights}))
    logs = gaps_BT * masks
    ratio = (logs.sum(-1, keepdim=True) if level == "sequence" else logs).exp().clamp(max=cap)
    assert (ratio == cap).any() and (ratio < cap).any()
    mine = ours(model, reference, weighted, "algorithm.kl=0.3")
    assert_equal(mine, theirs(*played, weights=ratio, loss_type="bnpo", beta=0.3))
