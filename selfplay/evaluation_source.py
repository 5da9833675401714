"""What an evaluation is asked about: a policy on disk, its settings, the games to play.

Every mistake in the asking is a ValueError that names the argument, the rule, the value and the
nearest valid choice. Loads no weights.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from dialop.starts import Entries, checked_entries
from dialop.store import read_records
from selfplay.checkpoint import policies
from selfplay.config import Config, GameConfig, load_config
from selfplay.config.play import MAX_GAMES
from selfplay.data import GENERATED, HELD_OUT, begun, kept_back
from selfplay.games import kit_of
from selfplay.hub import check_weights, is_hub_name, local_folder
from selfplay.partner_specs import CHECKPOINT, PAST, SELF, Spec, parse_shares
from selfplay.settings import load
from selfplay.tables import read_spec

# What a run needed to train and an evaluation does not: a fixed number of ranks.
ALONE = ("parallel.tp=1", "parallel.fsdp=null")


@dataclass(frozen=True, slots=True)
class Source:
    """Where the policy lies: its Hugging Face folder, the folder reports go to, the run's settings
    (None outside a run)."""

    weights: Path
    home: Path
    settings: Path | None
    hub: str | None = None  # the hub's name of fetched weights, whose home is no place for reports


@dataclass(frozen=True, slots=True)
class Games:
    """The instances to play; `records` are the people's games on them, empty where there are
    none."""

    instances: Sequence[Any]
    records: Sequence[dict[str, Any]]


def find_source(checkpoint: Path, *, what: str = "--checkpoint") -> Source:
    """What --checkpoint or another argument `what` names: a run folder (its newest weights, in the
    final export or a checkpoint, else its warm start), a part of one, or any Hugging Face folder.

    A hub's name is fetched. Raises ValueError for a folder that is missing or holds no model; names
    the nearest that does.
    """
    name = str(checkpoint)
    if not checkpoint.is_dir() and is_hub_name(name):
        fetched = local_folder(name, what=what)
        check_weights(fetched, what=what)
        return Source(fetched, fetched, None, hub=name)
    if not checkpoint.is_dir():
        raise ValueError(
            f"{what} must be a run folder or a Hugging Face folder or name, got {checkpoint}"
            + nearest(checkpoint.name, _beside(checkpoint, lambda path: path.is_dir()))
        )
    if (checkpoint / "config.yaml").exists():
        parts = [*policies(checkpoint), checkpoint / "warm_start"]
        weights = next((part for part in parts if _is_model(part)), None)
        if weights is None:
            raise ValueError(
                f"{what}: the run {checkpoint} has no final/, no checkpoints/step_N/hf and "
                "no warm_start/ yet"
            )
        return Source(weights, checkpoint, checkpoint / "config.yaml")
    weights = checkpoint / "hf" if _is_model(checkpoint / "hf") else checkpoint
    if not (weights / "config.json").exists() and not _is_model(weights):
        raise ValueError(
            f"{what}: {checkpoint} holds neither a run (config.yaml) nor a Hugging Face "
            "model (config.json and *.safetensors)"
        )
    check_weights(weights, what=what)
    for run in (checkpoint.parent, checkpoint.parent.parent, checkpoint.parent.parent.parent):
        if (run / "config.yaml").exists():
            return Source(weights, run, run / "config.yaml")
    return Source(weights, checkpoint, None)


def find_config(source: Source, given: Path | None, overrides: Sequence[str]) -> Config:
    """The run's settings or those of --config, with the policy's folder as their model.

    Raises:
        SettingsError, ValueError: settings that cannot be used, or none at all.
    """
    path = given or source.settings
    if path is None:
        raise ValueError(
            f"--config is needed: {source.weights} lies in no run, so nothing says which game to "
            "play; give a file such as configs/tiny.yaml"
        )
    policy = (f"model.path={json.dumps(str(source.weights))}", "model.scratch=null")
    return load_config(path, [*ALONE, *overrides, *policy])


def check_same_game(
    source: Source,
    config: Config,
    *,
    what: str,
    played: Path | str,
    overrides: Sequence[str] = (),
) -> None:
    """Raise ValueError where the policy's run was of another game than `config`'s, told it in other
    texts, or let it write what is refused here.

    `played` is where `config` was read from; what `overrides` say as game.KEY=value is asked of all
    who meet. Nothing is known of weights outside a run. Of a run's settings only these keys are
    read: others may be older than this code.
    """
    if source.settings is None:
        return
    saved = yaml.safe_load(source.settings.read_text(encoding="utf-8")).get("game", {})
    keys = ("name", "brief", "messages", "private_reasoning")
    words = [f"{key}={json.dumps(saved[key])}" for key in keys if key in saved]
    asked = [word.removeprefix("game.") for word in overrides if word.startswith("game.")]
    own, here = load(GameConfig, None, [*words, *asked]), config.game
    rules = dict.fromkeys(("name", "brief", "messages"), "the same for all who meet")
    if own.private_reasoning:  # who never wrote any can play where it is allowed
        rules["private_reasoning"] = "true where one was trained with it"
    for key, rule in rules.items():
        values = [str(getattr(game, key)).lower() for game in (own, here)]
        if values[0] != values[1]:
            raise ValueError(
                f"{what}: game.{key} must be {rule}, got {values[0]} in {source.home} and "
                f"{values[1]} in {played}"
            )


def find_games(
    games: str, num: int | None, config: Config, *, start: Entries | None = None
) -> Games:
    """The first `num` instances of the held-out stream or of a file (None: as many as a run plays
    at its end, or the whole file), begun as people began them where a `start` is given.

    Raises:
        ValueError: for a missing or empty file or more games than it holds.
        OSError: for a file that cannot be read.
    """
    if num is not None and not 1 <= num <= MAX_GAMES:
        raise ValueError(f"--num must be at least 1 and at most {MAX_GAMES}, got {num}")
    if games == GENERATED and start:
        raise ValueError("--start needs --games FILE.jsonl with recorded games, got generated")
    if games == GENERATED:
        num = num or config.eval.final_games
        return Games(kept_back(config, HELD_OUT, num=num), [])
    path = Path(games)
    if not path.is_file():
        files = _beside(path, lambda other: other.suffix in (".parquet", ".jsonl"))
        raise ValueError(
            f"--games must be '{GENERATED}' or a .parquet or .jsonl file, got {games}"
            + nearest(path.name, [GENERATED, *files])
        )
    try:
        instances = kit_of(config.game).read(path, config.game)
    except (OSError, ValueError) as error:
        raise ValueError(f"--games: {error}") from None
    if not instances:
        raise ValueError(f"--games: {path} holds no games")
    if num is not None and num > len(instances):
        raise ValueError(f"--num must be at most {len(instances)}, the games in {path}, got {num}")
    instances = instances[:num]
    played = path.suffix == ".jsonl" and kit_of(config.game).PLAYED_BY_PEOPLE
    records = islice(read_records(path), len(instances)) if played else ()
    if start:
        recorded = kit_of(config.game).read_recorded(path)[: len(instances)]
        instances = [begun(game, start, "evaluation", i) for i, game in enumerate(recorded)]
    return Games(instances, list(records))


def find_start(text: str) -> Entries:
    """What --start asks for. Raises ValueError for what is no start."""
    try:
        value: object = float(text) if "." in text else int(text)
    except ValueError:
        value = text
    try:
        return checked_entries(value)
    except ValueError as error:
        raise ValueError(f"--start: {error}") from None


def find_partner(
    partner: str, config: Config, *, played: Path | str, overrides: Sequence[str]
) -> Spec:
    """What --partner names. Raises ValueError for one that cannot be asked for here."""
    spec = read_spec(partner, config, what="--partner")
    if spec.kind == CHECKPOINT:
        what = f"--partner {spec.text}"
        found = find_source(Path(spec.argument), what=what)
        check_same_game(found, config, what=what, played=played, overrides=overrides)
    if spec.kind == PAST:
        raise ValueError(
            "--partner must name one policy, got past; nearest is checkpoint:RUN/past/step_000020"
        )
    return spec


def usual_partner(config: Config) -> str:
    """Whom a policy is evaluated with unless asked otherwise: itself, or in a game of unequal seats
    the first partner of its training."""
    if kit_of(config.game).LEARNER_SEAT is None:
        return SELF
    return parse_shares(config.rollout.partners)[0][0].text


def report_folder(source: Source, games: str, partner: str) -> Path:
    """RUN/eval_NAME: the policy's part of the run unless it is the final one, the games, the
    partner. Raises ValueError for weights from the hub."""
    if source.hub is not None:
        raise ValueError(f"--out is needed: {source.hub} lies on the hub, in no folder to write to")
    part = source.weights.parent.name if source.weights.name == "hf" else source.weights.name
    inside = source.weights != source.home and part != "final"
    beside = [re.sub(r"[^\w.-]+", "_", partner)] * (partner != "self")
    words = [part] * inside + [Path(games).stem] + beside
    return source.home / "_".join(["eval", *words])


def _is_model(folder: Path) -> bool:
    described = any((folder / name).exists() for name in ("config.json", "adapter_config.json"))
    return described and any(folder.glob("*.safetensors"))


def described_in(weights: Path) -> Path:
    """The folder of the model's config: adapters stand on another folder's weights."""
    adapters = weights / "adapter_config.json"
    if not adapters.exists():
        return weights
    return Path(json.loads(adapters.read_text())["base_model_name_or_path"])


def _beside(path: Path, wanted: Callable[[Path], bool]) -> list[str]:
    """Names of the wanted things in the folder where `path` should be."""
    home = path.parent
    return sorted(p.name for p in home.iterdir() if wanted(p)) if home.is_dir() else []


def nearest(got: str, valid: Sequence[str]) -> str:
    """The end of an error message: the valid word most like the one that was given, if any is."""
    near = difflib.get_close_matches(got, valid, n=1)
    return f"; nearest is {near[0]}" if near else ""
