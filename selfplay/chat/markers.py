"""The private copy of a tokenizer in which no typed text becomes a marker.

Units: token ids. A marker is a special token, or any added token that the chat template writes.
Must not know: torch, games' rules.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from selfplay.chat.template import Slot, Template

# What a decoded special token (or an id that no token has) looks like: text no rule of a game
# reads.
_UNREADABLE = "\ufffd"
# Control tokens by their look, whether or not they are flagged special.
_CONTROL = re.compile(r"<[|｜].*[|｜]>")
_SIGN = re.compile(r"[^\w\s]")


@dataclass(frozen=True, slots=True)
class Markers:
    """The private copy of a tokenizer, with the secret spelling of each marker by its public one.

    shown: what a decoded marker looks like, by its secret: a special token is unreadable, any other
    (`<think>`) has its public spelling.
    """

    backend: Tokenizer
    spelling: Mapping[str, str]
    shown: Mapping[str, str]
    pattern: re.Pattern[str]

    def hide(self, static: str) -> str:
        """Template text with its markers in the secret spelling."""
        return self.pattern.sub(lambda found: self.spelling[found[0]], static)

    def hide_slot(self, slot: Slot) -> Slot:
        """A slot with the template text before it hidden."""
        return replace(slot, before=self.hide(slot.before))

    def encode(self, text: str) -> list[int]:
        """Ids of text, in which only the secret spellings are markers."""
        # A batch of one, because only batches can do without each token's place in the text.
        (encoded,) = self.backend.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoded.ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids with its markers as they are shown."""
        text = self.backend.decode(list(ids), skip_special_tokens=False)
        for secret, shown in self.shown.items():
            text = text.replace(secret, shown)
        return text


def private_markers(tokenizer: PreTrainedTokenizerFast, template: Template) -> Markers:
    """Copy the tokenizer with every marker respelled by a secret no player can type; ids stay."""
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"chat needs a fast tokenizer (tokenizer.json), got {type(tokenizer).__name__}; "
            "convert it with AutoTokenizer.from_pretrained(..., use_fast=True).save_pretrained(...)"
        )
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    nonce = secrets.token_hex(12)
    found = [token for token in state["added_tokens"] if _is_marker(token, template)]
    spelling = {t["content"]: f"\ue000{nonce}{number}\ue001" for number, t in enumerate(found)}
    if not spelling:
        raise ValueError("chat needs a tokenizer with special tokens, got none")
    for token in state["added_tokens"]:
        token["content"] = spelling.get(token["content"], token["content"])
    # Post-processing adds beginnings of its own, which a chat template writes itself; padding and
    # cuts are not ours.
    state["post_processor"] = state["truncation"] = state["padding"] = None
    model = state["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {spelling.get(t, t): i for t, i in model["vocab"].items()}
    else:
        model["vocab"] = [[spelling.get(t, t), score] for t, score in model["vocab"]]
    if "merges" in model:
        # A marker is cut out of a text before merges see it, so merges that spell one, or go on
        # from one, never took part; here they would put it together from typed text.
        pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
        model["merges"] = [[a, b] for a, b in pairs if not {a, b, a + b} & spelling.keys()]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = spelling.get(model["unk_token"], model["unk_token"])
    backend = Tokenizer.from_str(json.dumps(state))
    for token in found:
        if backend.token_to_id(token["content"]) != token["id"]:
            raise ValueError(
                f"chat cannot copy this tokenizer: special token {token['id']} became "
                f"{backend.token_to_id(token['content'])}"
            )
    public = {secret: name for name, secret in spelling.items()}
    shown = {t["content"]: _UNREADABLE if t["special"] else public[t["content"]] for t in found}
    # Longest first, as the tokenizer itself matches.
    names = sorted(spelling, key=len, reverse=True)
    return Markers(backend, spelling, shown, re.compile("|".join(re.escape(n) for n in names)))


def _is_marker(token: Mapping[str, Any], template: Template) -> bool:
    """Whether players must not reach an added token: it is flagged special, looks like a control
    token, or is written by the template. Words and blanks are no markers, whoever writes them.
    """
    name = token["content"]
    if token["special"] or _CONTROL.fullmatch(name):
        return True
    return bool(_SIGN.search(name)) and template.writes(name)
