"""Tables that fit: no name and no figure is cut or folded, whatever the width.

A row is one line while it fits. A first cell that is too long for its column stands on a line of its own, with the others below
it. Where even the others are too long, each is named and they follow each other on as many lines as it takes. The last column
may be words: these go on in lines below, broken between words or pieces, never inside a figure and its unit.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

NARROW = 12  # columns that words need at least to go on beside the other cells
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
    """`right`: headers of columns that stand at the right. `pieces`: the last column is words, to be broken after this text
    (between words, if it is empty)."""
    lines = table_lines(headers, rows, console.width, right=right, pieces=pieces)
    for k, line in enumerate(lines):
        console.print(line, soft_wrap=True, style="bold" if k == 0 and any(headers) else None)


def print_words(console: Console, text: str) -> None:
    """Lines that a terminal would break anywhere are broken between words, and go on below where the words began. What does not
    go to a terminal is for programs to read, and has its lines as they are."""
    for line in text.splitlines():
        for each in hanging(line, console.width) if console.is_terminal else [line]:
            console.print(each, soft_wrap=True)


def hanging(line: str, width: int) -> list[str]:
    """A line in parts; those after the first begin below its second column, or below its first word."""
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
    """Lines of a text. What is written on lines of its own stays so."""
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
    """The first cell, and below it what the others are."""
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
