"""The kit of planning (`dialop.kit`): settings, files, scripted players, forms, pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dialop import people, rows
from dialop.forms import ACCEPT_OR_REJECT, Form, say, worth
from dialop.logged import part_of
from dialop.planning import generate, recorded, scripted, texts
from dialop.planning.board import AGENT, USER, Action, PlanningInstance, PlanningOptions, check_city
from dialop.planning.city import COMMON
from dialop.planning.game import PlanningGame
from dialop.planning.generate import PlanningRecipe, other_preferences
from dialop.planning.score import check_reference
from dialop.planning.scripted import ASK, GREETING
from dialop.values import parsed

TITLE = "city planning (DialOp)"
ROLES = ("user", "agent")
SCRIPT_NAMES = tuple(scripted.ScriptedPlayer.OPTIONS)
BASELINES = ("searcher", "guesser")
PLAYED_BY_PEOPLE = True
FACTS = {
    "best": "points of the best plan",
    "worst": "of the worst",
    "random": "score of an average plan",
}
RECORD_FIELDS = ("preferences", "events")

generate_instance = generate.generate_instance
make_script = scripted.make_scripted
restore = PlanningGame.from_state
rescore = recorded.rescore
instance_from_record, moves_from_record = recorded.instance_from_record, recorded.moves_from_record
recorded_tally = recorded.recorded_tally


@dataclass(frozen=True)
class Options(PlanningRecipe, PlanningOptions):
    """The recipe of instances and the rules of play."""


def new_game(instance: PlanningInstance, options: PlanningOptions) -> PlanningGame:
    """A new game, after the instance's opening if it has one."""
    return PlanningGame(instance, part_of(options, PlanningOptions))


def vary(instance: PlanningInstance, seat: int, *, seed: int) -> PlanningInstance | None:
    """The same city with other preferences, which only the user sees; None for the agent, who knows
    only the names of the sites before it searches."""
    return other_preferences(instance, seed=seed) if seat == USER else None


def seated(spec: str) -> tuple[str, str]:
    """The specs (user, agent) of a scripted pair; `spec` is one of the two.

    A silent user is paired with a guesser, because it tells an agent nothing.
    """
    player = make_script(spec, seed=0)
    if player.seat != 0:
        return "teller", spec
    return spec, "guesser" if player.name == "silent" else "searcher"


def written(action: Action, instance: PlanningInstance) -> str:
    """A recorded move as its seat would write it."""
    return texts.move_text(action)


def digest(instance: PlanningInstance) -> str:
    """A digest of the city and the preferences, independent of the file."""
    return people.digest(instance.sites, instance.preferences)


def described(instances: Sequence[PlanningInstance], options: Options) -> dict[str, Any]:
    """The settings, and the sizes of the cities."""
    return {**asdict(options), "city_sizes": sorted({len(i.sites) for i in instances})}


def phrases(
    instances: Sequence[PlanningInstance], options: Options, *, split_lines: bool
) -> Sequence[str]:
    """Tags, names, features, sentences and cells of the brief style; () in the full style.

    `split_lines` is ignored: no move of this game has several lines.
    """
    if not options.brief:
        return ()
    names = sorted({name for instance in instances for name in instance.names})
    features = sorted({f for i in instances for site in i.sites for f in site.features})
    found = [*texts.brief_phrases(names, features or COMMON), ASK, GREETING]
    if not options.simple:
        prices = sorted({site.price for i in instances for site in i.sites})
        found += texts.brief_tables(prices)
    return list(dict.fromkeys(found))


_SEARCH = (
    "Search(fields=[price, rating], filters=[category == cafe], sort_by=[rating desc], limit=5)"
)


def forms(game: PlanningGame, seat: int) -> list[Form]:
    """Answers to a proposal, or a message and, for the agent, a search and a plan."""
    if game.answer_due:
        return list(ACCEPT_OR_REJECT)
    view = game.view(seat)
    found = [say()] if view.options.messages else []
    if seat != AGENT:
        return found
    if view.options.search:
        found.append(Form("Search", "[tool] ", start=_SEARCH, hint="Search(…)"))
    sites = [(name, name) for name in view.names]
    if view.options.messages:
        sites.append(("NULL", "leave it empty"))
    slots = [(f"site {i + 1}", sites) for i in range(view.slots)]
    return [*found, Form("Propose", "[propose] [", "]", choices=slots, distinct=True)]


def picture(game: PlanningGame, num: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """No table; the value of each full proposal among the last `num` moves."""

    def points(action: Action) -> int | None:
        return game.total(action.plan) if action.plan and None not in action.plan else None

    return worth(game, num, points)


def write(path: str | Path, instances: Sequence[PlanningInstance]) -> None:
    """Write instances to one parquet file (`rows.write_rows`)."""
    lines = [{"key": i.key, "planning": json.dumps(asdict(i))} for i in instances]
    rows.write_rows(path, lines)


def read(path: str | Path) -> list[PlanningInstance]:
    """Read the instances of a .parquet file, or the cities of a .jsonl file of recorded games.

    Raises ValueError and OSError as `rows.read_instances`.
    """
    return rows.read_instances(path, _from_row, recorded.instance_from_record)


def _from_row(row: dict[str, Any]) -> PlanningInstance:
    if not isinstance(row.get("planning"), str):
        raise ValueError("the column `planning` with this game's instances is missing or not text")
    instance = parsed(PlanningInstance, rows.parse_json(row["planning"]))
    check_city(instance.sites, instance.preferences, slots=instance.slots)
    check_reference(instance)
    return instance
