"""The command that starts SGLang's OpenAI-compatible server; imports no SGLang.

Written for SGLang 0.5.17.
"""

from __future__ import annotations

import sys
from pathlib import Path

HOST = "127.0.0.1"


def server_command(
    weights: Path,
    *,
    name: str,
    port: int,
    device: str,
    dtype: str,
    attention_backend: str,
    tp_size: int,
    mem_fraction: float,
    max_cache_tokens: int | None,
    context_length: int | None,
) -> list[str]:
    """The command line that serves the Hugging Face folder `weights` as `name` on HOST:port.

    The sampling defaults are OpenAI's (temperature 1), which is how games are sampled in training.
    """
    words = [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", str(weights), "--served-model-name", name),
        *("--host", HOST, "--port", str(port)),
        *("--device", device, "--dtype", dtype, "--tp-size", str(tp_size)),
        *("--mem-fraction-static", str(mem_fraction)),
        *("--attention-backend", attention_backend, "--sampling-backend", "pytorch"),
        *("--grammar-backend", "none", "--sampling-defaults", "openai"),
        *("--disable-custom-all-reduce", "--log-level", "warning"),
    ]
    if device == "cpu":
        words += ["--disable-cuda-graph"]
    else:
        words += ["--disable-prefill-cuda-graph"]  # wrong outputs, open bug: sglang #37606
    if max_cache_tokens:
        words += ["--max-total-tokens", str(max_cache_tokens)]
    if context_length:
        words += ["--context-length", str(context_length)]
    return words
