"""The wheel: what it holds, and that an installed copy finds its settings from any folder."""

import ast
import importlib
import os
import re
import subprocess
import sys
import zipfile
from functools import lru_cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import selfplay
from selfplay.apps.play import __main__ as play

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    assert path.name.startswith(f"selfplay_lm-{selfplay.__version__}-")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def installed(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the unpacked wheel."""
    folder = tmp_path_factory.mktemp("installed")
    wheel.extractall(folder)
    return folder


def requirements(name: str) -> Path:
    """The path of requirements.txt, or of a list in the folder requirements/."""
    return (
        ROOT / "requirements.txt" if name == "requirements" else ROOT / f"requirements/{name}.txt"
    )


def run_in(folder: Path, installed: Path, code: str, *words: str) -> subprocess.CompletedProcess:
    """Run the code in `folder` with the installed copy, and without the clone."""
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_the_wheel_holds_the_code_and_the_settings_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for folder in ("dialop", "selfplay"):
        files = (p for p in (ROOT / folder).rglob("*") if p.is_file() and p.suffix != ".pyc")
        here = {p.relative_to(ROOT).as_posix() for p in files}
        assert here <= names and f"{folder}/py.typed" in names
    assert {f"selfplay/configs/{p.name}" for p in (ROOT / "configs").glob("*.yaml")} <= names
    assert wheel.read("selfplay/train.py") == (ROOT / "train.py").read_bytes()
    assert wheel.read("selfplay/eval.py") == (ROOT / "eval.py").read_bytes()
    assert {name.split("/")[0].split("-")[0] for name in names} == {
        *("dialop", "selfplay", "selfplay_lm")
    }
    assert f"\nversion: {selfplay.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {selfplay.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    data = {name for name in names if name.endswith((".jsonl", ".json", ".parquet", ".csv"))}
    assert not data and not any("test" in Path(name).name for name in names)


def test_the_requirements_are_those_of_the_requirements_files(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    lines = wheel.read(name).decode().splitlines()
    wanted = [Requirement(line.split(": ")[1]) for line in lines if line.startswith("Requires-D")]
    extras = {line.split(": ")[1] for line in lines if line.startswith("Provides-Extra")}
    for extra in ("", *extras):
        path = requirements({"": "requirements", "real": "gguf"}.get(extra, extra))
        listed = [line.split("#")[0] for line in path.read_text().splitlines()]
        asked = {
            canonicalize_name(Requirement(line).name) for line in listed if line and line[0] != "-"
        }
        given = {
            r.name
            for r in wanted
            if (f'extra == "{extra}"' in str(r.marker) if extra else r.marker is None)
        }
        assert given == asked, path.name


def test_every_command_is_a_function(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("/entry_points.txt"))
    lines = [line for line in wheel.read(name).decode().splitlines() if " = " in line]
    wanted = {f"selfplay-{name}" for name in ("train", "eval", "report", "play")}
    assert wanted <= {line.split(" = ")[0] for line in lines}
    for line in lines:
        module, function = line.split(" = ")[1].split(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_an_installed_copy_finds_its_settings_by_name(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("base: tiny.yaml\nout: here\n")
    code = "import sys, selfplay.config as c; print(*(c.load_config(p).out for p in sys.argv[1:]))"
    done = run_in(tmp_path, installed, code, "tiny", "tiny3.yaml", "configs/tiny.yaml", "own.yaml")
    assert done.stdout.split() == ["runs/tiny", "runs/tiny3", "runs/tiny", "here"], done.stderr
    done = run_in(tmp_path, installed, code, "tinny.yaml")
    assert done.stderr.strip().endswith("tinny.yaml: no such file; nearest shipped file is tiny")


# The two commands in one process.
TRAIN_AND_EVALUATE = """
import sys
import selfplay
from selfplay.preflight import command_line
place, words = sys.argv.index("--"), sys.argv[:]
for command, own in (("train", words[1:place]), ("evaluate", words[place + 1:])):
    sys.argv[1:] = own
    try:
        getattr(command_line, command)()
    except SystemExit as left:
        if left.code:
            raise
    if command == "train":
        print(selfplay.train.__module__, len(selfplay.load_run("runs/tiny").metrics))
"""


@pytest.mark.slow
def test_an_installed_copy_trains_and_evaluates_from_another_folder(
    installed: Path, tmp_path: Path
) -> None:
    small = ["steps=1", "warm_start.num_games=32", "warm_start.epochs=1", "eval.final_games=2"]
    small += ["rollout.instances=2", "rollout.group_size=2", "eval.every=0", "data.processes=1"]
    evaluate = ["--", "runs/tiny", "--games", "generated", "--num", "2"]
    done = run_in(tmp_path, installed, TRAIN_AND_EVALUATE, "--config", "tiny", *small, *evaluate)
    assert done.returncode == 0, done.stderr
    said = done.stdout.partition("\nselfplay.api.run 1\n")[2]
    assert "policy" in said
    for name in ("final/model.safetensors", "report.html"):
        assert (tmp_path / "runs/tiny" / name).exists()
    assert "commit unknown" in (tmp_path / "runs/tiny/code.txt").read_text()


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_a_lock_file_has_one_version_of_each_requirement_in_its_range(name: str) -> None:
    locked = {}
    for line in (ROOT / f"requirements/{name}.lock").read_text().splitlines():
        if line and not line.startswith("#"):
            package, version = line.split(";")[0].strip().split("==")
            assert canonicalize_name(package) not in locked, package
            locked[canonicalize_name(package)] = version
    lines = requirements(name).read_text() + requirements("requirements").read_text()
    for line in lines.splitlines():
        if line and line[0] not in "#-":
            wanted = Requirement(line.split("#")[0])
            assert wanted.specifier.contains(locked[canonicalize_name(wanted.name)]), line


installed_packages = lru_cache(packages_distributions)


def listed_in(path: Path) -> set[str]:
    """The packages that a requirements file names, itself or in a file that it includes."""
    names = set()
    for line in path.read_text().splitlines():
        if line.startswith("-r "):
            names |= listed_in(path.parent / line[3:])
        elif line and line[0] != "#":
            names.add(canonicalize_name(Requirement(line.split("#")[0]).name))
    return names


@pytest.mark.parametrize(
    ("folders", "name"),
    [(("dialop", "selfplay"), "requirements"), (("tests",), "dev")],
)
def test_every_imported_library_is_listed(folders: tuple[str, ...], name: str) -> None:
    """What a module imports when it is read; none is there only because another package brings it.
    Extras, the engine, the page to play and GPU tests have lists of their own."""
    listed, packages = listed_in(requirements(name)), installed_packages()
    own = {"dialop", "selfplay", "bench", "examples", "docs", "train", "eval", "tests"}
    own |= {path.stem for path in (ROOT / "tests").rglob("*.py")}
    missing = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        if {"extras", "sglang", "gpu", "play"} & set(path.relative_to(ROOT).parts[1:-1]):
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = (getattr(node, "module", None) or node.names[0].name).split(".")[0]
                if module not in own and module not in sys.stdlib_module_names:
                    given = {canonicalize_name(p) for p in packages.get(module, [module])}
                    missing |= {f"{path.name}: {module}"} if not given & listed else set()
    assert not missing


def test_the_docker_file_installs_what_is_here() -> None:
    """Every file that it copies is in the tree."""
    copied = re.findall(r"^COPY (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert copied == ["requirements/gpu.lock", "."]
    assert all((ROOT / name).exists() for name in copied)


def test_the_page_without_its_extra_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert play.main(["nowhere"]) == 2
    message = capsys.readouterr().err
    assert "pip install 'selfplay-lm[play]'" in message and message.count("\n") == 1
