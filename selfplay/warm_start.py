"""Imitation of scripted players and of people: a scratch model's tokenizer, the warm start before
self-play, and the auxiliary imitation loss during it.

The teachers' games become the same transcripts as self-play and train through the same update.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dialop.kit import Played
from selfplay.advantages.advantages import imitation_samples
from selfplay.advantages.sample import Sample
from selfplay.atomic import atomic_folder, damage, write_atomically
from selfplay.chat.rendering import Rendering, make_rendering
from selfplay.chat.tokenizer import train_tokenizer
from selfplay.checkpoint import resume, save_checkpoint
from selfplay.config import (
    Config,
    DataConfig,
    GameConfig,
    ModelConfig,
    RolloutConfig,
    WarmStartConfig,
)
from selfplay.data.instances import TEACHERS, TOKENIZER, generated, imitated_people
from selfplay.data.seeds import named_seed
from selfplay.distributed import World, barrier
from selfplay.errors import SettingsError
from selfplay.learner.learner import Learner, UpdateSettings
from selfplay.learner.optimizer import learning_rate
from selfplay.learner.update import LossTerm, optimizer_step
from selfplay.metrics.console import progress
from selfplay.metrics.run_folder import IMITATED_BOARDS
from selfplay.metrics.step_log import StepLog
from selfplay.model.hub import local_folder
from selfplay.rollout.driver import play_scripted
from selfplay.rollout.episode import GameSetup, Limits, limits_of
from selfplay.rollout.players import Teacher
from selfplay.rollout.seating import scripted_games, teacher_games, teacher_mixture

LOG_EVERY = 50  # optimizer steps per line of the warm start's log
SAVE_EVERY = 200  # optimizer steps between the checkpoints from which it resumes
FEWEST_OF_A_PART, MOST_OF_A_PART = 50, 1000  # games that are kept together


@dataclass(frozen=True, slots=True)
class TeacherSettings:
    """The settings of the teachers' games. `seed` is the run's."""

    game: GameConfig
    rollout: RolloutConfig
    data: DataConfig
    warm_start: WarmStartConfig
    seed: int

    @classmethod
    def of(cls, config: Config) -> TeacherSettings:
        return cls(config.game, config.rollout, config.data, config.warm_start, config.seed)


def scratch_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer trained on what the seats of scripted games read and write."""
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
    phrases = config.game.kit.phrases(
        instances, config.game.rules(), split_lines=scratch.split_lines
    )
    return train_tokenizer(
        _texts(config.game, config.rollout, specs, instances),
        vocab_size=scratch.vocab_size,
        phrases=phrases,
    )


def _texts(
    game: GameConfig, rollout: RolloutConfig, specs: Sequence[str], instances: Sequence[Any]
) -> Iterator[str]:
    share = -(-len(instances) // len(specs))
    for place, spec in enumerate(specs):
        setups = scripted_games(
            instances[place * share : (place + 1) * share], spec=spec, game=game
        )
        for episode in play_scripted(setups, limits=limits_of(rollout)):
            # The role names of a chat template would otherwise cost one token per letter.
            for prompt in episode.prompts:
                yield from (f"system\n{prompt.system}", f"user\n{prompt.user}")
            for turn in episode.turns:
                yield f"assistant\n{turn.text}"
                yield from (f"user\n{text}" for text in (*turn.observations, turn.error) if text)


def tokenizer_folder(model: ModelConfig, folder: Path) -> Path:
    """The folder of the tokenizer: the model's own, downloaded if needed, or `folder`/tokenizer for
    the scratch model of the run in `folder`."""
    return folder / "tokenizer" if model.path is None else local_folder(model.path)


def progress_folder(folder: Path) -> Path:
    """The folder of an unfinished warm start's progress; deleted when the warm start ends."""
    return folder / "warm_start_progress"


def warm_start(
    learner: Learner, config: Config, rendering: Rendering, *, folder: Path
) -> dict[str, float]:
    """Train the learner, in place, to imitate the teachers. Each rank takes its share of a batch.

    Writes `warm_start.jsonl` to the run's `folder`. For a restart it keeps the games, and a
    checkpoint every SAVE_EVERY optimizer steps, in `progress_folder`. Returns the
    metrics averaged over the last LOG_EVERY optimizer steps.
    """
    warm, world, settings = config.warm_start, learner.world, UpdateSettings.of(config)
    teachers = TeacherSettings.of(config)
    stages = kept_samples(teachers, config.model, rendering, folder=folder, world=world)
    if warm.recorded is not None:
        people = _people(teachers, rendering, folder=folder, rank=world.rank)
        last = stages.pop() if warm.num_games > warm.first_games else []
        stages.append(last + people)
    batches = warm_start_batches(stages, warm, seed=config.seed)
    kept = progress_folder(folder)
    first, state = resume(kept, learner)
    log = StepLog(folder / "warm_start.jsonl", after_step=first or None, rank=world.rank)
    recent = deque[dict[str, float]](state.get("recent", []), maxlen=LOG_EVERY)
    means: dict[str, float] = {}
    for step in progress(range(first, len(batches)), "warm start", rank=world.rank):
        part = LossTerm(batches[step][world.dp_rank :: world.dp_size], "imitation")
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
        if (step + 1) % SAVE_EVERY == 0 and step + 1 < len(batches):
            log.sync()
            state = {"recent": list(recent)}
            save_checkpoint(kept, learner, None, step=step + 1, keep=2, state=state, policy=False)
    log.close()
    return means


def kept_samples(
    settings: TeacherSettings,
    model: ModelConfig,
    rendering: Rendering,
    *,
    folder: Path,
    world: World,
) -> list[list[Sample]]:
    """The transcripts of the warm start's first games and of the others, as from `teacher_samples`;
    an empty list is left out.

    The games are played in parts, which the ranks share and save to the run's `folder`. Saved parts
    are not played again. With `data.processes` above 1 each rank uses that many processes of one
    thread. Every rank must call.
    """
    processes = settings.data.processes
    num_games, num_first = settings.warm_start.num_games, settings.warm_start.first_games
    # The same for any number of processes, which may change when a run resumes.
    size = min(MOST_OF_A_PART, max(FEWEST_OF_A_PART, -(-num_games // 64)))
    kept = progress_folder(folder)
    stages = [
        [
            (kept / f"games_{start:08d}_{stop:08d}", start, stop - start)
            for start in range(begin, end, size)
            for stop in [min(start + size, end)]
        ]
        for begin, end in ((0, num_first), (num_first, num_games))
        if begin < end
    ]
    parts = [part for stage in stages for part in stage]
    own = [part for part in parts[world.rank :: world.world_size] if damage(part[0]) is not None]
    if processes == 1:
        for part, start, num in own:
            _keep(_play(settings, rendering, start=start, num=num), part)
    elif own:
        job_settings = replace(settings, data=replace(settings.data, processes=1))
        tokenizer = tokenizer_folder(model, folder)
        jobs = [(job_settings, tokenizer, model.chat_template, start, num) for _, start, num in own]
        with ProcessPoolExecutor(
            processes, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            for (part, _, _), samples in zip(own, pool.map(_play_job, jobs), strict=True):
                _keep(samples, part)
    barrier(world)
    limit = settings.rollout.max_game_tokens
    return [
        _fitting(
            [s for part, _, _ in stage for s in _kept(part)], "the teachers' games", limit=limit
        )
        for stage in stages
    ]


def _play_job(
    job: tuple[TeacherSettings, Path, dict[str, object], int, int],
) -> list[Sample]:
    settings, tokenizer, chat_template, start, num = job
    rendering = make_rendering(
        AutoTokenizer.from_pretrained(tokenizer), template_kwargs=chat_template
    )
    return _play(settings, rendering, start=start, num=num)


def _keep(samples: Sequence[Sample], folder: Path) -> None:
    """Write the parts of the samples that imitation needs: names, starts, ids and masks."""
    with atomic_folder(folder) as place:
        tensors = {
            "lengths": torch.tensor([len(s.ids) for s in samples]),
            "ids": torch.tensor([i for s in samples for i in s.ids], dtype=torch.int32),
            "masks": torch.tensor([m for s in samples for m in s.mask], dtype=torch.uint8),
        }
        save_file(tensors, place / "samples.safetensors")
        (place / "names.json").write_text(json.dumps([[s.name, s.starts] for s in samples]))


def _kept(folder: Path) -> list[Sample]:
    tensors = load_file(folder / "samples.safetensors")
    lengths = tensors["lengths"].tolist()
    named = json.loads((folder / "names.json").read_text())
    parts = (tensors[name].split(lengths) for name in ("ids", "masks"))
    return [
        Sample(
            name,
            ids.tolist(),
            mask.tolist(),
            [0.0] * len(ids),
            mask.float().tolist(),
            starts=tuple(starts),
        )
        for (name, starts), ids, mask in zip(named, *parts, strict=True)
    ]


def _people(
    settings: TeacherSettings, rendering: Rendering, *, folder: Path, rank: int
) -> list[Sample]:
    """The recorded games' transcripts for one pass. Rank 0 writes the digests of their boards to
    the run's `folder`, where evaluations find them, and prints what was left out."""
    warm, kit = settings.warm_start, settings.game.kit
    assert warm.recorded is not None
    played = imitated_people(
        settings.game, settings.data, recorded=warm.recorded, share=warm.recorded_share
    )
    samples = people_samples(settings, rendering, played)
    if rank == 0:
        boards = sorted({kit.digest(game.instance) for game in played})
        write_atomically(folder / IMITATED_BOARDS, json.dumps(boards) + "\n")
        num_moves = sum(len(game.moves) + game.left_out for game in played)
        print(
            f"warm start: {len(samples)} transcripts of {len(played)} recorded games on "
            f"{len(boards)} boards; {sum(game.left_out for game in played)} of {num_moves} moves "
            "have no place in the game's turns",
            flush=True,
        )
    return samples * warm.recorded_repeats


def people_samples(
    settings: TeacherSettings, rendering: Rendering, played: Sequence[Played]
) -> list[Sample]:
    """Transcripts of both seats of recorded human games.

    Raises SettingsError if more than 5 % are above `rollout.max_game_tokens`; the others are
    dropped.
    """
    kit, samples = settings.game.kit, []
    for game in played:
        players = tuple(Teacher(script, rendering, name="people") for script in game.scripts)
        new_game = kit.new_game(game.instance, settings.game.rules())
        setup = GameSetup(new_game, players, game.instance.key, index=0)
        # The game stops with the recording, which may end before an agreement.
        limits = Limits(max_turns=len(game.moves), max_retries=0)
        samples += imitation_samples(play_scripted([setup], limits=limits))
    return _fitting(samples, "the recorded games", limit=settings.rollout.max_game_tokens)


def warm_start_batches(
    stages: Sequence[Sequence[Sample]], warm: WarmStartConfig, *, seed: int
) -> list[list[Sample]]:
    """The samples of each optimizer step. Each stage in turn makes `epochs` passes in seeded random
    order; a pass leaves out a last batch that is too short."""
    size = warm.batch_size
    batches = []
    for samples in stages:
        if len(samples) < size:
            raise SettingsError(
                f"warm_start.batch_size must be at most {len(samples)} transcripts, got {size}"
            )
        for epoch in range(warm.epochs):
            order = list(samples)
            random.Random(named_seed(seed, "warm start", epoch)).shuffle(order)
            for start in range(0, len(order) - size + 1, size):
                batches.append(order[start : start + size])
    return batches


def auxiliary_imitation(
    settings: TeacherSettings, rendering: Rendering, *, step: int, world: World
) -> list[LossTerm]:
    """The auxiliary imitation loss of a self-play step: this rank's share of new teachers' games,
    weighted by `warm_start.auxiliary_weight`; [] if the weight is 0."""
    warm = settings.warm_start
    if warm.auxiliary_weight == 0.0:
        return []
    start = warm.num_games + step * warm.auxiliary_games
    samples = teacher_samples(settings, rendering, start=start, num=warm.auxiliary_games)
    return [
        LossTerm(samples[world.dp_rank :: world.dp_size], "imitation", weight=warm.auxiliary_weight)
    ]


def teacher_samples(
    settings: TeacherSettings, rendering: Rendering, *, start: int, num: int
) -> list[Sample]:
    """Transcripts of both seats of the teachers' games start..start+num-1, with errors masked out.

    Transcripts above `rollout.max_game_tokens` are dropped. Raises SettingsError if these are more
    than 5 %.
    """
    transcripts = _play(settings, rendering, start=start, num=num)
    return _fitting(transcripts, "the teachers' games", limit=settings.rollout.max_game_tokens)


def _play(settings: TeacherSettings, rendering: Rendering, *, start: int, num: int) -> list[Sample]:
    instances = generated(
        TEACHERS,
        game=settings.game,
        seed=settings.seed,
        start=start,
        num=num,
        processes=settings.data.processes,
        easy=settings.warm_start.keep == "all",
    )
    warm = settings.warm_start
    setups = teacher_games(
        instances,
        teachers=warm.first_teachers if start < warm.first_games else warm.teachers,
        game=settings.game,
        seed=settings.seed,
        rendering=rendering,
    )
    return imitation_samples(play_scripted(setups, limits=limits_of(settings.rollout)))


def _fitting(samples: Sequence[Sample], whose: str, *, limit: int) -> list[Sample]:
    """The samples of at most `limit` tokens. Raises SettingsError if more than 5 % are longer."""
    fitting = [s for s in samples if s.longest <= limit]
    # Rare long games exceed any sensible limit; if many games do, the limit is too low.
    if len(fitting) < 0.95 * len(samples):
        raise SettingsError(
            f"rollout.max_game_tokens must hold {whose}: {len(samples) - len(fitting)} of "
            f"{len(samples)} transcripts are longer than {limit}, the longest "
            f"{max(s.longest for s in samples)}"
        )
    return fitting
