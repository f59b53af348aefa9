"""Draws a curve in characters, above its lower bound."""

from __future__ import annotations

from collections.abc import Sequence

COLUMNS, ROWS = 60, 9


def curve(values: Sequence[float], floor: float, marks: Sequence[tuple[int, str]] = ()) -> list[str]:
    """Lines of text: the means of the values over equal spans, the floor as a line, and names under some of the steps."""
    columns = min(COLUMNS, len(values))
    means = [_mean(values[k * len(values) // columns : (k + 1) * len(values) // columns]) for k in range(columns)]
    top, bottom = max([*means, floor]), min([*means, floor])
    height = (top - bottom) or 1.0
    rows = [round((top - mean) / height * (ROWS - 1)) for mean in means]
    at_floor = round((top - floor) / height * (ROWS - 1))
    lines = []
    for row in range(ROWS):
        label = f"{top - height * row / (ROWS - 1):6.2f}" if row in (0, ROWS - 1) else " " * 6
        if row == at_floor:
            label = f"{floor:6.2f}"
        body = "".join("*" if mine == row else "-" if row == at_floor else " " for mine in rows)
        lines.append(f"{label} | {body}{' floor' if row == at_floor else ''}".rstrip())
    lines.append(" " * 6 + " +" + "-" * (columns + 1))
    under = ""
    for step, name in sorted(marks):
        place = 9 + min(step * columns // len(values), columns - 1)
        under = (under + " " if len(under) > place else under.ljust(place)) + f"^ {name}"
    return [*lines, under] if under else lines


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
