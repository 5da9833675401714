"""Chats become the tokens and the mask of each family's own template, as TRL trains on them."""

import importlib.util
import re
from itertools import compress
from pathlib import Path

import pytest

from bench.chat_templates import stand_in
from selfplay.chat.rendering import Rendering, make_rendering
from selfplay.chat.template import CHATML, CLOCK, think
from selfplay.chat.transcript import Transcript
from selfplay.data.chats import Chat
from selfplay.warm_start.imitation import chat_transcript
from tests.chat.test_chat import CHANGES_HISTORY
from tests.helpers.chat_families import (
    ANEW,
    FAMILIES,
    Family,
    make_tokenizer,
    rendering_of,
    tokenizer_of,
)
from tests.helpers.shared_work import slow_except

USERS = ("Who are you?", "And now, user?", " Grüße, 世界 12 ")
ANSWERS = ("I, 12.\n\nassistant", "The other\tone.", "No.")


def messages(chat: Chat) -> list[dict[str, str]]:
    talk = [{"role": "system", "content": chat.system}] if chat.system else []
    for user, answer in zip(chat.users, chat.answers, strict=True):
        talk.append({"role": "user", "content": user})
        talk.append({"role": "assistant", "content": answer})
    return talk


def chat_of(rendering: Rendering) -> Chat:
    """Three turns of each; a system text where the template takes one."""
    return Chat("chat", "" if rendering.folds_system else "Be brief.", USERS, ANSWERS)


def trained(transcript: Transcript) -> list[int]:
    return list(compress(transcript.ids, transcript.mask))


def found_again(name: str, chat: Chat) -> tuple[list[int], dict[str, list[int]]]:
    """The ids of the rendered text of a chat, and the mask of each role's turns in it: a token with
    a character of a content, or of what is between the prompt and an answer, and the end-of-turn
    token after it."""
    tokenizer = tokenizer_of(name)
    options = {"strftime_now": CLOCK.strftime, **FAMILIES[name].kwargs, "tokenize": False}
    options["chat_template"] = tokenizer.chat_template or CHATML
    talk = messages(chat)
    text = str(tokenizer.apply_chat_template(talk, **options))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ends = str(tokenizer.decode([rendering_of(name).end_id], skip_special_tokens=False))
    masks = {role: [0] * len(encoded["input_ids"]) for role in ("system", "user", "assistant")}
    stop = 0
    for number, message in enumerate(talk):
        content = message["content"] if message["content"] in text else message["content"].strip()
        start = text.index(content, stop)
        stop = start + len(content)
        if message["role"] == "assistant":
            start = len(tokenizer.apply_chat_template(
                talk[:number], add_generation_prompt=True, **options
            ))  # fmt: skip
        stop += len(ends) * text.startswith(ends, stop)
        for i, (a, b) in enumerate(encoded["offset_mapping"]):
            masks[message["role"]][i] |= a < stop and b > start
    return encoded["input_ids"], masks


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in CHANGES_HISTORY])
def test_a_chat_is_the_templates_rendering_and_the_roles_turns_are_trained(name: str) -> None:
    rendering = rendering_of(name)
    chat = chat_of(rendering)
    ids, masks = found_again(name, chat)
    both = [a | b for a, b in zip(masks["assistant"], masks["user"], strict=True)]
    for roles, mask in (
        (("assistant",), masks["assistant"]),
        (("user",), masks["user"]),
        (("assistant", "user"), both),
    ):
        got = chat_transcript(rendering, chat, roles)
        num = len(got)
        assert got.ids == ids[:num]
        assert got.mask == mask[:num] and not any(mask[num:])
        assert not str(tokenizer_of(name).decode(ids[num:])).strip()
        assert not got.starts


@pytest.mark.parametrize("name", ANEW)
def test_where_a_template_drops_thoughts_each_answer_follows_the_templates_own_prompt(
    name: str,
) -> None:
    """Old answers lose their thoughts in it; the answer keeps its own, between the tags' tokens."""
    tokenizer, kwargs, rendering = tokenizer_of(name), ANEW[name].kwargs, rendering_of(name)
    answers = tuple(think(f"{number}?\n</think>\n\nFine.") for number in range(3))
    chat = Chat("chat", "Rules.", USERS, answers)
    got = chat_transcript(rendering, chat, ("assistant",))
    bounds = [0, *got.starts, len(got)]
    for turn in range(3):
        ids = got.ids[bounds[turn] : bounds[turn + 1]]
        prompt = tokenizer.apply_chat_template(
            messages(chat)[: 2 + 2 * turn], return_dict=False, add_generation_prompt=True, **kwargs
        )
        text = str(tokenizer.decode(prompt, skip_special_tokens=False))
        opened = text.rstrip().endswith("<think>")
        said = answers[turn].removeprefix("<think>\n" if opened else "")
        answer = tokenizer(said, add_special_tokens=False)["input_ids"]
        assert ids == [*prompt, *answer, rendering.end_id]
        mask = got.mask[bounds[turn] : bounds[turn + 1]]
        assert mask == [0] * len(prompt) + [1] * (len(answer) + 1)


def trl_templates() -> dict[str, str]:
    """TRL's templates by file name; read as files, because importing TRL takes long."""
    found = importlib.util.find_spec("trl")
    assert found is not None and found.submodule_search_locations
    folder = Path(found.submodule_search_locations[0]) / "chat_templates"
    return {path.stem: path.read_text("utf-8") for path in folder.glob("*.jinja")}


TRL = trl_templates()
# Those that `make_rendering` refuses, and two that drop thoughts and have no switch for them.
OTHERS = ("gptoss", "idefics3", "llava_next", "muse_glimmer", "smolvlm")
OTHERS += ("deepseek_r1_distill", "deepseekv3")
PAIRS = sorted(name for name in TRL if f"{name}_training" in TRL and name not in OTHERS)
FAST = ("qwen2_5", "qwen3", "llama3", "gemma", "glm4moe", "phi3")


@pytest.mark.parametrize("name", slow_except(PAIRS, *FAST))
def test_tokens_and_mask_are_those_of_trls_assistant_only_loss(name: str) -> None:
    """TRL also trains on what its template writes around an answer: line ends, the end of a text,
    and the empty thought that a prompt without thinking ends with. No policy samples these after a
    prompt and before its end of turn, so they have no loss here."""
    tokenizer = stand_in(TRL[name])
    thinks = "enable_thinking" in TRL[name]
    kwargs = {"enable_thinking": False} if thinks else {}
    rendering = make_rendering(tokenizer, template_kwargs=kwargs)
    chat = chat_of(rendering)
    got = chat_transcript(rendering, chat, ("assistant",))
    theirs = tokenizer.apply_chat_template(
        messages(chat),
        chat_template=TRL[f"{name}_training"],
        return_dict=True,
        return_assistant_tokens_mask=True,
        **kwargs,
    )
    ids, mask = theirs["input_ids"], theirs["assistant_masks"]
    num = len(got)
    assert got.ids == ids[:num]
    assert all(a <= b for a, b in zip(got.mask, mask[:num], strict=True))
    untrained = [*got.mask, *[0] * (len(ids) - num)]
    more = [i for i, a, b in zip(ids, untrained, mask, strict=True) if a < b]
    text = str(tokenizer.decode(more, skip_special_tokens=False))
    assert not re.sub(r"</?think>|<\|end\|>|<\|END_OF_TURN_TOKEN\|>", "", text).strip()


def test_a_typed_marker_is_text_and_trims_are_the_templates_own() -> None:
    tokenizer = make_tokenizer(FAMILIES["llama3"])
    rendering = make_rendering(tokenizer)
    chat = Chat("chat", "", ("Say <|eot_id|>",), ("  It is <|eot_id|>.\n",))
    got = chat_transcript(rendering, chat, ("assistant",))
    assert got.ids.count(rendering.end_id) == 2  # of the user's turn and the answer's
    assert rendering.decode(trained(got)) == "It is <|eot_id|>."


def test_an_empty_user_text_trains_its_end_alone() -> None:
    rendering = make_rendering(make_tokenizer(Family("qwen25", ("<|im_start|>", "<|im_end|>"))))
    got = chat_transcript(rendering, Chat("chat", "", ("", "b"), ("a",)), ("user",))
    assert rendering.readable(trained(got)) == "<|im_end|>b<|im_end|>"
