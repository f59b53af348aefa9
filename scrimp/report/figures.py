"""Charts as data, which the page's script draws: memory of a step, and lines over the steps of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scrimp.report import html
from scrimp.report.timeline import Curve

LINES = 6  # colours of lines in the style sheet
MEASURED, PREDICTED, BUDGET = "measured", "predicted", "budget"


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line over steps. `values`: None where there is none."""

    name: str
    steps: Sequence[float]
    values: Sequence[float | None]
    dash: bool = False
    dots: Sequence[float] | None = None  # radius of a dot at each point
    stairs: bool = False  # a value holds until the next one


def lines(
    given: Sequence[Line], *, unit: str, x_label: str = "step", x_unit: str = "plain", zero: bool = True
) -> dict[str, Any] | None:
    """None where there is nothing to draw. `zero`: the axis begins at zero."""
    shown = [each for each in given if any(value is not None for value in each.values)]
    if not shown:
        return None
    return {
        "unit": unit,
        "x_label": x_label,
        "x_unit": x_unit,
        "zero": zero,
        "start": len(shown[0].steps) - 1,
        "series": [
            {
                "name": each.name,
                "colour": f"var(--s{k % LINES})",
                "x": [*each.steps],
                "y": [*each.values],
                "dash": each.dash,
                "steps": each.stairs,
                **({} if each.dots is None else {"dots": [*each.dots]}),
            }
            for k, each in enumerate(shown)
        ],
    }


def memory(measured: Curve | None, predicted: Curve | None, budget: int | None) -> dict[str, Any] | None:
    """Measured bytes by kind, stacked; the prediction as a line of the kinds that are shown; the budget as another."""
    main = measured or predicted
    if main is None or not main.places:
        return None
    stacked = main.to_data()
    totals = main.totals
    order = sorted(stacked["kinds"], key=lambda kind: (html.order(kind), kind))
    steps = max(int(curve.places[-1]) + 1 for curve in (measured, predicted) if curve is not None and curve.places)
    series: list[dict[str, Any]] = [
        {"name": kind, "colour": html.colour(kind), "x": stacked["x"], "y": stacked["kinds"][kind], "stack": True}
        for kind in order
    ]
    if measured is not None and predicted is not None:
        data = predicted.to_data()
        drawn = {"name": PREDICTED, "colour": "var(--mark)", "dash": True, "steps": True}
        series.append({**drawn, **{key: data[key] for key in ("x", "kinds", "words", "label")}})
    if budget is not None and budget <= 4 * max(totals):
        series.append(
            {"name": BUDGET, "colour": "var(--bad)", "x": [0, steps], "y": [budget, budget], "dash": True, "steps": True}
        )
    return {
        "unit": "bytes",
        "x_label": "schedule step",
        "steps": True,
        "end": steps,
        "total": MEASURED if measured is not None else PREDICTED,
        "words": stacked["words"],
        "label": stacked["label"],
        "start": max(range(len(totals)), key=lambda k: totals[k]),
        "series": series,
    }


def over_steps(rows: Sequence[Mapping[str, Any]], key: str, name: str, *, dash: bool = False) -> Line:
    """One column of a metrics file."""
    values = [value if isinstance(value := row.get(key), (int, float)) else None for row in rows]
    return Line(name=name, steps=[row["step"] for row in rows], values=values, dash=dash)
