"""What pages draw of the planning game: the forms of moves, and what proposals are worth."""

from __future__ import annotations

from typing import Any

from dialop.forms import ACCEPT_OR_REJECT, Form, say, worth
from dialop.planning.board import AGENT
from dialop.planning.game import PlanningGame
from dialop.planning.score import sheet_of

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
    """No table; what each full proposal among the last `num` moves is worth."""
    instance, moves = game.instance, []
    log = game.moves
    for action in log[len(log) - num :]:
        move = {}
        if action.plan and None not in action.plan:
            points = sheet_of(instance.sites, instance.preferences, action.plan).total
            move = {"notes": [worth(points, instance.norm(points))]}
        moves.append(move)
    return {}, moves
