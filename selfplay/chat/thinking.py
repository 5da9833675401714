"""Finds chat templates that remove the policy's sampled thinking from old turns.

The error says how to turn thinking off. Units: text. Must not know: ids, torch, games' rules.
"""

from __future__ import annotations

import re

from jinja2.exceptions import TemplateError

from selfplay.chat.template import SLOT, RewritesHistory, Template, say

OPEN, CLOSE = "<think>\n", "</think>\n\n"  # around a thought, as templates write one

# Template arguments that turn thinking on and off.
_SWITCHES = ("enable_thinking", "thinking")
_TAG = re.compile(r"<[^<>\s]{1,40}>|\[[^\[\]\s]{1,40}\]")


def think(text: str) -> str:
    """The text with an opened thought before it, in the form that templates use."""
    return OPEN + text.removeprefix("\n")


def opens_thought(tail: str) -> bool:
    """Whether a generation prompt opens a thought and leaves it open."""
    return tail.rstrip().endswith(OPEN.strip())


def check_thinking(template: Template, tail: str) -> None:
    """Raise RewritesHistory for a template that removes sampled thinking from old turns.

    Accepts it when its generation prompt `tail` closes the thinking block or thinking is off.
    """
    lost = _lost_markup(template)
    if lost is None or "</think>" in tail or _is_off(template):
        return
    raise RewritesHistory(
        f"the chat template removes {lost} and the text it marks from old turns, so a later prompt "
        f"would not extend the sampled tokens; {_remedy(template)}"
    )


def _lost_markup(template: Template) -> str | None:
    """The first tag that an old answer loses, alone or with text around it; None if none.

    Tries `<think>` and every tag that the template's own text contains.
    """
    thought, answer = SLOT.format("thought"), SLOT.format("said")
    pair = f"<think>\n{thought}\n</think>\n\n{answer}"
    tags = dict.fromkeys(tag for text in template.literals for tag in _TAG.findall(text))
    contents = {"<think>": pair} | {tag: f"{thought}\n{tag}\n{answer}" for tag in tags}
    for tag, content in contents.items():
        talk = [say("user", 0), {"role": "assistant", "content": content}, say("user", 1)]
        try:
            kept = content in template.text(talk)
        except TemplateError:  # gpt-oss refuses answers that contain its own tags
            kept = False
        if not kept:
            return tag
    return None


def _is_off(template: Template) -> bool:
    """Whether the template has a switch for thinking and its prompt equals the one with it off."""
    talk = [say("user", 0)]
    current = template.text(talk)
    return any(
        current == template.text(talk, **{name: False}) != template.text(talk, **{name: True})
        for name in _SWITCHES
    )


def _remedy(template: Template) -> str:
    """Advice for turning thinking off; a switch is advised only if it works on this template."""
    for name in _SWITCHES:
        if _is_off(Template(template.tokenizer, {**template.kwargs, name: False})):
            return f"set model.chat_template: {{{name}: false}}"
    replace = "give the tokenizer folder a chat_template.jinja that keeps old turns"
    if "/no_think" in template.source:
        return (
            "it turns thinking off only for a text that contains /no_think, which no game writes: "
            f"{replace}, or one that writes what it writes after /no_think"
        )
    return f"use a model that does not think, or {replace}"
