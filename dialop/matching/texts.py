"""Every sentence a seat reads in the matching game: rules, grids, observations, history. Knows no
rules itself.

Two styles: full, with a system prompt and the comma-separated grid, and brief, a few words for very
small models. In both a message keeps its mark, and no line of it can be read as a line of the game:
the full style writes `[message]` and indents the lines after the first, the brief style puts a
message below `Partner:` and indents the lines that begin as its own lines do.
"""

from __future__ import annotations

from collections.abc import Sequence

from dialop.matching.roster import display_names
from dialop.tags import indent_further, indent_lookalikes

_RULES = """\
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
# How the brief style's own lines begin, beside brackets.
_BRIEF_WORDS = ("partner", "you", "your", "error")


def brief_phrases(
    reviewers: Sequence[str], papers: Sequence[str], *, split_lines: bool
) -> list[str]:
    """What the brief style repeats as units: a tokenizer of its own may give each one token.

    A cell is its name and its value. A line of a proposal is one token or, split, its paper's and
    its reviewer's: that a reviewer is taken is then a token that stands there already.
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
    """The full style's system prompt. `unknown` is the public value of unseen cells, None on scaled
    boards."""
    names, titles = display_names(reviewers, papers, brief=False)
    lines = [f"{title}: {name}" for title, name in zip(titles, reversed(names), strict=True)]
    return _RULES.format(
        size=len(papers),
        scale_rule=_SCALED if unknown is None else _UNSCALED.format(unknown=unknown),
        message_rule=_MESSAGE_RULE if messages else "",
        example="\n".join(lines),
    )


def grid(
    displayed: Sequence[Sequence[int | None]], reviewers: Sequence[str], *, papers: Sequence[str]
) -> str:
    """The full style's table: a header with the full titles, one comma-separated line a reviewer,
    unseen cells empty."""
    lines = ["," + ",".join(papers)]
    for name, row in zip(reviewers, displayed, strict=True):
        lines.append(",".join([name, *("" if cell is None else str(cell) for cell in row)]))
    return "\n".join(lines)


def cell_lines(
    displayed: Sequence[Sequence[int | None]], reviewers: Sequence[str], *, papers: Sequence[str]
) -> str:
    """The brief style's table: one `Ava BLEU 3` line a cell, `?` for an unseen one."""
    names, titles = display_names(reviewers, papers, brief=True)
    lines = [
        f"{name} {title} {'?' if cell is None else cell}"
        for name, row in zip(names, displayed, strict=True)
        for title, cell in zip(titles, row, strict=True)
    ]
    return "\n".join(lines)


def move_text(kind: str, content: str) -> str:
    """A move as its speaker would write it in the canonical form."""
    if kind in ("accept", "reject"):
        return f"[{kind}]"
    return f"[{kind}]\n{content}" if kind == "propose" else f"[{kind}] {content}"


def partner_text(kind: str, content: str, *, brief: bool) -> str:
    """What the other seat reads of a move. In the brief style a message stands on lines of its
    own, where cells look as they do in a table."""
    text = _told("Partner", kind, content, brief=brief)
    if kind == "propose" and not brief:
        return f"{text}\nYou can only answer [accept] or [reject]."
    return text


def mover_text(kind: str, *, brief: bool) -> str:
    """What the mover itself reads after its move; only a rejecter moves on, so only it needs a
    text."""
    if kind != "reject":
        return ""
    return "Your move." if brief else "You rejected the proposal. It is your move again."


def history(moves: Sequence[tuple[int, str, str]], seat: int, *, brief: bool) -> str:
    """Moves made before this game was restored, as (seat, kind, content), from one seat's side."""
    return "\n".join(
        _told("You" if mover == seat else "Partner", kind, content, brief=brief)
        for mover, kind, content in moves
    )


def _told(who: str, kind: str, content: str, *, brief: bool) -> str:
    """A move as somebody's; `content` of a message is a player's own text, of a proposal the
    game's."""
    if kind != "message":
        return f"{who}: {move_text(kind, content)}"
    if brief:
        return f"{who}:\n{indent_lookalikes(content, _BRIEF_WORDS)}"
    return f"{who}: {move_text(kind, indent_further(content))}"
