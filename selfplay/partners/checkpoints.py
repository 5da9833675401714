"""Finds a policy on disk and checks that it was trained on the same game."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dialop.kit import SWITCHES, switch
from dialop.specs import closest, other_form
from selfplay.checkpoint import home_of, policies, step_of
from selfplay.config import Config, GameConfig
from selfplay.config.load import load, read_value
from selfplay.config.own_code import (
    CODE,
    GAME,
    all_changed_originals,
    earlier_code,
    is_own_game,
    other_code,
    played_names,
    same_module,
)
from selfplay.config.player_spec import CHECKPOINT, Spec, parse_shares
from selfplay.errors import SettingsError
from selfplay.model.hub import SETTINGS, check_unchanged, check_weights, is_hub_name, local_folder

# Overrides of a run's settings for an evaluation, whose number of ranks may differ.
ONE_PROCESS = ("parallel.tp=1", "parallel.fsdp=null")


@dataclass(frozen=True, slots=True)
class Source:
    """A policy on disk. `weights` is its Hugging Face folder, `home` the run folder (or the folder
    itself), `settings` the run's config.yaml, or the selfplay.yaml of a published policy (None for
    any other folder), `policy` its name in a run with several."""

    weights: Path
    home: Path
    settings: Path | None
    # The name on the hub or of a .gguf file; `home` is then a cache, not a place for reports.
    hub: str | None = None
    policy: str = ""


def find_source(checkpoint: Path, *, what: str = "RUN") -> Source:
    """The policy named by a command's RUN, or by another argument `what`.

    It can be a run folder (its final export, else the newest checkpoint, else the warm start), a
    part of a run folder, any Hugging Face folder, a .gguf file, or a name on the hub, which is
    downloaded. Raises SettingsError, which names the most similar folder, for a folder that is
    missing or holds no model, and for one with several policies, which it lists.
    """
    sources = find_policies(checkpoint, what=what)
    if len(sources) > 1:
        raise SettingsError(
            f"{what} must name one policy here, got {checkpoint}, which has {_listed(sources)}"
        )
    (source,) = sources.values()
    return source


def seated(
    sources: Mapping[str, Source], roles: Sequence[str], *, what: str, seats: Sequence[int] = ()
) -> dict[int, Source]:
    """The policy that plays each of `seats` (default: all) of a game with these `roles`, of the
    result of `find_policies`: the one of several that learned the seat, the only one in any seat.

    Raises SettingsError for a seat that no policy has learned.
    """
    found = {seat: each for name, each in sources.items() for seat in seats_of(each, roles, name)}
    wanted = seats or range(len(roles))
    if lacking := [f"{seat} ({roles[seat]})" for seat in wanted if seat not in found]:
        raise SettingsError(
            f"{what} must have a policy for seat {', '.join(lacking)}, got {_listed(sources)}"
        )
    return {seat: found[seat] for seat in wanted}


def seats_of(source: Source, roles: Sequence[str], policy: str) -> list[int]:
    """The seats that a policy of several has learned in a game with these `roles`; all seats if
    `policy` is ""."""
    own: Any = roles
    if policy:
        assert source.settings is not None
        own = (_saved(source.settings, "policies")[policy] or {}).get("seats") or [policy]
    return [seat for seat, role in enumerate(roles) if seat in own or role in own]


def warn_of_seats(
    found: Mapping[str, Source], roles: Sequence[str], seats: Iterable[int], *, what: str
) -> None:
    """Warn on the first rank if the result of `find_policies` is one of several policies alone that
    would play some of `seats` of a game with these `roles` without having learned them. It may: a
    policy in the other role shows what it knows of it. `what` is the key or the argument that
    names the policy."""
    source = found.get("")
    if source is None or not source.policy or os.environ.get("RANK", "0") != "0":
        return
    learned = seats_of(source, roles, source.policy)
    named = {seat: f"{seat} ({role})" for seat, role in enumerate(roles)}
    if strange := [named[seat] for seat in sorted({*seats} - {*learned})]:
        print(
            f"warning: {what}: {source.weights} plays seat {', '.join(strange)}, which it has not "
            f"learned; its policy {source.policy} learned seat "
            f"{', '.join(named[seat] for seat in learned)}",
            file=sys.stderr,
            flush=True,
        )


def find_policies(checkpoint: Path, *, what: str = "RUN") -> dict[str, Source]:
    """The policies of a run with several, of its `final/` or of one of its checkpoints, by name;
    the only policy of any other place that `find_source` takes, by the name "".

    Of a run they are the newest weights, never those of the warm start, unless it is named. Raises
    SettingsError as `find_source`, and for a policy that has no weights yet.
    """
    try:
        checkpoint = checkpoint.expanduser()  # a shell leaves it in checkpoint:~/runs/a
    except RuntimeError:
        raise SettingsError(
            f"{what} must be a path whose ~USER has a home on this machine, got {checkpoint}; "
            f"nearest is {checkpoint.absolute()}"
        ) from None
    run = next((home for home in (checkpoint, *checkpoint.parents[:2]) if _names(home)), None)
    places = {}
    for name in _names(run) if run is not None else ():
        inside = (checkpoint / name, home_of(checkpoint, name) / "hf")
        places[name] = [*filter(_is_model, policies(run, name) if run == checkpoint else inside)]
    if run is None or not (run == checkpoint or any(places.values())):
        return {"": _only(checkpoint, what=what)}
    for name in places:
        if not places[name]:
            raise SettingsError(
                f"{what}: {checkpoint} has no weights of the policy {name} yet, neither "
                f"{run / 'final' / name} nor checkpoints/step_N/policies/{name}/hf"
            )
    return {name: _of_run(run, found[0], name, what=what) for name, found in places.items()}


def _listed(sources: Mapping[str, Source]) -> str:
    """The folders of policies, in a message."""
    return ", ".join(str(source.weights) for source in sources.values())


def _names(run: Path) -> list[str]:
    """The names of a run's policies, in the order of its settings; [] of a run with a single policy
    and of other folders."""
    settings = run / "config.yaml"
    return [*(read_value(settings, [], "policies") or ())] if settings.is_file() else []


def _of_run(run: Path, weights: Path, policy: str = "", *, what: str) -> Source:
    """The policy with these weights of a run. Raises SettingsError if they have changed."""
    check_unchanged(weights, what=what)
    return Source(weights, run, _settings(run, weights), policy=policy)


def _only(checkpoint: Path, *, what: str) -> Source:
    """The policy of a place that has one, as `find_source` describes the places. Raises
    SettingsError as it does."""
    name = str(checkpoint)
    if checkpoint.suffix == ".gguf" and checkpoint.is_file():
        return Source(local_folder(name, what=what), checkpoint.parent, None, hub=checkpoint.stem)
    if not checkpoint.is_dir() and is_hub_name(name):
        downloaded = local_folder(name, what=what)
        check_weights(downloaded, what=what)
        return Source(downloaded, downloaded, _published(downloaded), hub=name)
    if not checkpoint.is_dir():
        absent = "" if checkpoint.exists() else ", which does not exist here"
        home = next(folder for folder in checkpoint.parents if folder.is_dir())
        near = (
            nearest_beside(each / checkpoint.name, Path.is_dir) for each in (home, home / "final")
        )
        raise SettingsError(
            f"{what} must be a run folder, a Hugging Face folder or name, or a .gguf file, got "
            f"{checkpoint}{absent}{next(filter(None, near), '') or _runs_in(home)}"
        )
    if (checkpoint / "config.yaml").exists():
        exports = [*policies(checkpoint), checkpoint / "warm_start"]
        weights = next((folder for folder in exports if _is_model(folder)), None)
        if weights is None:
            raise SettingsError(
                f"{what}: the run {checkpoint} has no final/, no checkpoints/step_N/hf and "
                "no warm_start/ yet"
            )
        return _of_run(checkpoint, weights, what=what)
    weights = checkpoint / "hf" if _is_model(checkpoint / "hf") else checkpoint
    if not (weights / "config.json").exists() and not _is_model(weights):
        raise SettingsError(
            f"{what}: {checkpoint} holds neither a run (config.yaml) nor a Hugging Face "
            "model (config.json and *.safetensors)"
        )
    check_weights(weights, what=what)
    if (settings := _published(weights)) is not None:
        return Source(weights, checkpoint, settings)
    for run in checkpoint.parents[:5]:
        if (run / "config.yaml").exists():
            parts, names = weights.relative_to(run).parts, _names(run)
            policy = next((part for part in parts[::-1] if part in names), "")
            return Source(weights, run, _settings(run, weights), policy=policy)
    return Source(weights, checkpoint, None)


def _settings(run: Path, weights: Path) -> Path:
    """The settings of a run saved with the code that trained these weights of the run."""
    parts, step = weights.relative_to(run).parts, steps_of(run, weights)
    earlier = earlier_code(run / CODE)
    steps = [each for each in earlier if "warm_start" in parts or 0 <= step <= each]
    code = earlier[min(steps)] if steps else run
    return code / "config.yaml"


def steps_of(run: Path, weights: Path) -> int:
    """The number of self-play steps that trained these weights of the run: a checkpoint's folder
    has it in its name, a final export in a file; -1 if neither has it."""
    parts = weights.relative_to(run).parts
    saved = [part for part in parts if part[:5] == "step_" and part[5:].isdecimal()]
    return int(saved[-1][5:]) if saved else step_of(weights)


def _published(folder: Path) -> Path | None:
    """The settings file of a folder written by `selfplay.apps.publish`, which may have moved."""
    settings = folder / SETTINGS
    return settings if settings.is_file() else None


def check_same_game(
    source: Source,
    game: GameConfig,
    *,
    what: str,
    played: Path | str,
    overrides: Sequence[str] = (),
) -> None:
    """Raise SettingsError if the policy was trained on another game than `game`, on other texts of
    it, or with private reasoning if `game` has none.

    `played` is where `game` was read from. Overrides of the form game.KEY=value apply to both
    sides. Weights outside a run are not checked. Other keys of the run's settings are not read,
    because they may be older than this code.
    """
    if source.settings is None:
        return
    saved = _saved(source.settings, "game")
    options = saved.get("options") or {}
    words = [("name", saved["name"])] if "name" in saved else []
    words += [(f"options.{name}", options[name]) for name in SWITCHES if name in options]
    given = [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in words]
    given += [word.removeprefix("game.") for word in overrides if word.startswith("game.")]
    if (name := str(saved.get("name"))) != game.name and same_module(name, game.name):
        given += [f"name={json.dumps(game.name)}"]  # the run's copy, or one at another path
    trained_on = load(GameConfig, None, [word for word in given if word.startswith("name=")])
    if trained_on.name == game.name:  # else it may lack these options
        trained_on = load(GameConfig, None, given)
        warn_of_other_code([(GAME, game.name)] * is_own_game(game.name), source)
    for key in ("name", *(f"options.{name}" for name in SWITCHES)):
        trained, wanted = (_value(each, key) for each in (trained_on, game))
        # A policy without private reasoning can play in either game.
        either = key == "options.private_reasoning" and trained == "false"
        if trained != wanted and not either:
            raise SettingsError(
                f"{what}: game.{key} must be the same for all players, got {trained} in "
                f"{source.home} and {wanted} in {played}"
            )


def print_code(config: Config, source: Source | None) -> None:
    """Print the custom code that plays, and how the originals of a run's copies have changed; warn
    if the policy was trained with other code."""
    names = played_names(config)
    if names:
        print(
            f"code: {', '.join(value for _, value in names)}",
            *all_changed_originals(names),
            sep="\n",
        )
    if source is not None:
        warn_of_other_code(names, source)


def warn_of_other_code(names: Sequence[tuple[str, str]], source: Source) -> None:
    """Warn on the first rank if the custom code of these keys, which plays here, differs from the
    code that the policy was trained with."""
    other = other_code(names, source.settings) if names else []
    if other and os.environ.get("RANK", "0") == "0":
        print(
            f"warning: {', '.join(value for _, value in names)} plays here, not the code that "
            f"{source.home} was trained with: {', '.join(other)} differs",
            file=sys.stderr,
            flush=True,
        )


def _value(game: GameConfig, key: str) -> str:
    """A game's name or one of its switches, as text."""
    name = key.removeprefix("options.")
    if key == "name":
        return game.name
    return str(switch(game.options, name, default=name == "messages")).lower()


def model_words(source: Source, home: str = "") -> tuple[str, str]:
    """Overrides that set this policy as the model of any settings, or of the policy `home`."""
    path = json.dumps(str(source.weights), ensure_ascii=False)
    return f"{home}model.path={path}", f"{home}model.scratch=null"


def template_of(source: Source) -> dict[str, Any] | None:
    """The chat template arguments that the policy was trained with; None if its settings are
    unknown."""
    if source.settings is None:
        return None
    shared = _saved(source.settings, "model").get("chat_template")
    own = read_value(source.settings, [], f"policies.{source.policy}.model.chat_template")
    return shared if own is None else own and {**(shared or {}), **own}


def _saved(settings: Path, name: str) -> dict[str, Any]:
    """A section of a policy's saved settings."""
    section = read_value(settings, [], name)
    if not isinstance(section, dict):
        raise SettingsError(
            f"{settings} must hold the settings of a run, got no section {name}; restore the file"
        )
    return section


def part_of_run(source: Source, *, cast: bool = False) -> str | None:
    """The part of the run that holds the weights, such as step_000020, warm_start, or
    step_000020/user of several policies; None for final/ and for weights outside a run. Of a `cast`
    the policy's name is left out."""
    folder = source.weights.parent if source.weights.name == "hf" else source.weights
    if source.policy:
        parts = folder.relative_to(source.home).parts
        saved = [part for part in parts if part[:5] == "step_"]
        return "/".join(saved + [source.policy] * (not cast)) or None
    return None if source.weights == source.home or folder.name == "final" else folder.name


def _is_model(folder: Path) -> bool:
    has_config = any((folder / name).exists() for name in ("config.json", "adapter_config.json"))
    return has_config and any(folder.glob("*.safetensors"))


def _runs_in(folder: Path) -> str:
    """The end of an error message: the first runs in a folder, or the policies that a run's folder
    of several holds; "" without any."""
    found = {path.parent for path in folder.glob("*/config.yaml")}
    found = {run for run in found if not (run / "evaluation.json").is_file()}
    if any(map(_names, folder.parents[:4])):
        found |= {each for each in folder.glob("*") if _is_model(each) or _is_model(each / "hf")}
    there = sorted(map(str, found))
    return f"; there are {', '.join(there[:4])}" if there else ""


def nearest_beside(path: Path, wanted: Callable[[Path], bool], *words: str) -> str:
    """The end of an error message: the entry of `path`'s folder, or the word, with the most similar
    name. Only entries for which `wanted` is true count."""
    home = path.parent
    valid = {p.name: str(p) for p in sorted(home.iterdir()) if wanted(p)} if home.is_dir() else {}
    near = closest(path.name, {**valid, **dict(zip(words, words, strict=True))})
    if not near:
        return ""
    return f"; nearest is {valid.get(near, near)}{other_form(path.name, near)}"


def check_partners(
    partners: Sequence[str], game: GameConfig, *, out: str, what: str, seats: Sequence[int]
) -> None:
    """Raise SettingsError, before anything starts, for a checkpoint that is missing or was trained
    on another game. The run's own warm start may be missing, because the run creates it. The key
    `what` names the partners, who play `seats`."""
    for spec, _ in parse_shares(partners):
        if Path(spec.argument) != Path(out) / "warm_start":
            check_spec(spec, game, out=out, what=what, seats=seats)


def check_spec(spec: Spec, game: GameConfig, *, out: str, what: str, seats: Sequence[int]) -> None:
    """Raise SettingsError, naming the key `what`, for a checkpoint that is missing or was trained
    on another game; warn of one that has not learned a seat of `seats`."""
    if spec.kind == CHECKPOINT:
        what = f"{what}: {spec.text}"
        found = find_policies(Path(spec.argument), what=what)
        for source in found.values():
            check_same_game(source, game, what=what, played=out)
        warn_of_seats(found, game.kit.ROLES, seats, what=what)
