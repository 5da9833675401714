"""What the command that serves a policy prints and refuses, without SGLang."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from selfplay.apps.serve import __main__ as serve
from selfplay.chat.rendering import make_rendering
from tests.helpers.chat_families import FAMILIES, tokenizer_of
from tests.helpers.run_folders import SETTINGS, untrained_run


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that the program would become."""
    commands: list[list[str]] = []

    def become(_: str, command: list[str]) -> None:
        commands.append(command)
        raise InterruptedError

    monkeypatch.setattr(serve.os, "execv", become)
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(serve, "check_machine", lambda *_: None)
    return commands


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untrained_run(tmp_path_factory.mktemp("runs") / "my run", SETTINGS)


@pytest.mark.parametrize(("name", "near"), [("my run", "my_run"), ("run@x", "run_x")])
def test_a_name_that_no_partner_can_have_is_refused(
    name: str, near: str, started: list[Any], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder's own name is the default."""
    assert serve.main([str(run), *([] if name == run.name else ["--name", name])]) == 2
    said = capsys.readouterr().err
    assert f"--name must have no @ and no blanks, got {name!r}; nearest: {near}" in said
    assert not started


def test_the_printed_partner_is_one_word(
    started: list[list[str]], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InterruptedError):
        serve.main([str(run), "--name", "it's"])
    assert "it's" in started[0]
    (line,) = re.findall("python eval.py .*", capsys.readouterr().out)
    assert "endpoint:it's@http://127.0.0.1:30000/v1" in shlex.split(line)


@pytest.mark.parametrize(
    ("family", "bound", "told"),
    [
        ("qwen2.5", False, ""),
        ("granite 3.3", True, ""),
        ("granite 3.3", False, "without what its run gave it (a fixed date"),
        ("qwen3 without thinking", True, r"kept '<think>\n\n</think>\n\n' before old answers"),
    ],
)
def test_what_the_server_renders_otherwise_than_the_run_is_told(
    family: str,
    bound: bool,
    told: str,
    started: list[Any],
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(run, tmp_path / "run")
    kwargs = FAMILIES[family].kwargs
    tokenizer = tokenizer_of(family)
    if bound:
        tokenizer = make_rendering(tokenizer, template_kwargs=kwargs).tokenizer
    tokenizer.save_pretrained(tmp_path / "run" / "final")
    words = [f"model.chat_template={json.dumps(dict(kwargs))}"]
    with pytest.raises(InterruptedError):
        serve.main([str(tmp_path / "run"), *words])
    said = capsys.readouterr().err
    assert told in said and said.count("warning: ") == bool(told)
