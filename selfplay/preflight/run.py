"""Checks of the settings against this machine, before a run or an evaluation creates anything.

Every mistake raises a SettingsError or a ValueError: one line with the key, the rule and the value.
Loads no weights and writes no files.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path

import torch
from jinja2.exceptions import TemplateError
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from dialop.game import wrong_state
from dialop.kit import switch
from dialop.shown import error_line
from selfplay.chat.rendering import Rendering, make_rendering
from selfplay.chat.tokenizer import load_tokenizer, train_tokenizer
from selfplay.config import Config, EngineConfig, GameConfig, ModelConfig
from selfplay.config.features import section_class
from selfplay.config.monitors import BACK, DEFAULT_MONITORS, parse_rule
from selfplay.config.own_code import is_own_game, own_code, own_names
from selfplay.config.player_spec import SELF, parse_shares
from selfplay.config.plugins import PLUGINS, function_of, named
from selfplay.data.chats import check_shown, read_chats
from selfplay.data.instances import TOKENIZER, check_files, generated, imitated_people, trained_on
from selfplay.data.stream import made_instances, read_train_file
from selfplay.distributed import check_switches
from selfplay.distributed.tensor_parallel import why_undivided
from selfplay.engines.kinds import engine_kind
from selfplay.errors import SettingsError
from selfplay.evaluation.held_out import check_fixed_partners
from selfplay.learner.method import check_methods
from selfplay.learner.rescore import MISMATCH_METRICS
from selfplay.metrics.observers import check_observers
from selfplay.metrics.records import OBSERVED
from selfplay.metrics.run_folder import FILES, FOLDERS, check_names, holds_run
from selfplay.model.hub import check_weights, described_in, local_folder
from selfplay.model.policy import end_ids, scratch_config
from selfplay.model.stored import check_tensors
from selfplay.partners.checkpoints import check_partners, find_policies
from selfplay.partners.endpoint import check_endpoint
from selfplay.preflight.functions import check_functions
from selfplay.preflight.seats import check_players
from selfplay.rollout.driver import play_scripted
from selfplay.rollout.episode import Episode, limits_of
from selfplay.rollout.seat_rules import chosen_seats, partner_seats
from selfplay.rollout.seating import scripted_games
from selfplay.warm_start.teachers import blind_teachers, check_teachers

AT_START = {
    "torch.set_default_dtype": torch.float32,
    "torch.set_default_device": torch.device("cpu"),
    "torch.set_grad_enabled": True,
}
# Metrics that each policy has of its own update, in every run.
OF_UPDATE = (
    *("policy_loss", "entropy", "ratio_mean", "clip_share", "kl_reference", "grad_norm", "lr"),
    *MISMATCH_METRICS,
)
_LONG_GAME = 400  # turns after which a scripted game is stopped
_MOST_MOVES = 2000  # moves whose tokens are counted


def check_run(config: Config, *, here: bool = True) -> Rendering:
    """Raise SettingsError if `train.py` cannot use this machine, the models or the run folder.
    Returns the first policy's rendering.

    Without `here` the run is for another machine: the folder, the device, the engine and W&B's key
    are not checked.
    """
    if config.engine.device_map:
        raise SettingsError(
            f"engine.device_map must be null in training, got {config.engine.device_map}; "
            "parallel.fsdp and parallel.tp split a model that trains"
        )
    if here:
        check_folder(Path(config.out), what="out")
        check_names(Path(config.out))
    policies = [config.of_policy(name) for name in config.policy_names]
    for number, name in enumerate(config.policy_names):
        with section_class("policies").naming(config, name):
            check_functions(policies[number], policies[0] if number else None)
    _check_options(config, policies)
    own_code(own_names(config))
    check_switches(AT_START)  # a user's file may change them when it is imported
    check_players(config)
    ready = getattr(function_of("rollout.player", config.rollout.player), "ready", None)
    if here and ready is not None:
        ready()
    if config.data.train_file:
        read_train_file(config)
    check_files(config.game, config.data)  # before a model is fetched
    check_fixed_partners(config.eval, config.game, config.rollout, out=config.out)
    check_observers(config, here=here)
    check_monitors(config)
    check_going_back(config)
    check_state(config)
    renderings = []
    for name, each in zip(config.policy_names, policies, strict=True):
        with section_class("policies").naming(config, name):
            check_methods(each, ask=False, of_run=config if name else None)
            own = [seat for seat, owner in enumerate(config.policy_of_seat) if owner == name]
            what = f"policies.{name}.partners" if name else "rollout.partners"
            seats = own if name else partner_seats(config.game, config.rollout)
            check_partners(
                each.rollout.partners, config.game, out=config.out, what=what, seats=seats
            )
            renderings.append(_check_policy(each, here=here))
    return renderings[0]


def _check_options(config: Config, policies: Sequence[Config]) -> None:
    """Raise SettingsError for `algorithm.options` where no custom code may read them: a loss, an
    advantage, or a method, which gets all settings.

    The run's options count for its policies, which may have a loss of their own.
    """
    own = {name for each in policies for name in each.methods} - {*PLUGINS["methods"].built_in}
    for key in ("loss", "advantage"):
        own |= {getattr(each.algorithm, key) for each in policies}
        own -= {*PLUGINS[f"algorithm.{key}"].built_in}
    if config.algorithm.options and not own:
        raise SettingsError(
            "algorithm.options must be {} with a built-in algorithm.loss and algorithm.advantage, "
            f"which read no options, got {', '.join(config.algorithm.options)}"
        )


def _check_policy(config: Config, *, here: bool) -> Rendering:
    """The part of `check_run` that each policy has of its own; returns its rendering."""
    check_teachers(config)
    engine_kind(config.engine.kind).check(config.engine, here=False)
    if here:
        check_machine(config.device, config.engine)
    for spec, _ in parse_shares(config.rollout.partners):
        check_endpoint(spec, config.endpoint, what="rollout.partners")
    warm = config.warm_start
    if warm.recorded is not None:
        imitated_people(config.game, config.data, recorded=warm.recorded, share=warm.recorded_share)
    chats = read_chats(warm.chats, warm.chat_roles) if warm.chats is not None else ()
    rendering = read_rendering(
        config.model, config.game, seed=config.seed, adapters=False, weights=here
    )
    check_shown(chats, rendering.shows)
    if rendering.rewritten and getattr(config.engine, "sessions", None) is True:
        raise SettingsError(
            "engine.sessions must be false with this chat template, because no prompt continues "
            f"the last one, got true: {rendering.rewritten}"
        )
    undivided = why_undivided(described_model(config.model), config.parallel.tp)
    if undivided is not None:
        raise SettingsError(undivided)
    return rendering


def check_monitors(config: Config) -> None:
    """Raise SettingsError for a monitor whose metric no step can have: one of the update under a
    name without, or with another, policy; of evaluations in a run that makes none; or of observers
    in a run whose observers give no numbers. The default rules are for every run."""
    built_in = PLUGINS["observers"].built_in
    gives = [
        name not in built_in or getattr(function_of("observers", name), "measures", False)
        for name, _ in map(named, config.observers)
    ]
    known = [f"/{name}" if name else "" for name in config.policy_names]
    for rule in map(parse_rule, config.monitors):
        for metric in filter(None, (rule.metric, rule.rising)):
            of, slash, policy = metric.partition("/")
            must = ""
            if of in OF_UPDATE and "*" not in policy and slash + policy not in known:
                must = " or ".join(f"{of}{each}" for each in known)
            elif metric.startswith("eval_") and not config.eval.every:
                must = "left out where eval.every is 0"
            elif metric.startswith(OBSERVED) and not any(gives):
                must = f"left out where no observer gives numbers, as {[*config.observers]}"
            if must and rule.text not in DEFAULT_MONITORS:
                raise SettingsError(f"monitors: {metric} must be {must}, got {rule.text!r}")


def check_going_back(config: Config) -> None:
    """Raise SettingsError for a monitor that goes back by a policy's score with itself in a
    zero-sum game, where that is 0.5 whatever it plays."""
    kinds = {spec.kind for spec, _ in parse_shares(config.rollout.partners)}
    alone = chosen_seats(config.game, config.rollout) is None
    own = ["score/self", *(["eval_score"] if alone else []), *(["score"] if SELF in kinds else [])]
    for rule in map(parse_rule, config.monitors):
        by_own = rule.action == BACK and any(fnmatchcase(name, rule.metric) for name in own)
        if by_own and is_zero_sum(config):
            raise SettingsError(
                "monitors: in a zero-sum game best must be by observed/exploitability or by a "
                "score with a fixed opponent, such as eval_score/PARTNER, because a policy's score "
                f"with itself is 0.5 whatever it plays, got {rule.text!r}"
            )


def is_zero_sum(config: Config) -> bool:
    """Whether the scores of the seats always have the mean 0.5, in games of scripted players; in a
    game without scripted players at its start."""
    game = config.game
    ends = [each.outcome for each in baseline_games(config, num=4)]
    if not ends:
        (instance,) = made_instances(config, 0, [0])
        ends = [game.kit.new_game(instance, game.options).outcome()]
    half = len(game.kit.ROLES) / 2
    return all(end.seat_scores and abs(sum(end.seat_scores) - half) < 1e-9 for end in ends)


def check_state(config: Config) -> None:
    """Raise SettingsError if the state of a generated game, at its start or after scripted moves,
    cannot be written into logs."""
    if config.data.train_file:
        return
    game, (instance,) = config.game, made_instances(config, 0, [0])
    games = [game.kit.new_game(instance, game.options)]
    if is_own_game(game.name):
        games += [each.game for each in baseline_games(config, num=1) if each.game is not None]
    for each in games:
        if wrong := wrong_state(each.state()):
            raise SettingsError(f"game.name {game.name}: state() {wrong}")


def start_warnings(config: Config, rendering: Rendering) -> list[str]:
    """Warnings if the limits of `rollout` cut off games or moves of scripted players, if held-out
    files contain training instances, or if no teacher looks at its private view."""
    found = [*cut_off(config, baseline_games(config), rendering)]
    found += trained_on(config.game, config.data)
    if blind := blind_teachers(config):
        found.append(
            f"warm_start.teachers {', '.join(blind)}: no move depends on what only its seat sees, "
            "so self-play starts from a policy that ignores it and may stay so "
            "(docs/evaluation.md#the-view-effect)"
        )
    return found


def baseline_games(config: Config, *, num: int = 16) -> list[Episode]:
    """`num` games of each scripted player that the policy is compared with, played to the game's
    end. Takes a second or two."""
    kit, game = config.game.kit, config.game
    instances = kit.generate(kit.easy(game.options), seed=0, num=num) if kit.BASELINES else []
    limits = replace(limits_of(config.rollout), max_turns=_LONG_GAME)
    return [
        episode
        for spec in kit.BASELINES
        for episode in play_scripted(scripted_games(instances, spec=spec, game=game), limits=limits)
    ]


def cut_off(config: Config, episodes: Sequence[Episode], rendering: Rendering) -> list[str]:
    """A warning for each limit of `rollout` that more than 5 % of these games, or of their moves,
    exceed."""
    games = [[turn.text for turn in each.turns if turn.error is None] for each in episodes]
    texts = [*chain(*games)][:_MOST_MOVES]
    sizes = {
        "max_turns": ("games", list(map(len, games)), "turns"),
        "max_new_tokens": ("moves", [len(rendering.action_ids(text)) for text in texts], "tokens"),
    }
    found = []
    for key, (what, each, unit) in sizes.items():
        limit = getattr(config.rollout, key)
        num_cut = sum(size > limit for size in each)
        if num_cut > 0.05 * len(each):
            found.append(
                f"rollout.{key} {limit} is too low for {num_cut} of {len(each)} {what} of "
                f"{', '.join(config.game.kit.BASELINES)}; the longest takes {max(each)} {unit}"
            )
    return found


def check_machine(device: str, engine: EngineConfig) -> None:
    """Raise SettingsError for a device or an engine that this machine lacks."""
    if device == "cuda" and not torch.cuda.is_available():
        raise SettingsError(
            f"device must be cpu or auto where torch {torch.__version__} finds no GPU, got cuda; "
            "if this machine has a GPU, install torch with CUDA (requirements/gpu.txt)"
        )
    engine_kind(engine.kind).check(engine, here=True)


def check_folder(folder: Path, *, what: str) -> None:
    """Raise SettingsError for a path that is not a writable folder, for the home folder, a folder
    above it, the current folder unless it holds a run, and as `check_apart`."""
    whole = Path(os.path.realpath(folder))
    home = Path(os.path.realpath(os.environ.get("HOME") or "/"))
    if whole in (home, *home.parents) or (whole == Path.cwd() and not holds_run(whole)):
        raise SettingsError(f"{what} must name a separate folder, got '{folder}'")
    check_apart(folder, what=what)
    check_writable(folder, what=what)


def check_apart(path: Path, *, what: str) -> None:
    """Raise SettingsError for a path that is, or is inside, a file or a folder that a run writes in
    its own folder."""
    whole = Path(os.path.realpath(path))
    for each in (whole, *whole.parents):
        if each.name in (*FILES, *FOLDERS) and holds_run(each.parent):
            raise SettingsError(
                f"{what} must be apart from {each}, which the run there writes, got {path}; use "
                "another name"
            )


def check_writable(folder: Path, *, what: str) -> None:
    """Raise SettingsError for a path that is not a writable folder, or that would create a folder
    with blanks around its name."""
    try:
        for path in (folder, *folder.parents):
            if path.exists():
                continue
            if path.name != path.name.strip():
                raise SettingsError(f"{what} must not have blanks around a name, got '{folder}'")
            if path.is_symlink():
                path.stat()  # the error names the broken link
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise SettingsError(f"{what} must be a writable folder, got {folder}: {error}") from None


def read_rendering(
    model: ModelConfig,
    game: GameConfig,
    *,
    seed: int,
    adapters: bool = True,
    weights: bool = True,
) -> Rendering:
    """The policy's rendering, from its folder's tokenizer. A scratch model has no trained tokenizer
    yet, so an untrained one of the same size is used. Without `weights` a hub model's weights are
    neither downloaded nor checked.

    Raises SettingsError for a model, tokenizer or template that cannot be used and, if `adapters`
    is False, for a folder of adapters.
    """
    tokenizer, ends = _tokenizer(model, game, seed=seed, adapters=adapters, weights=weights)
    try:
        rendering = make_rendering(tokenizer, template_kwargs=model.chat_template, ends=ends)
    except SettingsError:
        raise
    except (ValueError, TypeError, TemplateError) as error:
        raise SettingsError(
            f"the chat template of {model.path or 'model.scratch'} with "
            f"model.chat_template {model.chat_template} cannot be used: {error}"
        ) from error
    if rendering.rewritten and not switch(game.options, "private_reasoning"):
        raise SettingsError(
            f"game.options.private_reasoning must be true with this chat template; otherwise moves "
            f"would begin with a thought: {rendering.rewritten}"
        )
    return rendering


def described_model(model: ModelConfig, num_tokens: int = 0) -> PretrainedConfig:
    """The config of the model to train, after `read_rendering` has fetched its folder. A scratch
    model's vocabulary has at least `num_tokens` tokens."""
    if model.path is None:
        assert model.scratch is not None
        num = max(model.scratch.vocab_size, num_tokens)
        return scratch_config(model.scratch, vocab_size=num)
    return AutoConfig.from_pretrained(described_in(local_folder(model.path, weights=False)))


def _refuse_run(folder: Path) -> None:
    """Raise SettingsError for a run folder, or a part of one with several policies; the message
    names its newest weights."""
    is_run, is_part = (folder / "config.yaml").exists(), folder.name in ("final", "final_adapters")
    if (folder / "config.json").exists() or not (is_run or is_part):
        return
    found = find_policies(folder, what="model.path")
    if is_run or len(found) > 1:
        listed = " or ".join(str(source.weights) for source in found.values())
        raise SettingsError(
            f"model.path must be a model's folder, got the run folder {folder}; nearest is {listed}"
        )


def _tokenizer(
    model: ModelConfig, game: GameConfig, *, seed: int, adapters: bool, weights: bool
) -> tuple[PreTrainedTokenizerBase, tuple[int, ...]]:
    """The tokenizer, and the ids that end a text according to the model's configs."""
    if model.path is None:
        scratch = model.scratch
        assert scratch is not None
        instances = generated(TOKENIZER, game=game, seed=seed, start=0, num=1)
        phrases = game.kit.phrases(instances, game.options, split_lines=scratch.split_lines)
        return train_tokenizer([], vocab_size=scratch.vocab_size, phrases=phrases), ()
    folder = local_folder(model.path, weights=weights)
    _refuse_run(folder)
    if weights or folder == Path(model.path):
        check_weights(folder, what="model.path")
    if (folder / "adapter_config.json").exists() and not adapters:
        raise SettingsError(
            f"model.path must be a full model to train, got adapters: {folder}; use final/ of "
            "their run, which has them merged, or a folder of peft's merge_and_unload"
        )
    described = folder
    try:
        described = described_in(folder)
        if any(described.glob("*.safetensors")):
            check_tensors(described, warns=False)
        return load_tokenizer(folder), end_ids(folder)
    except SettingsError:
        raise
    except Exception as error:
        base = "" if described == folder else f", or {described}, the base of its adapters,"
        raise SettingsError(
            f"model.path: {folder}{base} cannot be read: {error_line(error)}"
        ) from error
