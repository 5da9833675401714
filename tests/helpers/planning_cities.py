"""A hand-sized city and helpers that the planning tests share."""

from dialop.planning.board import PlanningInstance, PlanningOptions, Site
from dialop.planning.game import PlanningGame
from dialop.planning.preferences import Preference
from dialop.planning.score import referenced

FULL = PlanningOptions()
BRIEF = PlanningOptions(brief=True)
SILENT = PlanningOptions(messages=False)

SITES = (
    Site("Saul's", "restaurant", 20, (0.0, 0.0), {"has parking": True, "touristy": False}),
    Site("The Dive", "bar", 30, (0.3, 0.4), {"has parking": False, "live music": True}),
    Site("Atlas Park", "park", 0, (3.0, 4.0), {"touristy": True, "rating": 4.5}),
    Site("The Mall", "shop", 60, (0.0, 1.0), {"has parking": True, "live music": False}),
)
PREFERENCES = (
    Preference(
        "feature",
        "renting a car so preferably places with parking",
        4,
        name="has parking",
        liked=(True,),
        disliked=(False,),
    ),
    Preference(
        "feature", "check out live music!", 5, name="live music", liked=(True,), disliked=(False,)
    ),
    Preference("budget", "keep budget below $40", 6, budget=40),
    Preference(
        "sites", "definitely want to go to Atlas Park", 3, sites=("Atlas Park",), penalised=True
    ),
    Preference("category", "go to at least one bar", 2, name="bar"),
    Preference("distance", "minimize travel distance", 3),
)
HAND = referenced("hand/0", SITES, PREFERENCES, slots=3)
ONE = referenced("hand/1", SITES[:3], PREFERENCES[:2], slots=1)

PLAN = "[propose] [Saul's, The Dive, Atlas Park]"  # -10 points
BEST = "[propose] [Saul's, The Dive, The Mall]"


def new_game(instance: PlanningInstance = HAND, options: PlanningOptions = FULL) -> PlanningGame:
    return PlanningGame(instance, options)
