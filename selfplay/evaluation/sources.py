"""What an evaluation is asked about: a policy on disk, its settings, the games to play.

Every mistake in the asking is a ValueError that names the argument, the rule, the value and the
nearest valid choice. Loads no weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from dialop.matching.starts import Entries, checked_entries
from dialop.rows import read_records
from selfplay.config import Config, GameConfig, RolloutConfig, load_config
from selfplay.config.play import MAX_GAMES
from selfplay.config.player_spec import CHECKPOINT, POOL, SELF, Spec, parse_shares
from selfplay.data.instances import GENERATED, HELD_OUT, begun, kept_back
from selfplay.games import kit_of
from selfplay.partners.checkpoints import (
    ALONE,
    Source,
    _beside,
    check_same_game,
    find_source,
    nearest,
)
from selfplay.rollout.seating import read_spec


@dataclass(frozen=True, slots=True)
class Games:
    """The instances to play; `records` are the people's games on them, empty where there are
    none."""

    instances: Sequence[Any]
    records: Sequence[dict[str, Any]]


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
        return Games(kept_back(HELD_OUT, num=num, game=config.game, data=config.data), [])
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
    spec = read_spec(partner, config.game, what="--partner")
    if spec.kind == CHECKPOINT:
        what = f"--partner {spec.text}"
        found = find_source(Path(spec.argument), what=what)
        check_same_game(found, config, what=what, played=played, overrides=overrides)
    if spec.kind == POOL:
        raise ValueError(
            "--partner must name one policy, got pool; nearest is checkpoint:RUN/policy_pool/step_000020"
        )
    return spec


def usual_partner(game: GameConfig, rollout: RolloutConfig) -> str:
    """Whom a policy is evaluated with unless asked otherwise: itself, or in a game of unequal seats
    the first partner of its training."""
    if kit_of(game).LEARNER_SEAT is None:
        return SELF
    return parse_shares(rollout.partners)[0][0].text


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
