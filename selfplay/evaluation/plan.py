"""Plans an evaluation: who plays whom, with which settings, and where the report goes.

Every mistake is a ValueError that names the argument, the rule, the value and the nearest valid
choice. No weights are loaded.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from selfplay.config import Config, GameConfig, RolloutConfig, load_config
from selfplay.config.load import read_value
from selfplay.config.player_spec import (
    CHECKPOINT,
    ENDPOINT,
    POOL,
    SCRIPTED,
    SELF,
    Spec,
    parse_shares,
)
from selfplay.errors import SettingsError
from selfplay.evaluation.asked import EvalPlan
from selfplay.partners.checkpoints import (
    ONE_PROCESS,
    Source,
    check_same_game,
    find_source,
    model_words,
    part_of_run,
    template_of,
)
from selfplay.rollout.seat_rules import able_seats, chosen_seats, read_spec

# Policies come first, because the engine of a match's first player runs its games.
_RANK = (CHECKPOINT, SCRIPTED, ENDPOINT)
_LONGEST_NAME = 150  # bytes in the name of a report's folder; file systems allow 255
ITSELF = Spec(SELF, "", SELF)
PEOPLE = "people"  # the row of recorded games


@dataclass(frozen=True, slots=True)
class MatrixPlayer:
    """A player of the matrix. `label` is its name there; `source` is None if it has no weights."""

    label: str
    spec: Spec
    source: Source | None


@dataclass(frozen=True, slots=True)
class Match:
    """`one` plays `other` on every instance. `one` has seat `seat`, or takes the seats in turn if
    `seat` is None. `temperature` 0 is greedy. `name` is the row of the report."""

    name: str
    one: MatrixPlayer
    other: MatrixPlayer
    seat: int | None
    temperature: float


@dataclass(frozen=True, slots=True)
class Matches:
    """The matches of an evaluation. A player's matches are consecutive, so its weights load once.

    `config` holds the settings of the game, read from the file `settings` (None: the defaults).
    `rows` and `columns` are the labels of a cross-play matrix, empty for a single policy. `out` is
    the folder of the report.
    """

    config: Config
    settings: Path | None
    matches: list[Match]
    out: Path
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    @property
    def players(self) -> list[MatrixPlayer]:
        """Each player once; policies with weights come first."""
        return list(dict.fromkeys(p for match in self.matches for p in (match.one, match.other)))

    @property
    def talk_games(self) -> int:
        """How many games of a match measure the talk effect: none in a matrix, and none with an
        endpoint, whose answers may cost money."""
        endpoint = any(match.other.spec.kind == ENDPOINT for match in self.matches)
        return 0 if self.rows or endpoint else self.config.eval.talk_games


def find_matches(plan: EvalPlan) -> Matches:
    """One policy with itself or with `partner`, taking the seats in turn; or, with `partners`, the
    matrix of policies and partners, each pair in both seats.

    Without `runs` the partners are also the rows of the matrix. The settings come from the file
    `config`, else from the first run.

    Raises:
        SettingsError, ValueError: for players or settings that cannot be used.
    """
    runs, partners, overrides = plan.runs, plan.partners, plan.overrides
    what = "RUN and --partners" if partners and runs else "--partners"
    sources: list[Source | None] = [
        find_source(path, what=what if partners else "RUN") for path in runs
    ]
    sources += [_source_of(entry, what=what) for entry in partners]
    policies = [source for source in sources if source is not None]
    path = plan.config or next((s.settings for s in policies if s.settings is not None), None)
    rows: list[MatrixPlayer] = []
    columns: list[MatrixPlayer] = []
    if not partners:
        config = find_config(policies[0], path, overrides)
        pairs = [_pair_of_one(policies[0], plan.partner, config, path, overrides)]
        folder = report_folder(policies[0], plan.games, pairs[0][1].spec.text, plan.options)
    else:
        if path is None:
            raise ValueError(
                "--config is needed: no player comes from a run whose settings name the game; give "
                "a file such as configs/tiny.yaml"
            )
        config = load_config(path, [*ONE_PROCESS, *overrides])
        for source in policies:
            check_same_game(source, config.game, what=what, played=path, overrides=overrides)
        settings = [path, *(source.settings for source in policies if source.settings is not None)]
        _check_seats(settings, config, overrides, what=what)
        entries = [*map(str, runs), *partners]
        named = _read_players(entries, sources, config.game, config.rollout, what=what)
        players = sorted(dict.fromkeys(named), key=lambda player: _RANK.index(player.spec.kind))
        rows = [player for player in players if player in named[: len(runs) or None]]
        columns = [*rows, *(player for player in players if player not in rows)]
        pairs = _pairs_of_matrix(players, rows)
        home = next((_home(source) for source in policies if source.hub is None), None)
        if plan.out is None and home is None:
            raise ValueError("--out is needed: no player is a local folder to write to")
        who = [player.label for player in players]
        name = _folder_name(["crossplay", Path(plan.games).stem], [*who, *plan.options])
        folder = Path(f"{home}/{name}")
    usual = config.rollout.temperature
    matches = [
        Match(_row_name(pair, t, usual=usual, in_matrix=bool(rows)), *pair, t)
        for pair in pairs
        for t in plan.temperature or [usual]
    ]
    labels = (tuple(player.label for player in group) for group in (rows, columns))
    return Matches(config, path, matches, plan.out or folder, *labels)


Pair = tuple[MatrixPlayer, MatrixPlayer, int | None]  # `one`, `other` and the seat of `one`


def _pair_of_one(
    source: Source,
    partner: str | None,
    config: Config,
    settings: Path | None,
    overrides: Sequence[str],
) -> Pair:
    text = partner
    if text is None:  # self, or the first training partner where the policy has not all seats
        all_seats = chosen_seats(config.game, config.rollout) is None
        text = SELF if all_seats else parse_shares(config.rollout.partners)[0][0].text
    played = settings or source.home
    spec = find_partner(text, config.game, config.rollout, played=played, overrides=overrides)
    policy = MatrixPlayer("policy", ITSELF, source)
    return policy, policy if spec.kind == SELF else MatrixPlayer(text, spec, None), None


def _pairs_of_matrix(players: Sequence[MatrixPlayer], rows: Sequence[MatrixPlayer]) -> list[Pair]:
    """Every pair that includes a player of the rows, in both seats; self-play pairs once."""
    kinds = {player.spec.kind for player in rows}
    with_endpoint = any(player.spec.kind == ENDPOINT for player in players)
    if ENDPOINT in kinds or (SCRIPTED in kinds and with_endpoint):
        raise ValueError("--partners: only checkpoints can play with an endpoint; give them as RUN")
    return [
        (one, other, seat)
        for number, one in enumerate(players)
        for other in players[number:]
        if one in rows or other in rows
        for seat in ((None,) if one == other else (0, 1))
    ]


def pair_name(first: str, second: str) -> str:
    """The row name of a cell of the matrix, with `first` in seat 0."""
    return first if first == second else f"{first} with {second}"


def _row_name(pair: Pair, temperature: float, *, usual: float, in_matrix: bool) -> str:
    """The name of a match; for a single policy it names a temperature other than the usual one."""
    one, other, seat = pair
    labels = (other.label, one.label) if seat == 1 else (one.label, other.label)
    name = pair_name(*labels)
    if in_matrix or temperature == usual:
        return name
    return f"{name}, temperature {temperature:g}" if temperature else f"{name}, greedy"


def find_config(source: Source, given: Path | None, overrides: Sequence[str]) -> Config:
    """The settings from --config (`given`), else from the run, else the defaults (the full default
    game), with the policy's folder as the model and the chat template it was trained with.

    Raises:
        SettingsError, ValueError: for settings that cannot be used.
    """
    for key in ("model.path", "model.scratch"):
        if (value := read_value(None, overrides, key)) is not None:
            raise SettingsError(
                f"{key} must not be given, because RUN names the model, got {value}"
            )
    path = given or source.settings
    config = load_config(path, [*ONE_PROCESS, *overrides, *model_words(source)])
    own = template_of(source)
    if own is None or any(word.startswith("model.chat_template") for word in overrides):
        return config
    return replace(config, model=replace(config.model, chat_template=own))


def find_partner(
    partner: str,
    game: GameConfig,
    rollout: RolloutConfig,
    *,
    played: Path | str,
    overrides: Sequence[str],
) -> Spec:
    """The partner named by --partner. Raises ValueError for one that cannot play here.

    `played` is where `game` was read from.
    """
    spec = read_spec(partner, game, rollout, what="--partner")
    if spec.kind == CHECKPOINT:
        what = f"--partner {spec.text}"
        source = find_source(Path(spec.argument), what=what)
        check_same_game(source, game, what=what, played=played, overrides=overrides)
    if spec.kind == POOL:
        raise ValueError(
            "--partner must name a single policy, got pool; nearest is "
            "checkpoint:RUN/policy_pool/step_000020"
        )
    return spec


def report_folder(source: Source, games: str, partner: str, options: Sequence[str] = ()) -> Path:
    """RUN/eval_NAME, where NAME joins the part of the run (unless it is final/), the games, the
    partner (unless it is self) and `options` (words such as num=64), so that reports with
    different options do not overwrite each other."""
    part = part_of_run(source)
    words = ["eval", *([part] if part else []), Path(games).stem]
    words += [re.sub(r"[^\w.-]+", "_", partner)] if partner != SELF else []
    return _home(source) / _folder_name(words, options)


def _home(source: Source) -> Path:
    """The folder of a policy's reports: its run. For weights without a run it is runs/MODEL, named
    after the hub repository, the .gguf file, or the folder and its parent."""
    if source.hub is None and source.settings is not None:
        return source.home
    name = source.hub or "_".join(source.home.resolve().parts[-2:])
    return Path("runs") / re.sub(r"[^\w.-]+", "_", name)


def _folder_name(words: Sequence[str], options: Sequence[str]) -> str:
    """Words and options joined by underscores; a hash replaces the end of a name that is too
    long."""
    plain = [re.sub(r"[^\w.=-]+", "_", word).strip("_") for word in options]
    name = "_".join([*words, *plain])
    if len(name.encode()) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256("\n".join([*words, *options]).encode()).hexdigest()[:8]
    return f"{name.encode()[:_LONGEST_NAME].decode(errors='ignore')}_{digest}"


def _source_of(entry: str, *, what: str) -> Source | None:
    """The policy on disk named by an entry of --partners; None for a player without weights.

    Raises:
        ValueError: for a path that does not exist, with the nearest folder that does.
    """
    path = Path(entry.removeprefix(f"{CHECKPOINT}:"))
    looks_like_path = "/" in entry and "://" not in entry
    has_weights = path.is_dir() or entry.startswith(f"{CHECKPOINT}:") or looks_like_path
    return find_source(path, what=what) if has_weights else None


def _check_seats(
    settings: Sequence[Path], config: Config, overrides: Sequence[str], *, what: str
) -> None:
    """Raise ValueError unless the game has two seats and the run of each settings file learned
    both."""
    game, roles = config.game, ",".join(config.game.kit.ROLES)
    if len(game.kit.ROLES) != 2:
        raise ValueError(f"{what}: the game must have 2 seats, got game.name {game.name}")
    for path in dict.fromkeys(settings):
        named = read_value(path, overrides, "rollout.policy_seats") or ()
        if len(able_seats(game, replace(config.rollout, policy_seats=tuple(named)))) != 2:
            raise ValueError(
                f"{what}: rollout.policy_seats must be [{roles}] in {game.name}, because each pair "
                f"plays in both seats, got [{','.join(named)}] in {path}; --partner compares runs "
                "of one role"
            )


def _read_players(
    entries: Sequence[str],
    sources: Sequence[Source | None],
    game: GameConfig,
    rollout: RolloutConfig,
    *,
    what: str,
) -> list[MatrixPlayer]:
    """The players named by these entries, possibly with repeats. `sources` holds each entry's
    policy on disk; its label is RUN or RUN/PART, or its path if two would share a label.

    Raises:
        ValueError, SettingsError: for an entry that is not a player or cannot play in a matrix.
    """
    names = {
        source.weights: "/".join(filter(None, (source.home.name, part_of_run(source))))
        for source in sources
        if source is not None
    }
    players = []
    for entry, source in zip(entries, sources, strict=True):
        if source is not None:
            weights, name = str(source.weights), names[source.weights]
            label = name if list(names.values()).count(name) == 1 else weights
            spec = Spec(CHECKPOINT, weights, f"{CHECKPOINT}:{weights}")
            taken = label == PEOPLE or ":" in label  # the form of scripts' and endpoints' labels
            players.append(MatrixPlayer(_one_word(label, quoted=taken), spec, source))
            continue
        spec = read_spec(entry, game, rollout, what=what)
        if spec.kind in (SELF, POOL):
            raise ValueError(
                f"{what} must name folders, scripted players and endpoints, got {entry!r}; "
                "every player plays with itself anyway"
            )
        players.append(MatrixPlayer(_one_word(spec.text), spec, None))
    return players


def _one_word(label: str, *, quoted: bool = False) -> str:
    """The label, quoted if it contains spaces or quotes: row names join labels with spaces, and so
    stay distinct."""
    return json.dumps(label, ensure_ascii=False) if quoted or re.search(r'[\s"]', label) else label
