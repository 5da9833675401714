"""Every test here says how many GPUs it needs; with fewer it is skipped with a reason.

`-m one_gpu`, `-m two_gpus` and `-m four_gpus` choose by that number, so that parts of one host can
run parts of the tests at the same time, each with its own CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import pathlib

import pytest
import torch

HERE = pathlib.Path(__file__).resolve().parent
NEEDED = {"one_gpu": 1, "two_gpus": 2, "four_gpus": 4}


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by `-m`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    there = torch.cuda.device_count()
    for item in (item for item in items if HERE in item.path.parents):
        named = [mark.name for mark in item.iter_markers() if mark.name in NEEDED]
        if not named:
            item.add_marker(pytest.mark.one_gpu)
        needed = max([NEEDED[name] for name in named], default=1)
        if there < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, got {there}"))
