"""The policy: loads or creates it, computes its log-probs on packed rows, exports it.

Shapes: N packed tokens, M positions whose next token is scored, D width, V vocabulary.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from huggingface_hub import save_torch_state_dict
from torch.nn.functional import pad
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations import hub_kernels
from transformers.utils.logging import (
    get_verbosity,
    set_tqdm_hook,
    set_verbosity,
    set_verbosity_error,
)

from dialop.shown import error_line
from selfplay.config import LoraConfig, ScratchConfig
from selfplay.distributed import World, as_forward, fill_shards, shard, vocab_shard
from selfplay.errors import SettingsError
from selfplay.model.attention import NAME as PACKED
from selfplay.model.attention import PackedRow, packed_kwargs, register_packed_attention
from selfplay.model.hub import check_one_set, described_in, local_folder
from selfplay.model.logprob import ALIGNMENT, token_logprobs
from selfplay.model.lora import (
    add_adapters,
    check_mergeable,
    first_value,
    full_weights,
    is_adapter,
    plain_name,
)
from selfplay.model.stored import Stored, check_complete, check_shape

# If the package `kernels` is installed (SGLang depends on it), some models (Mamba, Falcon-H1) would
# download compiled code from the hub and run it.
hub_kernels._kernels_available = False

ARCHITECTURES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}
ROPE_THETA = 10_000.0  # the base of the rotary position embedding
PROGRAMS = 8  # of the gradient of a norm, per multiprocessor
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(
    name_or_folder: str, *, device: torch.device | str | dict[str, str], dtype: torch.dtype
) -> PreTrainedModel:
    """A Hugging Face causal model with packed attention, its weights in `dtype` on `device`. For a
    folder of adapters, the base model with its adapters.

    `device` may be a device map instead: "auto", or a device per module of the model by name.
    accelerate then moves inputs and outputs between the modules' devices. Not with adapters:
    transformers loses those on disk.

    Raises SettingsError for a folder whose tensors do not match its config.json; transformers would
    draw missing tensors at random. Also raises as `described_in` does.
    """
    register_packed_attention()
    device_map = device if device == "auto" or isinstance(device, dict) else None
    base = described_in(Path(name_or_folder))
    assert device_map is None or base == Path(name_or_folder)
    for folder in {base, Path(name_or_folder)}:
        check_one_set(folder, what="model.path")
    try:
        with loading_quietly():
            model, found = AutoModelForCausalLM.from_pretrained(
                base,
                dtype=dtype,
                device_map=device_map,
                attn_implementation=PACKED,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, in one line
            )
            missing, unread = found["missing_keys"], found["unexpected_keys"]
            if not found["mismatched_keys"] and any(base.glob("*.safetensors")):
                Stored(base, model)  # refuses what transformers would silently read differently
            if base != Path(name_or_folder):
                own = set(model.state_dict())
                adapters = model.load_adapter(name_or_folder)
                check_mergeable(model, own, folder=name_or_folder)
                missing, unread = adapters.missing_keys | missing, adapters.unexpected_keys | unread
    except (OSError, SettingsError):
        raise
    except Exception as error:
        if "ignore_mismatched_sizes" in str(error):  # transformers' message for adapters
            raise SettingsError(
                f"{name_or_folder} must hold adapters with the shapes given by its "
                "adapter_config.json and its base, got others"
            ) from None
        raise SettingsError(f"{name_or_folder} cannot be loaded: {error_line(error)}") from error
    for name, stored, expected in sorted(found["mismatched_keys"]):
        check_shape(base, name, stored, expected)
    check_complete(name_or_folder, missing, unread)
    model = _train_every_token(_ending(model, Path(name_or_folder)))
    if device_map is None:
        return model.to(device)
    # The last layer's device differs from the device of the indices with which `forward` selects
    # the positions to score.
    back = AlignDevicesHook(model.device, io_same_device=True, skip_keys="past_key_values")
    add_hook_to_module(model.base_model, back, append=True)
    return model


@contextmanager
def loading_quietly() -> Iterator[None]:
    """Inside the block, transformers shows no progress bars and no long report, which every rank
    would print between the run's lines. The bars of hub downloads stay on."""
    before = set_tqdm_hook(lambda bar, args, options: bar(*args, **{**options, "disable": True}))
    level = get_verbosity()
    set_verbosity_error()
    try:
        yield
    finally:
        set_tqdm_hook(before)
        set_verbosity(level)


def load_sharded(
    name_or_folder: str,
    world: World,
    *,
    master_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    recompute: int = 0,
    liger: bool = False,
    adapters: Mapping[str, LoraConfig] = MappingProxyType({}),
    seed: int = 0,
    kernels: str = "",
) -> PreTrainedModel:
    """`load_model` and `shard` in one, for models that do not fit on a single rank.

    The model is created and sharded on the meta device. Then each rank reads its own part of each
    tensor, so it never holds more than its shard and one tensor. The `adapters` of policies, by
    name and drawn from `seed`, are added and everything else is frozen. With the module of an
    engine's `kernels` it computes as the engine does. Raises ValueError for a folder without
    safetensors and for a tensor that is not in the folder.
    """
    if world.mesh is None:
        model = load_model(name_or_folder, device=world.device, dtype=master_dtype)
        for policy, lora in adapters.items():
            add_adapters(model, lora, seed=seed, policy=policy)
        return shard(model, world, recompute=recompute)
    folder = local_folder(name_or_folder)
    model = empty_model(AutoConfig.from_pretrained(folder), dtype=master_dtype)
    stored = Stored(folder, model)
    check_complete(folder, stored.missing, stored.unread, warns=world.rank == 0)
    if kernels:
        import_module(kernels).compute_as_engine(model)
    elif liger:
        apply_liger(model)
    for policy, lora in adapters.items():
        add_adapters(model, lora, seed=seed, policy=policy)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    wrapped = bool(adapters or kernels)
    shard(model, world, compute_dtype=compute_dtype, recompute=recompute, wrapped=wrapped)

    def read(name: str, box: tuple[slice, ...]) -> torch.Tensor:
        if is_adapter(name):
            return first_value(name, shapes[name], seed=seed)[box]
        return stored.read(plain_name(name), box)

    fill_shards(model, read, world.device)
    return _ending(model, folder)


def empty_model(config: PretrainedConfig, *, dtype: torch.dtype) -> PreTrainedModel:
    """A model on the meta device, except for buffers that no file contains (rotary frequencies,
    embedding scales).

    Those follow from the config; `fill_shards` allocates and fills everything else. Raises
    ValueError if transformers does not initialize such a buffer.
    """
    register_packed_attention()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=PACKED)
    for name, buffer in model.named_non_persistent_buffers():
        unset = float("nan") if buffer.is_floating_point() else 0
        module, _, leaf = name.rpartition(".")
        model.get_submodule(module)._buffers[leaf] = torch.full_like(buffer, unset, device="cpu")
    # As in from_pretrained. Only the buffers above get values; a draw on the meta device would take
    # a millisecond for each parameter.
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    model.initialize_weights()
    for name, buffer in model.named_non_persistent_buffers():
        if buffer.isnan().any():
            raise ValueError(
                "model.path must be of a family that can be loaded in shards, got "
                f"{config.model_type}: transformers does not initialize its buffer {name}"
            )
    return _train_every_token(model)


def scratch_config(
    scratch: ScratchConfig, *, vocab_size: int | None = None, **given: int | None
) -> PretrainedConfig:
    """The transformers config of a model with random weights. `vocab_size` overrides the settings;
    `given` may be bos_token_id, eos_token_id, pad_token_id, and tie_word_embeddings, which is true
    by default."""
    config_class, _ = ARCHITECTURES[scratch.arch]
    if scratch.arch == "qwen3":  # its default head width is 128
        given["head_dim"] = scratch.width // scratch.heads
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return config_class(
        vocab_size=scratch.vocab_size if vocab_size is None else vocab_size,
        hidden_size=scratch.width,
        intermediate_size=scratch.mlp_width,
        num_hidden_layers=scratch.layers,
        num_attention_heads=scratch.heads,
        num_key_value_heads=scratch.kv_heads,
        max_position_embeddings=scratch.max_positions,
        initializer_range=scratch.init_range,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        **{**ids, "tie_word_embeddings": True, **given},
    )


def scratch_model(
    scratch: ScratchConfig, *, seed: int, vocab_size: int | None = None, **special_ids: int | None
) -> PreTrainedModel:
    """An fp32 model on the CPU with random weights, which depend only on the seed.

    `vocab_size` overrides the settings; `special_ids` may be bos_token_id, eos_token_id and
    pad_token_id. Global generators do not change. Raises ValueError for sizes that do not fit.
    """
    register_packed_attention()
    config = scratch_config(scratch, vocab_size=vocab_size, **special_ids)
    config._attn_implementation = PACKED
    config.dtype = torch.float32
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return _train_every_token(ARCHITECTURES[scratch.arch][1](config))


def _train_every_token(model: PreTrainedModel) -> PreTrainedModel:
    """Give the padding token's embedding a gradient: in packed rows, which have no padding, it is a
    normal token."""
    model.get_input_embeddings().padding_idx = None
    return model


def _ending(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Have the model's exports list every id that ends a text (`end_ids`)."""
    if model.generation_config is not None:
        model.generation_config.eos_token_id = list(end_ids(folder)) or None
    return model


@as_forward
def policy_logprobs(
    model: PreTrainedModel,
    row: PackedRow,
    targets_M: torch.Tensor,
    *,
    temperature: float,
    entropy_grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of `targets_M` after the row's `predict_M`, and the entropies there; both fp32 [M],
    in nats.

    Logits exist only at those positions, one chunk at a time. Under FSDP all ranks must call
    together; the ranks of a tensor-parallel group must pass the same tokens.
    """
    hidden_MD = _hidden_states(model, row)
    head = model.get_output_embeddings()
    weight_VD, rows = vocab_shard(head.weight)
    if getattr(head, "bias", None) is not None:
        hidden_MD, weight_VD = _with_bias(hidden_MD, weight_VD, vocab_shard(head.bias)[0])
    scale, cap = logit_rule(model.config)
    return token_logprobs(
        hidden_MD,
        weight_VD,
        targets_M,
        temperature=temperature / scale,
        entropy_grad=entropy_grad,
        shard=rows,
        cap=None if cap is None else cap / scale,
        stats=getattr(model.base_model, "position_stats", None),  # of `engine.exact`
    )


def _with_bias(
    hidden_MD: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bias as a column of the weight, multiplied by a 1 that is appended to the hidden state;
    columns of zeros keep the rows aligned."""
    one_M1, zeros = hidden_MD.new_ones(len(hidden_MD), 1), (0, ALIGNMENT - 1)
    hidden_MD = torch.cat([hidden_MD, pad(one_M1, zeros)], dim=1)
    return hidden_MD, torch.cat([weight_VD, pad(bias_V[:, None], zeros)], dim=1)


def logit_rule(config: PretrainedConfig) -> tuple[float, float | None]:
    """(scale, cap): a logit x becomes cap * tanh(scale * x / cap), or scale * x without a cap.

    Granite divides by `logits_scaling`, Cohere multiplies by `logit_scale`, Gemma caps.
    """
    scale = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    return scale / divisor, getattr(config, "final_logit_softcapping", None)


@as_forward
def hidden_states(model: PreTrainedModel, row: PackedRow) -> torch.Tensor:
    """The last hidden states [M, D] at the row's `predict_M`."""
    return _hidden_states(model, row)


def _hidden_states(model: PreTrainedModel, row: PackedRow) -> torch.Tensor:
    hidden_1ND: torch.Tensor = model.base_model(
        input_ids=row.ids_N[None],
        position_ids=row.positions_N[None],
        use_cache=False,
        **packed_kwargs(row),
    ).last_hidden_state
    return hidden_1ND.squeeze(0).index_select(0, row.predict_M)


def export(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path | str,
    *,
    world: World | None = None,
    policy: str = "",
) -> None:
    """Write a standard Hugging Face folder: config, safetensors, tokenizer.

    Tensors keep their dtype and the released names (one tensor per expert). The adapters of
    `policy` are merged into their weights. Sharded weights are gathered one tensor at a time to
    rank 0, which writes; all ranks must call.
    """
    writes = world is None or world.rank == 0
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in full_weights(model, policy):
        if writes:
            weights[name] = tensor.cpu()
    if not writes:
        return
    unsaved = {name for name, _ in model.named_non_persistent_buffers()}
    weights |= {n: b.cpu() for n, b in model.named_buffers() if n not in unsaved}
    dtype = next(iter(weights.values())).dtype
    export_settings(model, tokenizer, Path(folder), dtype=dtype)
    # The names come from a fresh model of the family, because adapters add their own names.
    # Experts become views of one tensor, which safetensors cannot write, so they are cloned.
    weights = revert_weight_conversion(empty_model(model.config, dtype=torch.float32), weights)
    for name, tensor in weights.items():
        if tensor.untyped_storage().nbytes() > tensor.nbytes:
            weights[name] = tensor.clone()
    save_torch_state_dict(weights, folder, metadata={"format": "pt"})


def export_settings(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    *,
    dtype: torch.dtype,
) -> None:
    """Write the configs and the tokenizer of an exported folder.

    Of the generation config only ids are written. Its sampling defaults (temperature, top_p) differ
    from training, and a server that follows them plays another policy.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.config)
    # FSDP replaces the model's class by one whose name has a prefix.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.dtype = dtype
    config.save_pretrained(folder)
    if model.generation_config is not None:
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        ids = {name: getattr(model.generation_config, name) for name in names}
        GenerationConfig(**ids).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def end_ids(weights: Path) -> tuple[int, ...]:
    """The ids that end a text by config.json and generation_config.json, at which transformers and
    SGLang stop. Raises SettingsError for an eos, bos or pad id that is not in the vocabulary, and
    for a generation_config.json that cannot be read."""
    folder = described_in(weights)
    config = AutoConfig.from_pretrained(folder)
    given = [getattr(each, "eos_token_id", None) for each in (config, config.get_text_config())]
    rows = config.get_text_config().vocab_size
    file, _ = PretrainedConfig.get_config_dict(folder)
    parts = [file, *(part for part in file.values() if isinstance(part, dict))]
    if all(part.get("eos_token_id") is None for part in parts):
        # Each is the default of the family, which may have a larger vocabulary.
        given = [[i for i in ids if i < rows] for ids in map(_listed, given)]
    others = [(name, part.get(name)) for part in parts for name in ("bos_token_id", "pad_token_id")]
    if (folder / "generation_config.json").exists():
        try:
            generation = GenerationConfig.from_pretrained(folder)
            given.append(generation.eos_token_id)
            others += [(name, getattr(generation, name)) for name, _ in others[:2]]
        except Exception as error:
            raise SettingsError(
                f"{folder / 'generation_config.json'} cannot be read: {error_line(error)}"
            ) from error
    ids = [i for each in given for i in _listed(each)]
    if wrong := [i for i in ids if type(i) is not int]:
        raise SettingsError(
            f"{folder}: eos_token_id must be an id or a list of ids, got {wrong[0]!r}"
        )
    if outside := [i for i in ids if not 0 <= i < rows]:
        raise SettingsError(
            f"{folder}: eos_token_id must be below the vocab_size {rows} of config.json, got "
            f"{outside[0]}, which no sample can end with; leave it out of config.json and "
            "generation_config.json"
        )
    for name, value in others:
        if value is not None and (type(value) is not int or not -1 <= value < rows):
            raise SettingsError(
                f"{folder}: {name} must be below the vocab_size {rows} of config.json, got "
                f"{value!r}; leave it out of config.json and generation_config.json"
            )
    return tuple(dict.fromkeys(ids))


def _listed(ids: Any) -> list[Any]:
    """One id, several ids or None as a list."""
    return [i for i in (ids if isinstance(ids, list | tuple) else [ids]) if i is not None]


def apply_liger(model: PreTrainedModel) -> None:
    """Replace the model's RMSNorm, RoPE and SwiGLU with liger's Triton kernels; before `shard`.

    Norms and MLPs are replaced in this model only. RoPE is replaced for all models of this
    architecture in the process, which must then be on a GPU, and the launch of norms' gradients for
    all models. Raises ValueError for an architecture that liger does not support, ImportError
    without liger.
    """
    # It warns about each backend for other hardware that it cannot import.
    logging.getLogger("liger_kernel.backends.registry").setLevel(logging.ERROR)
    from liger_kernel.backends import set_impl
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ValueError(
            f"liger does not support the architecture {kind}; set model.liger to false"
        )
    # If the CuTe DSL is installed (SGLang and flash-attn-4 require it), liger would use its CuTe
    # RoPE for heads of 128, which is compiled for every row length.
    set_impl("nvidia-triton")
    fill_the_gpu()
    MODEL_TYPE_TO_APPLY_LIGER_FN[kind](
        rope=True,
        rms_norm=True,
        swiglu=True,
        cross_entropy=False,
        fused_linear_cross_entropy=False,
        model=model,
    )


def fill_the_gpu() -> None:
    """Tell Liger's norms that the GPU has PROGRAMS times its multiprocessors.

    Liger launches as many programs for the gradient of a norm, each of which waits for memory at
    every row: at widths up to 1,536 it reaches a sixth to a third of the memory's speed. The
    gradient of the input keeps its bits; that of the weight is an fp32 sum of more parts.
    """
    from liger_kernel.ops import rms_norm

    def properties(device: torch.device) -> SimpleNamespace:
        num = torch.cuda.get_device_properties(device).multi_processor_count
        return SimpleNamespace(multi_processor_count=PROGRAMS * num)

    cuda = SimpleNamespace(**{**vars(torch.cuda), "get_device_properties": properties})
    rms_norm.torch = SimpleNamespace(**{**vars(torch), "cuda": cuda})


def liger_is_here() -> bool:
    return find_spec("liger_kernel") is not None
