"""What the documentation site makes at build time: settings and errors from the code, formulas.

MkDocs runs it (`hooks` in mkdocs.yml; `make docs`). Imports no torch.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from html import unescape
from itertools import chain
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dialop.shown import escaped  # noqa: E402
from selfplay.config import Config  # noqa: E402
from selfplay.config.features import all_described  # noqa: E402
from selfplay.config.play import options_of  # noqa: E402

SETTINGS_HEAD = """---
search: {boost: 4}
---
# Settings

Every key of a settings file, generated from the code (`selfplay/config/`); `--help SECTION` prints
the same. A file holds only what differs from the defaults. `section.key=value` on the command line
overrides it. `base: FILE` extends another file or a shipped one. Each key has an address:
`settings/#optim.lr`.
"""
ERRORS_HEAD = """# All error messages

This page lists, by module, every message with which the code refuses something. It is generated
from the code. `…` stands for a value. A message gives the rule, the value and, where there is one,
the nearest valid choice. [Troubleshooting](troubleshooting.md) explains messages that need more
words. To find your message, search this page for its words without values.
"""
# Errors that a person meets. Others (TypeError, AssertionError) are mistakes in the code itself.
USER_ERRORS = {
    *("SettingsError", "ValueError", "OSError", "RuntimeError", "FloatingPointError"),
    *("EngineDisagrees", "EngineFault", "NoSandbox", "AllAborted", "LookupError"),
}


def settings_page() -> str:
    """A heading for each section, in it one for each key, with its type, default and meaning; then
    those of each method and kind of engine, and the options of each game."""
    lines = [SETTINGS_HEAD, "## The run", ""]
    for entry in chain(all_described(Config), *map(options_of, _games())):
        if entry.kind is None:
            absent = " Absent (null) by default." if entry.default else ""
            lines += [f"## {entry.name}", "", f"{_sentence(entry.sentence)}{absent}", ""]
            continue
        rules = f" ({'; '.join(map(escaped, entry.rules))})" if entry.rules else ""
        lines += [
            f"### {entry.name} {{: #{entry.name} }}",
            "",
            f"{escaped(entry.kind)}, default `{entry.default}`{rules}. {_sentence(entry.sentence)}",
            "",
        ]
    return "\n".join(lines) + "\n"


def _games() -> list[str]:
    """The games that have options of their own: folders of dialop/ with a kit."""
    return sorted(path.parent.name for path in (ROOT / "dialop").glob("*/kit.py"))


def errors_page() -> str:
    """One list a module, of the messages in its `raise` statements."""
    lines = [ERRORS_HEAD]
    paths = [*(ROOT / "selfplay").rglob("*.py"), *(ROOT / "dialop").rglob("*.py")]
    for path in sorted([*paths, ROOT / "train.py", ROOT / "eval.py"]):
        if messages := sorted(set(_messages(ast.parse(path.read_text(encoding="utf-8"))))):
            lines += [f"## {path.relative_to(ROOT).as_posix()}", ""]
            lines += [f"- {escaped(message)}" for message in messages] + [""]
    return "\n".join(lines)


def _messages(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
            continue
        name, words = node.exc.func, node.exc.args
        if isinstance(name, ast.Name) and name.id in USER_ERRORS and words:
            message = _text(words[0]).strip()
            if message.strip("… :"):
                yield message


def _text(node: ast.expr) -> str:
    """The text of an expression, with `…` for what is known only when it is raised."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return "…"


def _sentence(text: str) -> str:
    return escaped(text[:1].upper() + text[1:]).rstrip(".") + "."


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add pages of docs/ that the navigation does not list yet under "More", and leave out the edit
    links where the repository has no address."""
    config.edit_uri = config.edit_uri if config.repo_url else None
    listed = str(config.nav)
    pages = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
    if more := [page for page in pages if f"'{page}'" not in listed]:
        config.nav.append({"More": more})
    return config


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keep the notes, what was tried and measured once, out of the search."""
    if page.file.src_uri.startswith("notes/"):
        page.meta["search"] = {"exclude": True}
    return markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Formulas as MathML, which browsers draw without a script; they know no named spaces."""
    return re.sub(
        r'<(div|span) class="arithmatex">\\[[(](.*?)\\[])]</\1>',
        lambda found: convert(
            unescape(found[2]), display="block" if found[1] == "div" else "inline"
        ).replace('"thinmathspace"', '"0.167em"'),
        html,
        flags=re.DOTALL,
    )


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to those of docs/."""
    files.append(File.generated(config, "settings.md", content=settings_page()))
    files.append(File.generated(config, "errors.md", content=errors_page()))
    return files
