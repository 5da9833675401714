"""A .gguf file as a model: converted once, with a tokenizer whose eos ends a turn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer

from selfplay.chat.rendering import make_rendering
from selfplay.config import load_config
from selfplay.data.instances import generated
from selfplay.errors import SettingsError
from selfplay.model.gguf import converted, mend_tokenizer, split_as
from selfplay.model.hub import is_hub_name, local_folder
from tests.helpers.chat_families import FAMILIES, make_tokenizer
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
    with pytest.raises(ValueError, match="splits text as tekken, which is none of gpt-2, "):
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
