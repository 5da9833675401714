"""Whether a template keeps what the policy thought in old turns, and what turns thinking off.

Units: text. Must not know: ids, torch, games' rules.
"""

from __future__ import annotations

import re

from jinja2.exceptions import TemplateError

from selfplay.chat.template import SLOT, Template, say

# Arguments by which templates turn thinking on and off.
_SWITCHES = ("enable_thinking", "thinking")
_TAG = re.compile(r"<[^<>\s]{1,40}>|\[[^\[\]\s]{1,40}\]")


def check_thinking(template: Template, tail: str) -> None:
    """Raise ValueError for a template that removes sampled thinking from old turns, unless its
    prompt, which ends with `tail`, turns thinking off.
    """
    lost = _lost_markup(template)
    if lost is None or "</think>" in tail or _is_off(template):
        return
    raise ValueError(
        f"the chat template takes {lost} and what it marks out of old turns, so a later prompt "
        f"would not extend what was sampled; {_remedy(template)}"
    )


def _lost_markup(template: Template) -> str | None:
    """The first tag, of those that the template names or thoughts usually have, that does not
    come back from an old answer together with the text on both sides of it.
    """
    thought, said = SLOT.format("thought"), SLOT.format("said")
    pair = f"<think>\n{thought}\n</think>\n\n{said}"
    tags = dict.fromkeys(tag for text in template.literals for tag in _TAG.findall(text))
    old = {"<think>": pair} | {tag: f"{thought}\n{tag}\n{said}" for tag in tags}
    for tag, content in old.items():
        talk = [say("user", 0), {"role": "assistant", "content": content}, say("user", 1)]
        try:
            kept = content in template.text(talk)
        except TemplateError:  # gpt-oss refuses answers that hold its own tags
            kept = False
        if not kept:
            return tag
    return None


def _is_off(template: Template) -> bool:
    """Whether the template has a switch for thinking and the prompt is as with it off."""
    talk = [say("user", 0)]
    now = template.text(talk)
    return any(
        now == template.text(talk, **{name: False}) != template.text(talk, **{name: True})
        for name in _SWITCHES
    )


def _remedy(template: Template) -> str:
    """What turns thinking off, tried on the template itself."""
    for name in _SWITCHES:
        if _is_off(Template(template.tokenizer, {**template.kwargs, name: False})):
            return f"set model.chat_template: {{{name}: false}}"
    own = "give the tokenizer folder a chat_template.jinja that keeps old turns"
    if "/no_think" in template.source:
        return (
            "it turns thinking off only for a text that says /no_think, which no game does: "
            f"{own}, or one that writes what it writes after /no_think"
        )
    return f"use a model that does not think, or {own}"
