"""Selects the entries of largest magnitude, row by row, and removes them."""

from __future__ import annotations

import torch

from scrimp.exchange._native_select import host_selection, takes
from scrimp.exchange._row_topk import COLUMNS, RowTopK


def select_topk(values: torch.Tensor, how: RowTopK) -> torch.Tensor:
    """Positions of the top-k of a flat tensor, row after row, int64; unordered within a row, and unique."""
    if how.everything:
        return torch.arange(how.numel, device=values.device)
    kernel = host_selection() if takes([values]) else None
    return select_by_torch(values, how) if kernel is None else kernel.select(values, how)


def select_by_torch(values: torch.Tensor, how: RowTopK) -> torch.Tensor:
    rows, border = how.rows, how.rows * COLUMNS
    found = []
    if rows:
        largest = values[:border].view(rows, COLUMNS).abs().topk(how.per_row, dim=1, sorted=False).indices
        found.append((largest + torch.arange(0, border, COLUMNS, device=values.device)[:, None]).flatten())
    if how.rest:
        found.append(values[border:].abs().topk(how.from_rest, sorted=False).indices + border)
    return torch.cat(found)


def take(values: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Removes the values at `positions` and returns them rounded to `dtype`; the rounding error stays. In fp32 the difference is
    exact, because it has no more digits than the value."""
    there = values[positions]
    limit = torch.finfo(dtype).max
    sent = there.clamp(-limit, limit).to(dtype)
    values[positions] = (there.float() - sent.float()).to(values.dtype)
    return sent
