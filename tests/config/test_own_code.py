"""A run keeps the code that defines it: which files, who reads them, and what is told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dialop.kit import load_kit
from dialop.modules import own_files, own_module
from selfplay.api.run import load_run
from selfplay.apps.report.run_files import read_run
from selfplay.config import Config, load_config
from selfplay.config.load import load
from selfplay.config.own_code import copies_of, kept_in, other_code, own_code, own_names
from selfplay.errors import SettingsError
from selfplay.metrics.run_folder import check_run_folder, keep_code, open_run
from selfplay.partners.checkpoints import check_same_game, find_source, print_code
from tests.helpers.run_folders import bare_weights

ROOT = Path(__file__).resolve().parents[2]
GAME = """
from dataclasses import dataclass
from pathlib import Path
import json, numpy, {helper}
from dialop.turns import TurnGame

ROLES = ("a", "b")
ASKED = Path(__file__)
assert ASKED.with_name("words.txt").read_text() == "meet"

@dataclass(frozen=True)
class Instance:
    key: str

def generate_instance(options, *, seed, index):
    return Instance(str(index))

class Game(TurnGame):
    num_seats, tags, rules = 2, ("message",), {helper}.RULES
    sees = play = outcome = None

def new_game(instance, options):
    from {package}.deep import late
    return Game(instance, options)
"""
SCRATCH = ["model.scratch={}", "rollout.max_game_tokens=512"]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder of one's own: a game that imports a module and a package beside it, a reward."""
    home, name = tmp_path / "proj", "of_" + "".join(filter(str.isalnum, tmp_path.name))
    package = home / f"{name}_pkg"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "deep.py").write_text("from . import beside\nlate = 1\n")
    (package / "beside.py").write_text("")
    (home / f"{name}_helper.py").write_text("RULES = 'old'\n")
    words = {"helper": f"{name}_helper", "package": package.name}
    game = GAME.replace("{helper}", words["helper"]).replace("{package}", words["package"])
    (home / f"{name}.py").write_text(game)
    reward = "def reward(episode):\n    return episode.outcome.rewards, ()\n"
    (home / f"{name}_reward.py").write_text(reward)
    (home / "words.txt").write_text("meet")
    (home / "rubric.md").write_text("Rate it.")
    return home / f"{name}.py"


def words_of(game: Path, *more: str, folder: str = "") -> list[str]:
    home = folder or str(game.parent)
    return [
        *(*SCRATCH, f"game.name={home}/{game.name}"),
        f"reward.function={home}/{game.stem}_reward.py:reward",
        f"methods.judge.rubric={home}/rubric.md",
        "methods.judge.model=endpoint:m@http://127.0.0.1:9/v1",
        *more,
    ]


def begun(folder: Path, words: list[str]) -> Path:
    config = load_config(None, words)
    opening = check_run_folder(folder, config)
    open_run(opening)
    keep_code(opening)
    return folder


def python(code: str, *words: object, cwd: Path) -> tuple[str, str]:
    """What a new Python prints: one process imports one module of a name."""
    ran = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    return ran.stdout, ran.stderr


RULES = """
import sys
from pathlib import Path
from selfplay.config import load_config
game = load_config(Path(sys.argv[1]), sys.argv[2:]).game
made = game.kit.new_game(game.kit.generate(game.options, seed=0, num=1)[0], game.options)
print(made.rules, sys.modules[type(made).__module__].ASKED)
"""


def test_a_run_holds_the_files_that_define_it_with_what_they_import(
    own: Path, tmp_path: Path
) -> None:
    run = begun(tmp_path / "run", words_of(own))
    kept = kept_in(run / "code")
    assert kept is not None
    package = f"{own.stem}_pkg"
    assert sorted(kept.files) == sorted(
        [
            *(own.name, f"{own.stem}_helper.py", f"{own.stem}_reward.py"),
            *("rubric.md", "words.txt"),
            *(f"{package}/__init__.py", f"{package}/deep.py", f"{package}/beside.py"),
        ]
    )
    for name, (path, digest) in kept.files.items():
        assert path == own.parent / name and path.read_bytes() == (run / "code" / name).read_bytes()
        assert f"{digest}\n" in (run / "code.txt").read_text()


def test_the_copies_are_read_from_any_folder_also_of_a_run_that_moved(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own.parent)
    run = begun(tmp_path / "run", words_of(own, folder="."))
    moved = shutil.move(run, tmp_path / "moved")
    shutil.rmtree(own.parent)
    said, error = python(RULES, moved / "config.yaml", "data.processes=2", cwd=tmp_path)
    assert said == f"old {moved}/code/{own.name}\n", error


def test_a_changed_file_beside_is_told_and_one_in_the_command_wins(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begun(tmp_path / "run", words_of(own))
    load_run(run)
    assert not capsys.readouterr().out
    helper = own.with_name(f"{own.stem}_helper.py")
    helper.write_text("RULES = 'new'  # longer: bytecode goes by size and second\n")
    (own.parent / "rubric.md").unlink()
    load_run(run)
    told = capsys.readouterr().out
    assert f"{own.parent}/rubric.md is gone, {helper} differs" in told and told.count("\n") == 1
    # Started where the changed helper lies: Python would look there first.
    said, error = python(RULES, run / "config.yaml", cwd=own.parent)
    assert said == f"old {run}/code/{own.name}\n", error
    said, error = python(RULES, run / "config.yaml", f"game.name={own}", cwd=tmp_path)
    assert said == f"new {own}\n", error


def test_two_modules_of_one_name_are_not_taken_for_each_other(own: Path, tmp_path: Path) -> None:
    """Two runs of two versions of a game in one Python, and two helpers of a name in two folders:
    Python would use the first one in silence."""
    run = begun(tmp_path / "run", words_of(own))
    other = shutil.copytree(run, tmp_path / "other")
    assert load_config(other / "config.yaml").game.kit.ROLES == ("a", "b"), "what is equal is used"
    (other / "code" / f"{own.stem}_helper.py").write_text("RULES = 'new'\n")
    load_kit.cache_clear()
    with pytest.raises(SettingsError, match=r"_helper is .*/proj/.*_helper\.py, which differs"):
        load_config(other / "config.yaml")
    (tmp_path / "losses").mkdir()
    for name, text in ((f"{own.stem}_helper", ""), ("loss", f"import {own.stem}_helper\n")):
        (tmp_path / "losses" / f"{own.stem}_{name}.py").write_text(text)
    (tmp_path / "losses" / f"{own.stem}_helper.py").write_text("RULES = 'others'\n")
    words = words_of(own, f"algorithm.loss={tmp_path}/losses/{own.stem}_loss.py:loss")
    config = load(Config, None, words)
    with pytest.raises(ValueError, match=r"algorithm\.loss .* must use files with unique module n"):
        own_code(own_names(config))


def test_a_policy_of_another_version_of_the_game_is_told(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begun(tmp_path / "run", words_of(own))
    bare_weights(run / "final")
    other = shutil.copytree(run, tmp_path / "other")
    config = load_config(run / "config.yaml")
    for folder in (run, other):
        check_same_game(find_source(folder), config.game, what="RUN", played=run)
    assert capsys.readouterr().err == ""
    index = json.loads((other / "code" / "own_files.json").read_text())
    index["files"][f"{own.stem}_helper.py"]["sha256"] = "0" * 64
    (other / "code" / "own_files.json").write_text(json.dumps(index))
    check_same_game(find_source(other), config.game, what="RUN", played=run)
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and f"{other} was trained with" in told and "_helper.py" in told
    print_code(config, find_source(other))
    shown = capsys.readouterr()
    assert shown.out == f"code: {run}/code/{own.name}\n" and shown.err == told


def test_a_run_that_goes_on_with_other_code_keeps_that_of_its_steps_before(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, rubric = tmp_path / "run", own.parent / "rubric.md"
    config = load_config(None, words_of(own))
    open_run(check_run_folder(run, config))

    def go_on(text: str, step: int) -> None:
        rubric.write_text(text)
        if step:
            bare_weights(run / "checkpoints" / f"step_{step:06d}" / "hf")
        keep_code(check_run_folder(run, config))

    def used_at(part: str) -> str:
        settings = find_source(run / part).settings
        assert settings is not None
        return Path(load(Config, settings).methods["judge"].rubric).read_text()

    go_on("first", 0)
    go_on("second", 0)  # nothing was trained
    bare_weights(run / "warm_start")
    go_on("second", 20)
    assert sorted(path.name for path in (run / "code").glob("until*")) == []
    go_on("third", 40)
    open_run(check_run_folder(run, config))
    assert f"continues with a changed methods.judge.rubric {rubric}" in capsys.readouterr().out
    go_on("fourth", 0)  # of what the third has made nothing is left
    go_on("fifth", 60)
    parts = ("warm_start", "checkpoints/step_000020", "checkpoints/step_000040/hf")
    assert [used_at(part) for part in parts] == ["second"] * 3
    assert used_at("checkpoints/step_000060") == "fourth"
    (bare_weights(run / "final") / "progress.json").write_text('{"step": 70}')
    assert used_at("final") == "fifth"
    shutil.rmtree(run / "checkpoints" / "step_000060")  # damaged: its steps are made again
    go_on("fifth", 0)
    assert used_at("checkpoints/step_000040") == "second"
    (run / "final" / "progress.json").write_text('{"step": 41}')
    assert used_at("final") == "fifth"


def test_a_run_goes_on_by_its_own_settings_and_by_other_paths_of_the_same_files(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own.parent)
    run = begun(tmp_path / "run", words_of(own, folder="."))
    saved = (run / "config.yaml").read_text()
    (run / "checkpoints").mkdir()
    before = (run / "code" / "own_files.json").stat().st_mtime_ns
    begun(run, words_of(own))
    config = load_config(run / "config.yaml")
    assert config.game.name == f"{run}/code/{own.name}"
    open_run(check_run_folder(run, config))
    keep_code(check_run_folder(run, config))
    assert (run / "config.yaml").read_text() == saved
    assert (run / "code" / "own_files.json").stat().st_mtime_ns == before
    other = own.with_name(f"{own.stem}_reward.py")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / other.name).write_text("def other(episode):\n    return (0, 0), ()\n")
    with pytest.raises(ValueError, match=r"reward\.function .* unique module names"):
        name = f"{tmp_path}/other/{other.name}:other"
        check_run_folder(run, load_config(None, words_of(own, f"reward.function={name}")))
    with pytest.raises(SettingsError, match=r"reward\.function: .*:reward -> .*:another"):
        check_run_folder(run, load_config(None, words_of(own, f"reward.function={other}:another")))


def test_a_folder_code_that_no_run_wrote_stays_as_it_is(own: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "code").mkdir(parents=True)
    (tmp_path / "run" / "code" / "mine.py").write_text("")
    with pytest.raises(SettingsError, match=r"run/code must be free for copies of .* no run wrote"):
        begun(tmp_path / "run", words_of(own))
    assert [path.name for path in (tmp_path / "run").rglob("*")] == ["code", "mine.py"]


def test_a_page_imports_the_users_own_files_and_never_a_copy(own: Path, tmp_path: Path) -> None:
    run = begun(tmp_path / "run", words_of(own))
    assert read_run(run).kit is not None and not read_run(run).problems
    assert copies_of(run / "config.yaml") == run / "code"
    (run / "code" / own.name).write_text("raise SystemError('imported')\n")
    own.with_name(f"{own.stem}_helper.py").write_text("RULES = 'new'\n")
    page = read_run(run)
    assert page.kit is None and page.config is not None and page.config.steps == 100
    assert len(page.problems) == 1 and "_helper.py differs" in page.problems[0]
    assert ("game.name", "matching", str(own)) in page.settings


def test_an_old_run_is_read_as_before_and_other_code_is_none(own: Path, tmp_path: Path) -> None:
    run = begun(tmp_path / "run", words_of(own))
    shutil.rmtree(run / "code")
    config = load_config(run / "config.yaml")
    assert config.game.name == str(own)
    assert other_code([("game.name", str(own))], run / "config.yaml") == []


def test_a_package_without_an_init_file_is_looked_into_without_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`outer/inner/part.py` has no `__init__.py` above it, and nothing has imported `outer`."""
    part = tmp_path / "outer" / "inner" / "part.py"
    part.parent.mkdir(parents=True)
    part.write_text("NUMBER = 3\n")
    mine = tmp_path / "mine_of_parts.py"
    mine.write_text(
        "def number() -> int:\n    from outer.inner.part import NUMBER\n    return NUMBER\n"
    )
    (tmp_path / "outer" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = own_files("mine_of_parts", mine).values()
    assert set(found) == {mine, part, tmp_path / "outer" / "__init__.py"}


def test_a_long_text_in_a_file_of_ones_own_is_no_file(tmp_path: Path) -> None:
    """A name of 90 Chinese characters has 270 bytes, more than a file's may have."""
    mine = tmp_path / "mine_of_texts.py"
    mine.write_text(
        f'"""{"字" * 90}"""\ndef paid(outcome):\n    return list(outcome.rewards)\n', "utf-8"
    )
    found = own_code([("reward.function", f"{mine}:paid")])
    assert [path for path, _ in found.files.values()] == [mine]


def test_modules_of_the_project_are_not_searched_for_custom_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The packages that they import may lie anywhere, and SGLang's have thousands of files."""
    monkeypatch.setattr("ast.parse", lambda *_: pytest.fail("a file was searched"))
    found = own_module("selfplay.engines.hf", what="engine.kind", expected="hf")
    assert found.__name__ == "selfplay.engines.hf"
