"""Reads the question of an evaluation: a policy on disk, its settings, the games to play.

Every mistake is a ValueError that names the argument, the rule, the value and the nearest valid
choice. Loads no weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dialop.kit import Entries
from dialop.rows import read_records
from dialop.specs import nearest
from dialop.starts import checked_entries
from selfplay.config import (
    Config,
    DataConfig,
    EvalConfig,
    GameConfig,
    RolloutConfig,
    load_config,
)
from selfplay.config.play import MAX_GAMES
from selfplay.config.player_spec import CHECKPOINT, POOL, SELF, Spec, parse_shares
from selfplay.data.instances import GENERATED, HELD_OUT, begun, kept_back
from selfplay.games import kit_of
from selfplay.metrics.run_folder import IMITATED_BOARDS
from selfplay.partners.checkpoints import (
    ONE_PROCESS,
    Source,
    check_same_game,
    find_source,
    neighbours,
    part_of_run,
)
from selfplay.rollout.seating import chosen_seats, read_spec


@dataclass(frozen=True, slots=True)
class Games:
    """The instances to play. `records` are people's games on the same instances; may be empty."""

    instances: Sequence[Any]
    records: Sequence[dict[str, Any]]


def find_config(source: Source, given: Path | None, overrides: Sequence[str]) -> Config:
    """The settings of --config (`given`), else of the run, else the defaults (the full matching
    game), with the policy's folder as the model.

    Raises:
        SettingsError, ValueError: for settings that cannot be used.
    """
    path = given or source.settings
    policy = (f"model.path={json.dumps(str(source.weights))}", "model.scratch=null")
    return load_config(path, [*ONE_PROCESS, *overrides, *policy])


def find_games(
    games: str,
    num: int | None,
    *,
    game: GameConfig,
    data: DataConfig,
    eval_settings: EvalConfig,
    start: Entries | None = None,
    imitated: Collection[str] = (),
) -> Games:
    """The first `num` instances of the held-out stream or of a file.

    `num` None means `eval.final_games` of the stream or all of the file. With `start` the instances
    begin with people's recorded first moves. Instances of a file whose digest is in `imitated` are
    left out.

    Raises:
        ValueError: for a missing or empty file or more games than it holds.
        OSError: for a file that cannot be read.
    """
    if num is not None and not 1 <= num <= MAX_GAMES:
        raise ValueError(f"--num must be at least 1 and at most {MAX_GAMES}, got {num}")
    if games == GENERATED and start:
        raise ValueError("--start needs --games FILE.jsonl with recorded games, got generated")
    if games == GENERATED:
        num = num or eval_settings.final_games
        return Games(kept_back(HELD_OUT, num=num, game=game, data=data), [])
    path = Path(games)
    if not path.is_file():
        files = neighbours(path, lambda other: other.suffix in (".parquet", ".jsonl"))
        raise ValueError(
            f"--games must be '{GENERATED}' or a .parquet or .jsonl file, got {games}"
            + nearest(path.name, [GENERATED, *files])
        )
    try:
        instances = kit_of(game).read(path, game)
    except (OSError, ValueError) as error:
        raise ValueError(f"--games: {error}") from None
    if not instances:
        raise ValueError(f"--games: {path} holds no games")
    kit = kit_of(game)
    places = [i for i, one in enumerate(instances) if kit.digest(one) not in imitated]
    left_out = len(instances) - len(places)
    if not places:
        raise ValueError(
            f"--games: the policy's warm start imitated all {left_out} games of {path}"
        )
    if num is not None and num > len(places):
        besides = f" that its warm start did not imitate ({left_out} were)" if left_out else ""
        raise ValueError(
            f"--num must be at most {len(places)}, the games in {path}{besides}, got {num}"
        )
    places = places[:num]
    records = list(read_records(path)) if path.suffix == ".jsonl" and kit.PLAYED_BY_PEOPLE else []
    if start:
        recorded = kit.read_recorded(path)
        chosen = [begun(recorded[i], start, "evaluation", i) for i in places]
    else:
        chosen = [instances[i] for i in places]
    return Games(chosen, [records[i] for i in places] if records else [])


def imitated_boards(sources: Sequence[Source]) -> set[str]:
    """The digests of the recorded boards that the warm starts of these policies imitated."""
    files = {source.home / IMITATED_BOARDS for source in sources if source.hub is None}
    return {digest for file in files if file.is_file() for digest in json.loads(file.read_text())}


def find_start(text: str) -> Entries:
    """The value of --start. Raises ValueError for an invalid one."""
    try:
        value: object = float(text) if "." in text else int(text)
    except ValueError:
        value = text
    try:
        return checked_entries(value)
    except ValueError as error:
        raise ValueError(f"--start: {error}") from None


def find_partner(
    partner: str, game: GameConfig, *, played: Path | str, overrides: Sequence[str]
) -> Spec:
    """The partner that --partner names. Raises ValueError for one that cannot play here.

    `played` names where `game` was read from.
    """
    spec = read_spec(partner, game, what="--partner")
    if spec.kind == CHECKPOINT:
        what = f"--partner {spec.text}"
        source = find_source(Path(spec.argument), what=what)
        check_same_game(source, game, what=what, played=played, overrides=overrides)
    if spec.kind == POOL:
        raise ValueError(
            "--partner must name one policy, got pool; nearest is "
            "checkpoint:RUN/policy_pool/step_000020"
        )
    return spec


def usual_partner(game: GameConfig, rollout: RolloutConfig) -> str:
    """The default partner of an evaluation: the policy itself, or the first training partner where
    the policy does not play all seats."""
    if chosen_seats(game, rollout) is None:
        return SELF
    return parse_shares(rollout.partners)[0][0].text


def report_folder(source: Source, games: str, partner: str) -> Path:
    """RUN/eval_NAME, where NAME joins the part of the run (unless it is final/), the games and the
    partner (unless it is self). Weights from the hub or a .gguf file have runs/MODEL as RUN."""
    words = ["eval", Path(games).stem]
    if part := part_of_run(source):
        words.insert(1, part)
    if partner != SELF:
        words.append(re.sub(r"[^\w.-]+", "_", partner))
    home = source.home
    if source.hub is not None:
        home = Path("runs") / re.sub(r"[^\w.-]+", "_", source.hub)
    return home / "_".join(words)
