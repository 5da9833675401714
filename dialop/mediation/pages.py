"""What pages draw of mediation: the forms of moves, the rooms, and what proposals are worth."""

from __future__ import annotations

from typing import Any

from dialop.forms import ACCEPT_OR_REJECT, Choices, Form, say, worth
from dialop.mediation.game import MediationGame
from dialop.mediation.records import USERS, AgentView
from dialop.mediation.score import pair_costs
from dialop.mediation.texts import flight_text


def rooms(game: MediationGame, seat: int) -> list[str]:
    """The agent has a room with each user; a user has one room."""
    return [] if seat in USERS else [f"user {user}" for user in USERS]


def forms(game: MediationGame, seat: int) -> list[Form]:
    """A user answers a proposal or writes to the agent, who writes to either user or proposes."""
    view = game.view(seat)
    if not isinstance(view, AgentView):
        hint = "Only the agent reads this"
        return list(ACCEPT_OR_REJECT) if game.answer_due else [say(hint)]
    users = [(f"user {user}", _flights(view, user)) for user in USERS]
    messages = [
        Form(f"To {name}", f"{user}: [message] ", hint=f"Only {name} reads this")
        for user, (name, _) in enumerate(users)
    ]
    propose = Form("Propose", "all: [propose] ", choices=users)
    return [*(messages if view.options.messages else ()), propose]


def _flights(view: AgentView, user: int) -> Choices:
    """The flights of a user, each as a proposal names it and as the page shows it."""
    texts = [flight_text(flight) for flight in view.flights[user]] if view.flights else None
    return [
        (f"user {user}: id {i}", f"{i}: {texts[i]}" if texts else f"flight {i}")
        for i in range(len(view.prices[user]))
    ]


def picture(game: MediationGame, num: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """No table; what each proposal among the last `num` moves is worth."""
    instance, moves = game.instance, []
    log = game.moves
    for act in log[len(log) - num :]:
        move = {}
        if act.flights:
            points = sum(costs.total for costs in pair_costs(instance, act.flights))
            move = {"notes": [worth(points, instance.norm(points))]}
        moves.append(move)
    return {}, moves
