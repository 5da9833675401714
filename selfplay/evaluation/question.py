"""Reads the question of an evaluation: who plays whom, with which settings, which games.

Every mistake is a ValueError that names the argument, the rule, the value and the nearest valid
choice. Loads no weights.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dialop.kit import Entries
from dialop.rows import read_records
from dialop.starts import checked_entries
from selfplay.config import (
    Config,
    DataConfig,
    EvalConfig,
    GameConfig,
    RolloutConfig,
    load_config,
)
from selfplay.config.load import read_value
from selfplay.config.play import MAX_GAMES
from selfplay.config.player_spec import (
    CHECKPOINT,
    ENDPOINT,
    PERSON,
    POOL,
    SCRIPTED,
    SELF,
    Spec,
    parse_shares,
)
from selfplay.data.instances import GENERATED, HELD_OUT, begun, evaluation_instances, read_instances
from selfplay.errors import SettingsError
from selfplay.metrics.run_folder import IMITATED_BOARDS
from selfplay.partners.checkpoints import (
    ONE_PROCESS,
    Source,
    check_same_game,
    find_source,
    model_words,
    nearest_beside,
    part_of_run,
    template_of,
)
from selfplay.rollout.seating import chosen_seats, read_spec

# Policies come first, because the engine of a match's first player runs its games.
_RANK = (CHECKPOINT, SCRIPTED, ENDPOINT)
_LONGEST_NAME = 150  # bytes of a report's folder, of 255 that file systems allow
ITSELF = Spec(SELF, "", SELF)


@dataclass(frozen=True, slots=True)
class Games:
    """The instances to play. `records` are people's games on the same instances; may be empty."""

    instances: Sequence[Any]
    records: Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class MatrixPlayer:
    """A player of the matrix. `label` is its name there; `source` is None without weights."""

    label: str
    spec: Spec
    source: Source | None


@dataclass(frozen=True, slots=True)
class Match:
    """`one` plays `other` on every instance. `one` has `seat`; None takes the seats in turn.
    `temperature` 0 is greedy. `name` is the row of the report."""

    name: str
    one: MatrixPlayer
    other: MatrixPlayer
    seat: int | None
    temperature: float


@dataclass(frozen=True, slots=True)
class Question:
    """The evaluation that eval.py was asked for. A player's matches are consecutive, so that its
    weights are loaded once.

    `config` holds the settings of the game, read from the file `settings` (None: the defaults).
    `rows` and `columns` are the labels of a cross-play matrix; a single policy has none.
    """

    config: Config
    settings: Path | None
    matches: list[Match]
    out: Path
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    @property
    def players(self) -> list[MatrixPlayer]:
        """Each player once, those with weights first."""
        return list(dict.fromkeys(p for match in self.matches for p in (match.one, match.other)))


def one_policy(
    checkpoint: Path,
    *,
    partner: str | None,
    games: str,
    temperatures: Sequence[float],
    given: Path | None,
    overrides: Sequence[str],
    options: Sequence[str],
) -> Question:
    """A policy with itself or with --partner: a matrix of one row, its seats taken in turn.
    `options` are words for the folder's name, such as num=64.

    Raises SettingsError or ValueError for an argument that cannot be used.
    """
    source = find_source(checkpoint)
    config = find_config(source, given, overrides)
    text = partner or usual_partner(config.game, config.rollout)
    played = given or source.settings or source.home
    spec = find_partner(text, config.game, played=played, overrides=overrides)
    usual = config.rollout.temperature
    policy = MatrixPlayer("policy", ITSELF, source)
    other = policy if spec.kind == SELF else MatrixPlayer(text, spec, None)
    matches = [
        Match(row_name(text, t, usual=usual), policy, other, None, t)
        for t in temperatures or [usual]
    ]
    out = report_folder(source, games, text, [*options, *overrides])
    return Question(config, given or source.settings, matches, out)


def cross_play(
    checkpoints: Sequence[Path],
    partners: Sequence[str],
    *,
    games: str,
    out: Path | None,
    temperatures: Sequence[float],
    given: Path | None,
    overrides: Sequence[str],
    options: Sequence[str],
) -> Question:
    """The matrix of --checkpoint and --partners. Without --checkpoint the partners are the rows,
    too. The settings are those of the file `given`, or else of the first run. `options` are words
    for the folder's name.

    Raises:
        SettingsError, ValueError: for players or settings that cannot be used.
    """
    rows = [str(path) for path in checkpoints] or list(partners)
    entries = [*rows, *(partners if checkpoints else [])]
    what = "--checkpoint and --partners" if checkpoints else "--partners"
    sources = sources_of(entries, what=what)
    policies = [source for source in sources if source is not None]
    path = given or next((s.settings for s in policies if s.settings is not None), None)
    if path is None:
        raise ValueError(
            "--config is needed: no player comes from a run whose settings name the game; give a "
            "file such as configs/tiny.yaml"
        )
    config = load_config(path, [*ONE_PROCESS, *overrides])
    for source in policies:
        check_same_game(source, config.game, what=what, played=path, overrides=overrides)
    named = read_players(entries, sources, config.game, what=what)
    players = sorted(dict.fromkeys(named), key=lambda player: _RANK.index(player.spec.kind))
    row_players = [player for player in players if player in named[: len(rows)]]
    row_kinds = {player.spec.kind for player in row_players}
    with_endpoint = any(player.spec.kind == ENDPOINT for player in players)
    if ENDPOINT in row_kinds or (SCRIPTED in row_kinds and with_endpoint):
        raise ValueError(
            "--partners: only checkpoints can play with an endpoint; give them with --checkpoint"
        )
    home = next((source.home for source in policies if source.hub is None), None)
    if out is None and home is None:
        raise ValueError("--out is needed: no player is a local folder to write to")
    (temperature,) = temperatures or [config.rollout.temperature]
    matches = []
    for number, one in enumerate(players):
        for other in players[number:]:
            if one not in row_players and other not in row_players:
                continue
            seats = (None,) if one == other else (0, 1)
            matches += [
                Match(pair_name(*in_seats(one, other, seat)), one, other, seat, temperature)
                for seat in seats
            ]
    labels = tuple(player.label for player in row_players)
    name = _folder_name(["crossplay", Path(games).stem], [*options, *overrides])
    return Question(
        config,
        path,
        matches,
        Path(f"{home}/{name}"),
        labels,
        (*labels, *(player.label for player in players if player not in row_players)),
    )


def in_seats(one: MatrixPlayer, other: MatrixPlayer, seat: int | None) -> tuple[str, str]:
    """The labels of the players of seat 0 and of seat 1, where `one` has `seat`."""
    return (other.label, one.label) if seat == 1 else (one.label, other.label)


def pair_name(first: str, second: str) -> str:
    """The row of a cell of the matrix, with `first` in seat 0."""
    return first if first == second else f"{first} with {second}"


def row_name(partner: str, temperature: float, *, usual: float) -> str:
    """The name of a row, such as "policy" (sampling as in training), "policy, greedy" or "policy
    with scripted:honest, temperature 0.7"."""
    pair = "policy" if partner == SELF else f"policy with {partner}"
    if temperature == usual:
        return pair
    return f"{pair}, temperature {temperature:g}" if temperature else f"{pair}, greedy"


def find_config(source: Source, given: Path | None, overrides: Sequence[str]) -> Config:
    """The settings of --config (`given`), else of the run, else the defaults (the full matching
    game), with the policy's folder as the model and the chat template as in its training.

    Raises:
        SettingsError, ValueError: for settings that cannot be used.
    """
    for key in ("model.path", "model.scratch"):
        if (value := read_value(None, overrides, key)) is not None:
            raise SettingsError(
                f"{key} must not be given, because --checkpoint names the model, got {value}"
            )
    path = given or source.settings
    config = load_config(path, [*ONE_PROCESS, *overrides, *model_words(source)])
    own = template_of(source)
    if own is None or any(word.startswith("model.chat_template") for word in overrides):
        return config
    return replace(config, model=replace(config.model, chat_template=own))


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
        return Games(evaluation_instances(HELD_OUT, num=num, game=game, data=data), [])
    path = Path(games)
    if not path.is_file():
        raise ValueError(
            f"--games must be '{GENERATED}' or a .parquet or .jsonl file, got {games}"
            + nearest_beside(path, lambda p: p.suffix in (".parquet", ".jsonl"), GENERATED)
        )
    try:
        instances = read_instances(path, game)
    except (OSError, ValueError) as error:
        raise ValueError(f"--games: {error}") from None
    if not instances:
        raise ValueError(f"--games: {path} holds no games")
    kit = game.kit
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
    files = {home / IMITATED_BOARDS for source in sources for home in (source.home, source.weights)}
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


def report_folder(source: Source, games: str, partner: str, told: Sequence[str] = ()) -> Path:
    """RUN/eval_NAME, where NAME joins the part of the run (unless it is final/), the games, the
    partner (unless it is self), and what is `told` of options and overrides, so that no answer
    replaces that of another question. Weights from the hub or a .gguf file have runs/MODEL as
    RUN."""
    words = ["eval", Path(games).stem]
    if part := part_of_run(source):
        words.insert(1, part)
    if partner != SELF:
        words.append(re.sub(r"[^\w.-]+", "_", partner))
    home = source.home
    if source.hub is not None:
        home = Path("runs") / re.sub(r"[^\w.-]+", "_", source.hub)
    return home / _folder_name(words, told)


def _folder_name(words: Sequence[str], told: Sequence[str]) -> str:
    """Both, joined by underscores; a hash stands for what a file name cannot hold."""
    plain = [re.sub(r"[^\w.=-]+", "_", word).strip("_") for word in told]
    name = "_".join([*words, *plain])
    if len(name.encode()) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256("\n".join([*words, *told]).encode()).hexdigest()[:8]
    return f"{name.encode()[:_LONGEST_NAME].decode(errors='ignore')}_{digest}"


def split_list(text: str) -> list[str]:
    """The entries of a comma-separated list. A comma inside a script's options, as in
    scripted:honest:tell=top,slip=0.1, does not split."""
    entries: list[str] = []
    for part in text.split(","):
        if entries and re.fullmatch(r"\w+=[^/]*", part.strip()):
            entries[-1] += f",{part.strip()}"
        else:
            entries.append(part.strip())
    return [entry for entry in entries if entry]


def sources_of(entries: Sequence[str], *, what: str) -> list[Source | None]:
    """The policy on disk of each entry, None for an entry that names no folder.

    Raises:
        ValueError: for a path that does not exist, with the nearest folder that does.
    """
    sources = []
    for entry in entries:
        path = Path(entry.removeprefix(f"{CHECKPOINT}:"))
        looks_like_path = "/" in entry and "://" not in entry
        has_weights = path.is_dir() or entry.startswith(f"{CHECKPOINT}:") or looks_like_path
        sources.append(find_source(path, what=what) if has_weights else None)
    return sources


def read_players(
    entries: Sequence[str], sources: Sequence[Source | None], game: GameConfig, *, what: str
) -> list[MatrixPlayer]:
    """The players that these entries name; equal ones may repeat. `sources` holds each entry's
    policy on disk.

    Raises:
        ValueError, SettingsError: for an entry that is no player, or cannot play in a matrix.
    """
    kit = game.kit
    if len(kit.ROLES) != 2 or len(kit.POLICY_SEATS) != 2:
        raise ValueError(
            f"{what}: the policy must be able to play each of 2 seats, got game.name {game.name}"
        )
    labels = _labels([source for source in sources if source is not None])
    players = []
    for entry, source in zip(entries, sources, strict=True):
        if source is not None:
            weights = str(source.weights)
            spec = Spec(CHECKPOINT, weights, f"{CHECKPOINT}:{weights}")
            players.append(MatrixPlayer(labels[source.weights], spec, source))
            continue
        spec = read_spec(entry, game, what=what)
        if spec.kind in (SELF, POOL, PERSON):
            raise ValueError(
                f"{what} must name folders, scripted players and endpoints, got {entry!r}; "
                "every player plays with itself anyway"
            )
        players.append(MatrixPlayer(spec.text, spec, None))
    return players


def _labels(sources: Sequence[Source]) -> dict[Path, str]:
    """A short name of each policy by its weights: RUN or RUN/PART, or the full path where two
    policies would share a name."""
    names = {}
    for source in sources:
        part = part_of_run(source)
        names[source.weights] = f"{source.home.name}/{part}" if part else source.home.name
    return {
        weights: name if list(names.values()).count(name) == 1 else str(weights)
        for weights, name in names.items()
    }
