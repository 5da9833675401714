"""A small model in bf16 for GPU engines, four layers of Qwen2.5-0.5B with a shorter vocabulary, and
the settings of a small run."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from selfplay.engines.base import Completion, Engine, GameCoroutine, Generate, Request, Sampling
from selfplay.engines.options import ChosenEngine
from selfplay.engines.sglang.fast.engine import FastEngine
from tests.helpers import processes

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT_S = 400.0  # three engine starts with room to spare
PLAIN = Sampling(1.0, ())
GENERATOR = torch.Generator().manual_seed(0)
PROMPTS = torch.randint(10, 30_000, (16, 200), generator=GENERATOR).tolist()
# Triton compiles in seconds and needs no binary.
ENGINE = ChosenEngine(attention="triton", mem_fraction=0.2, max_batch=64, timeout_s=120.0)
CONFIG = Qwen2Config(
    vocab_size=32_000,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=4,
    num_attention_heads=14,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    eos_token_id=2,
    bos_token_id=None,
    architectures=["Qwen2ForCausalLM"],
)
# A head is 64 wide: the engine's kernels know no narrower one than 32, and none of 24.
RUN = """
steps: 2
save_every: 2
game:
  options: {size: 2, p_observed: 0.5, scale: false, max_value: 10, keep: exactly_one, brief: true}
model:
  dtype: bfloat16
  scratch: {width: 256, layers: 2, heads: 4, kv_heads: 2, mlp_width: 512, max_positions: 256,
            vocab_size: 512, tokenizer_games: 60, init_range: 0.04}
warm_start: {num_games: 2000, teachers: ["solo", "honest:tell=top"], batch_size: 32, lr: 1.0e-3}
rollout: {instances: 8, group_size: 4, max_turns: 6, max_retries: 1, max_new_tokens: 32,
          max_game_tokens: 192}
algorithm: {kl: 0.03}
optim: {lr: 1.0e-4, tokens_per_microbatch: 4096}
engine: {kind: sglang, attention: triton, mem_fraction: 0.2, max_batch: 64}
parallel: {offload: optimizer}
eval: {final_games: 16}
"""


def launch(folder: pathlib.Path, *words: str, killed: str = "", num: int = 0) -> Any:
    """train.py on `num` ranks, or killed.py with this way to end, in that run folder."""
    config = folder.parent / "run.yaml"
    config.write_text(RUN)
    script = HERE / "killed.py" if killed else ROOT / "train.py"
    settings = ["--config", str(config), f"out={folder}", *words]
    path, how = (HERE, ROOT / "tests" / "sglang"), [killed] if killed else []
    return processes.start(script, *how, *settings, torchrun=num, path=path)


def run(folder: pathlib.Path, *words: str, num: int = 0) -> str:
    """What a run printed that ends with status 0."""
    output, status = ended(launch(folder, *words, num=num))
    assert status == 0, output[-6000:]
    return output


def ended(process: Any) -> tuple[str, int]:
    """What a process printed, and its status."""
    output, _ = process.communicate(timeout=LIMIT_S)
    return output, process.returncode


def steps_of(folder: pathlib.Path, num_steps: int) -> list[dict[str, Any]]:
    """The run's metrics: each step once, its games complete, engine and trainer agreed."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, num_steps + 1))
    for line in lines:
        assert line["num_games"] == 8 * 4
        mismatches = [n for key, n in line.items() if key.partition("/")[0] == "mismatch_mean"]
        assert mismatches and max(mismatches) < 0.03
        assert line["num_trained_tokens"] > 0
    return lines


def used_bytes(family: Iterable[psutil.Process] | None = None) -> int:
    """What these processes hold of all GPUs; of None this one and its children. Other processes may
    use the GPUs too."""
    import pynvml

    torch.cuda.synchronize()
    me = psutil.Process()
    pids = {p.pid for p in (family or [me, *me.children(recursive=True)])}
    pynvml.nvmlInit()
    handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    running = [p for handle in handles for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    return sum(p.usedGpuMemory for p in running if p.pid in pids)


def start(folder: str, *, base_gpu_id: int = 0, group: Any = None, **settings: Any) -> FastEngine:
    """An engine whose weights are pushed; `settings` are keys of `engine`."""
    return FastEngine(
        folder,
        replace(ENGINE, **settings),
        context_length=1024,
        base_gpu_id=base_gpu_id,
        load_format="dummy",
        group=group,
    )


def save_config(folder: pathlib.Path) -> str:
    """A folder an engine can start from; its weights are pushed."""
    CONFIG.save_pretrained(folder)
    return str(folder)


def build(device: torch.device, *, seed: int = 0) -> PreTrainedModel:
    """Random weights in bf16, larger than usual so that distributions are far from flat."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5 if parameter.dim() > 1 else 1.0)
    return model


def game(prompt: list[int], seed: int = 0) -> GameCoroutine:
    """Three turns of one seat, which hears 64 tokens between them: each one's prompt and answer."""

    async def play(generate: Generate) -> list[tuple[list[int], Completion]]:
        ids, turns = list(prompt), []
        for turn in range(3):
            completion = await generate(Request(list(ids), 32, 100 * seed + turn))
            turns.append((list(ids), completion))
            ids += [*completion.ids, *prompt[turn : turn + 64]]
        return turns

    return play


def game_differences(model: PreTrainedModel, engine: FastEngine) -> torch.Tensor:
    """As `differences`, of games of three turns."""
    games = engine.run_games(map(game, PROMPTS), PLAIN)
    return torch.cat([apart(model, *turn) for turns in games for turn in turns])


@torch.no_grad()
def apart(model: PreTrainedModel, prompt: Sequence[int], completion: Completion) -> torch.Tensor:
    """Trainer's minus engine's log-prob of every token of a completion, in nats."""
    ids = torch.tensor([[*prompt, *completion.ids]], device=model.device)
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    own = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
    return own.cpu() - torch.tensor(completion.logprobs)


def differences(model: PreTrainedModel, engine: Engine) -> torch.Tensor:
    """Trainer's minus engine's log-prob of every token the engine samples, in nats."""
    asked = [Request(prompt, 64, seed) for seed, prompt in enumerate(PROMPTS)]
    answers = engine.generate_batch(asked, PLAIN)
    return torch.cat([apart(model, r.prompt_ids, a) for r, a in zip(asked, answers, strict=True)])
