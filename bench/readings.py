"""Measures how well a policy reads its texts and where it loses value, in a run's logged games.

    python -m bench.readings RUN

Matching, all logged games by thirds of the run, and the sampled held-out games before and after
self-play: the first legal proposal after a private table of levels 0 to 9. Three values are shares
of the best plan's value: the best plan under the levels that a teacher would write, the best plan
under the levels that the seat wrote, and the proposal. Then the proposal over the best plan, both
valued by the written levels ("search"), and the share of cells with the teacher's level. A loss
from the first value to the second is misreading, from the second to the third failed search.

Planning and mediation, the sampled held-out games before and after self-play and the logged games
of the last two steps: the agents' private points against a teacher's, the log-probs of points and
flights, and the loss of the agreed pairs. Log-probs are as sampled, in nats. Loads no model.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from bench.rows import ended
from dialop.kit import load_kit
from dialop.matching import pooling
from dialop.matching.statements import stated_cells
from dialop.mediation.score import arrival_costs, calendar_costs, price_costs
from dialop.planning.board import AGENT
from dialop.planning.scripted import make_scripted
from selfplay.apps.report.run_files import read_run

Record = Mapping[str, Any]
Token = tuple[str, float]  # a piece of text and its log-prob
POINTS = re.compile(r"^(.+)\|(-?\d+)$", re.MULTILINE)
TEACHER = "searcher:legs=1,think=points"
LAST_STEPS = 2
GAMES = ("matching", "planning", "mediation")
COLUMNS = ("true levels", "written levels", "proposed", "search", "levels right")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN")
    folder = parser.parse_args(words).run
    try:
        run = read_run(folder)
        game = run.kit.name if run.kit else "no game"
        if game not in GAMES:
            raise ValueError(f"RUN must be of {', '.join(GAMES)}, got {game}")
        logged = (folder / "games.jsonl").read_text(encoding="utf-8").splitlines()
    except (ValueError, OSError) as error:
        sys.exit(ended("readings", error))
    stages = ("before", "after")
    parts = {stage: row.games for stage in stages if (row := run.row(stage, "sampled"))}
    if game == "matching":
        print("\n".join(matching([json.loads(line) for line in logged], parts)))
        return
    newest = max((played["step"] for played in run.games), default=0)
    last = [played for played in run.games if played["step"] > newest - LAST_STEPS]
    parts["after"] = (*parts.get("after", ()), *last)
    print("\n".join((planning if game == "planning" else mediation)(parts)))


def matching(games: Sequence[Record], held_out: Mapping[str, Sequence[Record]]) -> Iterator[str]:
    """One row for each third of the run and for each part of `held_out`, with means over games."""
    last, parts = max((game["step"] for game in games), default=0), {}
    for third in range(3):
        first, end = (1 + last * bound // 3 for bound in (third, third + 1))
        parts[f"{first}–{end - 1}"] = [game for game in games if first <= game["step"] < end]
    parts |= {f"held out, {stage}": [*played] for stage, played in held_out.items()}
    yield f"| steps | games | {' | '.join(COLUMNS)} |"
    yield f"|---|{'--:|' * (1 + len(COLUMNS))}"
    num = left_out = 0
    for name, part in parts.items():
        found = [first_plan(game) for game in part]
        kept = [figures for figures in found if figures]
        num, left_out = num + len(found), left_out + len(found) - len(kept)
        if kept:
            means = " | ".join(f"{mean:.3f}" for mean in np.mean(kept, axis=0))
            yield f"| {name} | {len(kept)} | {means} |"
    yield f"\n{left_out} of {num} games have no legal proposal or no full table: left out."


def first_plan(record: Record) -> tuple[float, ...] | None:
    """The figures of a game's first legal proposal, in the order of COLUMNS. None if there is no
    such proposal, or no complete table before it."""
    over: Any = load_kit("matching").restore(record["state"])
    instance = over.instance
    game = type(over)(instance, over.options)
    for turn in record["turns"]:
        view = game.view(turn["seat"])
        if game.step(turn["seat"], turn["text"]).action != "propose":
            continue
        # A level may stand after the value that it comes from (`476=8`).
        thought = re.sub(r"\S+=", "", turn["text"].partition("[propose]")[0])
        cells = {(row, paper): level for row, paper, level in stated_cells(thought, view)}
        if len(cells) < view.size**2:
            return None
        places = range(view.size)
        written = np.array([[cells[r, p] for p in places] for r in places], float)
        proposed = game.view(turn["seat"]).log[-1].pairs
        stated = pooling.stated_by(view, seat=1 - turn["seat"])
        pooled, span = pooling.pooled_table(view, stated), pooling.value_range(view, stated)
        right = pooling.levels(pooled, span).astype(float)
        readable, best = pooling.best_plan(right), pooling.best_plan(written)
        true, value = np.array(instance.table, float), pooling.plan_value
        return (
            *(value(true, plan) / instance.best for plan in (readable, best, proposed)),
            value(written, proposed) / value(written, best),
            float((written == right).mean()),
        )
    return None


def planning(parts: Mapping[str, Sequence[Record]]) -> Iterator[str]:
    """The planning rows, over all games in which an agent wrote points."""
    games = [game for part in parts.values() for game in part]
    found = [(game, own) for game in games if len(own := _points(game))]
    if not found:
        yield "no agent wrote points"
        return
    pairs = np.concatenate([own for _, own in found])
    most = sum(Counter(own[:, 1].tolist()).most_common(1)[0][1] for _, own in found)
    lines = [np.corrcoef(own.T)[0, 1] for _, own in found]
    yield f"{len(found)} of {len(games)} games, {len(pairs)} points"
    yield (
        f"equal to the teacher's {(pairs[:, 0] == pairs[:, 1]).mean():.2f}, to the teacher's most "
        f"frequent of the city {most / len(pairs):.2f}; correlation {fmean(lines):.2f} in the mean "
        f"({min(lines):.2f} to {max(lines):.2f})"
    )
    tokens = [token for game, _ in found for turn in game["turns"] for token in turn["tokens"]]
    of_points = [-nats for text, nats in tokens if re.fullmatch(r"\|-?\d+", text)]
    of_all = -sum(nats for _, nats in tokens)
    yield f"a point {fmean(of_points):.2f} nats, all {sum(of_points) / of_all:.2f} of a game's"


def _points(game: Record) -> np.ndarray:
    """The points of each site [N, 2]: the agent's, the teacher's."""
    view = load_kit("planning").restore(game["state"]).view(AGENT)
    played = 0
    for turn in game["turns"]:
        written = dict(POINTS.findall(turn["text"]))
        if turn["seat"] == AGENT and written and turn["error"] is None:
            there = replace(view, log=view.log[:played], to_move=AGENT, pending=None)
            right = POINTS.findall(make_scripted(TEACHER, seed=0).lesson(there).text)
            return np.array([[int(written[n]), int(p)] for n, p in right if n in written])
        played += turn["error"] is None
    return np.empty((0, 2))


def mediation(parts: Mapping[str, Sequence[Record]]) -> Iterator[str]:
    """The mediation rows for each part: before self-play, then after it."""
    for part, games in parts.items():
        of_ids: list[tuple[float, float]] = []
        of_all, lost, random = 0.0, [], []
        for game in games:
            flights = [len(user["flights"]) for user in game["state"]["instance"]["users"]]
            tokens = [token for turn in game["turns"] for token in turn["tokens"]]
            plans = [turn["tokens"] for turn in game["turns"] if turn["action"] == "propose"]
            ids = [sum(nats for _, nats in token) for plan in plans for token in _numbers(plan)]
            of_ids += [(-nats, float(np.mean(np.log(flights)))) for nats in ids]
            of_all -= sum(nats for _, nats in tokens)
            if pair := game["state"]["play"]["agreed"]:
                over: Any = load_kit("mediation").restore(game["state"])
                users = over.instance.users
                own = [np.add.outer(*map(costs, users)) for costs in (calendar_costs, price_costs)]
                # Calendar, price and arrival of both users, for each pair of flights [3, F0, F1].
                terms = np.stack([*own, 2 * arrival_costs(users, over.instance.arrival_pref)])
                best = np.unravel_index(terms.sum(0).argmax(), terms.shape[1:])
                lost.append(terms[(slice(None), *best)] - terms[(slice(None), *pair)])
                random.append(terms[(slice(None), *best)] - terms.mean((1, 2)))
        nats, uniform = np.mean(of_ids, axis=0)
        yield f"{part}: {len(games)} games; an id {nats:.2f} nats, one at random {uniform:.2f}"
        yield f"  both ids {nats * len(of_ids) / of_all:.2f} of a game's nats"
        for name, values in (("lost to the best pair", lost), ("by random pairs", random)):
            means = ", ".join(f"{value:.1f}" for value in np.mean(values, axis=0))
            yield f"  {name}, calendar, price, arrival: {means}"


def _numbers(tokens: Sequence[Token]) -> Iterator[list[Token]]:
    """The tokens of each number, one per digit."""
    for digits, run in groupby(tokens, key=lambda token: token[0].isdigit()):
        if digits:
            yield list(run)


if __name__ == "__main__":
    main()
