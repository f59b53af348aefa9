"""A bucket: packets of several parameters, small dense tensors and a header, sent as one row of bytes.

All ranks make the same plan from the same names and sizes, so rows have one size and need no description. The header has the
step, whether a gradient was not finite, and a checksum. A row that does not fit its plan raises an error that names the rank,
because it would put wrong numbers into every replica. After the header one byte for each part says whether it has content: a rank
without a gradient, or with one that is not finite, sends zeros.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from scrimp.exchange._packet import BORDER, pack, packet_nbytes, wrong
from scrimp.exchange._row_topk import RowTopK, row_topk

HEADER = 32  # bytes, of four numbers: size, step, whether something is not finite, checksum
SMALL = 4096  # elements: smaller tensors are sent whole
PRESENT, NOT_FINITE = 1, 2  # values of a part's flag; 0: no content


@dataclass(frozen=True, kw_only=True)
class Part:
    """A parameter's bytes in a row, and the position of its flag; `how` is None if it is sent whole."""

    name: str
    numel: int
    flag: int
    start: int
    stop: int
    how: RowTopK | None

    @property
    def whole(self) -> bool:
        """All entries are sent, so there is no residual."""
        return self.how is None or self.how.everything


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """`summed`: each rank sends only the head as a row; the rest is all values, and is all-reduced."""

    parts: tuple[Part, ...]
    dtype: torch.dtype  # of the values
    nbytes: int
    summed: bool = False

    @property
    def head_nbytes(self) -> int:
        """Header and flags."""
        return self.parts[0].start

    def row(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(self.nbytes, dtype=torch.uint8, device=device)


def plan_bucket(
    sizes: Sequence[tuple[str, int]], density: float, dtype: torch.dtype, small: int = SMALL, *, summed: bool = False
) -> Bucket:
    """`sizes`: names and elements, in the same order on all ranks."""
    parts, start = [], HEADER + -(-len(sizes) // BORDER) * BORDER
    for k, (name, numel) in enumerate(sizes):
        how = row_topk(numel, density) if numel >= small and not summed else None
        nbytes = -(-numel * dtype.itemsize // BORDER) * BORDER if how is None else packet_nbytes(how, dtype)
        parts.append(Part(name=name, numel=numel, flag=HEADER + k, start=start, stop=start + nbytes, how=how))
        start += nbytes
    return Bucket(parts=tuple(parts), dtype=dtype, nbytes=start, summed=summed)


def put_part(row: torch.Tensor, part: Part, positions: torch.Tensor | None, values: torch.Tensor, dtype: torch.dtype) -> None:
    """Writes a part's entries, or all of its values, of any dtype."""
    row[part.flag].fill_(PRESENT)  # assigning a number would copy it, and wait for a GPU
    here = row[part.start : part.stop]
    if part.how is None:
        here[: part.numel * dtype.itemsize].view(dtype).copy_(values)
    else:
        assert positions is not None
        pack(here, part.how, positions, values.to(dtype))


def seal(row: torch.Tensor, step: int, *, finite: bool = True) -> None:
    """Writes the header, when all parts are written."""
    numbers = torch.tensor([row.numel(), step, int(not finite), _checksum(row)])
    row[:HEADER].view(torch.int64).copy_(numbers)


def row_error(row: torch.Tensor, step: int) -> str | None:
    """Describes what is wrong with a received row."""
    size, its_step, flag, checksum = row[:HEADER].view(torch.int64).tolist()
    if size != row.numel():
        return f"says that it has {size} bytes, and has {row.numel()}"
    if its_step != step:
        return f"is of step {its_step}, and this is step {step}"
    if flag not in (0, 1) or checksum != _checksum(row):
        return f"has the checksum {_checksum(row)}, and {checksum} was sent"
    return None


def all_finite(rows: torch.Tensor) -> bool:
    """Whether every rank's header says that all gradients are finite."""
    return not bool(rows[:, :HEADER].view(torch.int64)[:, 2].any())


def misplaced(row: torch.Tensor, bucket: Bucket) -> str | None:
    """Describes an invalid entry of a row."""
    for part in bucket.parts:
        if part.how is not None and wrong(row[part.start : part.stop], part.how, bucket.dtype):
            return f"a place beyond the {part.numel} elements of {part.name}"
    return None


def _checksum(row: torch.Tensor) -> int:
    """Checksum of the bytes after the header. On a GPU it is a sum of words weighted by position modulo a prime, which is fast
    there and detects swapped words too."""
    if row.device.type == "cpu":
        return zlib.crc32(row[HEADER:].numpy().data)
    numbers = row[HEADER:].view(torch.int32).to(torch.int64)
    return int((numbers * torch.arange(1, numbers.numel() + 1, device=row.device).remainder_(65521)).sum())
