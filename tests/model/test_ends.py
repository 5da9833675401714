"""What ends a move: the ends of the template, the tokenizer, config.json, generation_config.json.

In the engine, in the transcript's loss and in the move's text.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GlmConfig, LlamaConfig, PreTrainedModel

from selfplay.chat.rendering import Rendering
from selfplay.chat.transcript import Transcript
from selfplay.config import load_config
from selfplay.engines.base import Request, Sampling
from selfplay.engines.hf import HFEngine
from selfplay.errors import SettingsError
from selfplay.model.policy import end_ids, export, load_model
from selfplay.preflight.run import read_rendering
from tests.helpers.chat_families import tokenizer_of
from tests.helpers.tiny_run import tiny_model

END, EOS, OTHER, THIRD = "<end_of_turn>", "<eos>", "<start_of_turn>", "<bos>"
# The eos ids of config.json ("-": no such key) and of generation_config.json (None: no such file),
# and the tokens of the family gemma that end a move beside its template's and its tokenizer's.
SOURCES: dict[str, tuple[Any, Any, list[str]]] = {
    "a list in generation_config.json (Qwen, Llama 3, Gemma)": (EOS, [EOS, OTHER], [OTHER]),
    "another id in generation_config.json": (EOS, OTHER, [OTHER]),
    "a list in config.json (Llama 3.1)": ([EOS, OTHER], None, [OTHER]),
    "config.json alone": (OTHER, EOS, [OTHER]),
    "both": (OTHER, [EOS, THIRD], [OTHER, THIRD]),
    "neither": (None, {"temperature": 1.0}, []),
    "the default of the family's config, which is 2": ("-", None, ["<|im_end|>"]),
    "what the template ends with already": ([END], [END, EOS], []),
}


def _folder(folder: Path, config_eos: Any, generation_eos: Any) -> Path:
    """A Llama with random weights, and ids for the tokens that are named."""
    tokenizer = tokenizer_of("gemma")
    tokenizer.save_pretrained(folder)

    def ids(eos: Any) -> Any:
        if isinstance(eos, list):
            return [ids(each) for each in eos]
        return tokenizer.convert_tokens_to_ids(eos) if isinstance(eos, str) else eos

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    written = json.loads((folder / "config.json").read_text()) | {"eos_token_id": ids(config_eos)}
    if config_eos == "-":
        del written["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(written))
    if generation_eos is not None:
        told = generation_eos if isinstance(generation_eos, dict) else None
        given = json.dumps(told or {"eos_token_id": ids(generation_eos)})
        (folder / "generation_config.json").write_text(given)
    return folder


def _rendering(folder: Path) -> Rendering:
    config = load_config(None, [f"model.path={folder}"])
    return read_rendering(config.model, config.game, seed=0)


def _make_say(model: PreTrainedModel, prompt: list[int], ids: list[int]) -> None:
    """Make the model continue the prompt with these ids under greedy decoding."""
    forward = type(model).forward.__get__(model)

    def forced(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        position = int(kwargs["position_ids"][0, -1]) + 1 - len(prompt)
        output.logits[:, -1] = torch.nn.functional.one_hot(
            torch.tensor(ids[min(position, len(ids) - 1)]), output.logits.shape[-1]
        ).float()
        return output

    model.forward = forced


@pytest.mark.parametrize(("config", "generation", "more"), SOURCES.values(), ids=SOURCES)
def test_every_source_of_ends_ends_a_move(
    tmp_path: Path, config: Any, generation: Any, more: list[str]
) -> None:
    rendering = _rendering(_folder(tmp_path, config, generation))
    tokenizer = tokenizer_of("gemma")
    ends = [tokenizer.convert_tokens_to_ids(token) for token in [END, EOS, *more]]
    assert rendering.end_id == rendering.stop_ids[0] == ends[0]
    assert set(rendering.stop_ids) == set(ends) and len(rendering.stop_ids) == len(ends)
    prompt = rendering.first(system="", user="How many?")
    said = rendering.action_ids("[answer] 42")[:-1]
    model = load_model(str(tmp_path), device="cpu", dtype=torch.float32)
    for end in ends:
        _make_say(model, prompt, [*said, end, *said])
        (answer,) = HFEngine(model).generate_batch(
            [Request(prompt, 60, seed=0)], Sampling(0.0, rendering.stop_ids)
        )
        assert answer.finish == "stop" and answer.ids == [*said, end]
        assert rendering.decode(answer.ids) == "[answer] 42", "the end is no part of the text"
        transcript = Transcript()
        transcript.observe(prompt)
        transcript.act(answer.ids, logprobs=answer.logprobs)
        assert transcript.mask == [0] * len(prompt) + [1] * len(answer.ids), "the end is trained"


def test_an_eos_that_is_no_id_is_refused_in_one_line(tmp_path: Path) -> None:
    for wrong in ("<eos>", [1, "2"], 1.5, True):
        folder = _folder(tmp_path, EOS, None)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
        with pytest.raises(SettingsError, match="eos_token_id must be an id or a list of ids, got"):
            _rendering(folder)


def test_a_familys_own_ends_count_if_its_vocabulary_has_them(tmp_path: Path) -> None:
    """GLM's config has three ids as its default, and takes null for them."""
    config = GlmConfig(vocab_size=151_330)
    config.eos_token_id = None
    config.save_pretrained(tmp_path)
    assert end_ids(tmp_path) == (151_329,)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_eos_outside_the_vocabulary_is_refused_in_one_line(tmp_path: Path, file: str) -> None:
    path, size = _folder(tmp_path, EOS, EOS) / file, len(tokenizer_of("gemma"))
    for wrong in (size, [1, 128_001], [0, -1]):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": wrong}))
        outside = max(wrong, key=abs) if isinstance(wrong, list) else wrong
        rule = rf"eos_token_id must be below the vocab_size {size} of config.json, got {outside},"
        with pytest.raises(SettingsError, match=rule):
            _rendering(tmp_path)


@pytest.mark.parametrize("name", ["bos_token_id", "pad_token_id"])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_other_ids_outside_the_vocabulary_are_refused(name: str, file: str, tmp_path: Path) -> None:
    """-1 is what some folders have for none."""
    model = tiny_model()
    size = model.config.vocab_size
    for wrong in (-1, size - 1, size, -2):
        export(model, None, tmp_path)
        path = tmp_path / file
        held = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(held | {name: wrong}))
        right = wrong in (-1, size - 1)
        rule = rf"{name} must be below the vocab_size {size} of config.json, got {wrong!r}; leave"
        with nullcontext() if right else pytest.raises(SettingsError, match=rule):
            end_ids(tmp_path)
