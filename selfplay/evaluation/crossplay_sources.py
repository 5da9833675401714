"""What a cross-play matrix is asked about: its players, whose rows it has, which game they play.

Every mistake in the asking is a ValueError that names the argument, the rule, the value and the
nearest valid choice. Loads no weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from selfplay.config import Config, load_config
from selfplay.config.player_spec import CHECKPOINT, ENDPOINT, PERSON, POOL, SCRIPTED, SELF, Spec
from selfplay.games import kit_of
from selfplay.partners.checkpoints import ALONE, Source, check_same_game, find_source
from selfplay.rollout.seating import read_spec

_RANK = (CHECKPOINT, SCRIPTED, ENDPOINT)  # of two players the earlier one's engine leads


@dataclass(frozen=True, slots=True)
class MatrixPlayer:
    """A player of the matrix: its name there, who it is, where its weights lie (None: it has
    none)."""

    label: str
    spec: Spec
    source: Source | None


@dataclass(frozen=True, slots=True)
class CrossPlay:
    """Who plays, those with weights first, whose rows are asked for, and under which settings, read
    from which file; `home` is the first run or folder named, None without one."""

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
    """The players of --checkpoint and --partners, which without the first have the rows, too. The
    settings are those of the file given, or of the first run named.

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
    config = load_config(path, [*ALONE, *overrides])
    for source in sources:
        check_same_game(source, config, what=what, played=path, overrides=overrides)
    players = read_players(entries, config, what=what)
    wanted = {player.spec.text for player in read_players(rows, config, what=what)}
    row_players = [player for player in players if player.spec.text in wanted]
    _check_rows(row_players, players)
    labels = [player.label for player in row_players]
    home = next((source.home for source in sources if source.hub is None), None)
    return CrossPlay(players, labels, config, path, home)


def split_list(text: str) -> list[str]:
    """The entries of a comma-separated list; a comma inside a script's options, as in
    scripted:honest:tell=top,slip=0.1, divides nothing."""
    entries: list[str] = []
    for part in text.split(","):
        if entries and re.fullmatch(r"\w+=[^/]*", part.strip()):
            entries[-1] += f",{part.strip()}"
        else:
            entries.append(part.strip())
    return [entry for entry in entries if entry]


def sources_of(entries: Sequence[str], *, what: str) -> list[Source | None]:
    """Where each entry's weights lie, None for one that names no folder.

    Raises:
        ValueError: for a path to nothing, with the nearest folder that is there.
    """
    sources = []
    for entry in entries:
        path = Path(entry.removeprefix(f"{CHECKPOINT}:"))
        of_weights = path.is_dir() or entry.startswith(f"{CHECKPOINT}:") or _is_a_path(entry)
        sources.append(find_source(path, what=what) if of_weights else None)
    return sources


def read_players(entries: Sequence[str], config: Config, *, what: str) -> list[MatrixPlayer]:
    """The players that these entries name, each once, those with weights first.

    Raises:
        ValueError, SettingsError: for an entry that is no player, or none that can be one here.
    """
    if kit_of(config.game).LEARNER_SEAT is not None:
        raise ValueError(f"{what}: seats must be equal, got game.name {config.game.name}")
    sources = sources_of(entries, what=what)
    named = _folder_names([source for source in sources if source is not None])
    found: dict[str, MatrixPlayer] = {}
    for entry, source in zip(entries, sources, strict=True):
        if source is not None:
            text = f"{CHECKPOINT}:{source.weights}"
            spec = Spec(CHECKPOINT, str(source.weights), text)
            found.setdefault(text, MatrixPlayer(named[source.weights], spec, source))
            continue
        spec = read_spec(entry, config.game, what=what)
        if spec.kind in (SELF, POOL, PERSON):
            raise ValueError(
                f"{what} must name folders, scripted players and endpoints, got {entry!r}; "
                "with itself every player plays anyway"
            )
        found.setdefault(spec.text, MatrixPlayer(spec.text, spec, None))
    return sorted(found.values(), key=lambda player: _RANK.index(player.spec.kind))


def _check_rows(rows: Sequence[MatrixPlayer], players: Sequence[MatrixPlayer]) -> None:
    """Raise ValueError where an endpoint would have to play without a policy."""
    kinds = {player.spec.kind for player in rows}
    partners = {player.spec.kind for player in players}
    if ENDPOINT in kinds or (SCRIPTED in kinds and ENDPOINT in partners):
        raise ValueError(
            "--partners: an endpoint can be met by folders alone, give these with --checkpoint"
        )


def _is_a_path(entry: str) -> bool:
    return "/" in entry and "://" not in entry


def _folder_names(sources: Sequence[Source]) -> dict[Path, str]:
    """A short name for each policy: its run, and its part of it unless that is the final one; the
    whole path where two would bear one name."""
    names = {}
    for source in sources:
        part = source.weights.parent.name if source.weights.name == "hf" else source.weights.name
        inside = source.weights != source.home and part != "final"
        names[source.weights] = (
            source.hub or f"{source.home.name}/{part}" if inside else source.home.name
        )
    return {
        weights: name if list(names.values()).count(name) == 1 else str(weights)
        for weights, name in names.items()
    }
