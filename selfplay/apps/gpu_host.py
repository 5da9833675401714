"""Says what a host lacks for GPU runs, and which environment a settings file needs.

    python -m selfplay.apps.gpu_host               # one line for each thing that is needed
    python -m selfplay.apps.gpu_host --venv CONFIG [key=value ...]

`make gpu` and `make train` run it before anything is installed, so it imports the standard library
alone.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# What requirements/gpu.txt needs: torch for CUDA 13, kernels for Ampere and newer in bfloat16.
MIN_DRIVER, MIN_CUDA, MIN_CAPABILITY, MIN_PYTHON = 580, 13, 8.0, (3, 11)
MIN_DISK_GB = 20
CPU, GPU = ".venv", ".venv-gpu"


@dataclass(frozen=True, slots=True)
class Finding:
    """One requirement of a GPU run: what was found and, if that is not enough, the remedy."""

    what: str
    found: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{'missing' if self.fix else 'ok':8} {self.what:9} {self.found}" + (
            f": {self.fix}" if self.fix else ""
        )


def findings() -> Iterator[Finding]:
    """Check this host, from the driver to the disk."""
    yield _system()
    yield from _driver_and_gpus()
    yield _cuda()
    yield _compiler()
    yield _python()
    yield _disk(Path())


def _system() -> Finding:
    found = f"{platform.system()} {platform.machine()}"
    fix = "" if platform.system() == "Linux" else "SGLang and CUDA need Linux"
    return Finding("system", found, fix)


def _driver_and_gpus() -> Iterator[Finding]:
    fields = "driver_version,name,memory.total,compute_cap"
    said = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in line.split(",")] for line in (said or "").splitlines()]
    rows = [row for row in rows if len(row) == 4]
    if said is None:
        yield Finding("driver", "no nvidia-smi", f"install NVIDIA's driver {MIN_DRIVER} or newer")
    elif not rows:
        yield Finding("driver", "nvidia-smi lists no GPU", f"it says: {said.strip()[:100]!r}")
    else:
        driver = rows[0][0]
        old = _number(driver) < MIN_DRIVER
        fix = f"CUDA {MIN_CUDA} needs driver {MIN_DRIVER} or newer; update it" if old else ""
        yield Finding("driver", driver, fix)
    for name, memory_mib, capability in (row[1:] for row in rows):
        weak = _number(capability) < MIN_CAPABILITY
        fix = f"needs compute capability {MIN_CAPABILITY} or newer (Ampere)" if weak else ""
        found = f"{name}, {_number(memory_mib) / 1024:.0f} GiB, capability {capability}"
        yield Finding("GPU", found, fix)


def _cuda() -> Finding:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    if nvcc is None:
        fix = f"install the CUDA toolkit {MIN_CUDA} and set CUDA_HOME to its folder"
        return Finding("CUDA", "no nvcc on PATH or in CUDA_HOME", fix)
    release = re.search(r"release (\d+\.\d+)", _output(nvcc, "--version") or "")
    version = release.group(1) if release else "of unknown version"
    old = _number(version) < MIN_CUDA
    fix = f"install the CUDA toolkit {MIN_CUDA} or newer and set CUDA_HOME" if old else ""
    return Finding("CUDA", f"nvcc {version} in {Path(nvcc).parent}", fix)


def _compiler() -> Finding:
    found = shutil.which("g++") or shutil.which("c++")
    fix = "" if found else "kernels are compiled at their first use; apt-get install g++"
    return Finding("compiler", found or "no g++", fix)


def _python() -> Finding:
    version = platform.python_version()
    fix = ""
    if sys.version_info < MIN_PYTHON:
        fix = "3.11 or newer is needed; name another with make PYTHON=python3.12 gpu"
    elif not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        fix = f"no Python.h, which kernels need; apt-get install python{version[:4]}-dev"
    return Finding("Python", version, fix)


def _disk(folder: Path) -> Finding:
    free_gb = shutil.disk_usage(folder).free / 1e9
    fix = f"the packages need {MIN_DISK_GB} GB here" if free_gb < MIN_DISK_GB else ""
    return Finding("disk", f"{free_gb:.0f} GB free", fix)


def _output(*words: str) -> str | None:
    """The output of a command; None if it is missing or fails to start."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout or done.stderr


def _number(text: str) -> float:
    """The number at the start of the text; 0 if there is none."""
    found = re.match(r"\d+(\.\d+)?", text)
    return float(found.group()) if found else 0.0


def wants_gpu(config: Path, overrides: Sequence[str]) -> bool:
    """Whether the settings use SGLang or CUDA. Needs no YAML parser: searches the overrides, the
    file and its bases for `kind: sglang` and `device: cuda`."""
    for word in reversed(overrides):
        if word.startswith(("engine.kind=", "engine=", "device=")):
            return "sglang" in word or "cuda" in word
    seen: set[Path] = set()
    while config.is_file() and config not in seen:
        seen.add(config)
        text = re.sub(r"#.*", "", config.read_text(encoding="utf-8", errors="replace"))
        if re.search(r"\bkind: *sglang\b|^device: *cuda\b", text, re.MULTILINE):
            return True
        base = re.search(r"^base: *(\S+)", text, re.MULTILINE)
        config = config.parent / base.group(1) if base else Path()
    return False


def main(words: Sequence[str]) -> int:
    """Returns 1 if something is missing."""
    if words[:1] == ["--venv"] and len(words) > 1:
        if not wants_gpu(Path(words[1]), words[2:]):
            print(CPU)
            return 0
        if (Path(GPU) / ".run").exists():
            print(GPU)
            return 0
        print(
            f"{words[1]} needs a GPU (SGLang or CUDA) and {GPU} is not set up: run `make gpu` on a "
            "host with a GPU, or play with transformers here: "
            f"make train CONFIG={words[1]} ARGS=engine.kind=hf",
            file=sys.stderr,
        )
        return 1
    found = list(findings())
    print(*found, sep="\n")
    missing = [finding.what for finding in found if finding.fix]
    if missing:
        print(f"not ready for GPU runs: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
