"""Rendering equals each family's own template, extends turn by turn, and has no typed markers."""

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from dialop.game import Prompt
from dialop.tags import drop_reasoning
from selfplay.chat.rendering import Rendering, make_rendering
from selfplay.chat.template import CHATML, CLOCK, CLOSE, Template, think
from selfplay.chat.tokenizer import load_tokenizer, train_tokenizer
from selfplay.data.chats import PASSED
from selfplay.engines.base import Completion, Request
from selfplay.errors import SettingsError
from selfplay.rollout.players import PolicyPlayer
from tests.helpers.chat_families import (
    ANEW,
    FAMILIES,
    REFUSED,
    Family,
    make_tokenizer,
    rendering_of,
    tokenizer_of,
)

# Any text without lone surrogates and without the characters that begin special tokens.
PLAIN = st.text(st.characters(exclude_categories=["Cs"]), max_size=40).filter(
    lambda text: not re.search(r"[<|\[]", text)
)
EXAMPLES = settings(max_examples=25, suppress_health_check=list(HealthCheck), deadline=None)
every_family = pytest.mark.parametrize("name", FAMILIES)


def reference(name: str, messages: list[dict[str, str]]) -> list[int]:
    """The family's own `apply_chat_template`, with the generation prompt."""
    tokenizer = tokenizer_of(name)
    kwargs = dict((FAMILIES | ANEW)[name].kwargs)
    if tokenizer.chat_template is None:
        kwargs["chat_template"] = CHATML
    kwargs["strftime_now"] = CLOCK.strftime
    return tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=False, add_generation_prompt=True, **kwargs
    )


def opening(rendering: Rendering, system: str, user: str) -> list[dict[str, str]]:
    if not system:
        return [{"role": "user", "content": user}]
    if rendering.folds_system:
        return [{"role": "user", "content": f"{system}\n\n{user}"}]
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def text_of(name: str, ids: list[int]) -> str:
    return tokenizer_of(name).decode(ids, skip_special_tokens=False)


@every_family
@EXAMPLES
@given(system=PLAIN, user=PLAIN)
def test_first_prompt_is_the_templates_own(name: str, system: str, user: str) -> None:
    rendering = rendering_of(name)
    expected = reference(name, opening(rendering, system, user))
    assert rendering.first(system=system, user=user) == expected


def test_a_marker_that_takes_the_blanks_before_it_keeps_the_texts_together() -> None:
    tokenizer = make_tokenizer(FAMILIES["qwen2.5"])
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in state["added_tokens"]:
        token["lstrip"] = token["content"] == "<|im_end|>"
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
    rendering = make_rendering(tokenizer)
    talk = opening(rendering, "Rules. ", "A")
    expected = tokenizer.apply_chat_template(talk, return_dict=False, add_generation_prompt=True)
    assert rendering.first(system="Rules. ", user="A") == expected
    assert not rendering._splits and rendering_of("qwen2.5")._splits


@every_family
@EXAMPLES
@given(users=st.tuples(PLAIN, PLAIN, PLAIN))
@example(users=("A", "", ""))
def test_the_ids_after_an_answer_are_the_templates_own(name: str, users: tuple[str, ...]) -> None:
    rendering = rendering_of(name)
    talk = opening(rendering, "", users[0])
    for user in users[1:]:
        talk += [{"role": "assistant", "content": "Fine."}, {"role": "user", "content": user}]
        following = rendering.following(user, closed=True)
        expected = reference(name, talk)
        assert following == expected[-len(following) :]
        assert expected[-len(following) - 1] == rendering.end_id


# Their templates remove or change text in old turns that our prompts keep.
CHANGES_HISTORY = (
    *("qwen3 without thinking", "qwen3, tags unflagged"),
    *("smollm3 without thinking", "glm 4.5 without thinking"),
)


@pytest.mark.parametrize("name", [n for n in FAMILIES if n not in CHANGES_HISTORY])
def test_a_grown_conversation_is_the_templates_rendering_of_it(name: str) -> None:
    rendering = rendering_of(name)
    ids = rendering.first(system="Be brief.", user="Who are you?")
    talk = opening(rendering, "Be brief.", "Who are you?")
    for answer, user in [("I, 12.", "And now?"), ("The other one.", " good ")]:
        ids += rendering.action_ids(answer) + rendering.following(user, closed=True)
        talk += [{"role": "assistant", "content": answer}, {"role": "user", "content": user}]
        assert ids == reference(name, talk)


def test_qwen3_keeps_the_empty_think_block_that_was_in_the_prompt() -> None:
    """The template drops the block from old turns; our context keeps it, as the policy saw it."""
    name = "qwen3 without thinking"
    rendering = rendering_of(name)
    ids = rendering.first(system="", user="A") + rendering.action_ids("B")
    ids += rendering.following("C", closed=True)
    block = "<think>\n\n</think>\n\n"
    assert text_of(name, ids) == (
        f"<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n{block}B<|im_end|>\n"
        f"<|im_start|>user\nC<|im_end|>\n<|im_start|>assistant\n{block}"
    )


@pytest.mark.parametrize(
    ("name", "folds"),
    [("qwen2.5", False), ("llama3", False), ("mistral", True), ("mistral nemo", True)],
)
def test_without_a_reliable_system_role_the_system_text_joins_the_first_user_text(
    name: str, folds: bool
) -> None:
    rendering = rendering_of(name)
    assert rendering.folds_system is folds
    first = text_of(name, rendering.first(system="Rules.", user="Go."))
    assert ("Rules.\n\nGo." in first) is folds


@every_family
def test_the_end_of_turn_comes_from_the_sample_or_from_the_following_ids(name: str) -> None:
    rendering = rendering_of(name)
    answer = rendering.action_ids("Yes.")
    assert rendering.ends_turn(answer)
    assert not rendering.ends_turn(answer[:-1])
    assert not rendering.ends_turn([])
    truncated = answer[:-1] + rendering.following("Go on.", closed=False)
    assert truncated == answer + rendering.following("Go on.", closed=True)


@every_family
@EXAMPLES
@given(text=PLAIN)
def test_an_action_decodes_to_its_text(name: str, text: str) -> None:
    rendering = rendering_of(name)
    ids = rendering.action_ids(text)
    assert ids[-1] == rendering.end_id
    assert not set(ids[:-1]) & set(tokenizer_of(name).all_special_ids)
    if "word marks" not in name:  # Those decoders drop a text's first blank.
        normal = tokenizer_of(name).backend_tokenizer.normalizer
        assert rendering.decode(ids) == (normal.normalize_str(text) if normal else text)


@every_family
@pytest.mark.parametrize("text", ["BLEU: Ava\nSWAG: Noah", "\n Grüße, 世界 7", "a"])
def test_a_character_range_maps_to_the_tokens_that_contain_it(name: str, text: str) -> None:
    rendering, words = rendering_of(name), [m.span() for m in re.finditer(r"\w+", text)]
    ids = rendering.action_ids(text)
    for (start, end), (first, last) in zip(words, rendering.token_ranges(text, words), strict=True):
        assert 0 <= first < last < len(ids)
        assert text[start:end] in rendering.decode(ids[first:last])
        # The range is minimal: without its first or last token a part of the word is missing.
        for fewer in (ids[first + 1 : last], ids[first : last - 1]):
            assert text[start:end] not in rendering.decode(fewer)


@every_family
def test_no_added_token_that_the_template_writes_can_be_typed(name: str) -> None:
    """Typed markers, flagged special or not, are plain text everywhere in a prompt."""
    tokenizer, rendering = tokenizer_of(name), rendering_of(name)
    family = FAMILIES[name]
    names = list(dict.fromkeys([*family.specials, *family.added, *tokenizer.all_special_tokens]))
    markers = set(tokenizer.convert_tokens_to_ids(names))
    forged = "x" + "y".join(names) + "z"

    def num_markers(ids: list[int]) -> int:
        return sum(i in markers for i in ids)

    for words in (forged, *names, *(f"{n}\n{n}" for n in names)):
        first, plain = (rendering.first(system=w, user=w) for w in (words, "a"))
        assert num_markers(first) == num_markers(plain)
        following, plain = (rendering.following(w, closed=True) for w in (words, "a"))
        assert num_markers(following) == num_markers(plain)
        assert num_markers(rendering.action_ids(words)) == 1
    first = rendering.first(system=forged, user=forged)
    assert forged in tokenizer.decode(first, skip_special_tokens=False)
    assert rendering.decode(rendering.action_ids(forged)) == forged


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].added])
def test_a_sampled_tag_that_is_not_flagged_special_is_readable(name: str) -> None:
    """A thought in the policy's own `<think>` ids decodes like a typed one, so that the code that
    removes private reasoning finds its end. In a later prompt it is plain text.
    """
    tokenizer, rendering = tokenizer_of(name), rendering_of(name)
    begin, end = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    word = rendering.action_ids("yes")[:-1]
    text = rendering.decode([begin, *word, end, *word, rendering.end_id])
    assert text == "<think>yes</think>yes"
    assert drop_reasoning(text, ("accept",)) == "yes"
    plain = rendering.following("a", closed=True)
    prompt = rendering.following(text, closed=True)
    assert {begin, end} & set(prompt) <= {begin, end} & set(plain)
    assert len(prompt) > len(plain)


def test_added_words_of_a_game_stay_tokens_that_players_type() -> None:
    """The phrases of a scratch tokenizer are not markers, so typed text is encoded with them."""
    tokenizer = train_tokenizer(["Ava BLEU 3"], vocab_size=300, phrases=["[message]", "Ava BLEU "])
    ids = make_rendering(tokenizer).action_ids("[message]\nAva BLEU 3")
    assert set(tokenizer.convert_tokens_to_ids(["[message]", "Ava BLEU "])) <= set(ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_templates_whose_turns_are_opened_by_plain_text_are_known(name: str) -> None:
    plain = {"mistral", "mistral, word marks", "zephyr", "olmo 2"}
    plain.add("mistral, word marks, merges spell its tokens")
    typeable = rendering_of(name).typeable
    assert bool(typeable) is (name in plain)
    assert not typeable or typeable.split()[-1] in ("[/INST]", "<|assistant|>")


@every_family
def test_a_sampled_special_token_is_unreadable_and_not_its_spelling(name: str) -> None:
    rendering = rendering_of(name)
    word = rendering.action_ids("yes")[:-1]
    decoded = rendering.decode([*word, rendering.end_id, *word, rendering.end_id])
    assert decoded.count("\ufffd") == 1
    assert "<" not in decoded
    beyond = len(tokenizer_of(name)) + 5
    assert rendering.decode([beyond, rendering.end_id]) == "\ufffd"


def test_the_pieces_of_a_text_join_to_it() -> None:
    rendering = rendering_of("llama3")
    ids = rendering.action_ids("[message] Grüße 👍🏽, 世界!")
    pieces = rendering.pieces(ids[:-1])
    assert "".join(pieces) == "[message] Grüße 👍🏽, 世界!" and "" in pieces
    cut = pieces.index("")
    assert rendering.pieces(ids[:cut])[-1].endswith("\ufffd"), "no later token completes it"


def test_lone_surrogates_do_not_stop_a_game() -> None:
    rendering = rendering_of("llama3")
    assert rendering.following("\ud800", closed=True) == rendering.following("?", closed=True)
    assert rendering.action_ids("a\udfff") == rendering.action_ids("a?")


@pytest.mark.parametrize("name", [n for n in (*FAMILIES, *ANEW) if n not in CHANGES_HISTORY])
def test_whatever_ends_a_turn_the_next_prompt_is_the_templates_own(name: str) -> None:
    """The end of the template, of the tokenizer and any other of the model's configs: each is
    trained, and no later prompt shows one that the template would not write."""
    tokenizer, kwargs = tokenizer_of(name), (FAMILIES | ANEW)[name].kwargs
    others = [*tokenizer.all_special_ids, 200]
    rendering = make_rendering(tokenizer, template_kwargs=kwargs, ends=others)
    assert set(rendering.stop_ids) >= set(others)
    for end in rendering.stop_ids:
        player = PolicyPlayer(
            rendering, seed_names=(0,), max_new_tokens=64, max_game_tokens=4096, model=""
        )
        talk, answers = opening(rendering, "Rules.", "Who are you?"), ["I, 12.", "The other one."]

        async def sample(request: Request, talk=talk, answers=answers, end=end) -> Completion:
            assert list(request.prompt_ids) == reference(name, talk)
            ids = [*rendering.action_ids(answers[0])[:-1], end]
            return Completion(ids, [-1.0] * len(ids), "stop", 0)

        for observation in ("", "And now?", " good "):
            if observation:
                talk.append({"role": "assistant", "content": answers.pop(0)})
                talk.append({"role": "user", "content": observation})
            answers += ["Yes."] * (not answers)
            game: Any = SimpleNamespace(prompt=lambda seat: Prompt("Rules.", "Who are you?"))
            asyncio.run(player.move(game, 0, observation, sample))
        transcript = player.transcript
        assert [transcript.ids[s.end - 1] for s in transcript.spans] == [end] * 3
        assert [transcript.mask[s.end - 1] for s in transcript.spans] == [1] * 3
        assert len(transcript.starts) == (0 if end == rendering.end_id else 2) or name in ANEW


@pytest.mark.parametrize("name", ANEW)
@EXAMPLES
@given(users=st.tuples(PLAIN, PLAIN, PLAIN), answer=PLAIN, system=st.sampled_from(["", "Rules."]))
@example(users=("A", "", ""), answer="", system="")
def test_a_conversation_rendered_anew_is_the_templates_own_id_for_id(
    name: str, users: tuple[str, ...], answer: str, system: str
) -> None:
    """Whatever was thought in old turns, and in turns without a thought."""
    tokenizer, rendering = tokenizer_of(name), rendering_of(name)
    said = [think("12?\n" + CLOSE + "Fine."), f"x{answer}"]
    talk = opening(rendering, system, users[0])
    for text, user in zip(said, users[1:], strict=True):
        talk += [{"role": "assistant", "content": text}, {"role": "user", "content": user}]
    expected = tokenizer.apply_chat_template(
        talk, tokenize=True, return_dict=False, add_generation_prompt=True, **ANEW[name].kwargs
    )
    assert rendering.conversation(system, users, said) == expected
    assert "12?" not in tokenizer.decode(expected)


@pytest.mark.parametrize("name", ANEW)
def test_old_answers_rendered_anew_forge_no_markers(name: str) -> None:
    tokenizer, rendering = tokenizer_of(name), rendering_of(name)
    names = ANEW[name].specials + ANEW[name].added
    markers = set(tokenizer.convert_tokens_to_ids(list(names)))
    forged = "a" + "b".join(n for n in names if "think" not in n) + "c"

    def num_markers(answer: str) -> int:
        return sum(i in markers for i in rendering.conversation("S", ["A", "B"], [answer]))

    assert num_markers(forged) == num_markers("abc")
    assert num_markers(think(f"{forged}\n{CLOSE}fine")) == num_markers(think(f"x\n{CLOSE}fine"))


@pytest.mark.parametrize("name", ANEW)
def test_a_sampled_thought_reads_as_one_whether_the_prompt_opened_it_or_not(name: str) -> None:
    tokenizer, rendering = tokenizer_of(name), rendering_of(name)
    opened = name in ("qwen3 thinking 2507", "deepseek v3.1 thinking", "nemotron nano 2")
    thought = f"twelve\n{CLOSE}[accept]"
    sampled = thought if opened else think(thought)
    ids = tokenizer(sampled, add_special_tokens=False)["input_ids"]
    text = rendering.decode([*ids, rendering.end_id])
    assert text == think(thought)
    assert drop_reasoning(text, ("accept",)).strip() == "[accept]"
    teachers = rendering.action_ids("[accept]")
    assert rendering.decode(teachers) == "[accept]" and teachers[-1] == rendering.end_id


def test_templates_that_keep_old_turns_are_extended() -> None:
    assert not any(rendering_of(name).rewritten for name in FAMILIES)
    assert all("removes" in rendering_of(name).rewritten for name in ANEW)


CHAT = ("<|im_start|>", "<|im_end|>")


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_extended_is_refused_in_one_line_whose_setting_helps(name: str) -> None:
    """Each "set model.chat_template: {...}" in a refusal makes the template acceptable."""
    family, word = REFUSED[name]
    with pytest.raises(SettingsError) as refusal:
        make_rendering(make_tokenizer(family), template_kwargs=family.kwargs)
    message = str(refusal.value)
    assert "model.chat_template" in message and word in message and "\n" not in message
    for key, value in re.findall(r"set model.chat_template: \{(\w+): (\w+)\}", message):
        kwargs = {**family.kwargs, key: {"false": False, "true": True}[value]}
        make_rendering(make_tokenizer(family), template_kwargs=kwargs)


def test_templates_always_read_the_same_date() -> None:
    text = text_of("granite 3.3", rendering_of("granite 3.3").first(system="", user="A"))
    assert f"Today's Date: {CLOCK.strftime('%B %d, %Y')}." in text
    own = tokenizer_of("granite 3.3").apply_chat_template(
        [{"role": "user", "content": "A"}], tokenize=False, add_generation_prompt=True
    )
    assert own != text
    text = text_of("llama3.2 today", rendering_of("llama3.2 today").first(system="", user="A"))
    assert f"Today Date: {CLOCK.strftime('%d %b %Y')}" in text


@pytest.mark.parametrize("name", [*FAMILIES, *ANEW])
def test_a_date_and_an_empty_thought_are_what_a_server_is_told(name: str) -> None:
    rendering = rendering_of(name)
    dated = "strftime_now" in str(tokenizer_of(name).chat_template)
    told = " ".join(rendering.served)
    assert ("prints a date, which is 26 Jul 2024" in told) is dated
    assert ("before old answers" in told) is bool(rendering.kept)
    assert len(rendering.served) == dated + bool(rendering.kept)


@pytest.mark.parametrize("name", [*FAMILIES, *ANEW])
def test_an_exported_template_renders_without_arguments_what_the_run_trained(
    name: str, tmp_path: Path
) -> None:
    """Its date, its arguments and the place of its system text, as any program reads the folder;
    read again by a run, with the arguments or without, it renders the same."""
    family, rendering = (FAMILIES | ANEW)[name], rendering_of(name)
    assert tokenizer_of(name).chat_template == make_tokenizer(family).chat_template
    rendering.tokenizer.save_pretrained(tmp_path)
    for kwargs in ({}, family.kwargs):
        again = make_rendering(load_tokenizer(tmp_path), template_kwargs=kwargs)
        assert again.tokenizer.chat_template == rendering.tokenizer.chat_template
        for system in ("", "Rules: be brief."):
            told = [{"role": "system", "content": system}] * bool(system)
            talk = [*told, {"role": "user", "content": "Who?\n"}]
            expected = rendering.first(system=system, user="Who?\n")
            assert again.first(system=system, user="Who?\n") == expected
            served = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
                talk, return_dict=False, add_generation_prompt=True
            )
            assert served == expected
            more = [{"role": "assistant", "content": "I."}, {"role": "user", "content": "You?"}]
            served = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
                [*talk, *more], return_dict=False, add_generation_prompt=True
            )
            if name not in CHANGES_HISTORY:
                assert served == rendering.conversation(system, ["Who?\n", "You?"], ["I."])


@pytest.mark.parametrize(
    ("source", "unread"),
    [
        ("{% macro say() %}{{ tone }}{% endmacro %}{{ say() }}", ""),
        ("{% set tone = tone or 'calm' %}{{ tone }}", ""),
        ("{% if tone is not defined %}{% set tone = 'calm' %}{% endif %}{{ tone }}", ""),
        ("{% for m in messages %}{% if tone %}{% break %}{% endif %}{% endfor %}", ""),
        ("{% generation %}{{ 'A' if tone else 'B' }}{% endgeneration %}", ""),
        ("{% set tone = 'calm' %}{{ tone }}", "tone"),
        ("{{ messages[0].tone }}{{ 'tone' }}", "tone"),
    ],
)
def test_an_argument_is_read_wherever_the_template_looks_it_up(source: str, unread: str) -> None:
    template = Template(tokenizer_of("no template"), {"chat_template": source})
    assert template.unread(["tone"]) == unread


@pytest.mark.parametrize("key", PASSED)
def test_a_key_of_a_message_is_shown_by_a_template_that_writes_or_refuses_it(key: str) -> None:
    tokenizer = make_tokenizer(Family("", CHAT))
    assert make_rendering(tokenizer).shows == ()
    for shown in (
        f"(message.{key} or '') + message.content",
        f"raise_exception('x') if message['{key}'] else message.content",
    ):
        tokenizer.chat_template = CHATML.replace("message.content +", f"({shown}) +")
        assert make_rendering(tokenizer).shows == (key,)


NAMED = {"default": CHATML, "tool_use": CHATML.replace("<|im_start|>", "<|im_start|>tool ")}


def test_of_several_named_templates_the_default_or_the_named_one_is_used() -> None:
    tokenizer = make_tokenizer(Family("", CHAT))
    tokenizer.chat_template = NAMED
    first = make_rendering(tokenizer).first(system="", user="A")
    assert first == rendering_of("no template").first(system="", user="A")
    named = make_rendering(tokenizer, template_kwargs={"chat_template": "tool_use"})
    assert "<|im_start|>tool user" in tokenizer.decode(named.first(system="", user="A"))
    assert named.tokenizer.chat_template["default"] == NAMED["tool_use"] and first
    assert tokenizer.chat_template == NAMED


MARKED = make_tokenizer(Family("", CHAT))
TEXTUAL = make_tokenizer(Family("", ("<s>", "</s>"), bos="<s>", eos="</s>", word_marks=True))
# A tokenizer, its template, and what the refusal names beside model.chat_template.
UNUSABLE: list[tuple[Any, Any, str]] = [
    (MARKED, "{{ messages[0].content", ""),
    (MARKED, "{{ 1 / 0 }}", ""),
    (MARKED, "{{ nobody.name }}", ""),
    (TEXTUAL, None, r"missing: <\|im_start\|>, <\|im_end\|>.*add_special"),
    (MARKED, NAMED | {"chat_template": "rag"}, "default, tool_use.*'rag'"),
    (MARKED, {"rag": CHATML}, r"\{chat_template: rag\}"),
    # Old answers are shortened.
    (MARKED, CHATML.replace("message.content +", "message.content[:3] +"), "once and in order"),
    # The first turn looks different once there are more.
    (
        MARKED,
        CHATML.replace("message.role +", "message.role + loop.length | string +"),
        "beginning",
    ),
    # No generation prompt.
    (MARKED, CHATML.replace("add_generation_prompt", "false"), "does not open an answer"),
    # The end of a turn is no token of its own.
    (MARKED, CHATML.replace("<|im_end|>", "</turn>"), "one special token"),
    # Contents are changed.
    (MARKED, CHATML.replace("message.content +", "message.content.replace('12', '13') +"), "token"),
]


@pytest.mark.parametrize(("tokenizer", "template", "named"), UNUSABLE)
def test_a_template_that_cannot_be_used_is_refused_in_one_line(
    tokenizer: Any, template: Any, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = isinstance(template, dict) and "chat_template" in template
    kwargs = {"chat_template": template["chat_template"]} if asked else {}
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(SettingsError, match=rf"^[^\n]*model\.chat_template[^\n]*{named}[^\n]*$"):
        make_rendering(tokenizer, template_kwargs=kwargs)
