"""What travels together: the packets of some parameters, dense small tensors, and a header, as one row of bytes.

All ranks make the same plan from the same names and sizes, so that rows have one size and nothing need be said about what
is in them. The header says which step it is, whether a gradient was not finite, and what the bytes behind it add up to: a
row that does not fit its plan is an error that names the rank, not a wrong number in every replica. Behind it a byte for each
part says whether anything was put there: a rank that found no gradient, or one that is not finite, sends zeros.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from scrimp.exchange._packet import BORDER, pack, packet_nbytes, wrong
from scrimp.exchange._row_topk import RowTopK, row_topk

HEADER = 32  # bytes, of four numbers: size, step, whether something is not finite, checksum
SMALL = 4096  # elements: smaller tensors travel whole
PRESENT, NOT_FINITE = 1, 2  # what a part's byte says; 0: nothing was put there


@dataclass(frozen=True, kw_only=True)
class Part:
    """A parameter's bytes in a row, and where the one is that says whether they were written; `how` is None if it travels
    whole."""

    name: str
    numel: int
    flag: int
    start: int
    stop: int
    how: RowTopK | None

    @property
    def whole(self) -> bool:
        """Nothing is kept back."""
        return self.how is None or self.how.everything


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """`summed`: only its head travels as a row from each rank; what is behind it is all values, and summed over the ranks."""

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
    """`sizes`: names and elements, in an order that all ranks have."""
    parts, start = [], HEADER + -(-len(sizes) // BORDER) * BORDER
    for k, (name, numel) in enumerate(sizes):
        how = row_topk(numel, density) if numel >= small and not summed else None
        nbytes = -(-numel * dtype.itemsize // BORDER) * BORDER if how is None else packet_nbytes(how, dtype)
        parts.append(Part(name=name, numel=numel, flag=HEADER + k, start=start, stop=start + nbytes, how=how))
        start += nbytes
    return Bucket(parts=tuple(parts), dtype=dtype, nbytes=start, summed=summed)


def put_part(row: torch.Tensor, part: Part, positions: torch.Tensor | None, values: torch.Tensor, dtype: torch.dtype) -> None:
    """A part's entries, or all of its values, of any type."""
    row[part.flag].fill_(PRESENT)  # a number that is set is copied, and on a GPU waited for
    here = row[part.start : part.stop]
    if part.how is None:
        here[: part.numel * dtype.itemsize].view(dtype).copy_(values)
    else:
        assert positions is not None
        pack(here, part.how, positions, values.to(dtype))


def seal(row: torch.Tensor, step: int, *, finite: bool = True) -> None:
    """The header, when all parts are there."""
    numbers = torch.tensor([row.numel(), step, int(not finite), _checksum(row)])
    row[:HEADER].view(torch.int64).copy_(numbers)


def row_error(row: torch.Tensor, step: int) -> str | None:
    """What is wrong with a row that came, in words."""
    size, its_step, flag, checksum = row[:HEADER].view(torch.int64).tolist()
    if size != row.numel():
        return f"says that it has {size} bytes, and has {row.numel()}"
    if its_step != step:
        return f"is of step {its_step}, and this is step {step}"
    if flag not in (0, 1) or checksum != _checksum(row):
        return f"has the checksum {_checksum(row)}, and {checksum} was sent"
    return None


def all_finite(rows: torch.Tensor) -> bool:
    """Whether every rank said so."""
    return not bool(rows[:, :HEADER].view(torch.int64)[:, 2].any())


def misplaced(row: torch.Tensor, bucket: Bucket) -> str | None:
    """An entry of a row that no rank would send, in words."""
    for part in bucket.parts:
        if part.how is not None and wrong(row[part.start : part.stop], part.how, bucket.dtype):
            return f"a place beyond the {part.numel} elements of {part.name}"
    return None


def _checksum(row: torch.Tensor) -> int:
    """Of what follows the header; elsewhere than on the host by what a device is good at: words, each times its place's
    remainder, so that exchanged ones are seen too."""
    if row.device.type == "cpu":
        return zlib.crc32(row[HEADER:].numpy().data)
    numbers = row[HEADER:].view(torch.int32).to(torch.int64)
    return int((numbers * torch.arange(1, numbers.numel() + 1, device=row.device).remainder_(65521)).sum())
