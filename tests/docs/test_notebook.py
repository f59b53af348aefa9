"""The notebook runs from top to bottom, and lies in the repository without outputs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed (it is in the dev extra)")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed (it is in the dev extra)")
pytest.importorskip("ipykernel", reason="ipykernel is not installed (it is in the dev extra)")

ROOT = Path(__file__).parents[2]
TOUR = ROOT / "examples" / "tour.ipynb"
MOST_LINES = 12  # of a cell


def test_it_is_short_and_has_no_outputs() -> None:
    book = nbformat.read(TOUR, as_version=4)
    nbformat.validate(book)
    assert [cell.cell_type for cell in book.cells[:2]] == ["markdown", "code"]
    for cell in book.cells:
        assert len(cell.source.splitlines()) <= MOST_LINES, cell.source
        if cell.cell_type == "code":
            assert not cell.outputs
            assert cell.execution_count is None
    links = re.findall(r"\]\(([^)]+)\)", "\n".join(cell.source for cell in book.cells if cell.cell_type == "markdown"))
    assert links
    assert all((TOUR.parent / link).exists() for link in links)


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_it_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel of its own, which finds scrimp where this test does."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    book = nbformat.read(TOUR, as_version=4)
    nbclient.NotebookClient(book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    texts = ["".join(out.get("text", "") for out in cell.outputs) for cell in book.cells if cell.cell_type == "code"]
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", texts[1])]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert "cpu peak" in texts[2]
    assert "least" in texts[3]
    assert "peak" in texts[4]
    assert "rank 0" in texts[5]
    assert re.findall(r"(\w+\.html) \d+ KiB", texts[6]) == ["plan.html", "run.html"]
