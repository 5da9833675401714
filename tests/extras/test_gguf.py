"""A .gguf file as a model: converted once, with the source's log-probs and tokens, or refused by
the name of a key or tensor that is not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from selfplay.chat.rendering import make_rendering
from selfplay.chat.tokenizer import load_tokenizer
from selfplay.config import load_config
from selfplay.data.instances import generated
from selfplay.errors import SettingsError
from selfplay.extras.gguf import converted, mend_tokenizer, split_as
from selfplay.model.hub import is_hub_name, local_folder
from selfplay.model.policy import end_ids
from selfplay.preflight.small_copy import eager_logprobs, shake
from tests.helpers.chat_families import FAMILIES, make_tokenizer
from tests.helpers.gguf_files import write_gguf
from tests.helpers.real_models import smollm2


def test_an_eos_that_opens_turns_becomes_the_one_that_ends_them() -> None:
    for name in ("qwen2.5", "llama3", "gemma"):
        tokenizer = make_tokenizer(FAMILIES[name])
        end = tokenizer.convert_ids_to_tokens(make_rendering(tokenizer).end_id)
        right = tokenizer.eos_token
        mend_tokenizer(tokenizer)
        assert tokenizer.eos_token == right, "an eos beside the end of a turn stays"
        opens = {"qwen2.5": "<|im_start|>", "llama3": "<|start_header_id|>"}
        tokenizer.eos_token = opens.get(name, "<start_of_turn>")
        mend_tokenizer(tokenizer)
        assert tokenizer.eos_token == end
        assert tokenizer.clean_up_tokenization_spaces is False


def test_a_file_that_is_no_gguf_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"PK\3\4 something else")
    with pytest.raises(SettingsError, match=r"model\.path must be a GGUF file, got .*model\.gguf"):
        local_folder(str(file))
    file.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(SettingsError, match=r"model\.path must be a GGUF file of a model that"):
        converted(file, what="model.path", cache=tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    missing = str(tmp_path / "absent" / "model.gguf")
    with pytest.raises(SettingsError, match=r"model\.path must be a .*, which does not exist here"):
        local_folder(missing)
    assert not is_hub_name("models/model.gguf")
    assert not is_hub_name("runs/nothing") and is_hub_name("ORG/nothing")


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-4,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
TOKENIZER = make_tokenizer(FAMILIES["qwen3, tags unflagged"])
IDS = torch.randint(0, len(TOKENIZER), (100,), generator=torch.Generator().manual_seed(1)).tolist()


def _model(kind: str, **given: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(kind, **{**SMALL, "vocab_size": len(TOKENIZER), **given})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    shake(model)
    return model


def _rope(kind: str, **given: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **given}}


def _llama3(factor: float, original: int, **given: Any) -> dict[str, Any]:
    waves = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    length = {"original_max_position_embeddings": original}
    return given | _rope("llama3", factor=factor, **waves, **length)


YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=32)
SLOW_YARN = {"rope_parameters": YARN["rope_parameters"] | {"beta_fast": 8.0, "beta_slow": 2.0}}
LINEAR = _rope("linear", factor=4.0)
BIASES = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
NO_SCALING = {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}
SOURCES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "another base": ("llama", _rope("default"), {}),
    "biases, tied": ("llama", BIASES, {}),
    "Llama 3.1": ("llama", _llama3(8.0, 32), {}),
    "Llama 3.2": ("llama", _llama3(32.0, 100), {}),
    "Llama 3, no wave between": ("llama", _llama3(8.0, 64, head_dim=4), {}),
    "linear": ("llama", LINEAR, {}),
    "linear by default": ("qwen2", LINEAR, {"keys": {"rope.scaling.type": None}}),
    "scaling of type none": ("qwen2", {}, {"keys": NO_SCALING}),
    "yarn": ("qwen2", YARN, {}),
    "yarn's bounds": ("qwen3", SLOW_YARN, {}),
    "wide heads, normed": ("qwen3", {"head_dim": 24}, {}),
    "a shared expert": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 40}, {}),
    "experts": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}, {}),
    "F16": ("llama", {}, {"kind": "F16"}),
    "BF16": ("qwen2", {}, {"kind": "BF16"}),
}


@pytest.mark.parametrize(("kind", "given", "how"), SOURCES.values(), ids=SOURCES)
def test_a_converted_model_has_the_log_probs_of_its_source(
    tmp_path: Path, kind: str, given: dict[str, Any], how: dict[str, Any]
) -> None:
    """Also at positions beyond the original context of 32."""
    source = _model(kind, **given)
    if "kind" in how:
        stored = GGMLQuantizationType[how["kind"]]
        for parameter in source.parameters():
            if parameter.ndim > 1:
                rounded = quants.dequantize(quants.quantize(parameter.data.numpy(), stored), stored)
                parameter.data = torch.from_numpy(rounded.astype(np.float32))
    file = write_gguf(tmp_path / "model.gguf", source, TOKENIZER, **how)
    folder = converted(file, what="model.path", cache=tmp_path / "cache")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    got, right = (eager_logprobs(each.eval(), IDS, last=99) for each in (model, source))
    assert float((got - right).abs().max()) < 1e-4


ARCHITECTURES = "llama, qwen2, qwen3, qwen2moe, qwen3moe"
UP, DIVISORS = "model.layers.1.mlp.up_proj.weight", np.array([1.0, 3.0, 2.0, 8.0])
# A family, a key or tensor of the file and its value, and what is said of it.
KEYS: list[tuple[str, str, Any, str]] = [
    ("llama", "rope.scaling.type", "longrope", "must be none, linear or yarn, got longrope"),
    ("qwen2", "rope.scaling.attn_factor", 1.5, "is not read, got"),
    ("qwen2", "rope.scaling.yarn_log_multiplier", 0.1, "is not read, got"),
    ("qwen2", "attention.sliding_window", 16, "is not read, got"),
    ("qwen2", "attn_logit_softcapping", 50.0, "is not read, got"),
    ("qwen2", "logit_scale", 8.0, "is not read, got"),
    ("qwen2", "attention.head_count_kv", [2, 1], "must be one value, got [2, 1]"),
    ("llama", "rope.dimension_count", 4, "must be 8, got 4"),
    ("llama", "attention.layer_norm_rms_epsilon", None, "must be one value, got None"),
    ("", "general.type", "adapter", "must be model, got adapter"),
    ("", "split.count", 3, "must be 1, got 3"),
    ("", "tokenizer.ggml.model", "t5", "must be gpt2 or llama, got t5"),
    ("", "tokenizer.ggml.precompiled_charsmap", [1], "is not read"),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"architecture": "gemma2"}, f"must be one of {ARCHITECTURES}, got gemma2"),
    *((f or "llama", {"keys": {k: v}}, f"{f}.{k} ".strip(".") + said) for f, k, v, said in KEYS),
    ("llama", {"tensors": {"blk.1.attn_q_norm.weight": np.ones(8)}}, "q_norm.weight is not read"),
    ("llama", {"tensors": {"blk.1.ffn_up.weight": None}}, f"it has no tensor for {UP}"),
    ("llama", {"tensors": {"rope_freqs.weight": DIVISORS}}, "must hold the divisors of Llama 3's"),
]


@pytest.mark.parametrize(("kind", "how", "why"), REFUSED, ids=[why for *_, why in REFUSED])
def test_what_no_config_can_say_is_refused_by_name(
    tmp_path: Path, kind: str, how: dict[str, Any], why: str
) -> None:
    file = write_gguf(tmp_path / "model.gguf", _model(kind), TOKENIZER, **how)
    with pytest.raises(SettingsError) as refused:
        converted(file, what="model.path", cache=tmp_path / "cache")
    assert why in str(refused.value) and "\n" not in str(refused.value)


def test_a_converted_tokenizer_has_the_ids_of_its_source(tmp_path: Path) -> None:
    """Tokens that a user defined are found in text, also those not flagged special; a further end
    ends a text."""
    end = TOKENIZER.convert_tokens_to_ids("</think>")
    keys = {"tokenizer.ggml.eot_token_id": end, "tokenizer.ggml.eos_token_id": 1}
    file = write_gguf(tmp_path / "model.gguf", _model("qwen3"), TOKENIZER, keys=keys)
    folder = converted(file, what="model.path", cache=tmp_path / "cache")
    text = "<|im_start|>user\n the paper's 123 <think>\n\n</think> e\u0301<|im_end|>"
    tokenizer = load_tokenizer(folder)
    assert tokenizer(text).input_ids == TOKENIZER(text).input_ids
    assert len(tokenizer) == len(TOKENIZER)
    assert end_ids(folder) == (tokenizer.eos_token_id, end)


def test_a_tokenizer_of_word_marks_is_made_from_its_scores(tmp_path: Path) -> None:
    marked = make_tokenizer(FAMILIES["mistral, word marks"])
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": [-float(number) for number in range(len(marked))],
        "tokenizer.ggml.merges": None,
    }
    source = _model("llama", vocab_size=len(marked))
    file = write_gguf(tmp_path / "model.gguf", source, marked, keys=keys)
    folder = converted(file, what="model.path", cache=tmp_path / "cache")
    tokenizer, text = load_tokenizer(folder), "Hello, the paper goes to the reviewer 12."
    assert tokenizer(text).input_ids == marked(text, add_special_tokens=False).input_ids
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


def test_smollm2_has_its_own_tokens_and_template() -> None:
    """Prompts are the template's own, id for id, and what a turn ends with stops it."""
    folder = local_folder(str(smollm2()))
    assert folder == local_folder(str(smollm2())), "converted once"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token, len(tokenizer)) == ("<|im_end|>", 49_152)
    rendering = make_rendering(tokenizer)
    assert rendering.stop_ids == (tokenizer.eos_token_id,) and not rendering.typeable
    game = load_config(None, ["model.path=x", "game={options: {size: 4, keep: all}}"]).game
    for board in generated("test", game=game, seed=0, start=0, num=3):
        prompt = game.kit.new_game(board, game.options).prompt(0)
        talk = [
            {"role": "system", "content": prompt.system},
            {"role": "user", "content": prompt.user},
        ]
        ids = rendering.first(system=prompt.system, user=prompt.user)
        assert ids == tokenizer.apply_chat_template(
            talk, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        said = "[message] Ava has 37 on BLEU, don't you think ?"
        ids += rendering.action_ids(said) + rendering.following("Partner: [accept]", closed=True)
        talk += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": "Partner: [accept]"},
        ]
        assert ids == tokenizer.apply_chat_template(
            talk, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert rendering.decode(rendering.action_ids(said)) == said
        assert "[message] Ava has 37" in rendering.decode(ids), "markers beside it change nothing"


@pytest.mark.parametrize(
    ("names", "number", "words"),
    [
        (("gpt-2", "gpt2"), ["650841823"], ["it", "'s", " ICH", " WON", "'", "T"]),
        (("smollm", "starcoder"), list("650841823"), ["it", "'s", " ICH", " WON", "'", "T"]),
        (("qwen2", "stablelm2"), list("650841823"), ["it", "'s", " ICH", " WON", "'T"]),
        (("llama-bpe", "llama3"), ["650", "841", "823"], ["it", "'s", " ICH", " WON", "'T"]),
    ],
)
def test_text_is_split_as_the_file_names_it(
    names: tuple[str, ...], number: list[str], words: list[str]
) -> None:
    """transformers splits every byte-level file as GPT-2 does, so that numbers get other ids."""
    backend = Tokenizer(models.BPE())
    for name in names:
        split_as(backend, name)
        split = backend.pre_tokenizer.pre_tokenize_str
        assert [piece for piece, _ in split("650841823")] == number
        assert [piece.replace("Ġ", " ") for piece, _ in split("it's ICH WON'T")] == words
    with pytest.raises(ValueError, match=r"pre must be one of gpt-2, .*, got tekken"):
        split_as(backend, "tekken")


@pytest.mark.slow
def test_smollm2_answers_a_question() -> None:
    """The weights are the released ones: greedy decoding names the capital of France."""
    folder = local_folder(str(smollm2()))
    rendering = make_rendering(AutoTokenizer.from_pretrained(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([rendering.first(system="", user="What is the capital of France?")])
    with torch.no_grad():
        answer = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert "Paris" in rendering.decode(answer[0, ids.shape[1] :].tolist())
