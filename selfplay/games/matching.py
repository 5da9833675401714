"""The kit of the matching game: turns settings into board recipes and game options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from dialop.matching import scripted, starts, store, texts
from dialop.matching.game import MatchingGame, MatchingInstance, MatchingOptions
from dialop.matching.generate import Keep, MatchingRecipe, generate_many
from selfplay.config import GameConfig

SCRIPT_NAMES: tuple[str, ...] = scripted.NAMES
BASELINES: tuple[str, ...] = ("honest", "solo", "random")
LEARNER_SEAT: int | None = None
PLAYED_BY_PEOPLE: bool = True


def generate(
    game: GameConfig, *, seed: int, start: int, num: int, processes: int, easy: bool
) -> list[MatchingInstance]:
    """Boards drawn as the settings say; `easy` ignores the condition on solo plans."""
    recipe = MatchingRecipe(
        size=game.size,
        p_observed=game.p_observed,
        scale=game.scale,
        max_value=game.max_value,
        hardness=game.hardness,
        keep="all" if easy else cast(Keep, game.keep),
    )
    return generate_many(recipe, seed=seed, start=start, num=num, processes=processes)


def read(path: Path, game: GameConfig) -> list[MatchingInstance]:
    """The boards of a .parquet file, or of the recorded games of a .jsonl file."""
    return store.read_instances(path)


def read_recorded(path: Path) -> list[starts.RecordedGame]:
    """The games of a .jsonl of recorded games."""
    return starts.read_recorded(path)


def new_game(instance: MatchingInstance, game: GameConfig) -> MatchingGame:
    """A game on a board, at its start."""
    options = MatchingOptions(
        messages=game.messages, brief=game.brief, private_reasoning=game.private_reasoning
    )
    return MatchingGame(instance, options)


def make_script(spec: str, *, seed: int) -> scripted.ScriptedPlayer:
    """A scripted player from a spec such as "honest:tell=top,slip=0.05"."""
    return scripted.make_scripted(spec, seed=seed)


def seated(spec: str) -> tuple[str, str]:
    """The same spec for both seats: each can play either."""
    return spec, spec


def described(instances: Sequence[MatchingInstance], game: GameConfig) -> dict[str, Any]:
    """The sizes of the boards, and whether the seats may send messages."""
    sizes = sorted({instance.size for instance in instances})
    return {"board_sizes": sizes, "messages_allowed": game.messages}


def phrases(
    instances: Sequence[MatchingInstance], game: GameConfig, *, split_lines: bool
) -> Sequence[str]:
    """Tags, cell names and assignment lines of the brief style; () in the full style."""
    if not game.brief:
        return ()
    first = instances[0]
    return texts.brief_phrases(first.reviewers, first.papers, split_lines=split_lines)
