"""Reads the question of a cross-play matrix: its players, its rows, the game they play.

Every mistake is a ValueError that names the argument, the rule, the value and the nearest valid
choice. Loads no weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from selfplay.config import Config, GameConfig, load_config
from selfplay.config.player_spec import CHECKPOINT, ENDPOINT, PERSON, POOL, SCRIPTED, SELF, Spec
from selfplay.games import kit_of
from selfplay.partners.checkpoints import (
    ONE_PROCESS,
    Source,
    check_same_game,
    find_source,
    part_of_run,
)
from selfplay.rollout.seating import read_spec

# Policies come first: of two players the first one's engine runs the games.
_RANK = (CHECKPOINT, SCRIPTED, ENDPOINT)


@dataclass(frozen=True, slots=True)
class MatrixPlayer:
    """A player of the matrix. `label` is its name there; `source` is None without weights."""

    label: str
    spec: Spec
    source: Source | None


@dataclass(frozen=True, slots=True)
class CrossPlay:
    """The players, those with weights first, and the labels of the rows.

    `config` holds the settings of the game, read from the file `settings`. `home` is the first run
    or folder among the players, None without one.
    """

    players: list[MatrixPlayer]
    rows: list[str]
    config: Config
    settings: Path
    home: Path | None


def find_cross_play(
    checkpoints: Sequence[Path],
    partners: Sequence[str],
    *,
    given: Path | None,
    overrides: Sequence[str],
) -> CrossPlay:
    """The players of --checkpoint and --partners. Without --checkpoint the partners are the rows,
    too. The settings are those of the file `given`, or else of the first run.

    Raises:
        SettingsError, ValueError: for players or settings that cannot be used.
    """
    rows = [str(path) for path in checkpoints] or list(partners)
    entries = [*rows, *(partners if checkpoints else [])]
    what = "--checkpoint and --partners" if checkpoints else "--partners"
    sources = [source for source in sources_of(entries, what=what) if source is not None]
    path = given or next((s.settings for s in sources if s.settings is not None), None)
    if path is None:
        raise ValueError(
            "--config is needed: none of the players lies in a run, so nothing says which game to "
            "play; give a file such as configs/tiny.yaml"
        )
    config = load_config(path, [*ONE_PROCESS, *overrides])
    for source in sources:
        check_same_game(source, config.game, what=what, played=path, overrides=overrides)
    players = read_players(entries, config.game, what=what)
    row_specs = {player.spec for player in read_players(rows, config.game, what=what)}
    row_players = [player for player in players if player.spec in row_specs]
    _check_rows(row_players, players)
    labels = [player.label for player in row_players]
    home = next((source.home for source in sources if source.hub is None), None)
    return CrossPlay(players, labels, config, path, home)


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


def read_players(entries: Sequence[str], game: GameConfig, *, what: str) -> list[MatrixPlayer]:
    """The players that these entries name, each once, those with weights first.

    Raises:
        ValueError, SettingsError: for an entry that is no player, or cannot play in a matrix.
    """
    kit = kit_of(game)
    if len(kit.ROLES) != 2 or len(kit.POLICY_SEATS) != 2:
        raise ValueError(
            f"{what}: the policy must be able to play each of 2 seats, got game.name {game.name}"
        )
    sources = sources_of(entries, what=what)
    labels = _labels([source for source in sources if source is not None])
    players: dict[str, MatrixPlayer] = {}
    for entry, source in zip(entries, sources, strict=True):
        if source is not None:
            text = f"{CHECKPOINT}:{source.weights}"
            spec = Spec(CHECKPOINT, str(source.weights), text)
            players.setdefault(text, MatrixPlayer(labels[source.weights], spec, source))
            continue
        spec = read_spec(entry, game, what=what)
        if spec.kind in (SELF, POOL, PERSON):
            raise ValueError(
                f"{what} must name folders, scripted players and endpoints, got {entry!r}; "
                "with itself every player plays anyway"
            )
        players.setdefault(spec.text, MatrixPlayer(spec.text, spec, None))
    return sorted(players.values(), key=lambda player: _RANK.index(player.spec.kind))


def _check_rows(rows: Sequence[MatrixPlayer], players: Sequence[MatrixPlayer]) -> None:
    """Raise ValueError if an endpoint would have to play without a policy."""
    row_kinds = {player.spec.kind for player in rows}
    kinds = {player.spec.kind for player in players}
    if ENDPOINT in row_kinds or (SCRIPTED in row_kinds and ENDPOINT in kinds):
        raise ValueError(
            "--partners: an endpoint can be met by folders alone, give these with --checkpoint"
        )


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
