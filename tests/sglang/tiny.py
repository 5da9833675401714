"""A tiny model for the real engine on CPU, and what the trainer would say of the same tokens."""

from __future__ import annotations

import copy
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

HERE = pathlib.Path(__file__).resolve().parent
STOP = 3
# An odd vocabulary, so that FSDP's two shards differ in size and the engine has to pad.
SHAPE: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": STOP,
    "bos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": True,
}
ENGINE: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_total_tokens": 8192,
    "max_running_requests": 16,
    "timeout_s": 60.0,
}


def build() -> PreTrainedModel:
    """A two-layer Qwen2 in fp32, the same random weights each time."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE)).eval()


def save(folder: pathlib.Path) -> str:
    """Write that model where an engine can load it."""
    build().save_pretrained(folder)
    return str(folder)


def moved(model: PreTrainedModel, *, seed: int) -> PreTrainedModel:
    """A copy whose every parameter has been moved, as a few updates would."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


@torch.no_grad()
def score(
    model: PreTrainedModel, prompt: list[int], ids: list[int], temperature: float
) -> list[float]:
    """The model's own log-probs of `ids` after `prompt`: full softmax after the temperature."""
    tokens = torch.tensor([[*prompt, *ids]])
    logits = model(tokens).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0].tolist()


def worst_gap(
    model: PreTrainedModel, prompt: list[int], completion: Any, temperature: float = 1.0
) -> float:
    """The largest difference between the engine's log-probs and the model's, in nats."""
    own = score(model, prompt, completion.ids, temperature)
    return max(abs(a - b) for a, b in zip(own, completion.logprobs, strict=True))


def start(script: str, *arguments: str, torchrun: int = 0) -> subprocess.Popen[str]:
    """Run one of this folder's scripts as a trainer of its own, or as `torchrun` ranks."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}"]
        if torchrun
        else []
    )
    command = [sys.executable, *launcher, str(HERE / script), *arguments]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE / "stand_ins"), str(HERE.parents[1])])
    }
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def read_until(process: subprocess.Popen[str], mark: str) -> str:
    """What the process printed up to the line with `mark`; fails with all of it if none comes."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if mark in line:
            return "".join(lines)
    raise AssertionError(f"the process ended without {mark!r}:\n{''.join(lines)}")


def marks(output: str) -> dict[str, dict[str, Any]]:
    """What a script said with lines `MARK case {facts as JSON}`."""
    found = re.findall(r"^MARK ([a-z0-9 ]+) (\{.*\})$", output, re.MULTILINE)
    return {case: json.loads(facts) for case, facts in found}


def tree(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The process and all it started."""
    root = psutil.Process(process.pid)
    return [root, *root.children(recursive=True)]


def seconds_until_gone(processes: list[psutil.Process], *, limit_s: float = 15.0) -> float:
    """Seconds until none of them runs; zombies, which hold nothing but a number, count as gone."""
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < limit_s:
        if not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
            break
        time.sleep(0.05)
    return time.perf_counter() - began_s
