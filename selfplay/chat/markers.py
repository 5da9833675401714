"""A private copy of a tokenizer, which turns no text typed by a player into a marker.

A marker is a special token, or any added token that the chat template writes. The copy respells
each marker with a secret. Units: token ids.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from selfplay.chat.template import Slot, Template

if TYPE_CHECKING:  # it imports torch, which a program that draws a page does not need
    from transformers import PreTrainedTokenizerFast

# The text of a decoded special token, or of an id without a token; no game's rules use it.
_UNREADABLE = "\ufffd"
# Spellings of control tokens, which are not always flagged special.
_CONTROL = re.compile(r"<[|｜].*[|｜]>")
THOUGHT = ("<think>", "</think>")  # readable in a sample, so that a game can drop the thought
_SYMBOL = re.compile(r"[^\w\s]")


@dataclass(frozen=True, slots=True)
class Markers:
    """The private copy of a tokenizer.

    spelling: each marker's secret spelling, by its public one.
    shown: each marker's decoded text, by its secret spelling: U+FFFD for a special token, the
        public spelling for any other marker and for THOUGHT.
    pattern: matches the public spelling of any marker.
    """

    backend: Tokenizer
    spelling: Mapping[str, str]
    shown: Mapping[str, str]
    pattern: re.Pattern[str]

    def hide(self, static: str) -> str:
        """Template text with its markers in their secret spelling."""
        return self.pattern.sub(lambda match: self.spelling[match[0]], static)

    def hide_slot(self, slot: Slot) -> Slot:
        """The slot with the markers of its template text in their secret spelling."""
        return replace(slot, before=self.hide(slot.before))

    def encode(self, text: str) -> list[int]:
        """Ids of a text; only secret spellings become markers.

        Special tokens are never added."""
        # Only the batch call can skip the tokens' character offsets, which is faster.
        (encoded,) = self.backend.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoded.ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, with markers replaced by their `shown` text.

        An id without a token becomes U+FFFD: a vocabulary may have gaps, and a model more rows.
        """
        text = "".join(
            self.backend.decode(list(run), skip_special_tokens=False)
            if known
            else _UNREADABLE * len(list(run))
            for known, run in groupby(ids, self._is_known)
        )
        for secret, shown in self.shown.items():
            text = text.replace(secret, shown)
        return text

    def _is_known(self, token: int) -> bool:
        return token >= 0 and self.backend.id_to_token(token) is not None


def private_markers(tokenizer: PreTrainedTokenizerFast, template: Template) -> Markers:
    """Copy the tokenizer with each marker respelled by a secret; all ids stay the same.

    Raises ValueError for a slow tokenizer, one without markers, or one whose copy changes ids.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"chat needs a fast tokenizer (tokenizer.json), got {type(tokenizer).__name__}; "
            "convert it with AutoTokenizer.from_pretrained(..., use_fast=True).save_pretrained(...)"
        )
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    nonce = secrets.token_hex(12)
    markers = [token for token in state["added_tokens"] if _is_marker(token, template)]
    spelling = {t["content"]: f"\ue000{nonce}{number}\ue001" for number, t in enumerate(markers)}
    if not spelling:
        raise ValueError("chat needs a tokenizer with special tokens, got none")
    for token in state["added_tokens"]:
        token["content"] = spelling.get(token["content"], token["content"])
    # The chat template itself writes the tokens that post-processing would add. Prompts are not
    # padded or truncated.
    state["post_processor"] = state["truncation"] = state["padding"] = None
    model = state["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {spelling.get(t, t): i for t, i in model["vocab"].items()}
    else:
        model["vocab"] = [[spelling.get(t, t), score] for t, score in model["vocab"]]
    if "merges" in model:
        # The original splits markers off before merging, so merges that build or extend a marker
        # never apply there. In the copy they could build a marker from typed text.
        pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
        model["merges"] = [[a, b] for a, b in pairs if not {a, b, a + b} & spelling.keys()]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = spelling.get(model["unk_token"], model["unk_token"])
    backend = Tokenizer.from_str(json.dumps(state))
    for token in markers:
        if backend.token_to_id(token["content"]) != token["id"]:
            raise ValueError(
                f"chat cannot copy this tokenizer: special token {token['id']} became "
                f"{backend.token_to_id(token['content'])}"
            )
    public = {secret: name for name, secret in spelling.items()}
    shown = {
        t["content"]: public[t["content"]]
        if not t["special"] or public[t["content"]] in THOUGHT
        else _UNREADABLE
        for t in markers
    }
    # Longest first, as in the tokenizer.
    names = sorted(spelling, key=len, reverse=True)
    return Markers(backend, spelling, shown, re.compile("|".join(re.escape(n) for n in names)))


def _is_marker(token: Mapping[str, Any], template: Template) -> bool:
    """Whether an added token is a marker, which no player may produce by typing.

    It is one if it is flagged special, is spelled like a control token, or is written by the
    template and contains a symbol: a phrase of words and spaces is text that players may type.
    """
    name = token["content"]
    if token["special"] or _CONTROL.fullmatch(name):
        return True
    return bool(_SYMBOL.search(name)) and template.writes(name)
