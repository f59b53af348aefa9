"""Names and sizes of torch's dtypes, so that planning needs no torch."""

from __future__ import annotations

from scrimp.errors import MoveError

ITEMSIZE = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}  # fmt: skip

# Dtypes that can be summed. The others only move: a sum of fp8 or bool would round or saturate.
SUMMABLE = frozenset(name for name in ITEMSIZE if not name.startswith(("float8", "float4", "bool", "uint16", "uint32", "uint64")))


def dtype_name(dtype: object) -> str:
    """`torch.bfloat16`, `"torch.bfloat16"` and `"bfloat16"` -> `"bfloat16"`."""
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZE:
        raise MoveError(f"dtype {dtype!r} is unknown; scrimp moves {', '.join(ITEMSIZE)}")
    return name
