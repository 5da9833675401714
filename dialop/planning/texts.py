"""All text that a seat reads in the planning game, except errors and search results.

There are two styles. The full style has a system prompt and a score sheet in words; the brief style
uses few words, for very small models. In both, a message starts with its writer's role, and its
lines after the first are indented, so that none can be mistaken for a line of the game.
"""

from __future__ import annotations

from collections.abc import Sequence

from dialop.planning.board import AGENT, USER, Action, Plan, PlanningInstance, Sheet
from dialop.planning.city import CATEGORIES, FEATURES, shown
from dialop.planning.preferences import TEMPLATES, TRAVEL, Preference
from dialop.planning.score import tenths
from dialop.tags import indent_further

_NUMBER_WORDS = (
    "no",
    "one site",
    "two different sites, in order",
    "three different sites, in order",
)

_SHARED = """\
A traveller (the user) and a travel agent plan a day in a city. They choose {slots}. The user's \
preferences give the plan its points; both of you get the same score: how close the agreed plan is \
to the best possible one. Without an agreement both of you score zero.
"""

_USER = """
You are the user. You see your preferences, but not how many points each is worth; the agent \
cannot see them. Only the agent can look up sites and propose a plan. You see the score sheet of \
each proposal, and the agent does not.

Each of your turns is one move that starts with its tag:
{message_rule}[accept] the proposed plan, which ends the game
[reject] the proposed plan{after_reject}

When the agent has proposed a full plan, you must answer with [accept] or [reject] before anything \
else.{partial_rule}"""
_USER_MESSAGE = """\
[message] anything you want to tell the agent, who reads all lines but the first indented
"""
_USER_AFTER_REJECT = ", after which you move again and should say what to change"
_USER_PARTIAL = """ A plan with an empty slot (NULL) is a sketch: it needs no answer, but a \
message."""

_AGENT = """
You are the travel agent. Only the user knows the preferences. {user_can}

Each of your moves starts with its tag:
{message_rule}{tool_rule}[propose] {example}, a name for each slot{null_rule}

The user sees a score sheet of each plan that you propose. You do not. {after_proposal}
{tool}
The sites of this city:
{names}"""
_AGENT_MESSAGE = """\
[message] anything you want to tell the user, who reads all lines but the first indented
"""
_AGENT_TOOL_RULE = """\
[tool] Search(...), which is answered at once, and you move again
"""
_AGENT_NULL = ", or NULL to leave it empty"
_TOOL = """
The search tool, in which each argument is optional:
Search(fields=[price, rating], filters=[category == cafe, rating >= 4], text_query="live music", \
sort_by=[rating desc, distance_to({site})], limit=5)
- fields: what to show beside the name
- filters: conditions that a result must meet: ==, !=, <, <=, >, >= for numbers, == and != for the \
rest; a site without the field never meets one
- text_query: words that must occur in a site's name, category, or features that it has
- sort_by: fields to sort by, ascending unless followed by desc
- limit: the largest number of results
A field is name, category ({categories}), price in dollars, distance_to(NAME) in miles, or a \
feature, which only some sites have:
{features}
"""


def user_rules(*, slots: int, messages: bool) -> str:
    """The user's system prompt in the full style."""
    return _SHARED.format(slots=_NUMBER_WORDS[slots]) + _USER.format(
        message_rule=_USER_MESSAGE if messages else "",
        after_reject=_USER_AFTER_REJECT if messages else "",
        partial_rule=_USER_PARTIAL if messages else "",
    )


def agent_rules(names: Sequence[str], *, slots: int, messages: bool, search: bool) -> str:
    """The agent's system prompt in the full style."""
    features = "\n".join(
        f"- {name}: {' or '.join(map(shown, feature.values))}" for name, feature in FEATURES.items()
    )
    tool = _TOOL.format(site=names[0], categories=", ".join(CATEGORIES), features=features)
    answer = "The user answers a full plan with [accept] or [reject]"
    after = f"{answer}, and a plan with an empty slot with a message." if messages else f"{answer}."
    return _SHARED.format(slots=_NUMBER_WORDS[slots]) + _AGENT.format(
        user_can="Ask for them." if messages else "The user cannot write to you.",
        message_rule=_AGENT_MESSAGE if messages else "",
        tool_rule=_AGENT_TOOL_RULE if search else "",
        example=f"[{', '.join(names[:slots])}]",
        null_rule=_AGENT_NULL if messages and slots > 1 else "",
        after_proposal=after,
        tool=tool if search else "",
        names=", ".join(names),
    )


def user_opening(preferences: Sequence[Preference], *, brief: bool) -> str:
    """The user's private text: one sentence per line, without weights."""
    lines = [p.text for p in preferences]
    return "\n".join(lines if brief else ["Your preferences:", *(f"- {line}" for line in lines)])


def agent_opening(names: Sequence[str], *, brief: bool) -> str:
    """The agent's opening text: in the brief style, the names of the sites."""
    return ", ".join(names) if brief else "You are the travel agent."


def move_text(action: Action) -> str:
    """A move in canonical form."""
    return f"[{action.kind}] {action.text}".rstrip()


def read_by(
    seat: int, action: Action, instance: PlanningInstance, sheet: Sheet | None, *, brief: bool
) -> str:
    """The text that a seat reads about the other's move. `sheet` belongs to a proposal."""
    who = "User" if action.seat == USER else "Agent"
    if action.kind == "message":
        return f"{who}: [message] {indent_further(action.text)}"
    text = f"{who}: {move_text(action)}"
    if action.plan is None or sheet is None or seat == AGENT:
        return text
    write = _brief_sheet if brief else _full_sheet
    lines, ending = write(action.plan, instance, sheet), "You can only answer [accept] or [reject]."
    if None in action.plan:
        ending = "This plan has an empty slot. Answer with a [message]."
    return "\n".join([text, *lines] if brief else [text, *lines, ending])


def reject_text(*, brief: bool) -> str:
    """The text that the user reads after it has rejected a plan and must move again."""
    return "Your move." if brief else "You rejected the plan. It is your move again."


def history(
    log: Sequence[Action],
    sheets: Sequence[Sheet],
    seat: int,
    instance: PlanningInstance,
    *,
    brief: bool,
) -> str:
    """Moves made before the game was restored, as `seat` reads them. `sheets` has one sheet per
    proposal."""
    lines, sheet_of = [], iter(sheets)
    for action in log:
        sheet = next(sheet_of) if action.plan is not None else None
        if action.seat != seat:
            lines.append(read_by(seat, action, instance, sheet, brief=brief))
            continue
        lines.append(f"You: [{action.kind}] {indent_further(action.text)}".rstrip())
        if action.result:
            lines.append(action.result)
    return "\n".join(lines)


def _brief_sheet(plan: Plan, instance: PlanningInstance, sheet: Sheet) -> list[str]:
    lines = [
        f"{instance.sites[site].name} {points}"
        for site, points in zip(plan, sheet.sites, strict=True)
        if site is not None
    ]
    lines += [f"Travel {points}" for points in sheet.legs if any(sheet.legs)]
    lines += [f"{text} {points}" for text, points in sheet.checklist]
    return [*lines, f"Total {sheet.total}"]


def _full_sheet(plan: Plan, instance: PlanningInstance, sheet: Sheet) -> list[str]:
    lines = ["Score sheet:"]
    for slot, index in enumerate(plan):
        if slot and index is not None and (before := plan[slot - 1]) is not None:
            miles = tenths(instance.sites[before], instance.sites[index]) / 10
            lines.append(f"Travel {miles:g} miles: {sheet.legs[slot - 1]}")
        if index is None:
            lines.append(f"{slot + 1}. empty")
            continue
        site = instance.sites[index]
        facts = [site.category, f"${site.price}"]
        facts += [f"{n} {shown(v)}" for n, v in site.features.items()]
        lines.append(f"{slot + 1}. {site.name}: {sheet.sites[slot]} ({', '.join(facts)})")
    lines += [
        f"{'YES' if points >= 0 else 'NO'} {text}: {points}" for text, points in sheet.checklist
    ]
    return [*lines, f"Total: {sheet.total}"]


def brief_phrases(names: Sequence[str], features: Sequence[str]) -> list[str]:
    """Recurring phrases of the brief style; its tokenizer can make each one token."""
    return [
        *(f"[{tag}]" for tag in ("message", "tool", "propose", "accept", "reject")),
        *("User:", "Agent:", "Search(filters=[", "Search(fields=[", "Search results", "Total"),
        *(f"{name} == {value}" for name in features for value in (True, False)),
        *features,
        *names,
        *(template.text for template in TEMPLATES if template.name in features),
    ]


def brief_tables(prices: Sequence[int]) -> list[str]:
    """Further phrases for cities with all features.

    Each cell of a search result (field and value) is one token, and so is each number of points.
    Values and the starts of sentences are separate tokens.
    """
    features = [(f, shown(v)) for f, feature in FEATURES.items() for v in feature.values]
    words = {value for _, value in features if value.isalpha()} | set(CATEGORIES)
    known = {f"{f} {v}" for f, v in features} | {f"category {c}" for c in CATEGORIES}
    cells = known | {f"price {p}" for p in prices} | {f"{n / 10:g}" for n in range(100)}
    starts = (
        *("don't like", "like", "go to at least one ", "keep budget below $", TRAVEL),
        *("heard good things about ", "definitely want to go to ", "price", "category"),
        *("Search(sort_by=[distance_to(", "definitely want to check out Dan's recommendations: "),
        *(f"heard these {c}s were good: " for c in CATEGORIES),
    )
    points = [f" {n}" for n in range(-99, 100)]
    return [*starts, *sorted(words), *sorted(f"|{cell}" for cell in cells), *points]
