"""Checks of a user's function on hand-made inputs (docs/your_method.md)."""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from inspect import iscoroutinefunction, signature
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from dialop.game import Game
from dialop.shown import first_cause, on_one_line
from dialop.specs import nearest
from selfplay.advantages.advantages import SampleStatistics, checked_scales
from selfplay.advantages.rewards import move_rewards, seat_reward, with_rewards
from selfplay.advantages.sample import Sample, trained_stretches
from selfplay.chat.rendering import Rendering, make_rendering
from selfplay.chat.tokenizer import train_tokenizer
from selfplay.config import Config, RewardConfig
from selfplay.config.options import options_at
from selfplay.config.player_spec import POOL
from selfplay.config.plugins import PLUGINS, function_of, named, own_call, own_functions
from selfplay.data.stream import made_instances
from selfplay.engines.base import Completion, Engine, Generate, Request
from selfplay.errors import OwnFault, SettingsError
from selfplay.learner.batch import pack
from selfplay.learner.loss import checked_losses
from selfplay.learner.method import Method
from selfplay.metrics.observer import Observer
from selfplay.metrics.observers import own_options
from selfplay.partners.opponents import (
    Opponents,
    Result,
    checked_shares,
    opponents_state,
    partner_names,
)
from selfplay.partners.pool import joined
from selfplay.rollout.driver import play_scripted
from selfplay.rollout.episode import Episode, GameSetup, Position, limits_of
from selfplay.rollout.play import play_of
from selfplay.rollout.players import Move, PolicyPlayer
from selfplay.rollout.seat_rules import chosen_seats
from selfplay.rollout.seating import scripted_games

NUM_GAMES = 8  # of each scripted player
NUM_INSTANCES = 16  # of a step
NUM_STEPS = 100  # whose opponents are drawn
FAR = 99.0  # nats; exp of it overflows float32


def check_functions(config: Config, first: Config | None = None) -> None:
    """Check every custom function in the settings, and a built-in one that some games cannot use;
    of a further policy than the `first` those in sections that differ. Warnings go to standard
    error, from rank 0 only. Raises ValueError as `findings`."""
    checked = [*own_functions(config)]
    if config.reward.function == "message_credit":  # needs `Game.reach`
        checked.append(("reward.function", config.reward.function))
    for key, name in checked:
        if first and (own := attrgetter(key.partition(".")[0]))(config) == own(first):
            continue
        for line in findings(key, name, config):
            if line.startswith("warning: ") and os.environ.get("RANK", "0") == "0":
                print(f"warning: {key} {name}: {on_one_line(line[9:])}", file=sys.stderr)


def findings(key: str, name: str, config: Config) -> Iterator[str]:
    """One line for each check that passes; a "warning: " or "note: " prefix marks a remark.

    Raises:
        ValueError: one line for the first check that fails.
    """
    function = function_of(key, name)
    if PLUGINS[key].typed:
        options_at(key, config)
    try:
        with own_call(key, name):
            yield from _CHECKS[key](function, config)
    except (OwnFault, SettingsError) as error:
        hint = _hint(first_cause(error), key.partition(".")[0], config)
        raise ValueError(f"{error}{hint}") from error


def _hint(error: BaseException, section: str, config: Config) -> str:
    """What to do about a missing option or attribute."""
    options: Mapping[str, Any] | None = getattr(getattr(config, section), "options", None)
    if isinstance(error, KeyError) and error.args and options is not None:
        given = f" (given: {', '.join(options)})" if options else ""
        return f"; if it is an option, give {section}.options.{error.args[0]}=VALUE{given}"
    if isinstance(error, AttributeError) and dataclasses.is_dataclass(error.obj):
        names = [each for each in dir(error.obj) if not each.startswith("_")]
        return f"; it has {', '.join(names)}{nearest(str(error.name), names)}"
    return ""


def _scripted(config: Config, specs: Sequence[str], num: int) -> list[GameSetup]:
    """Games of the same `num` instances, played by the scripted players of each spec."""
    kit, game = config.game.kit, config.game
    instances = kit.generate(kit.easy(game.options), seed=0, num=num)
    return [setup for spec in specs for setup in scripted_games(instances, spec=spec, game=game)]


def _require(right: bool, rule: str) -> None:
    """Raise OwnFault with the rule that a function breaks."""
    if not right:
        raise OwnFault(rule)


def _require_subclass(kind: Any, base: type) -> None:
    """Raise OwnFault unless `kind` is a subclass of `base`."""
    is_subclass = isinstance(kind, type) and issubclass(kind, base)
    _require(is_subclass, f"it must be a subclass of {base.__module__}.{base.__name__}")


def _no_scripts(config: Config) -> str:
    """The line of a check that cannot be made without scripted players."""
    return f"nothing checked: {config.game.name} has no scripted players to play a game"


# --- losses ---------------------------------------------------------------------------------------


def _check_loss(loss: Callable[..., Any], config: Config) -> Iterator[str]:
    """Computes losses and gradients of three samples of hand-made log-probs: shapes, finite values
    far from the old log-probs, the sign at ratio 1, and independence of the other samples."""
    samples = [_sample(0, [1.0, 1.0, 1.0]), _sample(1, [-0.5, -0.5]), _sample(2, [0.0, 2.0, -1.0])]
    batch = pack(samples, device=torch.device("cpu"))
    # Each sample's sum (0.2, -0.1, 0.05) differs from the others, from their mean and from 0.
    moved_M = torch.tensor([0.0, 0.3, -0.1, 0.1, -0.2, 0.05, 0.5, -0.5])
    logprobs_M = (batch.old_logprobs_M + moved_M).requires_grad_()
    algorithm = config.algorithm
    losses_M, metrics = checked_losses(loss, logprobs_M, batch, algorithm)
    games = _scripted(config, config.game.kit.SCRIPT_NAMES[:1], 1)
    played = play_scripted(games, limits=limits_of(config.rollout))
    measured = {name for episode in played for name in episode.measures}
    _require(
        not (both := measured & metrics.keys()),
        f"metrics must not reuse the game's names, got {', '.join(both)}",
    )
    yield f"shapes: losses and metrics {', '.join(sorted(metrics)) or '(none)'} of each token"

    for far in (-FAR, FAR, 0.0):
        far_M = (batch.old_logprobs_M + far).requires_grad_()
        on_policy_M = _gradient(checked_losses(loss, far_M, batch, algorithm)[0], far_M)
    gradient_M = _gradient(losses_M, logprobs_M)
    yield f"finite: losses and gradients, also {FAR:g} nats from the old log-probs"

    _require(bool(gradient_M.any()), "its losses must depend on logprobs_M, got a gradient of 0")
    yield f"gradient: {on_policy_M[0]:g} for advantage 1 at ratio 1 (REINFORCE has -1)"
    if on_policy_M[0] > 0:
        yield "warning: a step makes tokens of positive advantage less likely; losses are minimized"
    if algorithm.epochs == algorithm.minibatches == 1:
        yield (
            "note: with algorithm.epochs=1 and algorithm.minibatches=1 every ratio is 1, so losses "
            "with the same gradient at ratio 1 train alike"
        )

    _require(
        torch.equal(losses_M, checked_losses(loss, logprobs_M, batch, algorithm)[0]),
        "it must be deterministic, got different losses from the same batch",
    )
    yield "deterministic: the same losses twice"

    parts, start = [], 0
    for sample in samples:
        part = pack([sample], device=torch.device("cpu"))
        own_M = logprobs_M[start : start + sum(sample.mask)]
        parts.append(checked_losses(loss, own_M, part, algorithm)[0])
        start += sum(sample.mask)
    cut_M = torch.cat(parts)
    pairs = ((cut_M, losses_M), (_gradient(cut_M, logprobs_M), gradient_M))
    _require(
        all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in pairs),
        "a token's loss must not depend on other samples: they may be in other micro-batches",
    )
    yield "cut: the same losses and gradients with one micro-batch per sample"


def _sample(number: int, advantages_K: Sequence[float]) -> Sample:
    """A two-token prompt, then one sampled token per advantage."""
    num = len(advantages_K)
    return Sample(
        name=f"sample {number}",
        ids=[1, 2, *range(10 * number + 3, 10 * number + 3 + num)],
        mask=[0, 0, *[1] * num],
        old_logprobs=[0.0, 0.0, *[-0.5 - 0.25 * k for k in range(num)]],
        advantages=[0.0, 0.0, *advantages_K],
    )


def _gradient(losses_M: torch.Tensor, logprobs_M: torch.Tensor) -> torch.Tensor:
    """The gradient of the losses' sum. Requires finite losses and a finite gradient."""
    (gradient_M,) = torch.autograd.grad(losses_M.sum(), logprobs_M, retain_graph=True)
    for what, values_M in (("losses", losses_M), ("gradient", gradient_M)):
        _require(
            bool(values_M.isfinite().all()),
            f"its {what} must be finite, got {values_M.tolist()}; selfplay.learner.loss.ratio is "
            "an exp of log-ratios that is always finite",
        )
    return gradient_M


# --- advantages -----------------------------------------------------------------------------------


def _check_advantage(advantage: Callable[..., Any], config: Config) -> Iterator[str]:
    """Computes baselines and divisors for groups with different rewards, with equal rewards and
    with one sample: shapes, finite values, and independence of the order of the samples."""
    rewards = {"a": (0.0, 0.5, 1.0), "b": (0.25, 0.25), "c": (-1.0,)}
    samples = [  # named as in a run
        SampleStatistics(
            f"instance {instance} episode {i} seat {seat}", f"seat {seat} of {instance}",
            f"seat {seat}", 4 + 3 * i + seat, reward, 0.0, (reward,) * (2 + i),
        )
        for seat in (0, 1)
        for instance, of_games in rewards.items()
        for i, reward in enumerate(of_games)
    ]  # fmt: skip
    state: dict[str, float] = {}
    algorithm = config.algorithm
    scales = checked_scales(advantage, samples, state, algorithm)
    yield "shapes: a baseline and a divisor for each sample"

    checked_scales(advantage, samples, dict(state), algorithm)
    kept = f"state {', '.join(state)}" if state else "no state"
    yield f"finite: also for equal returns, for a group of one, and in a second step; {kept}"

    again: dict[str, float] = {}
    _require(
        (scales, state) == (checked_scales(advantage, samples, again, algorithm), again),
        "it must be deterministic, because every rank computes it, got different numbers",
    )
    yield "deterministic: the same numbers twice"
    mixed = sorted(samples, key=lambda one: one.num_tokens)
    scale_of = {one.name: scale for one, scale in zip(samples, scales, strict=True)}
    others = zip(mixed, checked_scales(advantage, mixed, {}, algorithm), strict=True)
    _require(
        all(_alike(scale, scale_of[one.name]) for one, scale in others),
        "its numbers must not depend on the order of the samples, which depends on the ranks",
    )
    yield "order: the same numbers with the samples in another order"
    shown = [
        "dropped" if scale is None else f"{(one.mean - scale[0][0]) / scale[1]:.3g}"
        for one, scale in zip(samples, scales, strict=True)
    ]
    blind = "; they do not distinguish rewards" if len(set(shown[:3])) == 1 else ""
    yield f"advantages: {', '.join(shown[:3])} for a group of rewards 0, 0.5, 1{blind}"
    yield f"advantages: {', '.join(shown[3:5])} for a group of equal rewards"


Scale = tuple[tuple[float, ...], float] | None


def _alike(one: Scale, other: Scale) -> bool:
    """Whether two (baselines, divisor) agree up to rounding; None only equals None."""
    if one is None or other is None:
        return one is other
    mine, yours = (torch.tensor([*baselines, divisor]) for baselines, divisor in (one, other))
    return len(mine) == len(yours) and torch.allclose(mine, yours)


# --- rewards --------------------------------------------------------------------------------------


def _check_reward(reward: Callable[..., Any], config: Config) -> Iterator[str]:
    """Pays games between scripted players, one after an invalid move, and one without a turn: a
    finite number per seat, the same twice. Warns if a trained seat's rewards are all equal."""
    kit = config.game.kit
    _require(
        not config.reward.options or "options" in signature(reward).parameters,
        "it must have a parameter options, as in reward(episode, options=None), to use "
        f"reward.options, got {', '.join(config.reward.options)}",
    )
    if not kit.SCRIPT_NAMES:
        yield _no_scripts(config)
        return
    specs = kit.BASELINES or kit.SCRIPT_NAMES  # they play the same instances, well and badly
    games, limits = _scripted(config, specs, NUM_GAMES), limits_of(config.rollout)
    silent = dataclasses.replace(Position(games[0].copy(), limits).episode(), ended="tokens")
    episodes = play_scripted(games, limits=limits)
    for name in chain(*(getattr(of, "MEASURES", ()) for of in config.methods.values())):
        for number, each in enumerate((silent, *episodes)):
            each.measures[name] = number / len(episodes)
    invalid = dataclasses.replace(
        episodes[0].turns[0], action=None, error="Error: no", error_kind="no", rewards=()
    )
    repaired = dataclasses.replace(episodes[0], turns=(invalid, *episodes[0].turns))
    episodes += [repaired, silent]
    every = with_rewards(episodes, config.reward)
    paid = every[: len(games)]
    of_turns = [of for episode in paid if episode.paid for of in episode.paid[1]]
    moves = sum(map(any, of_turns))
    yield (
        f"shapes: a finite number per seat in {len(paid)} games of {config.game.name} between "
        f"scripted players ({', '.join(specs)}), and for {moves} of their turns; also after an "
        "invalid move and in a game without a turn"
    )
    if any(of_turns) and not moves:
        yield "warning: all its turn rewards are 0 in these games"
    _require(every == with_rewards(episodes, config.reward), "it must be deterministic")
    yield "deterministic: the same rewards twice"
    same, trained = [], chosen_seats(config.game, config.rollout) or range(len(kit.ROLES))
    for seat in range(len(kit.ROLES)):
        total = [seat_reward(episode, seat, config=RewardConfig()) for episode in paid]
        mean = sum(total) / len(total)
        yield f"seat {seat}: mean {mean:.3g}, from {min(total):.3g} to {max(total):.3g}"
        by_turn = any(move_rewards(episode, seat) for episode in paid)
        if seat in trained and len(set(total)) == 1 and not by_turn:
            same.append(str(seat))
    if same:
        yield (
            f"warning: seat {', '.join(same)} gets the same reward in all {len(paid)} games; "
            "a group whose rewards are all equal has advantages of zero"
        )


# --- players --------------------------------------------------------------------------------------


def _check_player(player: Callable[..., Any], config: Config) -> Iterator[str]:
    """Plays one game with the moves of scripts: each prompt must equal the transcript so far, the
    loss mask must cover the sampled tokens, and a fork must be independent."""
    kit, options = config.game.kit, config.game.options
    if not kit.SCRIPT_NAMES:
        yield _no_scripts(config)
        return
    scripts = [kit.make_script(each, seed=0) for each in _first_specs(config)]
    rendering = _rendering()
    (instance,) = kit.generate(kit.easy(options), seed=0, num=1)
    players = _players(player, rendering, len(scripts))
    setup = GameSetup(kit.new_game(instance, options), players, "check", 0)
    position = Position(setup, limits_of(config.rollout))
    prompts: list[list[list[int]]] = [[] for _ in scripts]
    num_sampled = [0] * len(scripts)

    async def generate(request: Request) -> Completion:
        seat = setup.game.seat_to_move or 0
        prompts[seat].append(list(request.prompt_ids))
        ids = rendering.action_ids(scripts[seat].act(setup.game.view(seat)))
        num_sampled[seat] += len(ids)
        return Completion(ids, [-0.5] * len(ids), "stop", 0)

    while position.ended is None:
        with suppress(StopIteration):
            position.turn(generate).send(None)
    for each, read, num in zip(players, prompts, num_sampled, strict=True):
        transcript = each.transcript
        _require(each.name == "policy" and transcript is not None, "it must be a PolicyPlayer")
        _require(sum(transcript.mask) == num, "the loss mask must cover exactly the sampled tokens")
        _require(
            read == [transcript.ids[:start] for start, _ in trained_stretches(transcript.mask)],
            "each prompt must equal the transcript before its turn, or log-probs of engine and "
            "trainer differ",
        )
    num = len(position.turns)
    yield f"tokens: the transcript keeps what the engine reads and writes in {num} turns"
    twin = players[0].fork("again")
    _require(
        twin.transcript is not players[0].transcript
        and twin.transcript.ids == players[0].transcript.ids,
        "a fork must have a separate transcript with the same tokens",
    )
    yield "fork: an independent copy"


def _first_specs(config: Config) -> Sequence[str]:
    """The script of each seat, of the game's first scripted players."""
    kit = config.game.kit
    return kit.seated((*kit.BASELINES, *kit.SCRIPT_NAMES)[0])


def _rendering() -> Rendering:
    """A rendering with an untrained byte-level tokenizer."""
    return make_rendering(train_tokenizer([], vocab_size=512, phrases=()))


def _players(player: Callable[..., Any], rendering: Rendering, num: int) -> tuple[Any, ...]:
    """A player for each of `num` seats, with more tokens than any game takes."""
    room = {"max_new_tokens": 100_000, "max_game_tokens": 1_000_000}
    return tuple(player(rendering, seed_names=("check", seat), **room) for seat in range(num))


# --- engines --------------------------------------------------------------------------------------


def _check_engine(engine: Any, config: Config) -> Iterator[str]:
    """Checks the class and its methods; starts no engine."""
    _require_subclass(engine, Engine)
    yield "class: a subclass of Engine"
    missing = sorted(getattr(engine, "__abstractmethods__", ()))
    _require(not missing, f"it must implement every method of Engine, lacks {', '.join(missing)}")
    yield "methods: all of Engine"


# --- methods --------------------------------------------------------------------------------------

HOOKS = ("after_play", "samples", "prepare", "terms", "state", "restore")


def _check_method(kind: Any, config: Config) -> Iterator[str]:
    """Checks the parameters of its hooks, and warns of methods named almost like a hook."""
    _require_subclass(kind, Method)
    used = [hook for hook in HOOKS if getattr(kind, hook) is not getattr(Method, hook)]
    for hook in used:
        own, rule = (list(signature(getattr(of, hook)).parameters) for of in (kind, Method))
        _require(own == rule, f"its {hook} must take ({', '.join(rule)}), got ({', '.join(own)})")
    yield f"hooks: {', '.join(used) or 'none'}"
    options = dataclasses.fields(kind.Options)
    yield f"settings: {', '.join(each.name for each in options) or 'none'}"
    for name in (name for name in vars(kind) if name not in (*HOOKS, *vars(Method))):
        if near := difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.8):
            yield f"warning: {name} is not a hook; nearest is {near[0]}"


# --- observers ------------------------------------------------------------------------------------


def _check_observer(observer: Any, config: Config) -> Iterator[str]:
    """Checks the class and the options that the settings give it."""
    _require_subclass(observer, Observer)
    yield "class: a subclass of Observer"
    for name, options in map(named, config.observers):
        if function_of("observers", name) is observer:
            own_options(observer, options)
    yield "options: all are declared"


# --- plays ----------------------------------------------------------------------------------------


def _check_play(play: Callable[..., Any], config: Config) -> Iterator[str]:
    """Plays games with the policy in all seats, twice. A script of the seat writes the policy's
    moves, in the game that it is called with, which may be a copy."""
    _require(iscoroutinefunction(play), "it must be a coroutine function (`async def`)")
    kit, game = config.game.kit, config.game
    if not kit.SCRIPT_NAMES:
        yield _no_scripts(config)
        return
    specs, rendering = _first_specs(config), _rendering()

    class Scripted(PolicyPlayer):
        """The policy with moves written by a script of its seat."""

        async def move(
            self, game: Game, seat: int, observation: str, generate: Generate
        ) -> Move | None:
            async def answer(request: Request) -> Completion:
                text = kit.make_script(specs[seat], seed=0).act(game.view(seat))
                ids = rendering.action_ids(text)
                return dataclasses.replace(
                    await generate(request), ids=ids, logprobs=[-0.5] * len(ids)
                )

            return await super().move(game, seat, observation, answer)

    async def generate(request: Request) -> Completion:
        return Completion([], [], "stop", 0)

    def played() -> list[Episode]:
        episodes = []
        for instance in kit.generate(kit.easy(game.options), seed=0, num=NUM_GAMES):
            players = _players(Scripted, rendering, len(specs))
            setup = GameSetup(kit.new_game(instance, game.options), players, instance.key, 0)
            position = Position(setup, limits_of(config.rollout))
            episodes.append(asyncio.run(play_of(config)(position, generate)))
        return episodes

    episodes = played()
    yield f"shapes: {len(episodes)} scripted games of {game.name}, each played to its end"
    for transcript in chain(*(episode.transcripts for episode in episodes)):
        _require(transcript is not None, "the seats of the policy must keep their transcripts")
    twice = ([(each.turns, each.ended) for each in one] for one in (episodes, played()))
    _require(len(set(map(str, twice))) == 1, "it must be deterministic, as with named seeds")
    yield "deterministic: the same games twice"


# --- instances ------------------------------------------------------------------------------------


def _check_instances(_: Callable[..., Any], config: Config) -> Iterator[str]:
    """Requests the instances of the first and the last step: all at once, again, one by one."""
    kit, numbers = config.game.kit, range(min(config.rollout.instances, NUM_INSTANCES))
    steps = sorted({0, max(0, config.steps - 1)})
    made = [made_instances(config, step, numbers) for step in steps]
    for instance in chain(*made):
        kit.new_game(instance, config.game.options).prompt(0)
    yield f"shapes: {len(numbers)} instances of {config.game.name}, each of which starts a game"
    again = [made_instances(config, step, numbers) for step in steps]
    single = [[*chain(*(made_instances(config, s, [n]) for n in numbers))] for s in steps]
    _require(
        made == again == single,
        "its instances must depend only on the step and their numbers, got different ones in a "
        "second call, or one by one",
    )
    yield "deterministic: the same instances twice, and one by one"


# --- opponents ------------------------------------------------------------------------------------


def _check_opponents(kind: Any, config: Config) -> Iterator[str]:
    """Draws the run's first steps with each step's pool members, and reports results: in one go,
    again, and with a resume halfway."""
    _require_subclass(kind, Opponents)
    num, pool = max(1, min(config.steps, NUM_STEPS)), config.policy_pool
    members: list[list[int]] = [[0]]
    for step in range(1, num):
        more = step % pool.every == 0
        members.append(joined(members[-1], step, size=pool.size) if more else members[-1])

    def played(opponents: Opponents, steps: range) -> list[list[tuple[str, float]]]:
        draws = []
        for step in steps:
            names = [f"{POOL}:{member}" for member in members[step]]
            known = partner_names(config, names)
            draws.append(checked_shares(opponents.draw(step, names), known))
            opponents.played(step, {name: Result(8, 0.25, 0.75) for name, _ in draws[-1]})
        return draws

    one = kind(config)
    first = played(one, range(num // 2))
    saved = opponents_state(one)
    rest = played(one, range(num // 2, num))
    drawn = dict.fromkeys(name for draw in first + rest for name, _ in draw)
    yield f"shapes: a share for each partner in {num} steps; they draw {', '.join(drawn)}"
    _require(
        played(kind(config), range(num)) == first + rest,
        "draw must be deterministic, as with a named seed, got different shares in the same steps",
    )
    yield "deterministic: the same shares twice"
    resumed = kind(config)
    if saved:
        resumed.restore(saved)
    _require(
        played(resumed, range(num // 2, num)) == rest,
        "state must hold all that draw depends on, got different shares after restore",
    )
    yield f"state: the same shares after a resume; it holds {', '.join(saved) or 'nothing'}"


_CHECKS: dict[str, Callable[..., Iterator[str]]] = {
    "algorithm.loss": _check_loss,
    "algorithm.advantage": _check_advantage,
    "reward.function": _check_reward,
    "rollout.player": _check_player,
    "engine.kind": _check_engine,
    "methods": _check_method,
    "observers": _check_observer,
    "rollout.play": _check_play,
    "data.train": _check_instances,
    "rollout.opponents": _check_opponents,
}
