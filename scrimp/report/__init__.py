"""Reports: one HTML file of a run, of a plan, or of several of them, that works without a network.

In:   a run folder, a plan file, or what an engine or a plan has in memory.
Out:  an HTML file, written whole or not at all; TensorBoard event files.

    run folder ──read──> Run ──> panels (figures, tables) ──> page ──> report.html

Read in this order:

    writing.py       `write` and `compare`
    run_folder.py    `Run`, the format of a run folder, and its reader and writer
    metrics.py       the metrics file: one line per step
    line.py          a step as a line of text
    timeline.py      measured and predicted bytes of a step, on one axis
    figures.py       charts as data
    run_view.py, plan_view.py    the panels of a run and of a plan
    page.py, compare_page.py     whole pages
    html.py          pieces of HTML
    tensorboard.py   metrics as TensorBoard events
    files.py         reading JSON with clear errors, atomic writing
    assets/          the style sheet, and the script that draws charts
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scrimp._lazy import lazily

if TYPE_CHECKING:
    from scrimp.report.compare_page import figure_rows, named_apart, peak_rows
    from scrimp.report.files import replace_text
    from scrimp.report.html import Cell
    from scrimp.report.line import StepLine, line_of
    from scrimp.report.metrics import MetricsFile, read_metrics
    from scrimp.report.run_folder import Run, RunWriter, finite, read, read_plan, rehearsal_of
    from scrimp.report.tensorboard import write_events
    from scrimp.report.writing import compare, write

__all__ = [
    "Cell", "MetricsFile", "Run", "RunWriter", "StepLine", "compare", "figure_rows", "finite", "line_of", "named_apart",
    "peak_rows", "read", "read_metrics", "read_plan", "rehearsal_of", "replace_text", "write", "write_events",
]  # fmt: skip

__getattr__ = lazily(
    __name__,
    {
        "replace_text": "scrimp.report.files",
        "Cell": "scrimp.report.html",
        "figure_rows": "scrimp.report.compare_page",
        "named_apart": "scrimp.report.compare_page",
        "peak_rows": "scrimp.report.compare_page",
        "StepLine": "scrimp.report.line",
        "line_of": "scrimp.report.line",
        "MetricsFile": "scrimp.report.metrics",
        "read_metrics": "scrimp.report.metrics",
        "Run": "scrimp.report.run_folder",
        "RunWriter": "scrimp.report.run_folder",
        "finite": "scrimp.report.run_folder",
        "read": "scrimp.report.run_folder",
        "read_plan": "scrimp.report.run_folder",
        "rehearsal_of": "scrimp.report.run_folder",
        "write_events": "scrimp.report.tensorboard",
        "compare": "scrimp.report.writing",
        "write": "scrimp.report.writing",
    },
)
