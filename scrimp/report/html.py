"""Pieces of a page as HTML text. Text is escaped here and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from scrimp.ledger import KINDS, format_nbytes

Number = int | float | None
NONE = "\N{EN DASH}"  # for a figure that is not known


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A number with its text; the page keeps the exact number too."""

    text: str
    value: Number


@dataclass(frozen=True, kw_only=True)
class Markup:
    """HTML that is not to be escaped again."""

    html: str


Content = str | int | Cell | Markup


def nbytes(size: int | None) -> Cell:
    return Cell(text=NONE if size is None else format_nbytes(size), value=size)


def seconds(value: float | None) -> Cell:
    if value is None:
        return Cell(text=NONE, value=None)
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(value) >= size:
            return Cell(text=f"{value / size:.4g} {unit}", value=value)
    return Cell(text=f"{value:.3g} s", value=value)


def number(value: float | None, digits: int = 4) -> Cell:
    return Cell(text=NONE if value is None else f"{value:,.{digits}g}", value=value)


def count(value: int) -> Cell:
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if value >= size:
            return Cell(text=f"{value / size:.4g} {unit}", value=value)
    return Cell(text=f"{value:,}", value=value)


def share(value: float | None) -> Cell:
    return Cell(text=NONE if value is None else f"{value:.2%}", value=value)


def panel(key: str, title: str, *parts: str) -> str:
    return (
        f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{escape(title)}</h2>{"".join(parts)}</section>'
    )


def words(text: str, kind: str = "") -> str:
    return f"<p{f' class={chr(34)}{kind}{chr(34)}' if kind else ''}>{escape(text)}</p>"


def heading(text: str) -> str:
    return f"<h3>{escape(text)}</h3>"


def table(key: str, headers: Sequence[str], rows: Iterable[Sequence[Content]], caption: str = "") -> str:
    """The first column names the row. A wide table scrolls in itself, and can be scrolled by keyboard."""
    lines = [*rows]
    right = [any(isinstance(row[k], (Cell, int)) for row in lines) for k in range(len(headers))]
    kinds = [' class="number"' if each else "" for each in right]
    head = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(headers, kinds, strict=True))
    body = "".join(f"<tr>{''.join(_cell(each, k == 0) for k, each in enumerate(row))}</tr>" for row in lines)
    said = f"<caption>{escape(caption)}</caption>" if caption else ""
    top = f"<thead><tr>{head}</tr></thead>" if any(headers) else ""
    label = escape(caption or key, quote=True)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table id="{key}">{said}{top}<tbody>{body}</tbody>'
        "</table></div>"
    )


def facts(key: str, rows: Iterable[tuple[str, Content]]) -> str:
    """Names and values, one above the other on a phone."""
    items = "".join(f"<div><dt>{escape(name)}</dt>{_tagged('dd', value)}</div>" for name, value in rows)
    return f'<dl class="facts" id="{key}">{items}</dl>'


def details(summary: str, *parts: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{''.join(parts)}</details>"


def swatch(kind: str) -> Markup:
    """The name of a kind with its colour."""
    return Markup(html=f'<span class="swatch" style="background:{colour(kind)}"></span>{escape(kind)}')


def order(kind: str) -> int:
    """Kinds are in the ledger's order everywhere."""
    return KINDS.index(kind) if kind in KINDS else len(KINDS)


def colour(kind: str) -> str:
    return f"var(--k{KINDS.index(kind)})" if kind in KINDS else "var(--other)"


def bar(parts: Sequence[tuple[str, int]], most: int) -> str:
    """One stacked bar of sizes by kind; `most` is the full width."""
    pieces = "".join(
        f'<i style="width:{100 * size / most:.3f}%;background:{colour(kind)}" title="{escape(kind)} {format_nbytes(size)}"></i>'
        for kind, size in parts
        if size and most
    )
    said = ", ".join(f"{kind} {format_nbytes(size)}" for kind, size in parts if size)
    return f'<div class="bar" role="img" aria-label="{escape(said, quote=True)}">{pieces}</div>'


def chart(key: str, title: str, figure: Mapping[str, Any]) -> str:
    """A place that the page's script draws into, with the figure as JSON."""
    data = json.dumps(figure, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<figure class="chart" id="{key}"><figcaption>{escape(title)}</figcaption>'
        f'<div class="legend"></div><div class="plot" tabindex="0" role="slider" aria-label="{escape(title, quote=True)}"></div>'
        f'<div class="readout" aria-live="polite"></div>'
        f'<script type="application/json">{data}</script></figure>'
    )


def _cell(content: Content, first: bool) -> str:
    return _tagged("th", content, ' scope="row"') if first else _tagged("td", content)


def _tagged(tag: str, content: Content, more: str = "") -> str:
    if isinstance(content, Markup):
        return f"<{tag}{more}>{content.html}</{tag}>"
    if isinstance(content, Cell):
        exact = "" if content.value is None else f' data-value="{json.dumps(content.value)}"'
        return f'<{tag}{more} class="number"{exact}>{escape(content.text)}</{tag}>'
    if isinstance(content, int):
        return f'<{tag}{more} class="number" data-value="{content}">{content:,}</{tag}>'
    return f"<{tag}{more}>{escape(content)}</{tag}>"
