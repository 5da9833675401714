"""Stand-ins with which the real SGLang runs on a CPU without AMX, for tests only.

Put this folder on PYTHONPATH: the interpreter, also of the engine's child processes, then runs this
file at start. What is faked, and why no test result depends on it:
- sgl_kernel: compiled kernels. The torch_native path imports their names and calls none; a call
  raises.
- xgrammar: constrained decoding. SGLang needs its types to import; the engine runs with
  grammar_backend="none".
- IPython: notebook display, imported by SGLang's top module.
- torchvision's registrations for operators that a CPU build of torch cannot load; no image is ever
  read.
Scheduler, prefix cache, sampling, log-probs, weight loading and tensor parallelism are SGLang's.

Most of these tests' time is imports, which take a quarter less: Python's collector comes less
often, and SGLang imports the two models that the tests have.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path


class Uncallable:
    """A stand-in for a compiled function; raises when called."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_: object, **__: object) -> None:
        raise NotImplementedError(
            f"sgl_kernel.{self.name}: this SGLang runs without compiled kernels"
        )


class Kernels(types.ModuleType):
    """Any public name is a function that raises when called."""

    __version__ = "0.4.5"

    def __getattr__(self, name: str) -> Uncallable:
        if name.startswith("__"):
            raise AttributeError(name)
        return Uncallable(name)


class Types(types.ModuleType):
    """Any public name is an empty pydantic model, which can annotate a field."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        from pydantic import BaseModel

        return type(name, (BaseModel,), {})


STAND_INS: dict[str, type[types.ModuleType]] = {
    "sgl_kernel": Kernels,
    "xgrammar": Types,
    "xgrammar.structural_tag": Types,
    "IPython": Types,
    "IPython.display": Types,
    "torchvision._meta_registrations": types.ModuleType,
}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads the stand-ins above, before any other finder."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in STAND_INS:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package="." not in fullname)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return STAND_INS[spec.name](spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Does nothing: the module's class provides its names."""


gc.set_threshold(100_000, 20, 20)
if (sglang := importlib.util.find_spec("sglang")) is not None and sglang.origin is not None:
    models = {file.stem for file in (Path(sglang.origin).parent / "srt" / "models").glob("*.py")}
    others = models - {"qwen2", "llama", "registry", "utils"}
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(sorted(others))
sys.meta_path.insert(0, Finder())
