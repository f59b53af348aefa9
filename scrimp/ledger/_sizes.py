"""Parses and formats sizes such as "24GiB"."""

from __future__ import annotations

import re

from scrimp.errors import ScrimpError

_UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_nbytes(size: int | str) -> int:
    """`"24GiB"`, `"1.5 MiB"`, `"800MB"` or a number of bytes."""
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise ScrimpError(f"a size is a number of bytes or a text like '24GiB', not {size!r}")
    if isinstance(size, int):
        if size < 0:
            raise ScrimpError(f"a size of {size} bytes is negative")
        return size
    match = _SIZE.fullmatch(size)
    if match is None or match[2].lower() not in _UNITS:
        raise ScrimpError(f"'{size}' is not a size; write a number and one of B, KiB, MiB, GiB, TiB, KB, MB, GB, TB")
    nbytes = float(match[1]) * _UNITS[match[2].lower()]
    if nbytes >= 2**63:
        raise ScrimpError(f"'{size[:40]}' is too large for a size: it is below 2 ** 63 bytes")
    return int(nbytes)


def format_nbytes(nbytes: int) -> str:
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_least(nbytes: int) -> str:
    """Formats a budget for a user to type: rounded up to a thousandth of its unit, so that `parse_nbytes` gives no less."""
    unit, nbytes_of_unit = "B", 1
    for name in ("KiB", "MiB", "GiB", "TiB"):
        if nbytes >= 1024 * nbytes_of_unit:
            unit, nbytes_of_unit = name, 1024 * nbytes_of_unit
    thousandths = -(-1000 * nbytes // nbytes_of_unit)
    while True:
        text = f"{thousandths // 1000}.{thousandths % 1000:03}".rstrip("0").rstrip(".") + f" {unit}"
        if parse_nbytes(text) >= nbytes:  # a float may fall short of a thousandth
            return text
        thousandths += 1
