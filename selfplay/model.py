"""The policy: loading or shaping it, scoring packed tokens with it, writing it out. Knows no
batches and no losses.

A packed row is N tokens holding S sequences back to back, without padding: `ids_N` and
`positions_N` (int64, positions restart at 0 in each sequence), `cu_seqlens_S1` (int32, the starts
and the end), `max_seqlen` (an int).

Shapes: N packed tokens, S sequences, M positions whose next token is scored, D width, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils.logging import set_tqdm_hook

from selfplay.attention import NAME as PACKED
from selfplay.attention import packed_kwargs, register_packed_attention
from selfplay.config import LoraConfig, ScratchConfig
from selfplay.hub import local_folder, tensor_files
from selfplay.liger import apply_liger
from selfplay.logprob import token_logprobs
from selfplay.lora import add_adapters, first_value, full_weights, is_adapter, plain_name
from selfplay.parallel import World, fill_shards, run_as_forward, shard, vocab_shard

ARCHITECTURES = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}


def load_model(
    name_or_folder: str, *, device: torch.device | str, dtype: torch.dtype
) -> PreTrainedModel:
    """A Hugging Face causal model, its weights in `dtype` on `device`, attending by "packed"."""
    register_packed_attention()
    with _without_loading_bar():
        model = AutoModelForCausalLM.from_pretrained(
            name_or_folder, dtype=dtype, attn_implementation=PACKED
        )
    return _train_every_token(model).to(device)


@contextmanager
def _without_loading_bar() -> Iterator[None]:
    """Every rank would draw a bar between the run's own lines. Only transformers' bars are off, and
    only inside: the hub still shows how far a download is."""
    before = set_tqdm_hook(lambda bar, args, options: bar(*args, **{**options, "disable": True}))
    try:
        yield
    finally:
        set_tqdm_hook(before)


def load_sharded(
    name_or_folder: str,
    world: World,
    *,
    dtype: torch.dtype,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype = torch.float32,
    activation_checkpointing: str = "none",
    liger: bool = False,
    lora: LoraConfig | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """`load_model` and `shard` in one, for models too large to be whole on any rank.

    The model is built and sharded without memory; then each rank reads its own part of each tensor,
    so that it never holds more than its shard and one tensor. With `lora` its adapters are put in,
    drawn by `seed`, and all else is frozen. Raises ValueError for a folder without safetensors and
    for a tensor that the folder lacks.
    """
    if world.mesh is None:
        model = load_model(name_or_folder, device=world.device, dtype=dtype)
        if lora is not None:
            add_adapters(model, lora, seed=seed)
        return shard(model, world, activation_checkpointing=activation_checkpointing)
    folder = local_folder(name_or_folder)
    files = tensor_files(folder)
    model = empty_model(AutoConfig.from_pretrained(folder), dtype=dtype)
    if liger:
        apply_liger(model)
    if lora is not None:
        add_adapters(model, lora, seed=seed)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    shard(
        model,
        world,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        activation_checkpointing=activation_checkpointing,
    )

    def read(name: str, box: tuple[slice, ...]) -> torch.Tensor:
        if is_adapter(name):
            return first_value(name, shapes[name], seed=seed)[box]
        name = plain_name(name)
        if name not in files:
            raise ValueError(f"{folder} must hold a tensor named {name}, got {len(files)} others")
        with safe_open(files[name], framework="pt") as file:
            part: torch.Tensor = file.get_slice(name)[box]
            return part

    fill_shards(model, read, world)
    return model


def empty_model(config: PretrainedConfig, *, dtype: torch.dtype) -> PreTrainedModel:
    """A model on the meta device, but for the rotary frequencies, which follow from the config and
    are in no file; its parameters get memory and values from `fill_shards`."""
    register_packed_attention()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=PACKED)
    trunk = model.base_model
    trunk.rotary_emb = type(trunk.rotary_emb)(config=model.config)
    return _train_every_token(model)


def scratch_model(
    scratch: ScratchConfig, *, seed: int, vocab_size: int | None = None, **special_ids: int | None
) -> PreTrainedModel:
    """An fp32 model on the CPU with random weights, the same for the same seed.

    `vocab_size` replaces the settings' own; `special_ids` may name bos_token_id, eos_token_id and
    pad_token_id. Global generators stay as they were. Raises ValueError where sizes do not fit.
    """
    if scratch.arch not in ARCHITECTURES:
        names = ", ".join(ARCHITECTURES)
        raise ValueError(f"model.scratch.arch must be one of {names}, got {scratch.arch!r}")
    scratch.check()
    register_packed_attention()
    config_class, model_class = ARCHITECTURES[scratch.arch]
    config = config_class(
        vocab_size=scratch.vocab_size if vocab_size is None else vocab_size,
        hidden_size=scratch.width,
        intermediate_size=scratch.mlp_width,
        num_hidden_layers=scratch.layers,
        num_attention_heads=scratch.heads,
        num_key_value_heads=scratch.kv_heads,
        max_position_embeddings=scratch.max_positions,
        tie_word_embeddings=scratch.tie_embeddings,
        initializer_range=scratch.init_range,
        rope_parameters={"rope_type": "default", "rope_theta": scratch.rope_theta},
        **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **special_ids},
    )
    config._attn_implementation = PACKED
    config.dtype = torch.float32
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return _train_every_token(model_class(config))


def _train_every_token(model: PreTrainedModel) -> PreTrainedModel:
    """Nothing is padded here, so where the padding token stands in a text it is a word like any
    other; its embedding would otherwise get no gradient."""
    model.get_input_embeddings().padding_idx = None
    return model


def policy_logprobs(
    model: PreTrainedModel,
    ids_N: torch.Tensor,
    positions_N: torch.Tensor,
    cu_seqlens_S1: torch.Tensor,
    max_seqlen: int,
    predict_M: torch.Tensor,
    targets_M: torch.Tensor,
    *,
    temperature: float,
    entropy_grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of `targets_M` after the tokens at `predict_M` (indices into N, each at most once),
    and the entropy there; both fp32 [M], in nats.

    Logits exist only at those positions, a chunk at a time. Under FSDP all ranks must call
    together; under tensor parallel the ranks of a row with the same tokens.
    """
    return run_as_forward(
        model,
        _policy_logprobs,
        ids_N,
        positions_N,
        cu_seqlens_S1,
        max_seqlen,
        predict_M,
        targets_M,
        temperature=temperature,
        entropy_grad=entropy_grad,
    )


def _policy_logprobs(
    model: PreTrainedModel,
    ids_N: torch.Tensor,
    positions_N: torch.Tensor,
    cu_seqlens_S1: torch.Tensor,
    max_seqlen: int,
    predict_M: torch.Tensor,
    targets_M: torch.Tensor,
    *,
    temperature: float,
    entropy_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden_MD = _hidden_states(model, ids_N, positions_N, cu_seqlens_S1, max_seqlen, predict_M)
    weight_VD, rows = vocab_shard(model.get_output_embeddings().weight)
    return token_logprobs(
        hidden_MD,
        weight_VD,
        targets_M,
        temperature=temperature,
        entropy_grad=entropy_grad,
        shard=rows,
    )


def hidden_states(model: PreTrainedModel, *row: torch.Tensor | int) -> torch.Tensor:
    """The last hidden states [M, D] at `predict_M`; `row` as in `policy_logprobs`, up to it."""
    return run_as_forward(model, _hidden_states, *row)


def _hidden_states(
    model: PreTrainedModel,
    ids_N: torch.Tensor,
    positions_N: torch.Tensor,
    cu_seqlens_S1: torch.Tensor,
    max_seqlen: int,
    predict_M: torch.Tensor,
) -> torch.Tensor:
    hidden_1ND: torch.Tensor = model.base_model(
        input_ids=ids_N[None],
        position_ids=positions_N[None],
        use_cache=False,
        **packed_kwargs(cu_seqlens_S1, max_seqlen),
    ).last_hidden_state
    return hidden_1ND[0].index_select(0, predict_M)


def export(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path | str,
    *,
    world: World | None = None,
) -> None:
    """Write an ordinary Hugging Face folder: config, safetensors in the weights' own dtype,
    tokenizer. Adapters are merged into the weights they belong to. Sharded weights are gathered one
    tensor at a time to rank 0, which writes; all ranks must call."""
    writes = world is None or world.rank == 0
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in full_weights(model):
        if writes:
            weights[name] = tensor.cpu()
    if not writes:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.config)
    # FSDP makes a class of its own that says so in its name.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.dtype = next(iter(weights.values())).dtype
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    save_torch_state_dict(weights, folder, metadata={"format": "pt"})
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
