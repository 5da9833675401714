"""What a set of played games shows, as plain numbers. docs/metrics.md gives each its formula and
its warning signs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from selfplay.config.player_spec import SELF
from selfplay.credit.advantages import CreditStats
from selfplay.distributed import World, gather_objects
from selfplay.metrics.branches import branch_metrics, branch_records, branch_tally
from selfplay.metrics.games import game_sums
from selfplay.rollout.driver import RolloutStats
from selfplay.rollout.episode import Episode

_BESIDE = "games beside "  # counts of games by partner and seat, in sums only


def tally(episodes: Sequence[Episode]) -> dict[str, float]:
    """Sums over games, addable over ranks (`add_up`), from which `game_measures` takes means.

    Words, statements and errors are the policy's where it plays beside a partner, else both seats'.
    """
    sums: Counter[str] = Counter()
    score_beside: defaultdict[str, float] = defaultdict(float)
    own: dict[str, float] = {}
    for episode in episodes:
        policy = {s for s, t in enumerate(episode.transcripts) if t is not None}
        turns = [t for t in episode.turns if not policy or t.seat in policy]
        sums["games"] += 1
        sums["agreement"] += episode.outcome.agreed
        sums["optimal"] += episode.outcome.score_norm > 1 - 1e-9
        sums["messages"] += sum(turn.action == "message" for turn in turns)
        sums["turns"] += len(episode.turns)
        sums["errors"] += sum(turn.error is not None for turn in turns)
        sums.update(f"errors_{turn.error_kind}" for turn in turns if turn.error_kind)
        sums[f"{_BESIDE}{_company(episode)}"] += 1
        score_beside[f"score/{_company(episode)}"] += episode.outcome.score_norm
        own = add_up((own, game_sums(episode, turns)))
    return {
        **{name: float(count) for name, count in sums.items()},
        **score_beside,
        **own,
        "games": float(len(episodes)),
        "score": sum(e.outcome.score_norm for e in episodes),
    }


def _company(episode: Episode) -> str:
    """Who sat beside the policy and, after a slash, the policy's own seat; "self" without one."""
    policy = [seat for seat, t in enumerate(episode.transcripts) if t is not None]
    others = [name for seat, name in enumerate(episode.players) if seat not in policy]
    return f"{others[0]}/{policy[0]}" if others and policy else SELF


def add_up(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Several tallies as one."""
    sums: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def game_measures(sums: Mapping[str, float]) -> dict[str, float]:
    """Means over games.

    `honesty` is the share of stated cell values that are true in the speaker's own table; it is
    missing when nothing was stated. Scores by partner and seat are there when the policy had a
    partner. Nothing at all comes of no games.
    """
    if not sums.get("games"):
        return {}
    company = [name.removeprefix(_BESIDE) for name in sums if name.startswith(_BESIDE)]
    apart = {"games", "true_statements", *(f"score/{who}" for who in company)}
    means = {
        name: value / sums["games"]
        for name, value in sums.items()
        if name not in apart and not name.startswith(_BESIDE)
    }
    if any(who != SELF for who in company):
        means |= {f"score/{who}": sums[f"score/{who}"] / sums[_BESIDE + who] for who in company}
    if sums.get("statements"):
        means["honesty"] = sums["true_statements"] / sums["statements"]
    return means


def game_record(episode: Episode, *, step: int) -> dict[str, Any]:
    """One game in full, both views, as written to games.jsonl."""
    return {
        "step": step,
        "instance": episode.instance,
        "episode": episode.index,
        "score_norm": episode.outcome.score_norm,
        "agreed": episode.outcome.agreed,
        "ended": episode.ended,
        "seats": [
            {"player": player, "system": prompt.system, "user": prompt.user}
            for player, prompt in zip(episode.players, episode.prompts, strict=True)
        ],
        "turns": [
            {
                "seat": turn.seat,
                "text": turn.text,
                "error": turn.error,
                "observations": list(turn.observations),
                "trained": episode.transcripts[turn.seat] is not None,
            }
            for turn in episode.turns
        ],
        "facts": episode.outcome.facts,
        **({"branches": branch_records(episode)} if episode.branches else {}),
    }


def step_metrics(
    episodes: Sequence[Episode],
    played: RolloutStats,
    credited: CreditStats,
    learnt: dict[str, float],
    world: World,
) -> dict[str, float]:
    """One step's numbers over all ranks: games, groups, what the update saw, the engine's pace."""
    mine = tally(episodes) | {
        "num_instances": float(len({episode.instance for episode in episodes})),
        "num_groups": float(credited.num_groups),
        "num_zero_variance_groups": float(credited.num_zero_variance_groups),
        "num_generated_tokens": float(played.num_generated_tokens),
        "num_prompt_tokens": float(played.num_prompt_tokens),
        "num_void": float(len(played.void)),
        "engine_s": played.engine_s,
        **branch_tally(episodes, credited),
        **{f"reward_{name}": part for name, part in credited.parts.items()},
    }
    gathered = gather_objects(mine, world)
    sums = add_up(gathered)
    engine_s = sums.pop("engine_s") / world.replica.num
    counts = {name: sums.pop(name) for name in list(sums) if name.startswith("num_")}
    branches = {name: sums.pop(name) for name in list(sums) if name.startswith("branch_")}
    return {
        **game_measures(sums),
        **learnt,
        "zero_variance_groups": counts["num_zero_variance_groups"] / max(1, counts["num_groups"]),
        "num_games": sums["games"],
        "num_void": counts["num_void"],
        "num_instances": counts["num_instances"],
        "num_groups": counts["num_groups"],
        **branch_metrics(branches),
        "num_prompt_tokens": counts["num_prompt_tokens"],
        "num_generated_tokens": counts["num_generated_tokens"],
        "engine_s": engine_s,
        "tokens_per_s": counts["num_generated_tokens"] / engine_s if engine_s else 0.0,
    }
