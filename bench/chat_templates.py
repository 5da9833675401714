"""Tests which public chat templates this trainer accepts, each with a small substitute tokenizer.

    python -m bench.chat_templates FOLDER [FOLDER ...] [--names]

Reads every `.jinja` file below the folders, and the chat templates in strings of Python files. A
file that is not Python 3 is named on stderr and left out. For each template it trains a tokenizer
that has the template's special tokens. A template is "extended" or "turn by turn" if
`make_rendering` accepts it and renders a conversation of three turns to the same ids as
`apply_chat_template`. Otherwise the reason is shown.
Prints one row per template, or with --names only the templates of each outcome.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.chat_templates",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--names", action="store_true", help="one line an outcome")
    args = parser.parse_args(words)
    if missing := [str(folder) for folder in args.folders if not folder.is_dir()]:
        parser.error(f"FOLDER must be a folder, got {', '.join(missing)}")
    return args


if __name__ == "__main__":  # --help and a mistake are answered before torch is imported
    arguments()

# isort: split
from jinja2.exceptions import TemplateError
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from selfplay.chat.rendering import make_rendering
from selfplay.chat.template import CLOCK
from selfplay.chat.tokenizer import train_tokenizer
from selfplay.errors import SettingsError

SUFFIXES = (".jinja", ".py")
TEXTS = ["Hello, world 12. You are user assistant system model in out, the other one.\n\n"] * 3
NAMED = re.compile(
    r"<\|[^|<>\s]{1,40}\|?>|<[a-z_]{1,20}\|>|<｜[^｜]{1,40}｜>|\[\|[a-z]{1,40}\|\]"
    r"|<[a-z]+_of_[a-z]+>|<SPECIAL_\d+>|\]~!?b[\[\]]|\[e~\[|</?s>"
)
TAGS = re.compile(r"</?[a-z_:]{3,20}>")  # in a conversation
MISTRAL = re.compile(r"\[/?[A-Z][A-Z_]+\]")
# bos_token and eos_token of a template: the first of these that it contains.
BOS = ("<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<|START_OF_TURN_TOKEN|>", "<|startoftext|>")
ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eot|>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>"),
    *("<|end|>", "<|return|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<|endoftext|>"),
)
SYSTEM, USERS, ANSWERS = "Be brief.", ("Who are you?", "And now?", "good"), ("I, 12.", "The other.")


def templates_in(path: Path) -> Iterator[tuple[str, str]]:
    """Name and text of each template in this file."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".jinja":
        yield path.stem, text
        return
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        print(f"{path}: left out: {error}", file=sys.stderr)
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            value, name = node.value.value, node.targets[0]
            if isinstance(value, str) and "{%" in value and "messages" in value:
                yield getattr(name, "id", path.stem), value


def stand_in(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer that has the template's special tokens and the tags that it writes into a
    conversation."""
    gemma = "_of_turn>" in template or "<turn|>" in template
    bos = next((token for token in BOS if token in template), "<bos>" if gemma else "<s>")
    eos = next((token for token in ENDS if token in template), "</s>")
    tokenizer = train_tokenizer(TEXTS, vocab_size=420)
    tokenizer.chat_template = template
    tokenizer.eos_token = eos
    if "bos_token" in template:
        tokenizer.bos_token = bos
    talk = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}] * 2
    try:
        written = tokenizer.apply_chat_template(talk[:3], tokenize=False)
    except (TemplateError, TypeError, ValueError):
        written = ""
    flagged = {*NAMED.findall(template), *NAMED.findall(written), bos, eos}
    if "[SYSTEM_PROMPT]" in template or "[AVAILABLE_TOOLS]" in template:
        flagged |= set(MISTRAL.findall(template))  # tokens since v3, plain text before
    tags = {"<think>", "</think>", *TAGS.findall(written)} - flagged
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in sorted(tags)])
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(flagged)})
    return tokenizer


def outcome(template: str, kwargs: Mapping[str, object]) -> str:
    """ "extended", "turn by turn", or why the template is refused."""
    tokenizer = stand_in(template)
    try:
        rendering = make_rendering(tokenizer, template_kwargs=kwargs)
    except SettingsError as error:
        return f"refused: {str(error).partition(': ')[2]}"
    system = {"role": "system", "content": SYSTEM}
    first = {"role": "user", "content": USERS[0]}
    if rendering.folds_system:
        talk = [{"role": "user", "content": f"{SYSTEM}\n\n{USERS[0]}"}]
    else:
        talk = [system, first]
    ids = rendering.first(system=SYSTEM, user=USERS[0])
    for answer, user in zip(ANSWERS, USERS[1:], strict=True):
        talk += [{"role": "assistant", "content": answer}, {"role": "user", "content": user}]
        following = rendering.following(user, closed=True)
        ids += rendering.action_ids(answer) + following
    try:
        expected = tokenizer.apply_chat_template(
            talk,
            tokenize=True,
            return_dict=False,
            add_generation_prompt=True,
            strftime_now=CLOCK.strftime,
            **kwargs,
        )
    except (TemplateError, TypeError, ValueError) as error:
        return f"WRONG: taken, but it fails on a conversation: {error}"
    if rendering.rewritten:
        same = rendering.conversation(SYSTEM, USERS, ANSWERS) == expected
        return "turn by turn" if same else "WRONG: turn by turn, ids differ"
    if ids == expected:
        return "extended"
    # The template drops a prompt's opening (an empty think block) from old turns; it may stay here.
    if (
        following == expected[-len(following) :]
        and expected[-len(following) - 1] == rendering.end_id
    ):
        return "extended, keeps what its prompts open"
    return "WRONG: extended, ids differ"


def main(words: Sequence[str] | None = None) -> None:
    args = arguments(words)
    found: defaultdict[str, list[str]] = defaultdict(list)
    seen: dict[str, str] = {}
    for folder in args.folders:
        for path in sorted(p for p in folder.rglob("*") if p.suffix in SUFFIXES and p.is_file()):
            for name, template in templates_in(path):
                name = f"{folder.name}/{name}"
                if template in seen:
                    found["the same as another"].append(name)
                    continue
                seen[template] = name
                result = outcome(template, {})
                if result.startswith("refused") and "enable_thinking" in template:
                    again = outcome(template, {"enable_thinking": False})
                    if not again.startswith("refused"):
                        result = f"{again} with enable_thinking: false"
                found[result].append(name)
                if not args.names:
                    print(f"{name} | {result}", flush=True)
    for result, names in sorted(found.items(), key=lambda item: -len(item[1])):
        print(f"\n{len(names)} | {result}\n    {', '.join(names)}")


if __name__ == "__main__":
    main()
