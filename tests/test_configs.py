"""Every configuration that is shipped loads, and says only what differs from the defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from selfplay.config import load_config

CONFIGS = sorted((Path(__file__).resolve().parents[1] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_loads_into_a_run_folder_of_its_own(path: Path) -> None:
    assert load_config(path).out == f"runs/{path.stem}"


def test_three_by_three_is_tiny_with_another_board() -> None:
    tiny, tiny3 = (load_config(p) for p in CONFIGS if p.stem in ("tiny", "tiny3"))
    assert (tiny.game.size, tiny3.game.size) == (2, 3)
    assert tiny3.optim == tiny.optim and tiny3.algorithm == tiny.algorithm
