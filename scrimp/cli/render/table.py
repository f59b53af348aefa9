"""Tables that fit any width without cutting or folding a name or a number.

A row is one line while it fits. A first cell that is too long for its column gets a line of its own, with the others below it.
Where even the others are too long, each is labelled and they follow each other on as many lines as needed. The last column may be
text: it continues on lines below, broken between words or pieces, never between a number and its unit.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

NARROW = 12  # columns that text needs at least to continue next to the other cells
INDENT = "    "
_HEAD = re.compile(r"\s*(?:\S+(?: \S+)?\s{2,}|)")  # up to a second column
_FIGURE = re.compile(r"(?:[-+\d][\d.,]*%? )?\S+")  # a word, or a figure with its unit


def print_table(
    console: Console,
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[str] = (),
    pieces: str | None = None,
) -> None:
    """`right`: headers of right-aligned columns. `pieces`: the last column is text, to be broken after this separator (between
    words, if it is empty)."""
    lines = table_lines(headers, rows, console.width, right=right, pieces=pieces)
    for k, line in enumerate(lines):
        console.print(line, soft_wrap=True, style="bold" if k == 0 and any(headers) else None)


def print_words(console: Console, text: str) -> None:
    """Breaks long lines between words, with a hanging indent, if the output is a terminal. Other output is for programs to read,
    and keeps its lines."""
    for line in text.splitlines():
        for each in hanging(line, console.width) if console.is_terminal else [line]:
            console.print(each, soft_wrap=True)


def hanging(line: str, width: int) -> list[str]:
    """Splits a line; continuation lines are indented to its second column, or to its first word."""
    if len(line) <= width:
        return [line]
    head = _HEAD.match(line)
    begin = head[0] if head is not None and len(head[0]) < width // 2 else ""
    first, *more = wrapped(line[len(begin) :], width - len(begin)) or [""]
    return [begin + first, *(" " * len(begin) + each for each in more)]


def table_lines(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    *,
    right: Collection[str] = (),
    pieces: str | None = None,
) -> list[str]:
    return [line for block in table_blocks(headers, rows, width, right=right, pieces=pieces) for line in block]


def table_blocks(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    *,
    right: Collection[str] = (),
    pieces: str | None = None,
) -> list[list[str]]:
    """The lines of the headers, then those of each row."""
    fixed = len(headers) - (pieces is not None)
    spans = [max(len(row[k]) for row in (headers, *rows)) for k in range(fixed)]
    gap = 2 if sum(spans) + 2 * (fixed - 1) <= width else 1
    others = sum(spans[1:]) + gap * (fixed - 1)
    if pieces is not None:
        longest = max((len(piece) for row in rows for piece in _pieces(row[-1], pieces)), default=0)
        others += gap + max(NARROW, min(longest, width // 4))
    wanted, spans[0] = spans[0], min(spans[0], width - others)
    if spans[0] < min(NARROW, wanted):
        return [[], *(_named(headers, row, width, pieces) for row in rows)]
    blocks = [_block(row, spans, gap, [name in right for name in headers], width, pieces) for row in (headers, *rows)]
    return blocks if any(headers) else [[], *blocks[1:]]


def _block(
    row: Sequence[str], spans: Sequence[int], gap: int, right: Sequence[bool], width: int, pieces: str | None
) -> list[str]:
    above, cells = [], [*row[: len(spans)]]
    if len(cells[0]) > spans[0]:
        above, cells[0] = [cells[0]], ""
    placed = zip(cells, spans, right, strict=False)
    begin = (" " * gap).join(cell.rjust(span) if at_right else cell.ljust(span) for cell, span, at_right in placed)
    if pieces is None:
        return [*above, begin.rstrip()]
    first, *more = wrapped(row[-1], width - len(begin) - gap, pieces) or [""]
    return [*above, f"{begin}{' ' * gap}{first}".rstrip(), *(" " * (len(begin) + gap) + each for each in more)]


def wrapped(text: str, width: int, sep: str = "") -> list[str]:
    """Lines of a text. Its own line breaks stay."""
    lines: list[str] = []
    for part in text.splitlines():
        line = ""
        whole = _pieces(part, sep)
        for piece in whole if all(len(each) <= width for each in whole) else _pieces(part, ""):
            if line and len(line) + 1 + len(piece) > width:
                lines.append(line)
                line = ""
            line = f"{line} {piece}" if line else piece
        lines.append(line)
    return lines


def _pieces(text: str, sep: str) -> list[str]:
    if not sep:
        return _FIGURE.findall(text)
    parts = text.split(f"{sep} ")
    return [f"{part}{sep}" for part in parts[:-1]] + parts[-1:]


def _named(headers: Sequence[str], row: Sequence[str], width: int, pieces: str | None) -> list[str]:
    """The first cell, and below it the others with their headers."""
    lines, line = [row[0]], ""
    for name, cell in zip(headers[1:], row[1:], strict=True):
        if not cell:
            continue
        if pieces and name == headers[-1]:
            lines += [INDENT + line] if line else []
            line = ""
            lines += [INDENT + each for each in wrapped(f"{name} {cell}", width - len(INDENT), pieces)]
            continue
        words = f"{name} {cell}".strip()
        if line and len(INDENT) + len(line) + 2 + len(words) > width:
            lines.append(INDENT + line)
            line = ""
        line = f"{line}  {words}" if line else words
    return [*lines, *([INDENT + line] if line else [])]
