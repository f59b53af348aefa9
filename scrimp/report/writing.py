"""Writes reports: of a run folder, of a plan file, or of what an engine or a plan has in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scrimp.report.compare_page import compare_page
from scrimp.report.files import replace_text
from scrimp.report.page import page
from scrimp.report.run_folder import Run, read, read_plan, rehearsal_of

Source = str | Path | Run


def write(
    source: Source,
    path: str | Path,
    *,
    plan: str | Path | None = None,
    rehearsal: str | Path | Mapping[str, Any] | None = None,
) -> None:
    """Write one HTML file, whole or not at all. `source`: a run folder or a plan file. `plan`: a plan file in place of the run's
    own. `rehearsal`: a rehearsal's JSON, which becomes the predicted timeline.

    >>> import scrimp
    >>> from scrimp import report, zoo
    >>> engine = scrimp.Engine(zoo.build("gpt-tiny"), memory="1GiB", device="cpu")
    >>> with scrimp.Progress(engine, run="run", quiet=True) as progress:
    ...     progress.update(engine.step(*zoo.example_batch("gpt-tiny", batch=8)))
    >>> engine.close()
    >>> report.write("run", "report.html")
    """
    run = _opened(source)
    if plan is not None:
        run = replace(run, plan=read_plan(plan))
    if rehearsal is not None:
        run = replace(run, rehearsal=rehearsal_of(rehearsal))
    replace_text(Path(path), page(run))


def compare(sources: Sequence[Source], path: str | Path) -> None:
    """Write one HTML file with several runs or plans side by side."""
    replace_text(Path(path), compare_page([_opened(source) for source in sources]))


def _opened(source: Source) -> Run:
    return source if isinstance(source, Run) else read(source)
