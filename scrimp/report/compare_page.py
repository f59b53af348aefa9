"""Several runs or plans side by side: one page, and the same rows for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from scrimp.errors import RunError
from scrimp.report import figures, html
from scrimp.report.page import document
from scrimp.report.run_folder import Run, intact
from scrimp.report.run_view import curves, summary_rows

Rows = list[tuple[str, list[html.Content]]]


def compare_page(runs: Sequence[Run]) -> str:
    runs = named_apart(runs)
    with intact(" / ".join(run.name for run in runs)):
        return document(" / ".join(run.name for run in runs), f"{len(runs)} runs or plans side by side.", _panels(runs))


def _panels(runs: Sequence[Run]) -> list[str]:
    return [
        html.panel("figures", "Figures", html.table("compared", ("", *(run.name for run in runs)), _cells(figure_rows(runs)))),
        _peaks(runs),
        _memory(runs),
        _over_steps("loss", "Loss", runs, [("loss", "Loss of each step", "plain", False)]),
        _over_steps(
            "time",
            "Time and traffic",
            runs,
            [
                ("seconds", "Seconds of a step", "seconds", True),
                ("up_nbytes", "Bytes copied to the device in a step", "bytes", True),
                ("received_nbytes", "Bytes received from other ranks in a step", "bytes", True),
            ],
        ),
        _machines(runs),
    ]


def named_apart(runs: Sequence[Run]) -> list[Run]:
    """Each run under a name of its own: equal names get a number."""
    if len(runs) < 2:
        raise RunError(f"a comparison takes two or more runs or plans, not {len(runs)}")
    names = [run.name for run in runs]
    return [replace(run, name=run.name if names.count(run.name) == 1 else f"{run.name} {k + 1}") for k, run in enumerate(runs)]


def figure_rows(runs: Sequence[Run]) -> Rows:
    """One row for each figure that any of them has; a missing one is a dash."""
    found = []
    for run in runs:
        with intact(run.name):
            found.append(dict(summary_rows(run)))
    nothing = html.Cell(text=html.NONE, value=None)
    return [(name, [_figure(each.get(name, nothing)) for each in found]) for name in _union(found)]


def _figure(content: html.Content) -> html.Content:
    """Words are aligned as numbers, since both are in one column."""
    return html.Cell(text=content, value=None) if isinstance(content, str) else content


def peak_rows(runs: Sequence[Run]) -> Rows:
    """The peak on the device by kind: measured of a run, planned of a plan."""
    found = [_by_kind(run) for run in runs]
    kinds = sorted(_union(found), key=html.order)
    rows: Rows = [(kind, [html.nbytes(each.get(kind, 0)) for each in found]) for kind in kinds]
    return [("in all", [html.nbytes(sum(each.values())) for each in found]), *rows]


def _by_kind(run: Run) -> dict[str, int]:
    with intact(run.name):
        if run.run is not None:
            return {kind: size for kind, size in run.run["ledgers"]["device"]["peak"]["by_kind"].items() if size}
        assert run.plan is not None
        return {kind["kind"]: kind["nbytes"] for kind in run.plan["memory"]["kinds"] if kind["nbytes"]}


def _peaks(runs: Sequence[Run]) -> str:
    rows = peak_rows(runs)
    found = [_by_kind(run) for run in runs]
    most = max((sum(each.values()) for each in found), default=0)
    bars = "".join(
        html.heading(run.name) + html.bar(sorted(each.items(), key=lambda item: html.order(item[0])), most)
        for run, each in zip(runs, found, strict=True)
    )
    table = html.table(
        "peaks",
        ("", *(run.name for run in runs)),
        [(name if name == "in all" else html.swatch(name), *cells) for name, cells in rows],
    )
    note = html.words("Measured where there is a run, planned where there is only a plan.", "note")
    return html.panel("peak", "Peak on the device by kind", bars, table, note)


def _memory(runs: Sequence[Run]) -> str:
    lines = []
    for run in runs:
        measured, predicted = curves(run)
        curve = measured or predicted
        if curve is not None and curve.places:
            end = max(curve.places[-1], 1.0)
            share = [100 * place / end for place in curve.places]
            lines.append(figures.Line(name=run.name, steps=share, values=curve.totals, stairs=True))
    figure = figures.lines(lines, unit="bytes", x_label="percent of the schedule steps of a training step")
    inner = (
        html.words("No step was recorded.", "note")
        if figure is None
        else html.chart("memory-chart", "Bytes on the device", figure)
    )
    return html.panel("memory", "Memory over a step", inner)


def _over_steps(key: str, title: str, runs: Sequence[Run], charts: Sequence[tuple[str, str, str, bool]]) -> str:
    parts = []
    for column, said, unit, zero in charts:
        figure = figures.lines([figures.over_steps(run.metrics, column, run.name) for run in runs], unit=unit, zero=zero)
        if figure is not None:
            parts.append(html.chart(f"{column}-chart", said, figure))
    return html.panel(key, title, *(parts or [html.words("No metrics are known.", "note")]))


def _machines(runs: Sequence[Run]) -> str:
    found = []
    for run in runs:
        machine = run.machine or {}
        plain = {name: str(value) for name, value in machine.items() if isinstance(value, str) and name != "format"}
        found.append({**plain, **machine.get("versions", {})})
    rows = [(name, *(each.get(name, html.NONE) for each in found)) for name in _union(found)]
    inner = (
        html.table("machines", ("", *(run.name for run in runs)), rows) if rows else html.words("No machine is known.", "note")
    )
    return html.panel("machine", "Machines and versions", inner)


def _cells(rows: Rows) -> list[tuple[html.Content, ...]]:
    return [(name, *cells) for name, cells in rows]


def _union(tables: Sequence[Mapping[str, object]]) -> list[str]:
    return [*dict.fromkeys(name for table in tables for name in table)]
