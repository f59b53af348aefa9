"""A packet, entries as bytes: all positions in their rows, 16 bits each, then all values. Rows are in order, so they need no
index.

Each of the two parts begins at a multiple of 8 bytes, so that it can be read in place.
"""

from __future__ import annotations

import torch

from scrimp.exchange._row_topk import COLUMNS, RowTopK

BORDER = 8


def packet_nbytes(cut: RowTopK, dtype: torch.dtype) -> int:
    return _padded(2 * cut.entries) + _padded(dtype.itemsize * cut.entries)


def pack(packet: torch.Tensor, cut: RowTopK, positions: torch.Tensor, values: torch.Tensor) -> None:
    """Fill a packet's bytes."""
    places, into = parts(packet, cut, values.dtype)
    places.copy_(positions.remainder(COLUMNS).to(torch.int32))  # int16: the upper half become negative
    into.copy_(values)


def unpack(packet: torch.Tensor, cut: RowTopK, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and values."""
    places, values = parts(packet, cut, dtype)
    positions = places.to(torch.int64).bitwise_and_(COLUMNS - 1)
    whole = positions[: cut.rows * cut.per_row].view(cut.rows, cut.per_row)
    whole.add_(torch.arange(cut.rows, device=packet.device)[:, None] * COLUMNS)
    positions[cut.rows * cut.per_row :].add_(cut.rows * COLUMNS)
    return positions, values


def wrong(packet: torch.Tensor, cut: RowTopK, dtype: torch.dtype) -> bool:
    """Whether a position lies beyond the parameter; in a whole row every 16-bit position is valid."""
    if not cut.from_rest:
        return False
    places = parts(packet, cut, dtype)[0][-cut.from_rest :]
    return bool((places.to(torch.int32).bitwise_and_(COLUMNS - 1) >= cut.rest).any())


def parts(packet: torch.Tensor, cut: RowTopK, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a packet's positions and values."""
    start = _padded(2 * cut.entries)
    places = packet[: 2 * cut.entries].view(torch.int16)
    return places, packet[start : start + dtype.itemsize * cut.entries].view(dtype)


def _padded(nbytes: int) -> int:
    return -(-nbytes // BORDER) * BORDER
