"""What the scheduler does with each decoded token: appended here, or left to SGLang."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from selfplay.engines.sglang import patches

ROOT = Path(__file__).resolve().parents[2]
STOP, END_OF_TEXT = 7, 2


def request(*, so_far: int = 0, limit: int = 5, **other: Any) -> Any:
    """A request as SchedulerClient sends it, with SGLang's names, after `so_far` new tokens."""
    logprob = SimpleNamespace(
        output_token_logprobs_val=[-1.0] * so_far, output_token_logprobs_idx=[50] * so_far
    )
    plain = {
        "sampling_params": SimpleNamespace(stop_token_ids={STOP}, max_new_tokens=limit),
        "logprob": logprob,
        "output_ids": [50] * so_far,
        "eos_token_ids": {END_OF_TEXT},
        "vocab_size": 100,
        "to_finish": None,
        "finished_reason": None,
        "is_retracted": False,
    }
    return SimpleNamespace(**plain | other)


def take(one: Any, token: int) -> bool:
    """Whether the token was appended; else SGLang has to handle it and nothing was changed."""
    before = len(one.output_ids)
    left = patches._append([one], [token], torch.tensor([-0.5]))
    appended = len(one.output_ids) - before
    assert left == ([] if appended else [0])
    assert len(one.logprob.output_token_logprobs_val) == before + appended
    assert len(one.logprob.output_token_logprobs_idx) == before + appended
    return bool(appended)


def test_tokens_of_turns_that_go_on_are_appended_with_their_log_probs() -> None:
    first, second = request(so_far=1), request()
    assert patches._append([first, second], [11, 12], torch.tensor([-0.25, -0.5])) == []
    assert (first.output_ids, second.output_ids) == ([50, 11], [12])
    assert first.logprob.output_token_logprobs_val == [-1.0, -0.25]
    assert first.logprob.output_token_logprobs_idx == [50, 11]
    assert second.logprob.output_token_logprobs_val == [-0.5]


@pytest.mark.parametrize(
    "one, token",
    [
        pytest.param(request(), STOP, id="stop token"),
        pytest.param(request(), END_OF_TEXT, id="the model's end of text"),
        pytest.param(request(so_far=4), 11, id="the last token of the limit"),
        pytest.param(request(limit=1), 11, id="a limit of one"),
        pytest.param(request(to_finish="abort"), 11, id="to be aborted"),
        pytest.param(request(finished_reason="stop"), 11, id="ended one step ago"),
        pytest.param(request(is_retracted=True), 11, id="retracted"),
        pytest.param(request(), 100, id="beyond the vocabulary"),
        pytest.param(request(), -1, id="a negative token"),
    ],
)
def test_a_token_that_ends_its_turn_is_left_to_sglang(one: Any, token: int) -> None:
    assert not take(one, token)


def test_a_request_of_n_tokens_gets_n_minus_one_here() -> None:
    one = request(limit=5)
    assert [take(one, 11) for _ in range(5)] == [True] * 4 + [False]


def test_the_version_is_the_pinned_one_and_another_is_warned_of() -> None:
    pin = re.search(r"^sglang\S*==(\S+)", (ROOT / "requirements/gpu.txt").read_text(), re.M)
    assert pin is not None and pin[1] == patches.VERSION
    assert patches.missing_speed_up(patches.VERSION) == ""
    assert "append_decoded_tokens is off" in patches.missing_speed_up("0.5.18")
