"""The pages that the documentation site makes from the code, and the keys that its tables name."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from selfplay.config import Config
from selfplay.config.settings import described, renamed_keys

DOCS = Path(__file__).resolve().parents[1] / "docs"
KEYS = {entry.name for entry in described(Config)}


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_site", DOCS / "site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_settings_page_has_every_key_once(site: ModuleType) -> None:
    rows = re.findall(r"^\| `(\S+)` \|", site.settings_page(), re.MULTILINE)
    keys = [entry.name for entry in described(Config) if entry.kind is not None]
    assert [row for row in rows if not row.startswith("game.options.")] == keys
    assert any(row.startswith("game.options.") for row in rows)


def test_the_errors_page_has_the_messages_of_the_code(site: ModuleType) -> None:
    page = site.errors_page()
    assert "- --port must be from 1024 to 65535, got …; nearest: 30000" in page
    assert "## selfplay/metrics/run\\_folder.py" in page or "## selfplay/metrics/run_folder" in page
    assert len(re.findall("^- ", page, re.MULTILINE)) > 250


def test_the_keys_for_people_from_other_trainers_exist() -> None:
    """The second column of each table of docs/coming_from.md names settings of this project."""
    named = 0
    for line in (DOCS / "coming_from.md").read_text(encoding="utf-8").splitlines():
        cells = line.split(" | ")
        if not line.startswith("| `") or len(cells) < 3:
            continue
        home = ""
        for words in re.findall(r"`([^`]+)`", cells[1]):
            key = re.split(r"[: ]", words)[0]
            if key.endswith(".*") or key in ("torchrun", "python", "dr_grpo"):
                continue
            full = key if key in KEYS else f"{home}.{key}"
            assert full in KEYS, line
            home, named = full.rpartition(".")[0], named + 1
    assert named > 70


def test_no_page_names_an_old_key() -> None:
    """Old names are in changes.md and the log alone."""
    old = [name for name in renamed_keys(Config) if "." in name]
    for path in DOCS.glob("*.md"):
        if path.name not in ("changes.md", "log.md"):
            text = path.read_text(encoding="utf-8")
            assert not [name for name in old if f"`{name}" in text], path.name
