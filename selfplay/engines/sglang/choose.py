"""Chooses values for the engine settings that are `auto`.

The rules follow the measurements in docs/notes/performance.md: 512 games on H100s and H200s, models
of 26M to 7B. None of these settings changes the sampling distribution.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from selfplay.config import Config
from selfplay.engines.options import NEED_FAST, ChosenEngine, SGLangOptions

# Above this model size a decode step takes longer on the GPU than in SGLang's scheduler, whose
# Python runs on one core: a second process would only share the GPU. Below the other size it takes
# longer in the scheduler, however long the turns are.
MAX_SHARED, MAX_BOUND = 0.8e9, 0.1e9
# Above this model size a small prefill is no longer bound by the CPU that launches it.
MAX_LAUNCH_BOUND = 3e9
SHORT, LONG = 16, 128  # tokens per turn
MIN_GAMES = 64  # per process
# Before any game, a turn is assumed to have this share of the tokens that it may have.
TURN_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Load:
    """An engine's workload and resources.

    The model has `num_weights`; `games` are played at once, with turns of about `turn_tokens`
    sampled tokens. With `continues` each prompt extends the seat's previous one. The host has
    `cores` for this engine, and a GPU if `gpu`.
    """

    num_weights: int
    games: int
    turn_tokens: float
    continues: bool
    cores: int
    gpu: bool


def load_of(
    config: Config, num_weights: int, *, replicas: int, continues: bool, cores: int, gpu: bool
) -> Load:
    """The expected load of each of a run's `replicas` engines, before any turn is played.
    `continues`: the chat template does not rewrite old turns."""
    rollout = config.rollout
    return Load(
        num_weights=num_weights,
        games=rollout.instances * rollout.group_size // replicas,
        turn_tokens=TURN_SHARE * rollout.max_new_tokens,
        continues=continues and not rollout.forks,
        cores=cores,
        gpu=gpu,
    )


def choose(config: SGLangOptions, load: Load) -> ChosenEngine:
    """The settings with each `auto` replaced by a value."""
    config = replace(config, deterministic=config.deterministic or config.exact)
    given = {field.name: getattr(config, field.name) for field in fields(config)}
    one = config.tp_size > 1 or not load.gpu
    num = 1 if one else num_processes(load)
    num = num if given["processes"] == "auto" else given["processes"]
    # Sessions rely on the prefix cache, which SGLang does not have in this case.
    uncached = config.deterministic and config.attention == "flashinfer"
    chosen = {
        "processes": num,
        "burst_share": burst_share(num, load.turn_tokens),
        "sessions": load.continues and not uncached,
        "prefill_graphs": load.num_weights <= MAX_LAUNCH_BOUND and load.gpu,
    }
    if not config.fast:
        chosen = {name: NEED_FAST[name] for name in chosen}
    chosen = {name: value for name, value in chosen.items() if given[name] == "auto"}
    return ChosenEngine(**{**given, **chosen, "adapts": config.fast and "burst_share" in chosen})


def num_processes(load: Load) -> int:
    """The shorter the turns and the smaller the model, the more processes; each needs a core in
    addition to the trainer's."""
    if load.num_weights > MAX_SHARED:
        return 1
    two = load.turn_tokens <= LONG or load.num_weights < MAX_BOUND
    wanted = 3 if load.turn_tokens < SHORT else 2 if two else 1
    return max(1, min(wanted, load.cores - 1, load.games // MIN_GAMES))


def burst_share(num_processes: int, turn_tokens: float) -> float:
    """Half of a process's requests if turns are short, otherwise an eighth of all requests."""
    return 0.5 if turn_tokens < SHORT else min(0.5, num_processes / 8)


def describe(chosen: ChosenEngine, load: Load) -> str:
    """One line with the chosen settings and the reasons."""
    sessions, graphs = ("on" if on else "off" for on in (chosen.sessions, chosen.prefill_graphs))
    return (
        f"engine: processes {chosen.processes}, burst_share {chosen.burst_share:g}, sessions "
        f"{sessions}, prefill_graphs {graphs} for {load.num_weights / 1e6:,.0f}M weights, "
        f"{load.games} games, turns of {load.turn_tokens:.0f} tokens, {load.cores} cores"
    )
