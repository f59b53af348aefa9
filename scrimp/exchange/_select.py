"""The entries of largest magnitude, row by row, in memory that does not grow with the parameter."""

from __future__ import annotations

import torch

from scrimp.exchange._cut import COLUMNS, Cut

PIECE = 16  # rows whose magnitudes are taken at a time: 4 MiB


def select(values: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Positions of the largest of a flat tensor, row after row, int64; in no order within a row. Never one twice."""
    if cut.everything:
        return torch.arange(cut.numel, device=values.device)
    found = torch.empty(cut.entries, dtype=torch.int64, device=values.device)
    whole = found[: cut.rows * cut.per_row].view(cut.rows, cut.per_row)
    rows = values[: cut.rows * COLUMNS].view(cut.rows, COLUMNS)
    for start in range(0, cut.rows, PIECE):
        largest = rows[start : start + PIECE].abs().topk(cut.per_row, dim=1, sorted=False).indices
        first = torch.arange(start, start + largest.shape[0], device=values.device) * COLUMNS
        torch.add(largest, first[:, None], out=whole[start : start + PIECE])
    if cut.rest:
        start = cut.rows * COLUMNS
        largest = values[start:].abs().topk(cut.from_rest, sorted=False).indices
        torch.add(largest, start, out=found[cut.rows * cut.per_row :])
    return found


def take(values: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is sent of the values there, rounded to `dtype`; what was rounded off stays. In fp32 that is exact: what is left
    has no more digits than were there."""
    there = values[positions]
    limit = torch.finfo(dtype).max
    sent = there.clamp(-limit, limit).to(dtype)
    values[positions] = (there.float() - sent.float()).to(values.dtype)
    return sent
