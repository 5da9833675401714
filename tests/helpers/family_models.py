"""A small random model of each family, as a released folder holds it, and transformers' own answer.

Two layers or one of each kind, a window far shorter than the text, caps and scales that act.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

VOCAB, WINDOW = 60, 5
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LOCAL = {"sliding_window": WINDOW}
MIXED = {**LOCAL, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "head_dim": 8,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 1},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {**EXPERTS, "head_dim": 8},
    "mistral": {**LOCAL, "head_dim": 8},
    "ministral": {**MIXED},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {**LOCAL},
    "olmo": {},
    "olmo2": {},
    "olmo3": {**MIXED},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "glm4_moe": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 8,
    },
    "smollm3": {"no_rope_layers": [1, 0]},
    "starcoder2": {**LOCAL, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "stablelm": {},
    "gemma": {"head_dim": 8},
    "gemma2": {**MIXED, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0,
               "attn_logit_softcapping": 0.5},
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 8},
    "vaultgemma": {**MIXED, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0,
               "attn_logit_softcapping": 0.5},
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5,
                "attention_multiplier": 0.2},
    "granitemoe": {"logits_scaling": 8.0, "num_local_experts": 4, "num_experts_per_tok": 2,
                   "embedding_multiplier": 3.0, "attention_multiplier": 0.2},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {**MIXED, "logit_scale": 0.25},
    "seed_oss": {"head_dim": 8},
    "ernie4_5": {"head_dim": 8},
    "exaone4": {**MIXED},
    "hunyuan_v1_dense": {"head_dim": 8},
    "helium": {"head_dim": 8},
    "arcee": {},
    "apertus": {},
    "nemotron": {"partial_rotary_factor": 0.5},
    "deepseek_v2": {**LATENT, "n_group": 1},
    "deepseek_v3": LATENT,
    "gpt_oss": {**MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_next": {
        **EXPERTS, "layer_types": ["linear_attention", "full_attention"], "head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "shared_expert_intermediate_size": 24,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1,
                  "mamba_d_state": 8, "mamba_chunk_size": 8, "lm_head_multiplier": 0.5},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
}  # fmt: skip


def family_config(name: str, **overrides: Any) -> PretrainedConfig:
    return AutoConfig.for_model(name, **{**COMMON, **FAMILIES[name], **overrides})


def shake(model: PreTrainedModel, *, seed: int = 0) -> None:
    """Weights of order one; no bias or norm stays neutral, which would hide its absence."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)
            elif "A_log" not in name:
                parameter.add_(0.3 * noise)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


def random_folder(name: str, folder: Path, **overrides: Any) -> Path:
    """Written by transformers itself, so tensors have the names that released folders have."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family_config(name, **overrides))
    shake(model)
    model.save_pretrained(folder)
    return folder


def eager_logprobs(folder: Path, texts: list[list[int]]) -> torch.Tensor:
    """Of each token after the first of each text, one text at a time, by eager attention."""
    plain = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    found = []
    with torch.no_grad():
        for ids in texts:
            logits = plain(torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
            found.append(logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
    return torch.cat(found)


def _texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (num,), generator=generator).tolist() for num in (7, 24, 3)]


TEXTS = _texts()
