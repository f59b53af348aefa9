"""Event files, decoded by code that shares nothing with the writer: TFRecord framing, CRC-32C bit by bit, protocol buffers."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp import RunError
from scrimp.report import write_events

ROWS = [
    {"step": 0, "loss": 4.25, "seconds": 0.5, "up_nbytes": 1 << 40, "lr": 1e-3},
    {"step": 1, "loss": None, "seconds": 0.25, "up_nbytes": 0},
    {"step": 300, "loss": -1.5, "seconds": 0.25, "name": "not a number", "flag": True},
]


def crc32c(data: bytes) -> int:
    """Polynomial division of the bits, most significant first, as the definition says."""
    register = 0xFFFFFFFF
    for byte in data:
        for bit in range(8):
            out = register >> 31 ^ (byte >> bit & 1)
            register = (register << 1 & 0xFFFFFFFF) ^ (0x1EDC6F41 if out else 0)
    return int(f"{register:032b}"[::-1], 2) ^ 0xFFFFFFFF


def check(data: bytes, masked: int) -> None:
    rotated = (masked - 0xA282EAD8) & 0xFFFFFFFF
    assert (rotated >> 17 | rotated << 15) & 0xFFFFFFFF == crc32c(data)


def records(data: bytes) -> list[bytes]:
    found = []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        check(data[:8], struct.unpack("<I", data[8:12])[0])
        body = data[12 : 12 + length]
        assert len(body) == length
        check(body, struct.unpack("<I", data[12 + length : 16 + length])[0])
        found.append(body)
        data = data[16 + length :]
    return found


def varint(data: bytes) -> tuple[int, bytes]:
    value = 0
    for k, byte in enumerate(data):
        value |= (byte & 0x7F) << 7 * k
        if byte < 0x80:
            return value, data[k + 1 :]
    raise AssertionError("a number without an end")


def message(data: bytes) -> list[tuple[int, Any]]:
    found: list[tuple[int, Any]] = []
    while data:
        key, data = varint(data)
        value: Any
        if key & 7 == 0:
            value, data = varint(data)
        elif key & 7 == 1:
            value, data = struct.unpack("<d", data[:8])[0], data[8:]
        elif key & 7 == 5:
            value, data = struct.unpack("<f", data[:4])[0], data[4:]
        else:
            assert key & 7 == 2
            length, data = varint(data)
            value, data = data[:length], data[length:]
        found.append((key >> 3, value))
    return found


def scalars(path: Path) -> tuple[str, list[tuple[float, int, dict[str, float]]]]:
    first, *rest = [dict(message(record)) for record in records(path.read_bytes())]
    steps = []
    for event in rest:
        values = [dict(message(value)) for number, value in message(event[5]) if number == 1]
        steps.append((event[1], event[2], {value[1].decode(): value[2] for value in values}))
    return first[3].decode(), steps


def test_the_check_value_of_crc32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # RFC 3720 and others


def test_a_file_of_events_has_every_number(tmp_path: Path) -> None:
    path = write_events(tmp_path / "deep" / "events", ROWS, 1700000000.0)
    assert path.name == "events.out.tfevents.1700000000.scrimp"
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    version, steps = scalars(path)
    assert version == "brain.Event:2"
    assert [(when, step) for when, step, _ in steps] == [(1700000000.5, 0), (1700000000.75, 1), (1700000001.0, 300)]
    assert steps[0][2] == {
        "loss": 4.25, "seconds": 0.5, "up_nbytes": float(1 << 40), "lr": struct.unpack("<f", struct.pack("<f", 1e-3))[0],
    }  # fmt: skip
    assert steps[1][2] == {"seconds": 0.25, "up_nbytes": 0.0}
    assert steps[2][2] == {"loss": -1.5, "seconds": 0.25}


@given(
    st.lists(
        st.tuples(st.text(min_size=1, max_size=200), st.floats(width=32, allow_nan=False)), max_size=8, unique_by=lambda t: t[0]
    )
)
def test_any_names_and_numbers_come_back(tmp_path_factory: pytest.TempPathFactory, values: list[tuple[str, float]]) -> None:
    row = {name: value for name, value in values if name not in ("step", "seconds")}
    path = write_events(tmp_path_factory.mktemp("events"), [{"step": 2**40, **row}], 0.0)
    assert scalars(path)[1] == [(0.0, 2**40, row)]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot be written"):
        write_events(tmp_path / "file", ROWS, 0.0)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
