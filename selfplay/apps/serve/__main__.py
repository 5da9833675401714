"""Serve a trained policy behind SGLang's OpenAI-compatible server, on this machine's loopback.

    python -m selfplay.apps.serve runs/talk --port 30000

It prints the `eval.py` command that plays against it, with the model's name and the URL.
Takes a run, a part of a run, a Hugging Face folder or name. key=value words change its settings;
engine.mem_fraction, engine.tp_size, engine.attention, engine.max_cache_tokens, model.dtype and
device are read. Ctrl-C ends the server.
"""

from __future__ import annotations

from dialop.terminal import open_terminal

open_terminal("selfplay.apps.serve")  # before the imports, which take seconds

# isort: split

import argparse
import importlib.util
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from selfplay.chat.rendering import make_rendering
from selfplay.chat.tokenizer import load_tokenizer
from selfplay.config import Config
from selfplay.engines.sglang.launch import pick_attention_backend
from selfplay.engines.sglang.processes import child_environment
from selfplay.errors import SettingsError
from selfplay.evaluation.plan import find_config
from selfplay.model.hub import described_in
from selfplay.partners.checkpoints import find_source
from selfplay.preflight.command_line import Parser, refused
from selfplay.preflight.run import check_machine

HOST = "127.0.0.1"


def read_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Raises ValueError for a mistake."""
    parser = Parser("selfplay.apps.serve", __doc__)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="a run, a Hugging Face folder or name")
    add("--port", type=int, default=30_000, help="port on 127.0.0.1 (default 30000)")
    add("--name", help="the model's name in requests (default: the folder's name)")
    add("overrides", nargs="*", metavar="key=value", help="settings that win over the run's")
    args = parser.parse_intermixed_args(words)
    parser.check_settings(args.overrides, trains=False)
    if not 1024 <= args.port < 65536:
        raise ValueError(f"--port must be from 1024 to 65535, got {args.port}; nearest: 30000")
    return args


def server_command(
    weights: Path, config: Config, *, name: str, port: int, device: str
) -> list[str]:
    """The command of SGLang 0.5.17 that serves the folder `weights` as `name` on HOST:port.

    The sampling defaults are OpenAI's (temperature 1), which is how games are sampled in training.
    """
    engine = config.engine
    attention = pick_attention_backend(device) if engine.attention == "auto" else engine.attention
    words = [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", str(weights), "--served-model-name", name),
        *("--host", HOST, "--port", str(port)),
        *("--device", device, "--dtype", config.model.dtype, "--tp-size", str(engine.tp_size)),
        *("--mem-fraction-static", str(engine.mem_fraction)),
        *("--attention-backend", attention, "--sampling-backend", "pytorch"),
        *("--grammar-backend", "none", "--sampling-defaults", "openai"),
        *("--disable-custom-all-reduce", "--log-level", "warning"),
    ]
    if device == "cpu":
        words += ["--disable-cuda-graph"]
    else:
        words += ["--disable-prefill-cuda-graph"]  # wrong outputs, open bug: sglang #37606
    if engine.max_cache_tokens:
        words += ["--max-total-tokens", str(engine.max_cache_tokens)]
    return words


def _warn_of_template(weights: Path, config: Config) -> None:
    """Print what the server renders otherwise than the run did. Raises SettingsError for a chat
    template that no run can use."""
    own = load_tokenizer(weights)
    trained = make_rendering(own, template_kwargs=config.model.chat_template)
    if trained.tokenizer.chat_template != own.chat_template:
        print(
            f"warning: {weights} has a chat template without what its run gave it (a fixed date, "
            "arguments, the system text's place), as older runs wrote it; the server does without",
            file=sys.stderr,
        )
    if trained.kept:
        print(
            f"warning: the run kept {trained.kept!r} before old answers, the server leaves it out",
            file=sys.stderr,
        )


def main(words: Sequence[str] | None = None) -> int:
    """Become the server. Returns only for bad arguments, with the exit status 2."""
    try:
        args = read_arguments(words)
        source = find_source(args.run)
        config = find_config(source, None, [*args.overrides, "engine.kind=sglang"])
        name = args.name or (args.run if source.hub else source.home.resolve()).name
        if re.search(r"[@\s]", name):
            near = re.sub(r"[@\s]+", "_", name)
            raise ValueError(f"--name must have no @ and no blanks, got {name!r}; nearest: {near}")
        if importlib.util.find_spec("sglang") is None:
            raise ValueError(
                "SGLang must be installed to serve: pip install -r requirements/gpu.txt"
            )
        check_machine(config.device, config.engine)
        if described_in(source.weights) != source.weights:
            raise ValueError(
                f"RUN must be a full model to serve, got adapters: {source.weights}; nearest: the "
                "final/ of their run, which holds them merged"
            )
        if source.settings is not None:
            _warn_of_template(source.weights, config)
    except (SettingsError, ValueError, OSError) as error:
        return refused("selfplay.apps.serve", error)
    device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    command = server_command(source.weights, config, name=name, port=args.port, device=device)
    needs = [f"endpoint.max_new_tokens={config.rollout.max_new_tokens}"]
    if config.model.chat_template:
        body = json.dumps({"chat_template_kwargs": config.model.chat_template})
        needs.append(f"endpoint.body={shlex.quote(body)}")
    partner = shlex.quote(f"endpoint:{name}@http://{HOST}:{args.port}/v1")
    print(f"weights: {source.weights}")
    print(
        "play against it, once it is up: python eval.py RUN --games generated "
        f"--partner {partner} {' '.join(needs)}",
        flush=True,
    )
    with child_environment(device, config.engine.tp_size):
        os.execv(command[0], command)  # never returns
    raise AssertionError


if __name__ == "__main__":
    sys.exit(main())
