"""A line plot as SVG text, readable on light and on dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 60, 210, 36, 48
COLOURS = ("#2f81f7", "#d9730d", "#2da44e", "#a371f7", "#cf222e", "#b08800", "#1b9e9e")
STYLE = """text { font: 12px sans-serif; fill: #57606a } .grid { stroke: #8c959f; stroke-opacity: 0.3 } .title { font-size: 14px }
@media (prefers-color-scheme: dark) { text { fill: #adbac7 } }"""


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points in the order of x; `dashed` for what was not measured but is a bound; `mark=False` for a line alone."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    dashed: bool = False
    mark: bool = True


def plot(title: str, x_label: str, y_label: str, series: Sequence[Series]) -> str:
    """Both axes begin at zero: what looks half as long is half as long."""
    shown = [one for one in series if one.points]
    x_ticks, y_ticks = (ticks(max(point[k] for one in shown for point in one.points)) for k in (0, 1))
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / x_ticks[-1] * (right - LEFT), bottom - y / y_ticks[-1] * (bottom - TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        _text(LEFT, 20, title, "start", ' class="title"'),
        _text((LEFT + right) / 2, HEIGHT - 10, x_label, "middle"),
        _text(16, (TOP + bottom) / 2, y_label, "middle", f' transform="rotate(-90 16 {(TOP + bottom) / 2:.0f})"'),
    ]
    for tick in x_ticks:
        x, _ = at(tick, 0)
        parts += [_line(x, TOP, x, bottom), _text(x, bottom + 18, f"{tick:g}", "middle")]
    for tick in y_ticks:
        _, y = at(0, tick)
        parts += [_line(LEFT, y, right, y), _text(LEFT - 8, y + 4, f"{tick:g}", "end")]
    for row, one in enumerate(shown):
        colour = COLOURS[one.colour % len(COLOURS)]
        dash = ' stroke-dasharray="6 4"' if one.dashed else ""
        places = [at(*point) for point in one.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        if one.mark:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in places]
        y = TOP + 10 + 20 * row
        swatch = f'<line x1="{right + 16}" y1="{y}" x2="{right + 44}" y2="{y}" stroke="{colour}" stroke-width="2"{dash}/>'
        parts += [swatch, _text(right + 50, y + 4, one.name, "start")]
    return "\n".join([*parts, "</svg>", ""])


def ticks(most: float) -> list[float]:
    """From 0 to `most` or beyond, four to eight steps of 1, 2 or 5 times a power of ten."""
    if most <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(most / 4))
    step = next(power * factor for factor in (1, 2, 5, 10) if most / (power * factor) <= 8)
    return [step * k for k in range(math.ceil(most / step - 1e-9) + 1)]


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="grid" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
