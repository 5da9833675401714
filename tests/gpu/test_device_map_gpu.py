"""The hf engine on a model that accelerate splits over two GPUs (`engine.device_map`)."""

from pathlib import Path

import pytest
import torch

from selfplay.checkpoint import export
from selfplay.model.policy import load_model
from tests.engines.test_device_map import answers
from tests.helpers.tiny_run import FORWARD, LOGPROB, tiny_model
from tests.helpers.tolerance import near

TWO = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.layers.0"), 0) | (
    dict.fromkeys(("model.layers.1", "model.norm", "lm_head"), 1)
)


@pytest.mark.two_gpus
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_on_two_gpus_plays_as_on_one(tmp_path: Path, tied: bool) -> None:
    model = tiny_model()
    if not tied:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        model.config.tie_word_embeddings = False
    export(model, None, tmp_path)
    one, two, auto = (
        load_model(str(tmp_path), device=device, dtype=torch.float32).requires_grad_(False)
        for device in ("cuda:0", TWO | ({"lm_head": 0} if tied else {}), "auto")
    )
    assert {str(p.device) for p in two.parameters()} == {"cuda:0", "cuda:1"}
    for split in (two, auto):
        for wanted, got in zip(answers(one), answers(split), strict=True):
            assert got.ids == wanted.ids
            assert got.logprobs == near(wanted.logprobs, FORWARD, scale=LOGPROB)
