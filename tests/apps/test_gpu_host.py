"""`make gpu` and `make train`: what a host lacks, before anything is installed."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from selfplay.apps import gpu_host

ROOT = Path(__file__).resolve().parents[2]
H100 = "580.95.05, NVIDIA H100 80GB HBM3, 81559, 9.0"


def tool(folder: Path, name: str, said: str) -> None:
    """A command of this name that prints this text."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{said}\nEND\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host whose only tools are in this folder."""
    for name in ("nvidia-smi", "nvcc", "g++"):
        tool(tmp_path, name, {"nvidia-smi": H100, "nvcc": "Cuda, release 13.0, V13"}.get(name, ""))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr(gpu_host, "MIN_DISK_GB", 0)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(gpu_host.sysconfig, "get_path", lambda name: str(tmp_path))
    return tmp_path


def missing() -> dict[str, str]:
    return {each.what: str(each) for each in gpu_host.findings() if each.fix}


def test_settings_may_be_words_of_make_itself() -> None:
    """Those of make, and what stands in ARGS, are none."""
    words = ["steps=3", "warm_start.teachers=[solo, honest]", "CONFIG=configs/tiny.yaml"]
    words += ["ARGS=seed=1 steps=2 out=x", "PIP_FLAGS=--quiet --no-cache-dir"]
    rule = "say: ; @printf '%s\\n' $(SETTINGS)"
    called = ["make", "--no-print-directory", "--eval", rule, "say", *words]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(called, cwd=ROOT, capture_output=True, text=True, env=plain)
    assert sorted(done.stdout.splitlines()) == sorted(words[:2]), done.stderr


def test_a_ready_host_lacks_nothing(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool(host, "nvidia-smi", f"{H100}\n{H100}")
    assert gpu_host.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and all(line.startswith("ok ") for line in lines)
    assert sum("H100 80GB HBM3, 80 GiB, capability 9.0" in line for line in lines) == 2


# A tool, what it says (None: it is not there), and what is then missing with its line.
LACKING = [
    ("nvidia-smi", "550.54.15, NVIDIA H100, 81559, 9.0", "driver", "550.54.15: CUDA 13 needs dri"),
    ("nvidia-smi", "580.1, Tesla V100, 32768, 7.0", "GPU", "7.0: needs compute capability 8.0"),
    ("nvidia-smi", "No devices were found", "driver", "no GPU: it says: 'No devices were found'"),
    ("nvidia-smi", None, "driver", ""),
    ("nvcc", "Cuda compilation tools, release 12.4, V12.4.131", "CUDA", "nvcc 12.4"),
    ("nvcc", "release 12.4,", "CUDA", "13 or newer"),
    ("nvcc", None, "CUDA", "no nvcc on PATH or in CUDA_HOME"),
    ("g++", None, "compiler", ""),
    ("Python.h", None, "Python", ""),
]


@pytest.mark.parametrize(("name", "said", "what", "line"), LACKING)
def test_what_a_host_lacks_is_one_line(
    name: str,
    said: str | None,
    what: str,
    line: str,
    host: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(host))
    (host / name).unlink()
    if said is not None:
        tool(host, name, said)
    assert list(missing()) == [what] and line in missing()[what]
    assert gpu_host.main([]) == 1
    shown = capsys.readouterr()
    assert shown.err == f"not ready for GPU runs: {what}\n"
    assert all(len(each) < 200 for each in shown.out.splitlines())
    if what == "CUDA":  # a newer one in CUDA_HOME
        (host / "cuda" / "bin").mkdir(parents=True)
        tool(host / "cuda" / "bin", "nvcc", "release 13.1,")
        assert ("CUDA" in missing()) == (said is not None)


CONFIGS = {path.name: path for path in (ROOT / "configs").glob("*.yaml")}


def test_which_shipped_settings_want_a_gpu() -> None:
    """The reader without YAML agrees with the loader."""
    from selfplay.config import load_config

    for name, path in CONFIGS.items():
        config = load_config(path)
        wanted = config.engine.kind == "sglang" or config.device == "cuda"
        assert gpu_host.wants_gpu(path, []) == wanted, name
        assert not gpu_host.wants_gpu(path, ["seed=1", "engine.kind=hf"]), name
        assert gpu_host.wants_gpu(path, ["engine.kind=sglang", "seed=1"]), name


def test_a_base_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("# kind: sglang\nbase: b.yaml\n")
    (tmp_path / "b.yaml").write_text("engine:\n  kind: hf\nbase: a.yaml\n")
    assert not gpu_host.wants_gpu(tmp_path / "a.yaml", [])
    (tmp_path / "b.yaml").write_text("engine:\n  kind: sglang\n")
    assert gpu_host.wants_gpu(tmp_path / "a.yaml", [])
    assert not gpu_host.wants_gpu(tmp_path / "none.yaml", [])


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["make", f"--file={ROOT / 'Makefile'}", f"PYTHON={sys.executable}", *words]
    outer = ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "MAKELEVEL", "ARGS")  # of `make test ARGS=…`
    environment = {key: value for key, value in os.environ.items() if key not in outer}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_make_train_says_one_sentence_and_installs_nothing(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("torch>=2\n")
    config = CONFIGS["qwen2.5_0.5b.yaml"]
    done = make(tmp_path, "train", f"CONFIG={config}")
    first, *rest = done.stderr.splitlines()
    assert done.returncode == 2 and "run `make gpu` on a host with a GPU" in first
    assert all(line.startswith("make") and "***" in line for line in rest)  # make[1] under make
    assert [path.name for path in tmp_path.iterdir()] == ["requirements.txt"]


def test_make_prints_and_runs_nothing_where_it_is_asked_to(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("torch>=2\n")
    done = make(tmp_path, "--dry-run", "train", "seed=1")
    assert done.returncode == 0 and not done.stderr
    assert "/bin/python train.py --config configs/talk.yaml  'seed=1'" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["requirements.txt"]
