"""The header of a safetensors file: which tensor is at which bytes. Checked before anything of that size is allocated.

The file is a length of 8 bytes, a JSON header, and the bytes of the tensors, end to end.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from scrimp.errors import CheckpointError
from scrimp.ledger import format_nbytes

KINDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64", torch.complex64: "C64",
}  # fmt: skip
DTYPES = {kind: dtype for dtype, kind in KINDS.items()}
MOST_NBYTES = 100_000_000  # of a header, as in the safetensors library


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor in a file; `start` counts from the first byte of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


def read_header(path: Path) -> tuple[dict[str, Stored], bytes]:
    """The tensors of a file, and the bytes of its header with their length. Raises `CheckpointError` if it makes no sense."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            begin = file.read(8)
            length = int.from_bytes(begin, "little")
            if len(begin) < 8 or length > min(size - 8, MOST_NBYTES):
                raise CheckpointError(
                    f"{path} is damaged: it has {size} bytes, and says that its header has {length} "
                    f"(at most {min(max(size - 8, 0), MOST_NBYTES)} are possible)"
                )
            text = file.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        found = _tensors(json.loads(text), 8 + length)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: its header cannot be read ({type(error).__name__}: {error})") from None
    end = max((stored.start + stored.nbytes for stored in found.values()), default=8 + length)
    if end != size:
        raise CheckpointError(
            f"{path} is damaged: it has {size} bytes ({format_nbytes(size)}), its header describes {end} ({format_nbytes(end)})"
        )
    return found, begin + text


def _tensors(header: Any, first: int) -> dict[str, Stored]:
    found, position = {}, 0
    rows = [(name, row) for name, row in header.items() if name != "__metadata__"]
    for name, row in sorted(rows, key=lambda item: item[1]["data_offsets"]):
        start, stop = row["data_offsets"]
        shape = tuple(row["shape"])
        if row["dtype"] not in DTYPES:
            raise ValueError(f"'{name}' has the dtype {row['dtype']!r}")
        if not all(type(size) is int and size >= 0 for size in (*shape, start, stop)):
            raise ValueError(f"'{name}' has the shape {shape} at {start} to {stop}")
        dtype = DTYPES[row["dtype"]]
        if start != position or stop - start != prod(shape) * dtype.itemsize:
            raise ValueError(f"'{name}' of shape {shape} and {dtype} is at bytes {start} to {stop}, and begins at {position}")
        found[name] = Stored(dtype=dtype, shape=shape, start=first + start, nbytes=stop - start)
        position = stop
    return found
