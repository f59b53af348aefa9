"""Metrics as a TensorBoard event file, without TensorBoard.

The file is a sequence of records (TFRecord): the length as uint64, its masked CRC-32C, the data, the masked CRC-32C of the data.
Each record is a protocol buffer `Event { double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5 }`,
with `Summary { repeated Value value = 1 }` and `Value { string tag = 1; float simple_value = 2 }`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from scrimp.errors import RunError

NAME = "events.out.tfevents.{seconds:010d}.scrimp"
POLYNOMIAL = 0x82F63B78  # Castagnoli's, reflected
MASK = 0xA282EAD8
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types


def _table() -> Iterator[int]:
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (POLYNOMIAL if value & 1 else 0)
        yield value


TABLE = tuple(_table())


def write_events(folder: str | Path, rows: Iterable[Mapping[str, Any]], began: float) -> Path:
    """Write every number of a metrics file as a scalar, under its name there. `began`: seconds since 1970 of the first step; the
    steps' own seconds give the times of the others. The file appears complete, or not at all."""
    path = Path(folder) / NAME.format(seconds=int(began))
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new.open("wb") as file:
            file.writelines(_record(event) for event in events(rows, began))
        new.replace(path)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}; give a folder that can be written") from error
    finally:
        with suppress(OSError):
            new.unlink()  # where it did not become the file
    return path


def events(rows: Iterable[Mapping[str, Any]], began: float) -> Iterator[bytes]:
    """The records of a file: its version, then one for each step."""
    yield _field(1, FIXED64, struct.pack("<d", began)) + _field(3, BYTES, b"brain.Event:2")
    now = began
    for row in rows:
        now += row.get("seconds") or 0.0
        numbers = {k: v for k, v in row.items() if k != "step" and isinstance(v, (int, float)) and not isinstance(v, bool)}
        values = b"".join(_field(1, BYTES, _value(name, float(value))) for name, value in numbers.items())
        yield (
            _field(1, FIXED64, struct.pack("<d", now)) + _field(2, VARINT, _varint(int(row["step"]))) + _field(5, BYTES, values)
        )


def _value(tag: str, value: float) -> bytes:
    return _field(1, BYTES, tag.encode()) + _field(2, FIXED32, struct.pack("<f", value))


def _field(number: int, wire: int, data: bytes) -> bytes:
    return _varint(number << 3 | wire) + (_varint(len(data)) if wire == BYTES else b"") + data


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked(length)) + data + struct.pack("<I", _masked(data))


def _masked(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + MASK) & 0xFFFFFFFF
