"""examples/notebook.ipynb runs from top to bottom. Its cells run by `exec` inside an event loop, as
a kernel of Jupyter runs them, so that no kernel is needed."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook.ipynb"
CELLS: list[dict[str, Any]] = [
    cell
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    if cell["cell_type"] == "code"
]


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}

    async def kernel() -> None:
        for number, cell in enumerate(CELLS):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)

    asyncio.run(kernel())
    assert len(names["run"].metrics) == 3 and names["run"].after is not None
    advantages = [sample.advantages[sample.mask.index(1)] for sample in names["samples"]]
    assert sum(advantages) == pytest.approx(0, abs=1e-6) and len(advantages) == 8
    own = names["own"]
    before, after = (rows["sampled"]["scores"] for rows in (own.before, own.after))
    assert sum(after) > sum(before), "the own game is not learnt"
    assert (names["run"].folder / "report.html").exists()


def test_the_notebook_shows_what_each_cell_printed() -> None:
    shown = [cell for cell in CELLS if cell["outputs"]]
    assert len(shown) >= len(CELLS) - 1
    for cell in shown:
        assert all(output["output_type"] != "error" for output in cell["outputs"])
