"""What the pages say and code must keep: commands, flags, settings, links, pictures."""

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from dialop.kit import load_kit
from docs.tools.documented import parts
from selfplay.config import Config
from selfplay.config.features import all_described
from tests.helpers.run_folders import make_run

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
GAMES = ("collab", "matching", "mediation", "planning", str(ROOT / "examples/meeting/meeting.py"))
OPTIONS = {
    f"game.options.{field.name}" for game in GAMES for field in fields(load_kit(game).Options)
}
EVERY = all_described(Config)
KEYS = {entry.name for entry in EVERY} | OPTIONS
FREE = {entry.name for entry in EVERY if entry.kind == "mapping"} - {"methods"}
JOINING = [ROOT / name for name in ("CONTRIBUTING.md", "AGENTS.md", "tests/README.md")]
PAGES = [ROOT / "README.md", *JOINING, *sorted(DOCS.glob("*.md"))]
CODE = ("bench", "configs", "dialop", "examples", "selfplay", "tests")
# Where a command's flags are declared.
SOURCES = {
    "train.py": ("train.py", "selfplay/preflight/*.py", "selfplay/config/*.py"),
    "eval.py": ("eval.py", "selfplay/evaluation/*.py", "selfplay/preflight/*.py"),
    "dialop": ("dialop/*.py", "dialop/*/*.py"),
    "bench.update": ("bench/update.py", "bench/rows.py"),
    "bench.peers": ("bench/peers.py", "bench/rows.py"),
}
COMMAND = re.compile(r"(?:^|[\s|`])(?:python3?|torchrun|selfplay-\w+|make) [^`|]*")
PROGRAM = re.compile(
    r"(?:^|\s)(train\.py|eval\.py|-m (?:selfplay|bench|dialop)[\w.]*|selfplay-\w+)"
)
SETTING = re.compile(r"[a-z_]+(?:\.[a-z_]+)*(?==)")


def commands() -> Iterator[tuple[str, str]]:
    """(page, command) of each documented command, with its continued lines joined."""
    for page in PAGES:
        for part, _ in parts(page):
            if found := COMMAND.search(part):
                yield page.name, re.split(r"\s+#\s", found[0].strip(" `|"))[0]


def test_the_calls_of_a_step_are_in_the_named_files() -> None:
    """Those that design.md lists, one a line: function or method, file, what it does."""
    page = (DOCS / "design.md").read_text(encoding="utf-8")
    calls = re.findall(r"^ {4}([\w.]+) +([\w/]+\.py)\b", page, re.MULTILINE)
    assert len(calls) == 21
    for name, file in calls:
        body = ast.parse((ROOT / "selfplay" / file).read_text(encoding="utf-8")).body
        for word in name.split("."):
            named = [node for node in body if getattr(node, "name", "") == word]
            assert named, f"{file} has no {name}"
            body = getattr(named[0], "body", [])


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_site", DOCS / "site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_settings_page_has_every_key_once(site: ModuleType) -> None:
    rows = re.findall(r"^### (\S+) \{: #\1 \}$", site.settings_page(), re.MULTILINE)
    keys = [entry.name for entry in EVERY if entry.kind is not None]
    assert [row for row in rows if not row.startswith("game.options.")] == keys
    assert any(row.startswith("game.options.") for row in rows)


def test_the_errors_page_has_the_messages_of_the_code(site: ModuleType) -> None:
    page = site.errors_page()
    assert "- --port must be from 0 to 65535, got …" in page
    assert "## selfplay/metrics/run\\_folder.py" in page or "## selfplay/metrics/run_folder" in page
    assert len(re.findall("^- ", page, re.MULTILINE)) > 250


def test_every_documented_command_exists() -> None:
    """Its program, its flags, its settings and the files of this project that it names."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    wrong, num = [], 0
    for page, command in commands():
        words = command.split()
        num += 1
        if words[0] == "make":
            plain = [word for word in words[1:] if re.fullmatch("[a-z-]+", word)]
            wrong += [(page, command) for target in plain[:1] if target not in targets]
        for path in re.findall(r"(?:configs|examples)/[\w./-]+", command):
            wrong += [(page, path)] if not (ROOT / path).exists() else []
        found = PROGRAM.search(command)
        if found is None:
            continue
        program = found[1].removeprefix("-m ").replace("selfplay-", "selfplay.")
        program = {"selfplay.train": "train.py", "selfplay.eval": "eval.py"}.get(program, program)
        patterns = SOURCES.get(program) or (
            f"{program.replace('.', '/')}.py",
            f"{program.replace('.', '/')}/*.py",
        )
        paths = [path for pattern in patterns for path in ROOT.glob(pattern)]
        wrong += [(page, program)] if not paths else []
        code = "\n".join(path.read_text("utf-8") for path in paths)
        rest = command[found.end() :]
        flags = set(re.findall(r"(?<!\S)--[a-z][\w-]*", rest)) - {"--help"}
        if program == "dialop":  # makes its flags of a game's options
            flags = {
                flag for flag in flags if flag[2:].replace("no-", "").replace("-", "_") not in code
            }
        wrong += [(page, command, flag) for flag in flags if f'"{flag}"' not in code]
        if program in ("train.py", "eval.py", "selfplay.apps.play"):
            words = [word.strip("\"'[") for word in rest.split()]
            keys = [key for word in words for key in SETTING.findall(word)[:1] if key != "key"]
            keys = [key for key in keys if key.rpartition(".")[0] not in FREE]
            wrong += [(page, command, key) for key in keys if key not in KEYS]
    assert not wrong
    assert num > 100


def test_every_setting_that_a_page_names_exists() -> None:
    sections = {key.partition(".")[0] for key in KEYS if "." in key}
    parts = {key.rpartition(".")[0] for key in KEYS}
    wrong = []
    for page in PAGES:
        text = page.read_text("utf-8")
        if page.name == "coming_from.md":  # whose first column has keys of other trainers
            cells = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
            text = "\n".join(cell[1] for cell in cells if len(cell) > 2)
        for key in re.findall(r"`(?:policies\.\w+\.)?([a-z_]+\.[a-z_.]+)(?:[:=][^`]*)?`", text):
            other = key.endswith((".py", ".zip", ".jsonl")) or key.rpartition(".")[0] in FREE
            if key.partition(".")[0] in sections and key not in KEYS | parts and not other:
                wrong.append((page.name, key))
    assert not wrong


def test_every_picture_is_shown_and_every_link_leads_somewhere() -> None:
    shown: set[str] = set()
    for page in [*PAGES, *DOCS.glob("notes/*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text("utf-8")):
            if "://" in target or target in ("settings.md", "errors.md"):  # made at build time
                continue
            path = (page.parent / target).resolve()
            assert path.exists(), (page.name, target)
            shown.add(path.name)
    assert {path.name for path in (DOCS / "figures").iterdir()} <= shown


def test_every_page_that_code_names_and_every_file_that_a_page_names_exists() -> None:
    files = [path for folder in CODE for path in (ROOT / folder).rglob("*.*") if path.is_file()]
    named = {
        (path.name, page)
        for path in [*files, ROOT / "train.py", ROOT / "eval.py", ROOT / "Makefile"]
        if path.suffix in (".py", ".yaml", "")
        for page in re.findall(r"docs/[\w/]+\.md", path.read_text("utf-8"))
    }
    assert len(named) > 20
    named |= {
        (page.name, file)
        for page in DOCS.glob("*.md")
        for file in re.findall(
            r"\b(?:selfplay|dialop|tests|bench)/[\w/]+\.py", page.read_text("utf-8")
        )
    }
    assert {(name, file) for name, file in named if not (ROOT / file).exists()} == set()


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.name not in ("trust.md", "design.md")], ids=lambda p: p.stem
)
def test_a_page_for_users_has_at_most_1200_words_short_cells_and_code_that_fits(page: Path) -> None:
    """Words outside code blocks; a cell of a table has at most 200 characters as shown, a line of
    code 92, which are 700 pixels of the site."""
    text = page.read_text("utf-8")
    blocks = re.findall(r"^```(?!mermaid).*?\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    code = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    code += [line for block in blocks for line in block.splitlines()]
    assert [line for line in code if len(line) > 92] == []
    lines = [line for line in text.splitlines() if not line.startswith("    ")]
    shown = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line) for line in lines]
    cells = [c for line in shown if line[:1] == "|" for c in re.split(r"(?<!\\)\|", line)]
    assert sum(len(line.split()) for line in shown) <= 1200
    assert [cell for cell in cells if len(cell.strip()) > 200] == []


def test_formulas_have_nothing_that_markdown_takes_for_itself() -> None:
    """GitHub reads Markdown before formulas: it drops the backslash of `\\,`, and `}_` may begin
    emphasis."""
    num, wrong = 0, []
    for page in PAGES:
        text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text("utf-8"), flags=re.M | re.S)
        text = re.sub("^    .*", "", text, flags=re.MULTILINE)
        for formula in re.findall(r"\$\$\n(.*?)\n\$\$|\$([^$]+)\$", text, re.DOTALL):
            num += 1
            wrong += [(page.name, f) for f in formula if re.search(r"\\[!-/:-@[-`{-~]|\W_", f)]
    assert not wrong
    assert num > 100


def test_the_run_folder_page_has_the_keys_of_its_files(tmp_path: Path) -> None:
    """Of a game, a turn and a row of an evaluation; the keys that not every game has stand too."""
    page = (DOCS / "run_folder.md").read_text("utf-8")
    parts = re.split(r"^##+ ", page, flags=re.MULTILINE)
    tables = {
        part.split("\n")[0]: {
            key
            for line in part.splitlines()
            if line.startswith("| `")
            for key in re.findall("`([a-z_]+)`", line.split(" | ")[0])
        }
        for part in parts
    }
    folder = make_run(tmp_path / "run", num_games=3)
    game = json.loads((folder / "games.jsonl").read_text("utf-8").splitlines()[0])
    row = json.loads((folder / "held_out_after.json").read_text("utf-8"))["sampled"]
    assert tables["A game"] == {*game, "branches", "judge", "paid"}
    assert tables["A turn"] == {*game["turns"][0], "tokens"}
    assert tables["An evaluation"] == set(row)


def test_the_map_of_the_tests_names_every_helper_and_mark() -> None:
    page = (ROOT / "tests" / "README.md").read_text("utf-8")
    named = set(re.findall(r"`(\w+\.py|templates)/?`", page.split("## Helpers")[1]))
    there = {path.name for path in (ROOT / "tests" / "helpers").glob("[a-z]*")}
    assert named == there
    marks = re.findall(r'^    "(\w+): ', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert set(marks) <= set(re.findall(r"`(\w+)`", page.split("## What")[0]))
    agents = (ROOT / "AGENTS.md").read_text("utf-8").splitlines()
    assert len(agents) <= 60


def test_the_game_on_the_front_page_is_that_of_the_example() -> None:
    example = (ROOT / "examples" / "meeting" / "meeting.py").read_text("utf-8").splitlines()
    for page in (ROOT / "README.md", DOCS / "your_game.md"):
        shown = page.read_text("utf-8").split("```python\n")[1].split("```")[0].splitlines()
        assert "class Meeting(TurnGame):" in shown
        assert [line for line in shown if line not in example] == []
