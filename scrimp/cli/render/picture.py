"""Draws layouts as text: which rank holds what, before a program and after each of its steps.

All grids of a program have the same outer size, since each shows the same array: the position of a cell is the part of the array
(to scale, as far as there is room). Dim 0 runs down and dim 1 to the right (the only dim of a vector to the right). A cell names
its holders:

    0 1      ranks 0 and 1 hold the same values        0-3      ranks 0 to 3 do
    0+1      they hold summands of a partial sum       0|1      they hold different parts along dim 2

Meshes and arrays too large for grids get index ranges instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from scrimp.layout import Box, Layout, Mesh, box_numel
from scrimp.move import Program

GRID_DEVICES = 16  # the largest mesh that is drawn
GRID_DIMS = 3
LISTED_RANKS = 8
GAP = "   "


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The state between two steps: the layout, and the part of the array on each rank."""

    title: str
    layout: Layout
    boxes: tuple[Box, ...]


@dataclass(frozen=True, kw_only=True)
class Cells:
    """The labels of a grid, row by row, and the part of the array behind each row and column."""

    labels: tuple[tuple[str, ...], ...]
    down: tuple[tuple[int, int], ...]
    right: tuple[tuple[int, int], ...]

    @property
    def column(self) -> int:
        """Columns that a cell needs for its label, a space on each side, and a border."""
        return max(len(label) for row in self.labels for label in row) + 3


def frames(program: Program) -> list[Frame]:
    """The source, then the state after every step."""
    mesh, shape = program.mesh, program.shape
    found = [(program.src, "source", shape)]
    found += [(step.after, f"after step {number}", program.padded) for number, step in enumerate(program.steps, start=1)]
    if program.steps:
        found[-1] = (found[-1][0], found[-1][1], shape)  # the target has its own tiles, whatever the padding between
    return [
        Frame(
            title=title,
            layout=layout.merge(mesh),
            boxes=tuple(layout.tile(shape, mesh, rank, padded) for rank in range(mesh.size)),
        )
        for layout, title, padded in found
    ]


def picture(program: Program, width: int = 100) -> str:
    """The frames side by side as far as they fit in `width` columns, with a legend."""
    shown, mesh = frames(program), program.mesh
    drawn = _grids(shown, mesh, width) if mesh.size <= GRID_DEVICES and len(program.shape) <= GRID_DIMS else None
    blocks = drawn or [_listed(frame, mesh) for frame in shown]
    return "\n".join([*_beside(blocks, width), "", *_legend(program, shown, grid=drawn is not None)])


def ranks_text(ranks: Iterable[int]) -> str:
    """[0, 1, 2, 3, 6] -> "0-3 6"; a run of two stays two numbers."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs)


def nbytes_text(nbytes: float) -> str:
    """1536 -> "1.50 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024 or unit == "TiB":
            break
        nbytes /= 1024
    return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.3g} {unit}" if nbytes < 1000 else f"{nbytes:.0f} {unit}"


def draw(labels: Sequence[Sequence[str]], columns: Sequence[int], rows: Sequence[int]) -> list[str]:
    """A grid of labelled cells, with borders at the given columns and rows."""
    spans = [right - left - 1 for left, right in pairwise(columns)]

    def border(left: str, middle: str, right: str) -> str:
        return left + middle.join("─" * span for span in spans) + right

    lines = [border("┌", "┬", "┐")]
    for row, (top, bottom) in zip(labels, pairwise(rows), strict=True):
        for y in range(top + 1, bottom):
            named = row if y == (top + bottom) // 2 else [""] * len(row)
            lines.append("│" + "│".join(label.center(span) for label, span in zip(named, spans, strict=True)) + "│")
        lines.append(border("├", "┼", "┤"))
    lines[-1] = border("└", "┴", "┘")
    return lines


def borders(sides: Sequence[tuple[int, int]], length: int, least: int) -> list[int]:
    """The positions of tile borders on a line: to scale, or even where a tile would be too short."""
    whole = sides[-1][1]
    found = [length * start // whole for start, _ in sides] + [length]
    if all(right - left >= least for left, right in pairwise(found)):
        return found
    return [length * k // len(sides) for k in range(len(sides) + 1)]


def cells(frame: Frame, mesh: Mesh) -> Cells:
    """The tiles that are not empty. A vector is one row, a scalar one cell."""
    holders: dict[tuple[tuple[int, int], tuple[int, int]], dict[Box, list[int]]] = {}
    for rank, box in enumerate(frame.boxes):
        if box_numel(box):
            sides = ((0, 1),) * (2 - len(box)) + box
            holders.setdefault((sides[0], sides[1]), {}).setdefault(sides[2:], []).append(rank)
    if not holders:
        return Cells(labels=(("empty",),), down=((0, 1),), right=((0, 1),))
    downs, rights = (tuple(sorted({place[side] for place in holders})) for side in (0, 1))
    labels = tuple(
        tuple("|".join(_holders_text(ranks, frame.layout, mesh) for ranks in holders[d, r].values()) for r in rights)
        for d in downs
    )
    return Cells(labels=labels, down=downs, right=rights)


def _holders_text(ranks: Sequence[int], layout: Layout, mesh: Mesh) -> str:
    """Who holds one part: copies, or for a partial sum the groups that each add up to a copy."""
    if not layout.partial:
        return ranks_text(ranks)
    groups = {tuple(sorted(mesh.group(rank, layout.partial))) for rank in ranks}
    return " ".join(_sum_text(group) for group in sorted(groups))


def _sum_text(group: Sequence[int]) -> str:
    in_a_row = len(group) > 4 and group[-1] - group[0] == len(group) - 1
    return f"{group[0]}+..+{group[-1]}" if in_a_row else "+".join(map(str, group))


def _grids(shown: Sequence[Frame], mesh: Mesh, width: int) -> list[list[str]] | None:
    """One block of lines for each frame; None where a grid would not fit."""
    found = [cells(frame, mesh) for frame in shown]
    across = max(len(grid.right) * grid.column for grid in found)
    tall = max(2 * len(grid.down) for grid in found)
    if across + 1 > width:
        return None
    blocks = []
    for frame, grid in zip(shown, found, strict=True):
        lines = draw(grid.labels, borders(grid.right, across, grid.column), borders(grid.down, tall, 2))
        idle = [rank for rank, box in enumerate(frame.boxes) if not box_numel(box)]
        note = [f"nothing on {ranks_text(idle)}"] if idle and len(idle) < mesh.size else []
        blocks.append([frame.title, str(frame.layout), *lines, *note])
    return blocks


def _listed(frame: Frame, mesh: Mesh) -> list[str]:
    shown = min(LISTED_RANKS, mesh.size)
    lines = [
        f"{rank}: " + (" ".join(f"{start}:{stop}" for start, stop in frame.boxes[rank]) or "the scalar") for rank in range(shown)
    ]
    more = [f"and {mesh.size - shown} more"] if mesh.size > shown else []
    return [frame.title, str(frame.layout), *lines, *more]


def _beside(blocks: Sequence[Sequence[str]], width: int) -> list[str]:
    """Blocks in rows, as many in a row as fit."""
    lines: list[str] = []
    row: list[list[str]] = []
    for block in blocks:
        span = max(map(len, block))
        padded = [line.ljust(span) for line in block]
        if row and sum(len(b[0]) + len(GAP) for b in row) + span > width:
            lines += [*_join(row), ""]
            row = []
        row.append(padded)
    return lines + _join(row)


def _join(row: Sequence[Sequence[str]]) -> list[str]:
    tall = max(map(len, row))
    filled = [[*block, *[" " * len(block[0])] * (tall - len(block))] for block in row]
    return [GAP.join(parts).rstrip() for parts in zip(*filled, strict=True)]


def _legend(program: Program, shown: Sequence[Frame], *, grid: bool) -> list[str]:
    if not grid:
        return ["rank: the part it holds, start:stop for each dim"]
    lines = ["a cell names the ranks that hold it; dim 0 runs down, dim 1 to the right"]
    if len(program.shape) < 2:
        lines = ["a cell names the ranks that hold it"]
    if any(frame.layout.partial for frame in shown):
        lines.append("0+1: ranks 0 and 1 hold summands of it")
    if len(program.shape) > 2:
        lines.append("dim 2 is not drawn: 0|1 hold different parts along it")
    return lines
