"""The records of played games: one game for games.jsonl, an instance's games for groups.jsonl."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dialop.game import wrong_state
from dialop.shown import on_one_line, printable
from selfplay.advantages.rewards import sample_name
from selfplay.advantages.sample import Sample
from selfplay.data.seeds import named_seed
from selfplay.rollout.branches import siblings_of
from selfplay.rollout.episode import Episode, check_game

if TYPE_CHECKING:  # it imports torch, which a program that draws a page does not need
    from selfplay.advantages.advantages import CreditStats

Pieces = Callable[[Sequence[int], str], list[str]]  # the texts of a policy's tokens
OBSERVED = "observed/"  # prefix of the numbers that custom observers return
MAX_PIECES = 400  # tokens of a turn that a record keeps
_WIDTH = 100  # characters per line of a game as text
_NAME = 60  # of them for a player's name before each of its turns


def game_record(episode: Episode, *, step: int, pieces: Pieces | None = None) -> dict[str, Any]:
    """One complete game with all seats' prompts, in the format of games.jsonl.

    With `pieces` each turn of the policy has its first MAX_PIECES sampled tokens as [text, log-prob
    in nats]. `state` is the game's own record, from which its module restores the game.
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
        **({"paid": list(episode.paid[0])} if episode.paid else {}),
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
        **({"state": checked_state(episode)} if episode.game is not None else {}),
        **({"branches": branch_records(episode)} if episode.branches else {}),
    }


def logged_games(
    episodes: Sequence[Episode], step: int, *, every: int, pieces: Pieces | None = None
) -> list[dict[str, Any]]:
    """The records of the `logged` games."""
    return [game_record(each, step=step, pieces=pieces) for each in logged(episodes, step, every)]


def logged(episodes: Sequence[Episode], step: int, every: int) -> list[Episode]:
    """This rank's games of step number `step` that are logged: one of each `every` games of the
    run, drawn at random, since instances and seats alternate."""
    first = (step - 1) * len(episodes)
    return [
        episode
        for number, episode in enumerate(episodes, start=first)
        if number % every == named_seed("logged game", number // every) % every
    ]


def checked_state(episode: Episode) -> Any:
    """The state of the finished game. Raises GameError for one that a file cannot hold."""
    assert episode.game is not None
    state = episode.game.state()
    check_game(episode.game, "state", wrong_state(state), episode.instance)
    return state


def _turn_tokens(episode: Episode, pieces: Pieces) -> list[list[list[Any]] | None]:
    """Each turn's tokens with their log-probs; None for a partner's turn."""
    spans = [iter(() if t is None else t.spans) for t in episode.transcripts]
    tokens: list[list[list[Any]] | None] = []
    for turn in episode.turns:
        transcript = episode.transcripts[turn.seat]
        if transcript is None:
            tokens.append(None)
            continue
        span = next(spans[turn.seat])
        first = slice(span.start, min(span.end, span.start + MAX_PIECES))
        texts = pieces(transcript.ids[first], transcript.policy)
        nats = [round(logprob, 3) for logprob in transcript.logprobs[first]]
        tokens.append([list(pair) for pair in zip(texts, nats, strict=True)])
    return tokens


def branch_records(episode: Episode) -> list[dict[str, Any]]:
    """The branch points of one game, in the format of games.jsonl.

    Sibling 0 is the played game's own turn, and its first score is that of the played game.
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
    return {one.name: sum(one.advantages) / max(1, sum(one.mask)) for one in samples}


def group_records(
    episodes: Sequence[Episode],
    stats: CreditStats,
    advantages: Mapping[str, float],
    *,
    step: int,
    pieces: Pieces | None = None,
) -> list[dict[str, Any]]:
    """The games of each instance side by side: {"step", "instance", "games"}, in order.

    A game is a record as in games.jsonl whose trained seats also have their `reward` (the total of
    the game), their mean `return` over the seat's trained tokens, and the mean `advantage` of these
    tokens, as methods leave it to the update. The advantage is None if the sample does not train,
    because all returns of the group are equal or a method leaves it out.
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


# --- as text --------------------------------------------------------------------------------------


def game_text(game: Mapping[str, Any] | Episode) -> str:
    """One game, or its record in games.jsonl, as text in lines of at most _WIDTH characters: rules,
    private views, turns, outcome.

    An invalid move is marked with ✗ and followed by its error. Control characters, which could
    affect a terminal, show as `·`.
    """
    record = game_record(game, step=0) if isinstance(game, Episode) else game
    seats = record["seats"]
    names = [f"seat {i} ({on_one_line(seat['player'])[:_NAME]})" for i, seat in enumerate(seats)]
    name = on_one_line(str(record["instance"]))
    step = f", step {record['step']}" if record["step"] else ""
    lines = [*_wrapped(f"Game {name}, episode {record['episode']}{step}"), ""]
    shared = len({seat["system"] for seat in seats}) == 1
    if shared and seats[0]["system"]:
        lines += [_rule("rules"), *_wrapped(seats[0]["system"])]
    for name, seat in zip(names, seats, strict=True):
        view = seat["user"] if shared else f"{seat['system']}\n\n{seat['user']}".strip()
        lines += [_rule(f"{name} sees"), *_wrapped(view)]
    lines += [_rule("talk")]
    margin = max(map(len, names)) + 4
    for turn in record["turns"]:
        text = _wrapped(turn["text"] or "(nothing)", max(20, _WIDTH - margin))
        if turn["error"]:
            text += _wrapped(f"refused: {turn['error']}", max(20, _WIDTH - margin))
        head = f"{names[turn['seat']]} {'✗' if turn['error'] else ''}".ljust(margin)
        lines += [head + text[0], *(" " * margin + line for line in text[1:])]
    lines += [_rule("outcome"), *_wrapped(_outcome(record))]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _rule(title: str) -> str:
    return f"── {title} ".ljust(_WIDTH, "─")


def _wrapped(text: str, width: int = _WIDTH) -> list[str]:
    """Lines of at most `width` columns with the text's own line breaks, without control characters
    and the character of `_rule`."""
    lines = printable(text).replace("─", "-").split("\n")
    return [part for line in lines for part in textwrap.wrap(line, width) or [""]]


def _outcome(record: Mapping[str, Any]) -> str:
    parts = ["agreed" if record["agreed"] else "no agreement"]
    if record.get("ended") not in (None, "finished"):
        parts.append(f"ended by {record['ended']}")
    if own := record.get("seat_scores"):
        parts.append(f"score {', '.join(f'{one:.3f} of seat {i}' for i, one in enumerate(own))}")
    else:
        parts.append(f"score {record['score_norm']:.3f} of the best")
    num_errors = sum(bool(turn["error"]) for turn in record["turns"])
    parts.append(f"{len(record['turns'])} turns, {num_errors} refused")
    numbers = {**record["facts"], **record.get("measures", {})}
    facts = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
    judge = f"\njudge: {record['judge']}" if record.get("judge") else ""
    return "; ".join(parts) + (f" ({facts})" if facts else "") + judge
