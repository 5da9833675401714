"""examples/notebook.ipynb runs from top to bottom in a kernel of Jupyter."""

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
CELLS: list[dict[str, Any]] = [
    cell
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    if cell["cell_type"] == "code"
]
# What must hold after the last cell.
CLAIMS = """
assert len(run.metrics) == 8 and run.after is not None
advantages = [sample.advantages[sample.mask.index(1)] for sample in samples]
assert abs(sum(advantages)) < 1e-6 and len(advantages) == 8, advantages
for how in ("sampled", "greedy"):
    before, after = (sum(rows[how]["scores"]) for rows in (run.before, run.after))
    assert after > before + 6, "the game is not learnt"  # of 64 games, or 0.1
assert (run.folder / "report.html").exists()
"""


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = map(pytest.importorskip, ("nbformat", "nbclient"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(CLAIMS))
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": tmp_path}}).execute()


def test_the_notebook_shows_what_each_cell_printed() -> None:
    shown = [cell for cell in CELLS if cell["outputs"]]
    assert len(shown) >= len(CELLS) - 1
    for cell in shown:
        assert all(output["output_type"] != "error" for output in cell["outputs"])
