"""Imitation of scripted players, of people and of chats: a scratch model's tokenizer, the warm
start before self-play, and the samples of the auxiliary imitation loss during it.

Games and chats become the same transcripts as self-play and train through the same update.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from dialop.game import Instance, Prompt
from dialop.people import PeoplesGame
from dialop.workers import Spawn
from selfplay.advantages.advantages import imitated, imitation_samples
from selfplay.advantages.sample import Sample
from selfplay.atomic import atomic_folder, damage, discard, write_atomically
from selfplay.chat.rendering import Rendering, make_rendering
from selfplay.chat.tokenizer import load_tokenizer, train_tokenizer
from selfplay.chat.transcript import Transcript
from selfplay.checkpoint import begin_checkpoint, export_atomically, resume
from selfplay.config import Config, GameConfig, ModelConfig, RolloutConfig
from selfplay.config.player_spec import SCRIPTED
from selfplay.data.chats import Chat, read_chats
from selfplay.data.instances import TEACHERS, TOKENIZER, generated, imitated_people
from selfplay.data.seeds import named_seed, pick
from selfplay.distributed import World, barrier, on_first_rank
from selfplay.errors import SettingsError
from selfplay.learner.batch import micro_batches
from selfplay.learner.learner import Learner, make_learner
from selfplay.learner.method import LossTerm
from selfplay.learner.update import imitation, learning_rate, optimizer_step, step_means
from selfplay.metrics.progress import progress
from selfplay.metrics.run_folder import IMITATED_BOARDS
from selfplay.metrics.step_log import StepLog
from selfplay.model.hub import local_folder
from selfplay.model.policy import export, scratch_model
from selfplay.rollout.driver import play_scripted
from selfplay.rollout.episode import GameSetup, Limits, limits_of
from selfplay.rollout.players import Player, ScriptedPartner, Teacher
from selfplay.rollout.seat_rules import able_seats
from selfplay.rollout.seating import game_setup, scripted_games
from selfplay.warm_start.beside import EngineBeside
from selfplay.warm_start.options import WarmStartConfig
from selfplay.warm_start.teachers import teacher_mixture, tokenizer_scripts

WARM_LOG = "warm_start.jsonl"
LOG_EVERY = 50  # optimizer steps per line of the warm start's log; fewer in a short one
MIN_LINES = 20  # lines of a log, if the warm start has at least as many optimizer steps
SAVE_EVERY = 200  # optimizer steps between the checkpoints of a warm start
MIN_CHUNK, MAX_CHUNK = 50, 1000  # games that are saved together


def scratch_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer trained on the text that seats read and write in scripted games;
    for a game without scripts, on the first prompts only."""
    scratch = config.model.scratch
    assert scratch is not None
    specs = tokenizer_scripts(config)
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
        instances, config.game.options, split_lines=scratch.split_lines
    )
    return train_tokenizer(
        _texts(config, specs, instances),
        vocab_size=scratch.vocab_size,
        phrases=phrases,
    )


def _texts(config: Config, specs: Sequence[str], instances: Sequence[Any]) -> Iterator[str]:
    """The text that seats read and write in games of each of these scripted players; without any,
    only their first prompts."""
    if not specs:
        for instance in instances:
            game = config.game.kit.new_game(instance, config.game.options)
            yield from _prompt_texts(map(game.prompt, range(game.num_seats)))
        return
    num = -(-len(instances) // len(specs))
    for index, spec in enumerate(specs):
        setups = scripted_games(
            instances[index * num : (index + 1) * num], spec=spec, game=config.game
        )
        for episode in play_scripted(setups, limits=limits_of(config.rollout)):
            yield from _prompt_texts(episode.prompts)
            for turn in episode.turns:
                yield f"assistant\n{turn.text}"
                yield from (f"user\n{text}" for text in (*turn.observations, turn.error) if text)


def _prompt_texts(prompts: Iterable[Prompt]) -> Iterator[str]:
    # The role names of a chat template would otherwise cost one token per letter.
    for prompt in prompts:
        yield from (f"system\n{prompt.system}", f"user\n{prompt.user}")


def tokenizer_folder(model: ModelConfig, folder: Path) -> Path:
    """The folder of the tokenizer: the model's own, downloaded if needed, or `folder`/tokenizer for
    a scratch model of the run in `folder`."""
    return folder / "tokenizer" if model.path is None else local_folder(model.path)


def progress_folder(folder: Path) -> Path:
    """The folder of an unfinished warm start's progress; deleted when the warm start ends."""
    return folder / "warm_start_progress"


def warm_start(
    learner: Learner,
    config: Config,
    rendering: Rendering,
    games: Sequence[Sequence[Sample]],
    *,
    folder: Path,
    seats: Collection[int] = (),
) -> dict[str, float]:
    """Train the learner, in place, to imitate chats and these seats (none: all) of the teachers'
    `games`, from `saved_samples`. Every rank must call.

    Writes `warm_start.jsonl` to the run's `folder`. For a restart it saves a checkpoint every
    SAVE_EVERY optimizer steps in `progress_folder`. Returns the metrics of the log's last line,
    each a mean over the optimizer steps since the previous line.
    """
    warm, world = config.warm_start, learner.world
    stages = [of_seats(stage, seats) for stage in games]
    files, chats = list[Sample](), list[Sample]()
    if warm.recorded is not None:
        files += of_seats(_people(config, rendering, folder=folder, rank=world.rank), seats)
    if warm.chats is not None:
        chats = chat_samples(config, rendering, rank=world.rank)
        files += chats
    if files:
        last = stages.pop() if warm.num_games > warm.first_games else []
        stages.append(last + files)
    num_samples = sum(map(len, stages))
    counts = {"num_transcripts": num_samples - len(chats), "num_chats": len(chats)}
    # With games in the mix, the loss of the chats is also logged separately.
    separate = frozenset(s.name for s in chats if len(chats) < num_samples)
    batches = warm_start_batches(stages, warm, seed=config.seed)
    unfinished = progress_folder(folder)
    first, state = resume(unfinished, {"": learner})
    num = state.get("num_lines", {}).get(WARM_LOG)
    log = StepLog(folder / WARM_LOG, after_step=first or None, rank=world.rank, num=num)
    every = min(LOG_EVERY, max(1, len(batches) // MIN_LINES))
    recent: list[dict[str, float]] = state.get("recent", [])
    means: dict[str, float] = {}
    rates = replace(config.optim, lr=warm.lr, warmup_steps=warm.warmup_steps)
    rates = replace(rates, schedule="cosine", final_share=0.05)
    bar = progress(range(first, len(batches)), "warm start", rank=world.rank)
    for step in bar:
        own = batches[step][world.dp_rank :: world.dp_size]
        term = LossTerm(own, partial(imitation, chats=separate), name="imitation")
        lr = learning_rate(step, rates, num_steps=len(batches))
        recent.append(optimizer_step(learner, [term], lr=lr, config=config))
        if (step + 1) % every == 0 or step + 1 == len(batches):
            means = step_means(recent)
            recent.clear()
            log.append({"step": step + 1, **means, **counts})
            bar.set_postfix_str(f"loss {means['imitation_loss']:.3f}", refresh=False)
        if (step + 1) % SAVE_EVERY == 0 and step + 1 < len(batches):
            log.sync()
            opened = begin_checkpoint(unfinished, {"": (learner, None)}, step=step + 1)
            lines = {WARM_LOG: log.num_lines}
            opened.finish({"recent": recent, "num_lines": lines}, keep=2)
    log.close()
    return means


def rehearse(learner: Learner) -> None:
    """Compute the gradients of a made-up transcript of 64 tokens and drop them, so that a GPU
    compiles the kernels of the first step (30 s on a new host) while the teachers still play. Every
    rank must call."""
    learner.model.train()
    sample = imitated("a rehearsal", range(64), [0] + [1] * 63, ())
    for _, batch in micro_batches([sample], learner.world, budget=64):
        losses_M, _ = imitation(learner, batch)
        losses_M.sum().backward()
    learner.optimizer.zero_grad(set_to_none=True)
    learner.model.eval()


def of_seats(samples: Sequence[Sample], seats: Collection[int]) -> list[Sample]:
    """The samples of these seats of games; all without seats."""
    return [s for s in samples if not seats or int(s.name.rpartition(" seat ")[2]) in seats]


def saved_samples(
    config: Config,
    rendering: Rendering,
    *,
    folder: Path,
    world: World,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[list[Sample]]:
    """The transcripts of the warm start's first games and of its other games, as from
    `teacher_samples`; an empty list is left out.

    The games are played in chunks, which the ranks share and save to the run's `folder`; saved
    chunks are not played again. With `data.processes` above 1 each rank uses as many single-thread
    processes, and calls `meanwhile` while they play; otherwise it calls it first. If that fails, no
    further chunk is begun. Every rank must call.
    """
    num_games, num_first = config.warm_start.num_games, config.warm_start.first_games
    # Independent of the number of processes, which may change when a run resumes.
    size = min(MAX_CHUNK, max(MIN_CHUNK, -(-num_games // 64)))
    stages = [
        [range(start, min(start + size, end)) for start in range(begin, end, size)]
        for begin, end in ((0, num_first), (num_first, num_games))
        if begin < end
    ]
    chunks = [chunk for stage in stages for chunk in stage]
    own = chunks[world.rank :: world.world_size]
    missing = [chunk for chunk in own if damage(chunk_folder(folder, chunk)) is not None]
    loaded = dict[range, list[Sample]]()
    if config.data.processes == 1 or not missing:
        meanwhile()
        for chunk in missing:
            _play_and_save(config, rendering, folder, chunk)
    else:
        job_config = replace(config, data=replace(config.data, processes=1))
        tokenizer = tokenizer_folder(config.model, folder)
        with ProcessPoolExecutor(
            config.data.processes,
            Spawn(),
            initializer=torch.set_num_threads,
            initargs=(1,),
        ) as pool:
            played = pool.map(partial(_play_job, job_config, tokenizer, folder), missing)

            def load() -> None:
                for chunk, _ in zip(missing, played, strict=True):  # while the others are played
                    loaded[chunk] = _load(chunk_folder(folder, chunk))

            with ThreadPoolExecutor(1) as loader:
                loading = loader.submit(load)
                try:
                    meanwhile()
                    loading.result()
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
    barrier(world)
    limit = config.rollout.max_game_tokens
    return [
        _fitting(
            [
                sample
                for chunk in stage
                for sample in loaded.pop(chunk, None) or _load(chunk_folder(folder, chunk))
            ],
            "the teachers' games",
            limit=limit,
        )
        for stage in stages
    ]


def chunk_folder(folder: Path, games: range) -> Path:
    """The folder where the run in `folder` saves the transcripts of these teachers' games."""
    return progress_folder(folder) / f"games_{games.start:08d}_{games.stop:08d}"


def _play_job(config: Config, tokenizer: Path, folder: Path, games: range) -> None:
    rendering = make_rendering(
        load_tokenizer(tokenizer), template_kwargs=config.model.chat_template
    )
    _play_and_save(config, rendering, folder, games)


def _play_and_save(config: Config, rendering: Rendering, folder: Path, games: range) -> None:
    """Play these games and save their samples for imitation: names, starts, ids and masks."""
    samples = _play(config, rendering, games)
    with atomic_folder(chunk_folder(folder, games)) as partial_folder:
        tensors = {
            "lengths": torch.tensor([len(s.ids) for s in samples]),
            "ids": torch.tensor([i for s in samples for i in s.ids], dtype=torch.int32),
            "masks": torch.tensor([m for s in samples for m in s.mask], dtype=torch.uint8),
        }
        save_file(tensors, partial_folder / "samples.safetensors")
        names = json.dumps([[s.name, s.starts] for s in samples])
        (partial_folder / "names.json").write_text(names)


def _load(folder: Path) -> list[Sample]:
    tensors = load_file(folder / "samples.safetensors")
    lengths = tensors["lengths"].tolist()
    named = json.loads((folder / "names.json").read_text())
    ids_and_masks = (tensors[name].split(lengths) for name in ("ids", "masks"))
    return [
        imitated(name, ids.long().numpy(), mask.numpy(), starts)
        for (name, starts), ids, mask in zip(named, *ids_and_masks, strict=True)
    ]


def _people(config: Config, rendering: Rendering, *, folder: Path, rank: int) -> list[Sample]:
    """The recorded games' transcripts for one pass. Rank 0 writes the digests of their boards to
    the run's `folder` for evaluations, and prints how many moves were left out."""
    warm, kit = config.warm_start, config.game.kit
    assert warm.recorded is not None
    played = imitated_people(
        config.game, config.data, recorded=warm.recorded, share=warm.recorded_share
    )
    samples = people_samples(config, rendering, played)
    if rank == 0:
        boards = sorted({kit.digest(game.instance) for game in played})
        write_atomically(folder / IMITATED_BOARDS, json.dumps(boards) + "\n")
        num_moves = sum(len(game.moves) + game.left_out for game in played)
        print(
            f"warm start: {len(samples)} transcripts of {len(played)} recorded games of "
            f"{len(boards)} instances; {sum(game.left_out for game in played)} of {num_moves} "
            "moves do not fit the game's turns and are left out",
            flush=True,
        )
    return samples * warm.recorded_repeats


def people_samples(
    config: Config, rendering: Rendering, played: Sequence[PeoplesGame]
) -> list[Sample]:
    """Transcripts of all seats of recorded human games.

    Transcripts above `rollout.max_game_tokens` are dropped. Raises SettingsError if these are more
    than 5 %.
    """
    kit, samples = config.game.kit, []
    for game in played:
        players = tuple(
            Teacher(game.script(seat), rendering, name="people") for seat in range(len(kit.ROLES))
        )
        new_game = kit.new_game(game.instance, config.game.options)
        setup = GameSetup(new_game, players, game.instance.key, index=0)
        # The game ends with the recording, which may stop before an agreement.
        limits = Limits(max_turns=len(game.moves), max_retries=0)
        samples += imitation_samples(play_scripted([setup], limits=limits))
    return _fitting(samples, "the recorded games", limit=config.rollout.max_game_tokens)


def chat_samples(config: Config, rendering: Rendering, *, rank: int) -> list[Sample]:
    """The transcripts of the warm start's chats. Those above `rollout.max_game_tokens` are left
    out; rank 0 prints how many.

    Raises SettingsError if the chats cannot be read or all are too long.
    """
    warm, limit = config.warm_start, config.rollout.max_game_tokens
    assert warm.chats is not None
    samples = []
    chats = read_chats(warm.chats, warm.chat_roles)
    for chat in chats:
        text = chat_transcript(rendering, chat, warm.chat_roles)
        samples.append(imitated(chat.name, text.ids, text.mask, text.starts))
    fitting = [sample for sample in samples if sample.longest <= limit]
    longest = max(sample.longest for sample in samples)
    if not fitting:
        raise SettingsError(
            f"rollout.max_game_tokens must be large enough for a chat of {warm.chats}, got "
            f"{limit}; the longest has {longest} tokens"
        )
    if rank == 0:
        line = f"warm start: {len(fitting)} chats of {warm.chats}"
        if len(fitting) < len(samples):
            line += (
                f"; {len(samples) - len(fitting)} left out, longer than rollout.max_game_tokens "
                f"{limit}, the longest with {longest} tokens"
            )
        if unread := frozenset[str]().union(*(chat.unread for chat in chats)):
            line += f"; ignored: {', '.join(sorted(unread))}"
        print(line, flush=True)
    return fitting


def chat_transcript(rendering: Rendering, chat: Chat, roles: Collection[str]) -> Transcript:
    """A chat as if a policy had read and sampled it; the turns of `roles`, each with its
    end-of-turn token, are trained."""
    transcript = Transcript()

    def add(ids: list[int], start: int, end: int) -> None:
        """Append ids; those from `start` to `end` are trained."""
        untrained = ((0, start), (end, len(ids)))
        transcript.act(ids, logprobs=[0.0] * len(ids), untrained=untrained)

    for number, user in enumerate(chat.users):
        if rendering.rewritten:
            transcript.begin()
            users, answers = chat.users[: number + 1], chat.answers[:number]
            prompt = rendering.conversation(chat.system, users, answers)
        elif number:
            prompt = rendering.following(user, closed=True)
        else:
            prompt = rendering.first(system=chat.system, user=user)
        first, last = rendering.last_user(user) if "user" in roles else (0, 0)
        add(prompt, len(prompt) + first, len(prompt) + last)
        if number < len(chat.answers):
            answer = rendering.answer_ids(chat.answers[number])
            add(answer, 0, len(answer) if "assistant" in roles else 0)
    return transcript


def warm_start_batches(
    stages: Sequence[Sequence[Sample]], warm: WarmStartConfig, *, seed: int
) -> list[list[Sample]]:
    """The samples of each optimizer step. Each stage in turn makes `epochs` passes in seeded random
    order; a pass drops an incomplete last batch."""
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


def teacher_games(
    instances: Sequence[Instance],
    *,
    teachers: Sequence[str],
    game: GameConfig,
    rollout: RolloutConfig,
    seed: int,
    rendering: Rendering,
) -> list[GameSetup]:
    """One game of each instance between teachers. Each seat's teacher is drawn from the mixture's
    teachers that can play it. If none can, the game chooses the seat's player."""
    mixture = list(zip(*teacher_mixture(teachers, game), strict=True))
    kit, able_to_learn, setups = game.kit, able_seats(game, rollout), []
    for instance in instances:
        players: list[Player] = []
        for seat in range(len(kit.ROLES)):
            able = [entry for entry in mixture if kit.seated(entry[0])[seat] == entry[0]]
            specs, weights = zip(*(able or mixture), strict=True)
            spec = pick(specs, weights, named_seed(seed, "teacher", instance.key, seat))
            spec = kit.seated(spec)[seat]
            script = kit.make_script(
                spec, seed=named_seed(seed, "teacher's words", instance.key, seat)
            )
            name = f"{SCRIPTED}:{spec}"
            players.append(
                Teacher(script, rendering, name=name)
                if seat in able_to_learn
                else ScriptedPartner(script, name=name)
            )
        setups.append(game_setup(instance, tuple(players), game))
    return setups


def teacher_samples(config: Config, rendering: Rendering, *, start: int, num: int) -> list[Sample]:
    """Transcripts of both seats of the teachers' games start..start+num-1; errors are masked out.

    Transcripts above `rollout.max_game_tokens` are dropped. Raises SettingsError if these are more
    than 5 %.
    """
    transcripts = _play(config, rendering, range(start, start + num))
    return _fitting(transcripts, "the teachers' games", limit=config.rollout.max_game_tokens)


def _play(config: Config, rendering: Rendering, games: range) -> list[Sample]:
    warm = config.warm_start
    instances = generated(
        TEACHERS,
        game=config.game,
        seed=config.seed,
        start=games.start,
        num=len(games),
        processes=config.data.processes,
        easy=warm.keep == "all",
    )
    setups = teacher_games(
        instances,
        teachers=warm.first_teachers if games.start < warm.first_games else warm.teachers,
        game=config.game,
        rollout=config.rollout,
        seed=config.seed,
        rendering=rendering,
    )
    return imitation_samples(play_scripted(setups, limits=limits_of(config.rollout)))


def _fitting(samples: Sequence[Sample], whose: str, *, limit: int) -> list[Sample]:
    """The samples of at most `limit` tokens. Raises SettingsError if more than 5 % are longer."""
    fitting = [s for s in samples if s.longest <= limit]
    # Rare long games exceed any sensible limit; if many games do, the limit is too low.
    if len(fitting) < 0.95 * len(samples):
        raise SettingsError(
            f"rollout.max_game_tokens must be large enough for {whose}: "
            f"{len(samples) - len(fitting)} of {len(samples)} transcripts are longer than {limit}, "
            f"the longest has {max(s.longest for s in samples)}"
        )
    return fitting


def first_folder(config: Config, folder: Path) -> Path:
    """The folder of the weights that self-play starts from: the result of the warm start if there
    is one, else the model's own or random weights."""
    return folder / "warm_start" if config.warm_start.imitates else _own_folder(config, folder)


def _own_folder(config: Config, folder: Path) -> Path:
    """The model's own folder, or the run's folder of a scratch model's random weights."""
    path = config.model.path
    return folder / "random_start" if path is None else local_folder(path)


def first_weights(
    config: Config,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    rendering: Rendering,
    world: World,
    *,
    seats: Collection[int] = (),
    engine: EngineBeside | None = None,
) -> Path:
    """The `first_folder`; created if it does not exist, by an imitation of these seats, or all.
    Then `engine`, if given, may start with it and gets its weights at the end."""
    settings = config.warm_start
    if not settings.imitates:
        return _own_weights(config, folder, tokenizer, world)
    if not (warm := first_folder(config, folder)).exists():
        own, made = _own_weights(config, folder, tokenizer, world), list[Learner]()

        def begin() -> None:
            if engine is not None:
                engine.start(own)  # first, because it takes a share of the free memory
            how = {"imitation": settings.optimizer, "adapters": settings.lora}
            made.append(make_learner(config, own, world, **how))
            rehearse(made[0])

        games = saved_samples(config, rendering, folder=folder, world=world, meanwhile=begin)
        learner = made.pop()
        means = warm_start(learner, config, rendering, games, folder=folder, seats=seats)
        export_atomically(learner.model, tokenizer, warm, world=world)
        if engine is not None:
            engine.fill(learner)
        if world.rank == 0:
            loss = f"with a loss of {means['imitation_loss']:.3f} nats per token"
            print(f"the warm start is finished {loss}; the policy is in {warm}", flush=True)
        on_first_rank(partial(discard, progress_folder(folder)), world)
    return warm


def _own_weights(
    config: Config, folder: Path, tokenizer: PreTrainedTokenizerBase, world: World
) -> Path:
    """The `_own_folder`; created if it does not exist."""
    own, scratch = _own_folder(config, folder), config.model.scratch
    if scratch is None:
        return own

    def make() -> None:
        if own.exists():
            return
        model = scratch_model(
            scratch,
            vocab_size=max(scratch.vocab_size, len(tokenizer)),
            seed=config.seed,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        with atomic_folder(own) as partial_folder:
            export(model, tokenizer, partial_folder)

    on_first_rank(make, world)
    return own
