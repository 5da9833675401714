"""From nothing to a player that knows the rules: a tokenizer from scripted games, and imitation of
scripted players.

The teachers' games become the same transcripts as self-play and train through the same update.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from selfplay.chat.rendering import Rendering, make_rendering
from selfplay.chat.tokenizer import train_tokenizer
from selfplay.config import Config, GameConfig, RolloutConfig, WarmStartConfig
from selfplay.config.settings import SettingsError
from selfplay.credit.advantages import imitation_samples
from selfplay.credit.sample import Sample
from selfplay.data.instances import TEACHERS, TOKENIZER, generated
from selfplay.data.seeds import named_seed
from selfplay.distributed import World
from selfplay.games import kit_of
from selfplay.learner.learner import Learner, UpdateSettings
from selfplay.learner.objective import Part
from selfplay.learner.optimizer import learning_rate
from selfplay.learner.optimizer_step import optimizer_step
from selfplay.metrics.console import progress
from selfplay.metrics.step_log import StepLog
from selfplay.model.hub import local_folder
from selfplay.rollout.driver import play_scripted
from selfplay.rollout.episode import limits_of
from selfplay.rollout.seating import scripted_games, teacher_games, teacher_mixture

LOG_EVERY = 50  # optimizer steps of the warm start to a line of its log


def scratch_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer trained on what seats read and say in scripted games."""
    scratch = config.model.scratch
    assert scratch is not None
    specs, _ = teacher_mixture(config.warm_start.teachers, config.game)
    instances = generated(
        TOKENIZER,
        game=config.game,
        seed=config.seed,
        start=0,
        num=scratch.tokenizer_games,
        processes=config.data.processes,
        easy=config.warm_start.keep == "all",
    )
    phrases = kit_of(config.game).phrases(instances, config.game, split_lines=scratch.split_lines)
    return train_tokenizer(
        _texts(config.game, config.rollout, specs, instances),
        vocab_size=scratch.vocab_size,
        phrases=phrases,
    )


def tokenizer_folder(config: Config, folder: Path) -> Path:
    """Where the tokenizer of the run in `folder` is read from: the model's own folder, downloaded
    if need be, or the run's own for a scratch model."""
    path = config.model.path
    return folder / "tokenizer" if path is None else local_folder(path)


def _texts(
    game: GameConfig, rollout: RolloutConfig, specs: Sequence[str], instances: Sequence[Any]
) -> Iterator[str]:
    share = -(-len(instances) // len(specs))
    for place, spec in enumerate(specs):
        tables = scripted_games(
            instances[place * share : (place + 1) * share], spec=spec, game=game
        )
        for episode in play_scripted(tables, limits=limits_of(rollout)):
            # With a chat template's role names, which would cost a token a letter otherwise.
            for prompt in episode.prompts:
                yield from (f"system\n{prompt.system}", f"user\n{prompt.user}")
            for turn in episode.turns:
                yield f"assistant\n{turn.text}"
                yield from (f"user\n{text}" for text in (*turn.observations, turn.error) if text)


def teacher_samples(config: Config, rendering: Rendering, *, start: int, num: int) -> list[Sample]:
    """Transcripts of the teachers' games start..start+num-1, both seats, slips masked out.

    Raises ValueError when many of them are longer than a policy's transcript may be.
    """
    instances = generated(
        TEACHERS,
        game=config.game,
        seed=config.seed,
        start=start,
        num=num,
        processes=config.data.processes,
        easy=config.warm_start.keep == "all",
    )
    tables = teacher_games(
        instances,
        teachers=config.warm_start.teachers,
        game=config.game,
        seed=config.seed,
        rendering=rendering,
    )
    samples = imitation_samples(play_scripted(tables, limits=limits_of(config.rollout)))
    fitting = [s for s in samples if len(s.ids) <= config.rollout.max_game_tokens]
    # A rare quarrel outgrows any sensible limit; if many games do, the limit is wrong.
    if len(fitting) < 0.95 * len(samples):
        raise SettingsError(
            f"rollout.max_game_tokens must hold the teachers' games: {len(samples) - len(fitting)} "
            f"of {len(samples)} transcripts are longer than {config.rollout.max_game_tokens}, "
            f"the longest {max(len(s.ids) for s in samples)}"
        )
    return fitting


def _samples(config: Config, rendering: Rendering, folder: Path) -> list[Sample]:
    """The transcripts of all games, played by several processes where the settings ask for it,
    each on one thread. `folder` is the run's."""
    num, processes = config.warm_start.num_games, config.data.processes
    if processes == 1:
        return teacher_samples(config, rendering, start=0, num=num)
    alone = replace(config, data=replace(config.data, processes=1))
    chunk = -(-num // (4 * processes))
    home = tokenizer_folder(config, folder)
    jobs = [(alone, home, start, min(chunk, num - start)) for start in range(0, num, chunk)]
    with ProcessPoolExecutor(
        processes, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        return [sample for part in pool.map(_teacher_job, jobs) for sample in part]


def _teacher_job(job: tuple[Config, Path, int, int]) -> list[Sample]:
    config, folder, start, num = job
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rendering = make_rendering(tokenizer, template_kwargs=config.model.chat_template)
    return teacher_samples(config, rendering, start=start, num=num)


def warm_start_batches(
    samples: Sequence[Sample], warm: WarmStartConfig, *, seed: int
) -> list[list[Sample]]:
    """All optimizer steps' samples: `epochs` seeded passes, each without its last, short batch."""
    size = warm.batch_size
    if len(samples) < size:
        raise SettingsError(
            f"warm_start.batch_size must be at most {len(samples)} transcripts, got {size}"
        )
    batches = []
    for epoch in range(warm.epochs):
        order = list(samples)
        random.Random(named_seed(seed, "warm start", epoch)).shuffle(order)
        for start in range(0, len(order) - size + 1, size):
            batches.append(order[start : start + size])
    return batches


def warm_start(
    learner: Learner, config: Config, rendering: Rendering, *, folder: Path
) -> dict[str, float]:
    """Imitate the teachers; returns the last steps' metrics, averaged. Each rank takes its share of
    a batch. `folder` is the run's: it holds a scratch model's tokenizer and gets
    `warm_start.jsonl`."""
    warm, world, settings = config.warm_start, learner.world, UpdateSettings.of(config)
    batches = warm_start_batches(_samples(config, rendering, folder), warm, seed=config.seed)
    log = StepLog(folder / "warm_start.jsonl", after_step=None, rank=world.rank)
    recent: deque[dict[str, float]] = deque(maxlen=LOG_EVERY)
    means: dict[str, float] = {}
    for step in progress(range(len(batches)), "warm start", rank=world.rank):
        part = Part(batches[step][world.dp_rank :: world.dp_size], "imitation")
        lr = learning_rate(
            step,
            peak=warm.lr,
            num_steps=len(batches),
            warmup_steps=warm.warmup_steps,
            schedule="cosine",
            final_share=0.05,
        )
        recent.append(optimizer_step(learner, [part], lr=lr, settings=settings))
        if (step + 1) % LOG_EVERY == 0 or step + 1 == len(batches):
            means = {name: sum(m[name] for m in recent) / len(recent) for name in recent[-1]}
            log.append({"step": step + 1, **means})
    log.close()
    return means


def auxiliary_imitation(
    config: Config, rendering: Rendering, *, step: int, world: World
) -> list[Part]:
    """Fresh teachers' games to imitate beside a self-play step, weighted; [] without replay."""
    warm = config.warm_start
    if warm.auxiliary_weight == 0.0:
        return []
    start = warm.num_games + step * warm.auxiliary_games
    samples = teacher_samples(config, rendering, start=start, num=warm.auxiliary_games)
    return [
        Part(samples[world.dp_rank :: world.dp_size], "imitation", weight=warm.auxiliary_weight)
    ]
