"""The planning game as `dialop.kit` wants it: settings, instances, games, scripted players."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dialop.kit import option
from dialop.planning import scripted, texts
from dialop.planning.board import MAX_SLOTS, USER, PlanningInstance, PlanningOptions
from dialop.planning.city import COMMON, NUM_SITES
from dialop.planning.game import PlanningGame
from dialop.planning.generate import PlanningRecipe, generate_many, other_preferences
from dialop.planning.recorded import replay
from dialop.planning.scripted import ASK, GREETING, make_scripted
from dialop.planning.starts import read_recorded, recorded_messages, recorded_tally
from dialop.planning.store import read_instances as read
from dialop.planning.store import write_instances as write

__all__ = [
    "BASELINES",
    "PLAYED_BY_PEOPLE",
    "ROLES",
    "SCRIPT_NAMES",
    "Options",
    "described",
    "generate",
    "make_script",
    "new_game",
    "phrases",
    "read",
    "read_recorded",
    "recorded_messages",
    "recorded_tally",
    "replay",
    "restore",
    "seated",
    "vary",
    "write",
]

ROLES = ("user", "agent")
SCRIPT_NAMES = scripted.NAMES
BASELINES = ("searcher", "guesser")
PLAYED_BY_PEOPLE = True
restore = PlanningGame.from_state
make_script = make_scripted


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of the game and of its generated instances."""

    messages: bool = True
    brief: bool = False
    private_reasoning: bool = False
    search: bool = option(True, "allow the agent's search tool")
    sites: int = option(NUM_SITES, "sites of a city", low=2, high=NUM_SITES)
    slots: int = option(MAX_SLOTS, "sites of a plan", low=1, high=MAX_SLOTS)
    preferences: int = option(
        10, "most preferences of a user, without the one for short ways", low=1, high=10
    )
    distance: bool = option(True, "whether users want short ways")
    simple: bool = option(
        False, "draw only yes-or-no features that every site has, for small models"
    )


def generate(options: Options, *, seed: int, start: int, num: int) -> list[PlanningInstance]:
    """Instances start..start+num-1 of the stream `seed`."""
    recipe = PlanningRecipe(
        sites=options.sites,
        slots=options.slots,
        preferences=options.preferences,
        distance=options.distance,
        simple=options.simple,
    )
    return generate_many(recipe, seed=seed, start=start, num=num)


def new_game(instance: PlanningInstance, options: Options) -> PlanningGame:
    """A game at its start, or after the instance's opening."""
    rules = PlanningOptions(
        messages=options.messages,
        search=options.search,
        brief=options.brief,
        private_reasoning=options.private_reasoning,
    )
    return PlanningGame(instance, rules)


def vary(instance: PlanningInstance, seat: int, *, seed: int) -> PlanningInstance | None:
    """The same city with other preferences, which only the user sees; None for the agent, who sees
    nothing of the city before it searches."""
    return other_preferences(instance, seed=seed) if seat == USER else None


def seated(spec: str) -> tuple[str, str]:
    """The specs (user, agent) of a scripted pair; `spec` is one of the two.

    A silent user has a guesser, because nothing else can be done for it.
    """
    player = make_scripted(spec, seed=0)
    if player.seat != 0:
        return "teller", spec
    return spec, "guesser" if player.name == "silent" else "searcher"


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
