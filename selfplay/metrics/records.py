"""The records of played games: one game, for games.jsonl; the games of an instance side by side,
for groups.jsonl; the rows of evaluations as files of any version hold them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dialop.game import wrong_state
from selfplay.advantages.rewards import sample_name
from selfplay.advantages.sample import Sample
from selfplay.config.player_spec import SCRIPTED
from selfplay.rollout.branches import siblings_of
from selfplay.rollout.episode import Episode, check_game

if TYPE_CHECKING:  # it imports torch, which a program that draws a page does not need
    from selfplay.advantages.advantages import CreditStats

Pieces = Callable[[Sequence[int]], list[str]]  # the text of each token
SCRIPT = f"{SCRIPTED}:"  # begins the names of scripts' rows, and of no other
MAX_PIECES = 400  # tokens of a turn that a record keeps


def game_record(episode: Episode, *, step: int, pieces: Pieces | None = None) -> dict[str, Any]:
    """One complete game, with all seats' prompts, as written to games.jsonl.

    With `pieces` each turn of the policy has its first MAX_PIECES tokens as [text, log-prob in
    nats], as sampled. `state` is the game's own record, from which its module restores the game.
    """
    tokens = _turn_tokens(episode, pieces) if pieces else [None] * len(episode.turns)
    return {
        "step": step,
        "instance": episode.instance,
        "episode": episode.index,
        "score_norm": episode.score,
        "agreed": episode.outcome.agreed,
        "ended": episode.ended,
        "rewards": list(episode.outcome.rewards),
        "seat_scores": list(episode.outcome.seat_scores),
        "seats": [
            {"player": player, "system": prompt.system, "user": prompt.user}
            for player, prompt in zip(episode.players, episode.prompts, strict=True)
        ],
        "turns": [
            {
                "seat": turn.seat,
                "text": turn.text,
                "action": turn.action,
                "error": turn.error,
                "error_kind": turn.error_kind,
                "observations": list(turn.observations),
                "trained": episode.transcripts[turn.seat] is not None,
                **({"tokens": sampled} if sampled else {}),
            }
            for turn, sampled in zip(episode.turns, tokens, strict=True)
        ],
        "facts": episode.outcome.facts,
        "measures": dict(episode.measures),
        **({"judge": episode.judge} if episode.judge else {}),
        **({"state": _state(episode)} if episode.game is not None else {}),
        **({"branches": branch_records(episode)} if episode.branches else {}),
    }


def _state(episode: Episode) -> Any:
    """The state of the finished game. Raises GameError for one that no file holds."""
    assert episode.game is not None
    state = episode.game.state()
    check_game(episode.game, "state", wrong_state(state), episode.instance)
    return state


def _turn_tokens(episode: Episode, pieces: Pieces) -> list[list[list[Any]] | None]:
    """Each turn's tokens with their log-probs; None for a partner's turn."""
    num_turns: Counter[int] = Counter()
    tokens: list[list[list[Any]] | None] = []
    for turn in episode.turns:
        transcript, number = episode.transcripts[turn.seat], num_turns[turn.seat]
        num_turns[turn.seat] += 1
        if transcript is None:
            tokens.append(None)
            continue
        span = transcript.spans[number]
        first = slice(span.start, min(span.end, span.start + MAX_PIECES))
        texts = pieces(transcript.ids[first])
        nats = [round(logprob, 3) for logprob in transcript.logprobs[first]]
        tokens.append([list(pair) for pair in zip(texts, nats, strict=True)])
    return tokens


def branch_records(episode: Episode) -> list[dict[str, Any]]:
    """The branch points of one game as they are written to games.jsonl.

    Sibling 0 is the turn that the played game took, and its first score is that game's.
    """
    records = []
    for point in episode.branches:
        siblings = []
        for continuations in siblings_of(episode, point):
            turn = continuations[0].turns[point.turn]
            scores = [continuation.score for continuation in continuations]
            siblings.append(
                {
                    "text": turn.text,
                    "error": turn.error,
                    "value": sum(scores) / len(scores),
                    "scores": scores,
                }
            )
        records.append({"turn": point.turn, "seat": point.seat, "siblings": siblings})
    return records


def mean_advantages(samples: Sequence[Sample]) -> dict[str, float]:
    """Each sample's mean advantage over its trained tokens, by its name."""
    return {one.name: sum(one.advantages) / sum(one.mask) for one in samples}


def group_records(
    episodes: Sequence[Episode],
    stats: CreditStats,
    advantages: Mapping[str, float],
    *,
    step: int,
    pieces: Pieces | None = None,
) -> list[dict[str, Any]]:
    """The games of each instance side by side: {"step", "instance", "games"}, in order.

    A game is a record as in games.jsonl whose trained seats also have their `reward`, the total of
    the game; their `return`, the mean over the seat's trained tokens of the reward that is still to
    come; and the mean `advantage` of these tokens. That is None where no sample trains: all returns
    of the group are equal, or a critic gives the advantages later.
    """
    records: dict[str, dict[str, Any]] = {}
    for episode in episodes:
        game = game_record(episode, step=step, pieces=pieces)
        for seat in episode.policy_seats:
            name = sample_name(episode, seat)
            if name in stats.rewards:
                reward, returned = stats.rewards[name]
                credit = {"reward": reward, "return": returned, "advantage": advantages.get(name)}
                game["seats"][seat] |= credit
        new = {"step": step, "instance": episode.instance, "games": []}
        records.setdefault(episode.instance, new)["games"].append(game)
    return list(records.values())


def named_rows(rows: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of a held-out file or of an evaluation, by their names of today.

    A script's begin with "scripted:". Files before 2026-11-29 have its bare name, which may stand
    in place of the policy's row, or of people's, of that name: such a row is the script's and the
    other one is lost. It has its key as its own `name`, as no row of the policy in held-out games
    has, and only scripts in its games.
    """
    named: dict[str, Any] = {}
    for name, row in rows.items():
        old = not name.startswith(SCRIPT) and isinstance(row, dict) and row.get("name") == name
        named.setdefault(f"{SCRIPT}{name}" if old and _by_scripts(row) else name, row)
    return named


def _by_scripts(row: Mapping[str, Any]) -> bool:
    """Whether a row has example games, and only scripts play them."""
    examples = row.get("examples")
    games = [*examples.values()] if isinstance(examples, dict) else []
    try:
        players = [str(seat["player"]) for game in games for seat in game["seats"]]
    except (LookupError, TypeError):  # which the row's reader names
        return False
    return bool(players) and all(player.startswith(SCRIPT) for player in players)
