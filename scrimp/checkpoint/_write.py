"""Writes a safetensors file tensor by tensor, so that saving needs no second copy of the data.

The format is a length, a JSON header with every tensor's dtype, shape and offsets, and the bytes.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path

import torch

Named = tuple[str, torch.dtype, tuple[int, ...], Callable[[], torch.Tensor]]

KINDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64", torch.complex64: "C64",
}  # fmt: skip
BLOCK = 1 << 22


def write(path: Path, tensors: Iterable[Named]) -> bytes:
    """Writes (name, dtype, shape, function that makes it) in order; returns the checksum of the file."""
    rows = list(tensors)
    header: dict[str, object] = {}
    position = 0
    for name, dtype, shape, _ in rows:
        nbytes = prod(shape) * dtype.itemsize
        header[name] = {"dtype": KINDS[dtype], "shape": list(shape), "data_offsets": [position, position + nbytes]}
        position += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.blake2b(digest_size=32)
    with path.open("wb") as file:
        for block in (len(text).to_bytes(8, "little"), text):
            file.write(block)
            digest.update(block)
        for *_, make in rows:
            tensor = make().contiguous()
            view = _bytes(tensor)
            for at in range(0, len(view), BLOCK):
                file.write(view[at : at + BLOCK])
                digest.update(view[at : at + BLOCK])
            del tensor, view  # free it before the next one is made
    return digest.digest()


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, without numpy, because torch no longer resizes a storage that numpy has viewed."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
