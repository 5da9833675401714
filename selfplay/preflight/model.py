"""Checks that the model can be trained here, and that trainer, engine and plain transformers agree
on its log-probs.

`check_model` comes first and needs no weights: it checks the settings against the model's config,
then the model family on a small random copy (`small_copy`). It returns a `StartCheck`, which later
compares the real weights on one text: the engine's log-probs of tokens it samples, the trainer's
packed rows, and an eager forward pass of a plain copy if there is memory for one. The text is
longer than any sliding window, unless transcripts, positions or MOST_TOKENS are shorter. All
log-probs are in nats at temperature 1.
"""

from __future__ import annotations

import gc
import os
import tempfile
from dataclasses import KW_ONLY, dataclass, field
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from dialop.shown import error_line
from selfplay.advantages.sample import Sample
from selfplay.atomic import REFUSALS
from selfplay.chat.rendering import Rendering
from selfplay.config import Config
from selfplay.data.instances import GENERATED, HELD_OUT, evaluation_instances, read_file
from selfplay.data.stream import made_instances
from selfplay.distributed import World, broadcast_object, on_first_rank, reshard
from selfplay.engines.base import Engine, Request, Sampling
from selfplay.engines.kinds import engine_kind
from selfplay.errors import SettingsError
from selfplay.evaluation.evaluate import check_room
from selfplay.learner.batch import pack
from selfplay.learner.learner import Learner, autocast, batch_logprobs
from selfplay.model.families import max_positions, why_not
from selfplay.model.lora import check_targets, use_adapters
from selfplay.model.policy import DTYPES, empty_model, export_settings, loading_quietly
from selfplay.preflight.run import described_model
from selfplay.preflight.small_copy import check_copy, eager_logprobs
from selfplay.weight_sync.supervised import Supervised

NUM_INSTANCES = 4  # held-out ones, whose prompts must leave room for a reply
MOST_INSTANCES = 256  # about as many of each file, spread over it
NUM_SAMPLED = 32  # tokens that the engine samples
NUM_COMPARED = 64  # last tokens of the text, whose log-probs are compared
MOST_TOKENS = 4200  # largest length of the text, above a window of 4,096
MOST_PARAMETERS = {"cpu": 2e9}  # largest plain copy on a CPU, where a forward pass is slow
# The bound on a mean mismatch, in nats per token. In fp32 a mean of 1e-4 is a hundred times the
# noise of a different summation order. In bf16 the noise is measured: the distance between an eager
# pass in bf16 and one in fp32. Trainer and engine each differ from fp32 by about this distance; the
# factor 4 leaves room for kernels that round more often. The bound is at least the dtype's epsilon
# (0.008 in bf16), because a few tokens measure the noise only roughly.
BOUND, NOISES = 1e-4, 4.0


def check_model(
    config: Config, tokenizer: PreTrainedTokenizerBase, rendering: Rendering, world: World
) -> StartCheck:
    """Refuse a model that cannot be trained, from its configs alone, before anything costly.
    Returns the check that compares the weights later.

    Raises SettingsError, on every rank.
    """
    described = described_model(config.model, len(tokenizer))
    problem = on_first_rank(  # all ranks read the same files, so one rank checks
        lambda: (
            no_room(described, rendering, config) or _refusal(described, tokenizer, world, config)
        ),
        world,
    )
    if problem is not None:
        raise SettingsError(problem)
    return StartCheck(
        tokenizer,
        described,
        world,
        dtype=DTYPES[config.model.dtype],
        max_game_tokens=config.rollout.max_game_tokens,
        max_mismatch=config.engine.max_mismatch,
    )


def no_room(described: PretrainedConfig, rendering: Rendering, config: Config) -> str | None:
    """Why transcripts do not fit the model, or the prompts of held-out instances and of the files
    of `data` do not fit transcripts; None if all fit."""
    game, data = config.game, config.data
    instances = [*evaluation_instances(HELD_OUT, num=NUM_INSTANCES, game=game, data=data)]
    for name in ("train", "test", "validation"):
        source = getattr(data, name)
        if source == GENERATED:
            continue
        if name == "train" and data.train_file is None:
            for step in {0, max(0, config.steps - 1)}:
                instances += made_instances(config, step, range(config.rollout.instances))
        else:
            found = read_file(game, f"data.{name}", source)
            instances += found[:: max(1, len(found) // MOST_INSTANCES)]
    try:
        check_room(instances, rendering, config, max_positions=max_positions(described))
    except ValueError as error:
        return str(error)
    return None


def _refusal(
    described: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, world: World, config: Config
) -> str | None:
    """Why this model cannot be trained; None if it can."""
    model = config.model
    needed, rows = reachable_vocab_size(tokenizer), described.get_text_config().vocab_size
    if needed > rows:
        return (
            f"model.path must have an embedding for each of its tokenizer's {needed} tokens, got "
            f"{rows}: enlarge it (resize_token_embeddings) or fix the tokenizer"
        )
    family = described.model_type
    try:
        skeleton = skeleton_of(described)
        if model.lora is not None:
            check_targets(skeleton, model.lora)
    except SettingsError as error:
        return str(error)
    why = why_not(
        skeleton,
        sharded=world.mesh is not None or config.parallel.checkpointing != "none",
        max_tokens=config.rollout.max_game_tokens,
    )
    kind = engine_kind(config.engine.kind)
    why = why or kind.why_not(skeleton)
    if config.engine.kernels:
        problem = import_module(config.engine.kernels).why_not_exact(described)
        if problem is not None:
            return f"engine.exact must be false for this model, got true: {problem}"
    if why is None and model.path is not None:
        why = check_copy(described, engine=kind.in_trainer)
    if why is not None:
        return f"model.path must be a family that can be trained, got {family}: {why}"
    try:
        with tempfile.TemporaryDirectory() as name:
            export_settings(skeleton, tokenizer, Path(name), dtype=torch.float32)
    except Exception as error:  # transformers checks much only when it saves
        if isinstance(error, OSError) and error.errno in REFUSALS:  # a full disk
            raise
        why = error_line(error)
        return f"model.path must have configs and a tokenizer that can be saved, got {why}"
    return None


def skeleton_of(described: PretrainedConfig) -> PreTrainedModel:
    """The model on the meta device. Raises SettingsError if the config does not build one."""
    try:
        return empty_model(described, dtype=torch.float32)
    except Exception as error:
        raise SettingsError(
            f"model.path must be a family that can be trained, got {described.model_type}: it "
            f"cannot be built with packed attention ({error_line(error)})"
        ) from error


# The last log-probs of plain transformers' eager fp32 pass, in nats, and their mean distance from
# the same pass in the compute dtype.
PlainPass = tuple[Tensor, float]
Sampled = tuple[list[int], list[float]]  # a text's token ids, and the log-probs of its last ones


@dataclass(slots=True)
class StartCheck:
    """The comparison on real weights: `sample` from the engine that holds them, then `compare`.

    `dtype` is the compute dtype, `max_game_tokens` the longest transcript, `max_mismatch` the
    largest accepted mean mismatch in nats per token if no plain copy measures the noise. `policy`
    names one of several in the line that `compare` prints.
    """

    tokenizer: PreTrainedTokenizerBase
    described: PretrainedConfig
    world: World
    _: KW_ONLY
    dtype: torch.dtype
    max_game_tokens: int
    max_mismatch: float
    policy: str = ""
    _ids: list[int] = field(default_factory=list)
    _engine_logprobs: list[float] = field(default_factory=list)

    def sample(self, engine: Engine | Supervised) -> None:
        """Sample a few tokens after the text with rank 0's engine, which must be awake. A
        collective call."""
        prompt = text_ids(self.tokenizer, self._length())
        requests = [Request(prompt, NUM_SAMPLED, seed=0)] if self.world.rank == 0 else []
        sampled: Sampled = [], []
        for answer in engine.generate_batch(requests, Sampling(temperature=1.0, stop_ids=())):
            sampled = [*prompt, *answer.ids], answer.logprobs
        self._ids, self._engine_logprobs = broadcast_object(sampled, self.world)

    def _length(self) -> int:
        """Tokens of the text before the sampled ones."""
        window = getattr(self.described.get_text_config(), "sliding_window", None) or 0
        longest = min(self.max_game_tokens, MOST_TOKENS)
        return max(2, min(longest - NUM_SAMPLED, max(256, window + NUM_COMPARED)))

    def compare(self, learner: Learner, engine: Engine, weights: Path) -> float:
        """Compare trainer, engine and plain transformers, all with the weights of this folder, on
        the engine's text. A collective call. An engine that has not sampled yet must be awake.

        Returns the bound on the mean mismatch, from the measured noise, in nats per token. Raises
        SettingsError on every rank; the message names the faulty part.
        """
        if not self._ids:
            self.sample(engine)
        packed = _packed_pass(learner, self._ids)
        unpacked = _unpacked_pass(learner, self._ids)
        problem, bound = None, 0.0
        if self.world.rank == 0:
            plain = plain_pass(weights, self._ids, learner.world, learner.compute_dtype)
            noise = self.max_mismatch / NOISES if plain is None else plain[1]
            bound = max(BOUND, torch.finfo(self.dtype).eps, NOISES * noise)
            problem = self._problem(packed, unpacked, plain and plain[0], bound)
        problem, bound = broadcast_object((problem, bound), self.world)
        if problem is not None:
            raise SettingsError(problem)
        return bound

    def _problem(
        self, packed: Tensor, unpacked: Tensor | None, plain: Tensor | None, bound: float
    ) -> str | None:
        """The message that names the faulty part; None if all agree within the bound. `plain`
        has the plain pass's log-probs."""
        truth = unpacked if plain is None else plain
        engine = torch.tensor(self._engine_logprobs)
        mismatches: dict[str, float] = {}
        if truth is not None:
            mismatches["trainer"] = _mean_mismatch(packed, truth)
        if len(engine):
            mismatches["engine"] = _mean_mismatch(engine, packed if truth is None else truth)
        numbers = ", ".join(f"{part} {value:.1e}" for part, value in mismatches.items())
        against = "an eager forward pass" if plain is not None else "the model's own forward pass"
        summary = (
            f"{numbers} nats per token from {against} on {len(self._ids)} tokens, bound {bound:.1e}"
        )
        print(f"start check{self.policy and f' of {self.policy}'}: {summary}", flush=True)
        # "not <=" instead of ">", so that a NaN is a fault.
        if not mismatches.get("trainer", 0.0) <= bound:
            fault = "the trainer's packed attention or logits"
            if plain is not None and (
                unpacked is None or not _mean_mismatch(unpacked, plain) <= bound
            ):
                fault = "the trainer's weights or their sharding"
            return (
                "model.path must give the same numbers everywhere, "
                f"{self.described.model_type} does not: {fault}; {summary}"
            )
        if not mismatches.get("engine", 0.0) <= bound:
            return (
                "engine.kind must give the log-probs of the trainer, which it does not for "
                f"{self.described.model_type}; {summary}"
            )
        return None


def reachable_vocab_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest token id that can occur in a text. A special token that the chat
    template does not write cannot (Gemma-3 has one for images after its last word)."""
    written = str(tokenizer.chat_template)
    unreachable = {
        token
        for token, added in tokenizer.added_tokens_decoder.items()
        if added.special and added.content not in written
    } - {tokenizer.eos_token_id, tokenizer.bos_token_id}
    return max(set(tokenizer.get_vocab().values()) - unreachable) + 1


def text_ids(tokenizer: PreTrainedTokenizerBase, num: int) -> list[int]:
    """The first `num` tokens of a text without repeated lines."""
    lines: list[str] = []
    ids: list[int] = []
    while len(ids) < num:
        lines += [
            f"Entry {n}: {37 * n % 101} at {53 * n % 97}.\n"
            for n in range(len(lines), 2 * len(lines) + 16)
        ]
        ids = tokenizer("".join(lines), add_special_tokens=False)["input_ids"]
    return list(ids[:num])


def _mean_mismatch(a: Tensor, b: Tensor) -> float:
    """The mean absolute difference of the last log-probs that both have, in nats per token."""
    num = min(len(a), len(b))
    return float((a[-num:] - b[-num:]).abs().mean())


def _packed_pass(learner: Learner, ids: list[int]) -> Tensor:
    """The trainer's log-probs of the text's last tokens.

    The row holds another text, a prefix of this text, and this text. The shared prefix is computed
    once; with or without sharing, the row ends with the text's tokens.
    """
    num = min(NUM_COMPARED, len(ids) - 1)
    beginning = ids[: max(2, len(ids) // 3)]
    samples = [
        Sample("other", beginning[::-1], [0] * len(beginning), old_logprobs=[], advantages=[]),
        Sample("beginning", beginning, [0] * len(beginning), old_logprobs=[], advantages=[]),
        Sample("text", ids, [0] * (len(ids) - num) + [1] * num, old_logprobs=[], advantages=[]),
    ]
    batch = pack(samples, device=learner.world.device)
    with torch.no_grad():
        logprobs_M, _ = batch_logprobs(learner, learner.model, batch, temperature=1.0)
    return logprobs_M.cpu()


def _unpacked_pass(learner: Learner, ids: list[int]) -> Tensor | None:
    """The log-probs from the model's own forward pass; None with tensor parallelism, which shards
    the vocabulary."""
    if learner.world.tp > 1:
        return None
    last, device = min(NUM_COMPARED, len(ids) - 1), learner.world.device
    use_adapters(learner.model, learner.policy)
    with autocast(learner):
        logprobs = eager_logprobs(learner.model, ids, last=last, device=device)
    reshard(learner.model)
    return logprobs


def plain_pass(folder: Path, ids: list[int], world: World, dtype: torch.dtype) -> PlainPass | None:
    """An eager pass of a full fp32 copy, and one in `dtype` to measure its noise; None if there is
    no memory for the copy."""
    config = AutoConfig.from_pretrained(folder)
    num = sum(p.numel() for p in empty_model(config, dtype=dtype).parameters())
    kind = world.device.type
    if num > MOST_PARAMETERS.get(kind, float("inf")) or 5 * num > _free_bytes(world.device):
        return None
    with loading_quietly():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    model = model.to(world.device).eval()
    last = min(NUM_COMPARED, len(ids) - 1)
    exact = eager_logprobs(model, ids, last=last)
    noise = 0.0
    if dtype != torch.float32:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        noise = _mean_mismatch(eager_logprobs(model, ids, last=last), exact)
    del model
    if kind == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    return exact, noise


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
