"""Before anything is trained: can this model be trained here, and do trainer, engine and plain
transformers give the same numbers?

`check_model` comes first and needs no weights: what the settings ask of the model, then the family
on a small random copy (`small_copy`). `StartCheck` then compares the real weights on one text: the
engine's words about what it samples, the trainer's packed rows, and an eager forward pass of a
plain copy where one can be held beside them. Its text is longer than any sliding window, unless
transcripts, positions or MOST_TOKENS are shorter. All log-probs are in nats at temperature 1.
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from selfplay.chat.rendering import Rendering
from selfplay.config import Config
from selfplay.config.settings import SettingsError
from selfplay.credit.sample import Sample
from selfplay.data.instances import HELD_OUT, kept_back
from selfplay.distributed import World, broadcast_object, reshard
from selfplay.engines.base import Engine, Request, Sampling
from selfplay.evaluation.evaluate import check_room
from selfplay.learner.batch import pack
from selfplay.learner.learner import Learner, batch_logprobs
from selfplay.model.families import why_not
from selfplay.model.lora import check_targets
from selfplay.model.policy import DTYPES, described_in, empty_model, without_loading_bar
from selfplay.model.scratch import scratch_config
from selfplay.model.small_copy import check_copy, eager_logprobs, first_difference, layer_outputs

NUM_BOARDS = 4  # whose prompts must leave room to speak
SAID = 32  # tokens that the engine samples
SCORED = 64  # the text's last tokens, which are compared
MOST_TOKENS = 4200  # of the text: more than a window of 4,096
MOST_PARAMETERS = {"cpu": 2e9}  # of a plain copy on a processor, where a pass takes seconds
# In fp32 a mean of 1e-4 is a hundred times the noise of a sum in another order. In bf16 the noise
# is measured: how far an eager pass in bf16 lies from the same in fp32. Trainer and engine are each
# about one such noise away; four leave room for kernels that round more often. Nothing below the
# dtype's own relative step (0.008 in bf16) counts, for few tokens measure a noise roughly.
BOUND, NOISES = 1e-4, 4.0


def check_model(
    config: Config, tokenizer: PreTrainedTokenizerBase, rendering: Rendering, world: World
) -> StartCheck:
    """Refuse what cannot be trained before anything costly; reads configs only, no weights. Returns
    what will compare the weights once they are there.

    Raises SettingsError, on every rank.
    """
    if config.model.path is not None:
        folder = Path(config.model.path)
        source = described_in(folder) if folder.is_dir() else config.model.path
        described = AutoConfig.from_pretrained(source)
    else:
        assert config.model.scratch is not None
        num = max(config.model.scratch.vocab_size, len(tokenizer))
        described = scratch_config(config.model.scratch, vocab_size=num)
    wrong = None
    if world.rank == 0:  # one rank asks, for all see the same files
        wrong = _without_room(config, described, rendering)
        wrong = wrong or _refusal(config, described, tokenizer, world)
    wrong = broadcast_object(wrong, world)
    if wrong is not None:
        raise SettingsError(wrong)
    return StartCheck(config, tokenizer, described, world)


def _without_room(config: Config, described: PretrainedConfig, rendering: Rendering) -> str | None:
    """Why transcripts do not fit the model, or the first held-out prompts the transcripts."""
    try:
        check_room(
            kept_back(HELD_OUT, num=NUM_BOARDS, game=config.game, data=config.data),
            rendering=rendering,
            game=config.game,
            rollout=config.rollout,
            max_positions=getattr(described.get_text_config(), "max_position_embeddings", None),
        )
    except ValueError as error:
        return str(error)
    return None


def _refusal(
    config: Config, described: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, world: World
) -> str | None:
    words, rows = num_words(tokenizer), described.get_text_config().vocab_size
    if words > rows:
        return (
            f"model.path must have an embedding for each of its tokenizer's {words} tokens, got "
            f"{rows}: enlarge it (resize_token_embeddings) or mend the tokenizer"
        )
    family = described.model_type
    try:
        model = empty_model(described, dtype=torch.float32)
    except Exception as error:  # noqa: BLE001 — whatever a family raises is told
        return (
            f"model.path must be a family that can be trained, got {family}: it cannot be built "
            f"with packed attention ({type(error).__name__}: {error})"
        )
    if config.model.lora is not None:
        try:
            check_targets(model, config.model.lora)
        except SettingsError as error:
            return str(error)
    why = why_not(
        model,
        sharded=world.mesh is not None or config.parallel.checkpointing != "none",
        tp=world.tp,
        engine=config.engine.kind,
        max_tokens=config.rollout.max_game_tokens,
    )
    if why is None and config.model.path is not None:
        why = check_copy(described, engine=config.engine.kind == "hf")
    if why is not None:
        return f"model.path must be a family that can be trained, got {family}: {why}"
    return None


@dataclass(slots=True)
class Plain:
    """What plain transformers says about the text: log-probs of its last tokens, how far the dtype
    of computation is from fp32 on them (mean), and each layer's hidden state at the end."""

    logprobs: Tensor
    noise: float
    layers: list[Tensor]
    layer_noise: float


@dataclass(slots=True)
class StartCheck:
    """The comparison on real weights: `listen` to the engine that holds them, then `compare`."""

    config: Config
    tokenizer: PreTrainedTokenizerBase
    described: PretrainedConfig
    world: World
    _ids: list[int] = field(default_factory=list)
    _said: list[float] = field(default_factory=list)

    def listen(self, engine: Engine | None) -> None:
        """Let rank 0's engine, awake, say a few tokens after the text. Every rank calls."""
        heard: tuple[list[int], list[float]] = ([], [])
        if self.world.rank == 0 and engine is not None:
            prompt = text_ids(self.tokenizer, self._length())
            sampling = Sampling(temperature=1.0, stop_ids=())
            (said,) = engine.generate([Request(prompt, SAID, seed=0)], sampling)
            heard = ([*prompt, *said.ids], said.logprobs)
        self._ids, self._said = broadcast_object(heard, self.world)

    def _length(self) -> int:
        window = getattr(self.described.get_text_config(), "sliding_window", None) or 0
        longest = min(self.config.rollout.max_game_tokens, MOST_TOKENS)
        return max(2, min(longest - SAID, max(256, window + SCORED)))

    def compare(self, learner: Learner, engine: Engine | None, weights: Path) -> None:
        """The trainer, the engine and plain transformers on the engine's text, all with the weights
        of this folder. All ranks call; an engine that was not listened to yet is awake.

        Raises SettingsError, on every rank, naming where the fault lies.
        """
        if not self._ids:
            self.listen(engine)
        packed, layers = _packed(learner, self._ids)
        own = _unpacked(learner, self._ids)
        verdict = None
        if self.world.rank == 0:
            plain = plain_copy_says(weights, self._ids, learner.world, learner.compute_dtype)
            verdict = self._verdict(packed, layers, own, plain)
        verdict = broadcast_object(verdict, self.world)
        if verdict is not None:
            raise SettingsError(verdict)

    def _verdict(
        self, packed: Tensor, layers: list[Tensor], own: Tensor | None, plain: Plain | None
    ) -> str | None:
        judge = plain.logprobs if plain is not None else own
        noise = plain.noise if plain is not None else self.config.engine.max_mismatch / NOISES
        dtype = DTYPES[self.config.model.dtype]
        bound = max(BOUND, torch.finfo(dtype).eps, NOISES * noise)
        engine = torch.tensor(self._said)
        gaps: dict[str, float] = {}
        if judge is not None:
            gaps["trainer"] = _mean_gap(packed, judge)
        if len(engine):
            gaps["engine"] = _mean_gap(engine, packed if judge is None else judge)
        seen = ", ".join(f"{who} {gap:.1e}" for who, gap in gaps.items())
        against = "an eager forward pass" if plain is not None else "the model's own forward pass"
        told = f"{seen} nats a token from {against} on {len(self._ids)} tokens, bound {bound:.1e}"
        print(f"start check: {told}", flush=True)
        fault = None
        if not gaps.get("trainer", 0.0) <= bound:
            whole = own is not None and plain is not None
            alike = whole and _mean_gap(own, plain.logprobs) <= bound  # type: ignore[arg-type,union-attr]
            packing = "the trainer's packed attention or logits"
            fault = packing if alike or plain is None else "the trainer's weights or their sharding"
            if plain is not None and len(layers) == len(plain.layers):
                near = max(1e-3, NOISES * plain.layer_noise)
                fault += f" ({first_difference(layers, plain.layers, bound=near)})"
        elif not gaps.get("engine", 0.0) <= bound:
            fault = "the engine"
        if fault is None:
            return None
        return (
            f"model.path must give the same numbers everywhere, {self.described.model_type} does "
            f"not: {fault}; {told}"
        )


def num_words(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id that a text here can hold. Special tokens that the chat template
    does not write cannot be reached (Gemma-3 keeps one for images behind its last word)."""
    written = str(tokenizer.chat_template)
    unreachable = {
        token
        for token, added in tokenizer.added_tokens_decoder.items()
        if added.special and added.content not in written
    } - {tokenizer.eos_token_id, tokenizer.bos_token_id}
    return max(set(tokenizer.get_vocab().values()) - unreachable) + 1


def text_ids(tokenizer: PreTrainedTokenizerBase, num: int) -> list[int]:
    """So many tokens of a ledger in which nothing repeats itself exactly."""
    lines: list[str] = []
    ids: list[int] = []
    while len(ids) < num:
        lines += [
            f"Entry {n}: {37 * n % 101} at {53 * n % 97}.\n"
            for n in range(len(lines), 2 * len(lines) + 16)
        ]
        ids = tokenizer("".join(lines), add_special_tokens=False)["input_ids"]
    return list(ids[:num])


def _mean_gap(a: Tensor, b: Tensor) -> float:
    num = min(len(a), len(b))
    return float((a[-num:] - b[-num:]).abs().mean())


def _packed(learner: Learner, ids: list[int]) -> tuple[Tensor, list[Tensor]]:
    """The trainer's log-probs of the text's end, in a row behind another text, and its layers."""
    num = min(SCORED, len(ids) - 1)
    other = ids[: max(2, len(ids) // 3)]
    samples = [
        Sample("other", other, [0] * len(other), [], []),
        Sample("text", ids, [0] * (len(ids) - num) + [1] * num, [], []),
    ]
    batch = pack(samples, device=learner.world.device)
    with torch.no_grad(), layer_outputs(learner.model) as layers:
        logprobs_M, _ = batch_logprobs(learner, learner.model, batch, temperature=1.0)
    return logprobs_M.cpu(), layers


def _unpacked(learner: Learner, ids: list[int]) -> Tensor | None:
    """The trainer's model by its own forward pass; None where its words are divided over ranks."""
    if learner.world.tp > 1:
        return None
    world, dtype = learner.world, learner.compute_dtype
    lowered = world.mesh is None and dtype != torch.float32
    with torch.autocast(world.device.type, dtype, enabled=lowered):
        found = eager_logprobs(
            learner.model, ids, last=min(SCORED, len(ids) - 1), device=world.device
        )
    reshard(learner.model)
    return found


def plain_copy_says(folder: Path, ids: list[int], world: World, dtype: torch.dtype) -> Plain | None:
    """An eager pass of a whole copy in fp32, and one in `dtype` for its noise; None where there is
    no room for the copy."""
    config = AutoConfig.from_pretrained(folder)
    num = sum(p.numel() for p in empty_model(config, dtype=dtype).parameters())
    kind = world.device.type
    if num > MOST_PARAMETERS.get(kind, float("inf")) or 5 * num > _free_bytes(world.device):
        return None
    with without_loading_bar():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    model = model.to(world.device).eval()
    last = min(SCORED, len(ids) - 1)
    with layer_outputs(model) as layers:
        exact = eager_logprobs(model, ids, last=last)
    noise = layer_noise = 0.0
    if dtype != torch.float32:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        with layer_outputs(model) as rounded:
            noise = _mean_gap(eager_logprobs(model, ids, last=last), exact)
        pairs = zip(rounded, layers, strict=True)
        layer_noise = max((float((a - b).norm() / b.norm()) for a, b in pairs), default=0.0)
    del model
    if kind == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    return Plain(exact, noise, layers, layer_noise)


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
