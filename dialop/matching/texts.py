"""All text that a seat reads in the matching game, except errors: rules, grids, moves, history.

There are two styles. The full style has a system prompt and a comma-separated grid; the brief style
uses few words, for very small models. In both, no line of a player's message can be mistaken for a
line of the game. The full style writes `[message]` and indents the message's lines after the first.
The brief style puts the message below `Partner:` and indents the lines that look like its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from dialop.matching.roster import display_names
from dialop.tags import indent_further, indent_lookalikes

RULES = """\
You and a partner assign {size} reviewers to {size} papers, one reviewer to each paper. Every \
reviewer-paper pair has a hidden value; your shared score is the total value of the agreed \
assignment, divided by the best possible total. Without an agreement both of you score zero.

You see only some of the values, your partner sees others. {scale_rule}

The two of you take turns. Each turn is one move that starts with its tag:
{message_rule}[propose] a full assignment, one `paper: reviewer` line for each paper, like this:
[propose]
Proposal:
{example}
[accept] the pending proposal, which ends the game
[reject] the pending proposal, after which you move again

When your partner has proposed, you must answer with [accept] or [reject] before anything else."""

_SCALED = """\
The values you see are multiplied by an unknown factor of your own, your partner's by another, so \
only comparisons within one table are exact. A value that neither of you sees counts as the \
average value."""
_UNSCALED = "A value that neither of you sees counts as {unknown}, the average value."
_MESSAGE_RULE = """\
[message] anything you want to tell your partner, who reads all lines but the first indented
"""
# The first words of the brief style's own lines; its other lines start with a bracket.
_BRIEF_WORDS = ("partner", "you", "your", "error")


def brief_phrases(
    reviewers: Sequence[str], papers: Sequence[str], *, split_lines: bool
) -> list[str]:
    """Recurring phrases of the brief style; its tokenizer can make each one token.

    A cell's two names form one phrase. A line of a proposal is one phrase, or with `split_lines`
    two: the paper and the reviewer. With split lines a model can see from an earlier occurrence of
    the same token that a reviewer is taken.
    """
    names, titles = display_names(reviewers, papers, brief=True)
    pairs = [(name, title) for name in names for title in titles]
    lines = [f"{title}: {name}" for name, title in pairs]
    return [
        *(f"[{tag}]" for tag in ("message", "propose", "accept", "reject")),
        "Partner:",
        *(f"{name} {title} " for name, title in pairs),
        *([f"{title}: " for title in titles] + names if split_lines else lines),
    ]


def rules(
    reviewers: Sequence[str], papers: Sequence[str], *, unknown: int | None, messages: bool
) -> str:
    """The full style's system prompt.

    `unknown` is the value of cells that neither seat sees, None on boards with hidden scales.
    """
    names, titles = display_names(reviewers, papers, brief=False)
    lines = [f"{title}: {name}" for title, name in zip(titles, reversed(names), strict=True)]
    return RULES.format(
        size=len(papers),
        scale_rule=_SCALED if unknown is None else _UNSCALED.format(unknown=unknown),
        message_rule=_MESSAGE_RULE if messages else "",
        example="\n".join(lines),
    )


def grid(
    displayed: Sequence[Sequence[int | None]], reviewers: Sequence[str], *, papers: Sequence[str]
) -> str:
    """The full style's table as comma-separated lines: a header with the full titles, then one line
    per reviewer. Unseen cells are empty."""
    lines = ["," + ",".join(papers)]
    for name, row in zip(reviewers, displayed, strict=True):
        lines.append(",".join([name, *("" if cell is None else str(cell) for cell in row)]))
    return "\n".join(lines)


def cell_lines(
    displayed: Sequence[Sequence[int | str | None]],
    reviewers: Sequence[str],
    *,
    papers: Sequence[str],
) -> str:
    """The brief style's table: one line per cell, such as `Ava BLEU 3`, with `?` if unseen."""
    names, titles = display_names(reviewers, papers, brief=True)
    lines = [
        f"{name} {title} {'?' if cell is None else cell}"
        for name, row in zip(names, displayed, strict=True)
        for title, cell in zip(titles, row, strict=True)
    ]
    return "\n".join(lines)


def move_text(kind: str, content: str) -> str:
    """A move in canonical form."""
    if kind in ("accept", "reject"):
        return f"[{kind}]"
    return f"[{kind}]\n{content}" if kind == "propose" else f"[{kind}] {content}"


def partner_text(kind: str, content: str, *, brief: bool) -> str:
    """The other seat's text about a move.

    In the brief style a message starts on a new line, so that its cells look like a table's cells.
    """
    text = _attributed("Partner", kind, content, brief=brief)
    if kind == "propose" and not brief:
        return f"{text}\nYou can only answer [accept] or [reject]."
    return text


def mover_text(kind: str, *, brief: bool) -> str:
    """The mover's text after its own move: "" unless it rejected and moves again."""
    if kind != "reject":
        return ""
    return "Your move." if brief else "You rejected the proposal. It is your move again."


def history(moves: Sequence[tuple[int, str, str]], seat: int, *, brief: bool) -> str:
    """The moves made before the game was restored, as `seat` reads them. Each move is a tuple
    (seat, kind, content)."""
    return "\n".join(
        _attributed("You" if mover == seat else "Partner", kind, content, brief=brief)
        for mover, kind, content in moves
    )


def _attributed(who: str, kind: str, content: str, *, brief: bool) -> str:
    """A move with its player's name in front. Only messages contain text written by a player."""
    if kind != "message":
        return f"{who}: {move_text(kind, content)}"
    if brief:
        return f"{who}:\n{indent_lookalikes(content, _BRIEF_WORDS)}"
    return f"{who}: {move_text(kind, indent_further(content))}"
