"""The kit of the matching game: turns settings into board recipes and game options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from dialop.demonstrations import demonstrated
from dialop.kit import load_kit
from dialop.logged import Rules
from dialop.matching import kit, people, recorded, scripted, store, texts
from dialop.matching.game import MatchingGame, MatchingInstance
from dialop.starts import RecordedGame, tally
from selfplay.config import GameConfig

ROLES: tuple[str, ...] = kit.ROLES
POLICY_SEATS: tuple[int, ...] = (0, 1)
SCRIPT_NAMES: tuple[str, ...] = kit.SCRIPT_NAMES
BASELINES: tuple[str, ...] = kit.BASELINES
PLAYED_BY_PEOPLE: bool = True
# Both seats tell all that they see, then the first proposes.
_DEMONSTRATOR, _DEMONSTRATED = "honest:reply=tell", 2**62  # the player, and the stream of boards


def generate(
    game: GameConfig, *, seed: int, start: int, num: int, processes: int, easy: bool
) -> list[MatchingInstance]:
    """Boards drawn as the settings say; `easy` ignores the condition on solo plans."""
    options = kit.Options(
        size=game.size,
        p_observed=game.p_observed,
        scale=game.scale,
        max_value=game.max_value,
        hardness=game.hardness,
        keep="all" if easy else game.keep,
    )
    return load_kit("matching").generate(
        options, seed=seed, start=start, num=num, processes=processes
    )


def read(path: Path, game: GameConfig) -> list[MatchingInstance]:
    """The boards of a .parquet file, or of the recorded games of a .jsonl file."""
    return store.read_instances(path)


def read_recorded(path: Path) -> list[RecordedGame]:
    """The games of a .jsonl of recorded games."""
    return recorded.read_recorded(path)


def recorded_tally(record: Mapping[str, Any], instance: MatchingInstance) -> dict[str, float]:
    """The figures of people's recorded game.

    The score is the recorded one, so games whose proposals use another roster count, too. Errors
    were not recorded, and the parser of scripted statements finds almost none in people's prose. A
    note between two moves of one person counts as a message.
    """
    log, accepted = record["action_log"], recorded.agreed(record)
    score = instance.norm(float(record["proposal_reward"])) if accepted else 0.0
    said = recorded.said_in(record)
    proposals = sum(entry["type"] == "proposal" for entry in log)
    figures = tally(score, said, accepted=accepted, proposals=proposals, turns=len(log))
    return {**figures, "talk_value": score - instance.norm(max(instance.solo))}


def recorded_messages(record: Mapping[str, Any]) -> list[str]:
    """The texts of a recorded game's messages."""
    return recorded.said_in(record)


def read_people(path: Path) -> list[people.PeoplesGame]:
    """The games of a .jsonl of recorded games, to imitate."""
    games = [people.peoples_game(game) for game in recorded.read_recorded(path)]
    return [game for game in games if game is not None]


def digest(instance: MatchingInstance) -> str:
    """A name of the table and of what the seats see of it."""
    return people.board_digest(instance)


def new_game(instance: MatchingInstance, game: GameConfig) -> MatchingGame:
    """A game on a board, at its start, with `game.demonstrations` games in its prompts."""
    return MatchingGame(instance, _options(game), demonstrations=_demonstrations(game))


def _options(game: GameConfig) -> Rules:
    return Rules(messages=game.messages, brief=game.brief, private_reasoning=game.private_reasoning)


@lru_cache(maxsize=8)
def _demonstrations(game: GameConfig) -> tuple[tuple[tuple[str, str], ...], str]:
    """The demonstration games of these rules, the same for every game of every run."""
    boards = generate(
        game, seed=_DEMONSTRATED, start=0, num=game.demonstrations, processes=1, easy=True
    )
    scripts = [make_script(_DEMONSTRATOR, seed=seat) for seat in (0, 1)]
    return demonstrated([(MatchingGame(board, _options(game)), scripts) for board in boards])


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
